"""Wrote the files of this folder with kvlens 0.1.0, as it was before anything was renamed. They are never written again.

    python tests/written_by_0_1_0/write.py FOLDER             models, biases, a training run and a batch, both interrupted
    python tests/written_by_0_1_0/write.py FOLDER format_1    by still earlier code: models, biases of linear attention
    python tests/written_by_0_1_0/write.py FOLDER format_2    by the code in between: biases of every kind

``expected.safetensors`` beside the files holds what that code made of them, in float64. Names and arguments are spelled as they
were then.
"""

import functools
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVBias, KVShiftConfig, convert_prompt

SIZES = dict(n_layers=1, d_model=8, d_head=4, n_heads=2, n_ctx=40, d_vocab=11, d_mlp=6, act_fn="gelu", device="cpu", seed=3)
GROUPED = dict(n_key_value_heads=1, positional_embedding_type="rotary", kv_shift=KVShiftConfig(window=2, queries=True))
SENTENCES = ("The widget is purple and the gadget is green.", "Return the widget. Return the gadget. Frobnicate both.")
PROMPTS = ["The widget is purple.", "Return the gadget and both widgets"]
BASIC = {
    "softmax": dict(n_layers=2),
    "linear": dict(n_layers=2, attention="linear", positional_embedding_type="rotary", kv_shift=KVShiftConfig()),
}
SOFTMAX = {
    "softmax-shift": GROUPED,
    "softmax-gate": dict(positional_embedding_type="sinusoidal", kv_shift=KVShiftConfig(window=3, parametrization="gate")),
    "softmax-clamp": dict(positional_embedding_type="none", kv_shift=KVShiftConfig(values=False, parametrization="clamp")),
    "softmax-alibi": dict(positional_embedding_type="alibi", alibi_slopes=[0.5, 0.125]),
    "softmax-local": dict(
        n_layers=2, use_local_attn=True, window_size=6, attn_types=["local", "global"], attn_scores_soft_cap=2.0
    ),
}
LINEAR = {
    "linear-identity": dict(feature_map="identity", normalizer="none", decay="retnet", **GROUPED),
    "linear-relu": dict(feature_map="relu", positional_embedding_type="standard"),
    "linear-random": dict(feature_map="random", n_random_features=6, positional_embedding_type="rotary"),
    "linear-taylor": dict(feature_map="taylor", positional_embedding_type="sinusoidal"),
    "linear-hedgehog": dict(feature_map="hedgehog", **GROUPED),
    "linear-decay": dict(normalizer="none", decay=[0.9, 0.7], positional_embedding_type="none", accumulation_dtype="float64"),
    "linear-trained": dict(trainable_kv_bias=True, positional_embedding_type="rotary", rotary_placement="before"),
}
PARALLEL = dict(keys=True, values=True, depth=2, width=3, activation="silu", parallel=0.5)
VARIANTS = {
    "regularised": dict(regularised=dict(alpha=0.3)),
    "normalised": dict(regularised=dict(alpha=-0.7, form="normalised")),
    "one-step": dict(regularised=dict(alpha=0.3, form="one_step"), augmented=PARALLEL),
    "augmented": dict(augmented=dict(values=True)),
    "negative-query": dict(negative=dict(k=3, beta=0.4)),
    "negative-label": dict(negative=dict(k=0.3, beta=0.4, per="label"), regularised=dict(alpha=0.2)),
    "ridge": dict(ridge=dict(strength=0.5), augmented=dict(keys=True, activation="relu")),
}
QUICK = dict(n_continuations=6, continuation_length=8, verbose=False)
APPROXIMATE = {
    "landmark": dict(method="landmark", n_features=3, **QUICK),
    "greedy": dict(method="landmark", n_features=4, budget="greedy", polish_steps=2, **QUICK),
    "random": dict(method="random", n_features=5, **QUICK),
    "taylor": dict(method="taylor", **QUICK),
    "learned": dict(method="learned", n_features=3, **QUICK),
}


