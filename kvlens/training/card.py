"""The model card of a trained model, written from its measurements (see :func:`kvlens.training.ship.facts_of`)."""

from typing import Any


def model_card(facts: dict[str, Any]) -> str:
    """Return the card, in Markdown."""
    return "\n".join(
        [
            f"# {facts['name']}",
            "",
            facts["summary"],
            "",
            *_about(facts),
            "",
            f"## Held-out measurements ({facts['heldout']['sequences']:,} sequences)",
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in _measurements(facts["heldout"])),
            "",
            "## Licence",
            "",
            *(f"- text of {name}: {licence}" for name, licence in facts["data"]["licences"].items()),
            "- the weights: MIT, as kvlens",
            "",
        ]
    )


def _about(facts: dict[str, Any]) -> list[str]:
    recipe, training = facts["recipe"], facts["recipe"]["training"]
    data, run = facts["data"], facts["training"]
    settings = ", ".join(f"{name} {value}" for name, value in recipe["task_settings"].items() if value is not None)
    lines = [
        f"- **Architecture**: {architecture(facts['config'])}; {facts['n_parameters']:,} parameters, stored in "
        f"{recipe['stored_dtype']}.",
        f"- **Task**: `{recipe['task']}` ({settings}); {data['source']}.",
        f"- **Reproduce**: `{facts['command']}` (seed {training['seed']}).",
        f"- **Training**: {run['steps']:,} steps of {training['batch_size']} sequences, AdamW, peak learning rate "
        f"{training['learning_rate']:g}, {training['schedule']}, forward pass in {training['precision']}; stopped by "
        f"{run['stopped_by']}. The weights are those of step {run['best_step']:,}, which had the lowest loss on "
        f"{training['eval_sequences']} held-out sequences.",
    ]
    if training["max_minutes"] is not None:
        lines[2] += " The time budget makes the number of steps depend on the machine."
    if "corpus_hash" in data:
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        lines.append(
            f"- **Text**: {data['characters']['train']:,} characters to train on, {data['characters']['heldout']:,} held out "
            f"by module, deduplicated; {versions}; sha256 {data['corpus_hash']}."
        )
    return lines


def architecture(cfg: dict[str, Any]) -> str:
    """A configuration in one line."""
    if "layer_types" in cfg:
        kinds = ", ".join(kind.replace("_", " ") for kind in cfg["layer_types"])
        linear = f"{cfg['linear_num_value_heads']} of {cfg['linear_value_head_dim']}"
        return (
            f"Transformers' `{cfg['architectures'][0]}`, layers {kinds}, d_model {cfg['hidden_size']}, "
            f"{cfg['num_attention_heads']} heads of {cfg['head_dim']} (linear: {linear}, convolution of "
            f"{cfg['linear_conv_kernel_dim']}), MLP of {cfg['intermediate_size']}"
        )
    shift = cfg["kv_shift"]
    linear = f"linear attention ({cfg['feature_map']}, normalizer {cfg['normalizer']})"
    up_to = "up to " if cfg.get("n_heads_by_layer") or cfg.get("d_head_by_layer") else ""
    words = [
        f"{cfg['n_layers']} layers" if cfg["n_layers"] > 1 else "1 layer",
        f"d_model {cfg['d_model']}, {up_to}{cfg['n_heads']} heads of {up_to}{cfg['d_head']}",
        linear if cfg["attention"] == "linear" else "softmax attention",
        "no MLP" if cfg["attn_only"] else f"MLP of {cfg['d_mlp']}",
        f"positions {cfg['positional_embedding_type']}",
    ]
    if shift:
        parts = [part for part in ("keys", "values", "queries") if shift[part]]
        words.append(f"KV shift ({', '.join(parts)}; window {shift['window']}, {shift['parametrization']})")
    return ", ".join(words)


def _measurements(held: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("loss over scored positions", f"{held['loss']:.4g} nats" if held["accuracy"] is not None else f"{held['loss']:.4g}")
    ]
    if held["accuracy"] is not None:
        rows.append(("accuracy over scored positions", f"{held['accuracy']:.4%}"))
    if "bits_a_character" in held:
        rows.append(("bits a character", f"{held['bits_a_character']:.3f}"))
    if "n_context" in held:
        rows += [
            (f"loss on {held['n_text']} tokens, no context", f"{held['without']:.4f}"),
            (f"the same after {held['n_context']} tokens of context", f"{held['with_context']:.4f}"),
            ("the same with the context converted to a bias", f"{held['converted']:.4f}"),
            ("gain of the converted context", f"{held['gain']:.4f} nats per token"),
            ("relative error of the converted logits", f"{held['relative_error']:.1e}"),
        ]
    for answers in held.get("answers", ()):
        rows += _answer_rows(answers)
    return rows


def _answer_rows(answers: dict[str, Any]) -> list[tuple[str, str]]:
    hops = {None: "", 1: ", one hop", 2: ", two hops"}[answers.get("hops")]
    about = f"right answers, {answers['n_facts']} facts{hops}"
    rows = [
        (f"{about} ({answers['n_answers']:,} questions), after the story", answers["with_story"]),
        (f"{about}, the story converted to a bias", answers["converted"]),
        (f"{about}, without the story", answers["without_story"]),
        (f"{about}, by chance: any value of the kind", answers["guess"]),
        (f"{about}, by chance: any value of the kind in the story", answers["guess_in_story"]),
    ]
    return [(what, f"{share:.2%}") for what, share in rows if share is not None]