def model_of(tokenizer=None, cls=HookedKVTransformer, **fields):
    """A model whose attention is anything but uniform, and none of whose parameters is 0."""
    cfg = HookedKVTransformerConfig(**{**SIZES, "dtype": torch.float64, **fields})
    model = cls(cfg, tokenizer) if cls is HookedKVTransformer else cls(cfg, 3)
    generator = torch.Generator().manual_seed(11)
    for name, parameter in sorted(model.named_parameters()):
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if name.endswith((".attn.b_KV", ".attn.b_D")):
            parameter.data += drawn.abs()
        elif "shift_coef" in name:
            parameter.data += 0.3 * drawn
        else:
            parameter.data += drawn * (1 if parameter.dim() < 2 else parameter.shape[-2] ** -0.5)
    return model.requires_grad_(False)


def tokens(*shape, d_vocab=11, seed=0):
    return torch.randint(d_vocab, shape, generator=torch.Generator().manual_seed(seed))


def logits(model, bias=None):
    """Of the first tokens of the vocabulary, on one text of five tokens, or one for every prompt of the bias."""
    n = 1 if bias is None or bias.batch_size is None else bias.batch_size
    text = tokens(n, 5, d_vocab=model.cfg.d_vocab, seed=1)
    if bias is None:
        return model(text)[..., :16]
    with model.kv_bias(bias):
        return model(text)[..., :16]


def write_models(folder, expected):
    from kvlens.corpus import train_bpe_tokenizer

    tokenizer = train_bpe_tokenizer(SENTENCES, vocab_size=260)
    models = {name: model_of(**{**SOFTMAX, **BASIC}[name]) for name in ("softmax", *SOFTMAX)}
    models |= {name: model_of(attention="linear", **fields) for name, fields in LINEAR.items()}
    models["linear"] = model_of(**BASIC["linear"])
    for variant, fields in VARIANTS.items():
        models[f"softmax-{variant}"] = model_of(attention_variant=fields, **GROUPED)
    for variant in ("normalised", "one-step", "negative-query", "ridge"):
        fields = dict(attention="linear", positional_embedding_type="rotary", attention_variant=VARIANTS[variant])
        models[f"linear-{variant}"] = model_of(**fields)
    for name in BASIC:
        models[f"{name}-text"] = model_of(tokenizer, **{**BASIC[name], "n_layers": 1, "d_vocab": len(tokenizer)})
    for name, model in models.items():
        model.save(folder / "models" / name)
        expected[f"models/{name}"] = logits(model)
    models["linear"].save(folder / "models" / "linear-rounded", stored_dtype="float16")
    expected["models/linear-rounded"] = logits(HookedKVTransformer.load(folder / "models" / "linear-rounded"))
    return models


def write_regressors(folder, expected):
    from kvlens.model import HookedKVRegressor

    for name, fields in (("softmax", {}), ("linear", dict(attention="linear", positional_embedding_type="sinusoidal"))):
        model = model_of(cls=HookedKVRegressor, **{**fields, "d_vocab": 1})
        model.save(folder / "regressors" / name)
        inputs = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        expected[f"regressors/{name}"] = model(inputs)


def write_biases(folder, models, expected):
    (folder / "biases").mkdir(exist_ok=True)

    def write(name, kind, bias):
        bias.save(folder / "biases" / f"{name}.{kind}.safetensors")
        read = KVBias.load(folder / "biases" / f"{name}.{kind}.safetensors")
        expected[f"biases/{name}.{kind}"] = logits(models[name], read)

    one, two = tokens(7, seed=4), tokens(2, 9, seed=5)
    for name, model in models.items():
        if not any(word in name for word in ("negative", "ridge", "text")):
            write(name, "exact", convert_prompt(model, one))
    for name in ("linear", "linear-hedgehog", "softmax-shift"):
        write(name, "batch", convert_prompt(models[name], two))
        write(name, "continued", convert_prompt(models[name], two[0], initial=convert_prompt(models[name], one)))
    for name in ("linear", "softmax"):
        both = convert_prompt(models[name], one), convert_prompt(models[name], two[1, :7])
        write(name, "sum", both[0] + 0.5 * both[1])
        write(name, "selected", both[0].select(layers=[1], heads=[(0, 1)]))
    for name in ("linear-text", "softmax-text"):
        write(name, "ragged", convert_prompt(models[name], PROMPTS))
    for kind, options in APPROXIMATE.items():
        write("softmax", kind, convert_prompt(models["softmax"], one, **options))
        write("softmax-shift", kind, convert_prompt(models["softmax-shift"], two, **options))
        if kind in ("landmark", "greedy"):
            write("softmax-alibi", kind, convert_prompt(models["softmax-alibi"], one, **options))
            write("softmax-local", kind, convert_prompt(models["softmax-local"], one, **options))
            write("softmax-text", f"ragged-{kind}", convert_prompt(models["softmax-text"], PROMPTS, **options))


def write_run(folder, expected):
    """A training run of eight steps that a kill ended after the sixth; its last checkpoint is of the fourth."""
    from kvlens.tasks import InductionTask
    from kvlens.training import build_model, train

    task = InductionTask(vocab_size=9, length=8, law="both")
    settings = dict(steps=8, batch_size=3, learning_rate=5e-3, eval_every=2, eval_sequences=5, checkpoint_every=4, watch="coef")
    whole, killed = (
        build_model(task, dict(n_layers=1, d_model=8, d_head=4, kv_shift=True, dtype="float64"), device="cpu") for _ in range(2)
    )
    result = train(whole, task, progress=False, **settings)
    for name, parameter in whole.named_parameters():
        expected[f"run/{name}"] = parameter.detach()
    expected["run metrics"] = torch.tensor(result.metrics[["step", "loss", "accuracy", "tokens"]].to_numpy(float))

    class Killed(Exception):
        pass

    sample, calls = InductionTask.sample, []

    def seven(self, batch_size, generator, split="train"):
        calls.append(split)
        if calls.count("train") == 7:
            raise Killed
        return sample(self, batch_size, generator, split)

    InductionTask.sample = seven
    try:
        train(killed, task, folder=folder / "run", progress=False, **settings)
    except Killed:
        (folder / "run" / ".lock").unlink(missing_ok=True)
    InductionTask.sample = sample


def write_batch(folder, expected):
    """``kvlens analyse own_analysis:ENTROPIES prompts.jsonl --model ...``, stopped after two of four."""
    from kvlens.cli import main

    os.chdir(folder / "batch")
    sys.path.insert(0, str(folder / "batch"))
    import own_analysis
    import pandas as pd

    command = ["analyse", "own_analysis:ENTROPIES", "prompts.jsonl", "--model", "../models/linear-text", "--text", " is green"]
    command += ["--temperature", "2.0", "--prompts-per-job", "1"]
    assert main([*command, "--out", "whole.parquet"]) == 0
    expected["batch"] = torch.tensor(pd.read_parquet("whole.parquet")[["position", "entropy"]].to_numpy(float))
    Path("whole.parquet").unlink()
    entropies, calls = own_analysis.ENTROPIES.function, []

    @functools.wraps(entropies)
    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return entropies(*args, **options)

    object.__setattr__(own_analysis.ENTROPIES, "function", interrupted)
    assert main([*command, "--out", "table.parquet"]) == 130


def write_earlier(folder, which, expected):
    for name in BASIC:
        model = model_of(**{**BASIC[name], "n_layers": 1})
        if which == "format_1":
            model.save(folder / name)
            expected[name] = logits(model)
            if name == "softmax":  # whose biases had no files yet
                continue
        kinds = {"exact": convert_prompt(model, tokens(7, seed=4)), "batch": convert_prompt(model, tokens(2, 9, seed=5))}
        if name == "softmax":
            kinds |= {kind: convert_prompt(model, tokens(7, seed=4), **options) for kind, options in APPROXIMATE.items()}
        for kind, bias in kinds.items():
            bias.save(folder / f"{name}.{kind}.safetensors")
            expected[f"{name}.{kind}"] = logits(model, bias)


def main():
    folder, expected = Path(sys.argv[1]).resolve(), {}
    if sys.argv[2:]:
        folder = folder / sys.argv[2]
        folder.mkdir()
        write_earlier(folder, sys.argv[2], expected)
    else:
        write_run(folder, expected)
        write_regressors(folder, expected)
        write_biases(folder, write_models(folder, expected), expected)
        write_batch(folder, expected)
    save_file({key: value.detach().contiguous() for key, value in expected.items()}, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
