"""The page of an explanation: sections show what their analyses found; the head that matters is darkest in the map and first in
the table; a page of a real model's size stays small enough to send."""

import re
from dataclasses import replace
from html import unescape

import pandas as pd
import pytest
import torch
from chat_templates import chat_model
from precision import float64
from tiny_hf import tiny_hf_model, tiny_tokenizer
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import Chat, HookedKVTransformer, KVLensError, explain, load
from kvlens.analyses import (
    HeadDetails,
    LinkedShares,
    conversion_error,
    dual_losses,
    layer_contributions,
    prompt_effect,
    readings,
)
from kvlens.arguments import SECTIONS, USUAL_SECTIONS
from kvlens.cli.prompts import STORY
from kvlens.explanation import explanation_page, page
from kvlens.explanation.page import SHARE, SHOWN, n_parameters
from kvlens.viz import Piece

pytestmark = pytest.mark.usefixtures("short_answers")


def measured(model, found, ablates=False):
    return page._Measured(model, found, ablates)


def text_of(model, found, *sections, **options):
    return unescape(explanation_page(model, found, sections, **options).to_html())


def shown(name, given, monkeypatch, piece):
    """What a section gives to a function of :mod:`kvlens.viz`: its first argument, call by call."""
    seen = []
    monkeypatch.setattr(page, piece, lambda *args, **named: seen.append(args) or Piece("", ""))
    list(SHOWN[name][1](given))
    return seen


@pytest.fixture(scope="module")
def model():
    return tiny_text_model()


@pytest.fixture(scope="module")
def found(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvlens.explanation.steps.MOST_TOKENS", 8)
        return explain(model, PROMPT, TEXT, depth="units")


@pytest.fixture(scope="module")
def story():
    model = HookedKVTransformer.from_zoo("facts-linear")
    return model, explain(model, *STORY)


# --- what it is about ------------------------------------------------------------------------------------------------


def test_the_answer_is_read_first_with_the_question_and_the_model(story, tmp_path):
    model, found = story
    html = text_of(model, found, *USUAL_SECTIONS)
    first = (
        "<h1>Why did the model say 'donkey'?</h1>",
        f'Asked: "{STORY[1].strip()}" Model: facts-linear, 2 layers of 4 heads, ',
    )
    n = f"Prompt: {len(found.tokens)} tokens, 6 parts. Answer: {len(found.response_tokens)} tokens. Explained in "
    assert f"{n}{found.cost['passes'].sum()} passes that read {found.n_tokens:,} tokens." in html
    assert re.search(r"Made 20\d\d-\d\d-\d\dT[\d:+]+ with kvlens ", html)
    then = (
        "The model answers",
        "With all 6 parts of the prompt removed",
        *(SHOWN[name][0] + "</h2>" for name in USUAL_SECTIONS),
    )
    places = [html.index(words) for words in (*first, *then)]
    assert places == sorted(places)
    assert f"Model: {tmp_path.name}, 2 layers" in text_of(model, found, model_name=str(tmp_path))  # pages are shared
    assert "<h1>Why did the model say this?</h1>" in text_of(model, replace(found, is_whole=True))


@pytest.mark.parametrize("text", [None, " green"])
def test_behind_a_chat_the_text_is_what_the_template_writes_and_the_answer(text):
    model = chat_model()
    chat = Chat.ask("Return the widget?", {"a.txt": PROMPT})
    found, tokens = explain(model, chat, text, depth="units"), chat.tokens(model)
    begun = model.to_tokens("<|im_end|>\n<|im_start|>assistant\n", prepend_bos=False)[0]
    n, more = len(tokens) - len(begun), [] if text is None else [model.to_tokens(text, prepend_bos=False)[0]]
    given = measured(model, found)
    assert tokens[n:].equal(begun) and given.prompt.equal(tokens[:n])
    assert given.text.equal(torch.cat([begun, *more, found.response_tokens]))
    assert f'Asked: "Return the widget?{text or ""}" ' in text_of(model, found)


@pytest.mark.parametrize("by", ["sentence", ["widget"]])
def test_behind_a_text_the_prompt_ends_where_it_begins(model, by):
    found = explain(model, PROMPT, TEXT, by=by, depth="units")
    assert found.tokens[: found.n_prompt].equal(model.to_tokens(PROMPT)[0])
    assert found.tokens[found.n_prompt :].equal(model.to_tokens(TEXT, prepend_bos=False)[0])


def test_units_that_were_given_leave_the_last_token_to_the_text(model):
    found = explain(model, PROMPT, by=["widget"], depth="units")
    assert found.n_prompt == len(found.tokens) - 1 == len(model.to_tokens(PROMPT)[0]) - 1


def test_an_unknown_section_is_refused_before_anything_runs(model, found, monkeypatch):
    monkeypatch.setattr(page, "explanation_view", lambda found, asked: pytest.fail("it ran"))
    with pytest.raises(KVLensError, match=r"sections must be .*heads, patterns, .*haeds"):
        explanation_page(model, found, ["effect", "haeds"])


def test_a_section_for_each_name(model, found):
    assert tuple(SHOWN) == SECTIONS and all(shows.__doc__ for _, shows in SHOWN.values())
    told = []
    html = text_of(model, found, *SECTIONS, "heads", on_progress=lambda what, done: told.append((what, done)))
    headings = re.findall("<h2>(.*?)</h2>", html)
    assert headings == ["The answer", *(title for title, _ in SHOWN.values())] and "It is not shown" not in html
    assert {what for what, _ in told} == {f"section {name}" for name in SECTIONS}
    assert told[0][1] == 0 and all(0 <= done <= 1 for _, done in told)


# --- what sections show ----------------------------------------------------------------------------------------------


def test_each_condition_is_read_once_for_all_sections(model, found, monkeypatch):
    """With the prompt, behind its BOS alone, converted; and for the rounding error with the prompt, as it is and in float64."""
    read, lengths, state = readings.text_logits, [], torch.get_rng_state()

    def counted(model, prompt, *rest, kept=None):
        lengths.append(None if prompt is None else len(prompt) if kept is None else int(kept.sum()))
        return read(model, prompt, *rest, kept=kept)

    monkeypatch.setattr(readings, "text_logits", counted)
    explanation_page(model, found, SECTIONS)
    assert lengths == [n := len(model.to_tokens(PROMPT)[0]), 1, None, n, n]
    assert torch.equal(torch.get_rng_state(), state) and model.attached_kv_bias is None


def test_exactness_is_that_of_the_conversion_and_a_lost_shift_state_is_no_rounding(model, found, monkeypatch):
    given = measured(model, found)
    errors = conversion_error(*given.sequences, bias=given.bias)
    html = text_of(model, found, "exactness")
    assert f"<td>{len(errors)} of {len(errors)}</td>" in html and "exact to rounding" in html
    given.bias = given.bias.map_layers(lambda layer: replace(layer, last={name: 0 * row for name, row in layer.last.items()}))
    ((table,),) = shown("exactness", given, monkeypatch, "error_table")
    assert table["verdict"][0] == "NOT EXACT"


def test_the_effect_colors_the_token_that_is_predicted_and_lists_where_the_prompt_helps_and_hurts_most(
    model, found, monkeypatch
):
    """The loss at position 2 is that of the token at 3; the prompt lowers it most there, and raises it most at 1."""
    given = measured(model, found)
    effect = prompt_effect(*given.sequences, bias=given.bias)
    gains = effect["position"].map({0: 0.5, 1: -2.0, 2: 3.0, 3: -1.0}).fillna(0.0).where(effect["next_token"].notna())
    effect["loss"] = 5 + gains.where(effect["condition"] == "without_prompt", 0 * gains)
    monkeypatch.setattr(page, "prompt_effect", lambda *args, **named: effect)
    ((tokens, colors),) = shown("effect", given, monkeypatch, "colored_tokens")
    rows = effect[effect["condition"] == "with_prompt"]
    assert [*tokens] == rows["token"].tolist() and pd.isna(colors[0]) and colors[1:5] == [0.5, -2.0, 3.0, -1.0]
    (means,), (places,) = shown("effect", given, monkeypatch, "error_table")
    assert means["without it"][0] - means["with the prompt"][0] == pytest.approx(0.5 / (len(rows) - 1))
    assert places["position"].tolist() == [2, 0, 1, 3] and places["decrease"].tolist() == [3.0, 0.5, -2.0, -1.0]
    assert places["next token"].tolist() != places["after"].tolist()


def test_without_the_prompt_and_converted_are_what_prompt_effect_says(model, found, monkeypatch):
    given = measured(model, found)
    means = prompt_effect(*given.sequences, bias=given.bias).groupby("condition")[["loss", "argmax_agrees", "kl"]].mean()
    (table,), _ = shown("effect", given, monkeypatch, "error_table")
    assert table["with the prompt"].tolist() == pytest.approx(means.loc["with_prompt"].tolist())
    assert table["without it"].tolist() == pytest.approx(means.loc["without_prompt"].tolist())


def test_direct_contributions_add_up(model, found, monkeypatch):
    given = measured(model, found)
    ((table, column),) = shown("logits", given, monkeypatch, "contribution_bars")
    whole = layer_contributions(model, given.bias, given.text).dropna().groupby("position")["logit"].sum().mean()
    assert table[column].sum() == pytest.approx(whole)
    monkeypatch.undo()
    assert text_of(model, found, "logits").count("layer 1, attention_bias") == 1


def test_dual_models_are_those_of_the_texts_tokens_and_refused_of_a_long_prompt(model, found, monkeypatch):
    given = measured(model, found)
    ((losses, demonstrations),) = shown("dual", given, monkeypatch, "dual_view")
    n = found.n_prompt
    pd.testing.assert_frame_equal(losses, dual_losses(model, torch.cat([given.prompt, given.text]), n_demonstrations=n))
    assert set(losses["position"]) == set(range(n, n + len(given.text)))
    assert set(demonstrations["prompt_position"]) == set(range(n))
    monkeypatch.setattr(page, "MOST_PAIRS", model.cfg.n_heads * n**2 - 1)
    monkeypatch.setattr(page, "dual_losses", lambda *_, **__: pytest.fail("it ran"))
    html = text_of(model, found, "dual", "depth")
    assert f"every two of the prompt's tokens are compared, {n} here; there is room for {n - 1}" in html
    assert "Layer by layer" in html


# --- heads -----------------------------------------------------------------------------------------------------------


def cells(html):
    """The map's first table, in which the page chooses the darkest cell: color by head."""
    first = re.search(r'<figcaption>map of heads.*?<table class="heat[^>]*data-column="([^"]*)".*?</table>', html, re.DOTALL)
    found = re.findall(r'data-layer="(\d+)" data-head="(\d+)"[^>]*?class="(\w+)[^"]*"(?: style="--x:([\d.]+)%")?', first[0])
    return first[1], {(int(layer), int(head)): float(x or 0) for layer, head, kind, x in found if kind == "positive"}


def test_the_head_without_which_the_answer_loses_most_is_first_and_darkest(story):
    model, found = story
    ranked, by = measured(model, found, ablates=True).heads, "what 'donkey' loses without the head, nats"
    assert ranked[by].is_monotonic_decreasing and not ranked[SHARE].is_monotonic_decreasing
    html = text_of(model, found, "heads", "shares")
    column, colors = cells(html)
    strongest = tuple(ranked.iloc[0][["layer", "head"]].astype(int))
    assert column == by and max(colors, key=colors.get) == strongest and colors[strongest] == pytest.approx(100)
    assert f"heads, the largest first: {by}" in html and f"<tbody><tr><td>L{strongest[0]}H{strongest[1]}</td>" in html


def test_the_panels_can_color_heads_by_their_effect(story, monkeypatch):
    given = measured(*story, ablates=True)
    ((data,),) = shown("shares", given, monkeypatch, "linked_view")
    for layer, head, nats in given.heads[["layer", "head", given.by]].itertuples(index=False):
        assert float(data.colorings[given.by][layer, head]) == nats
    ((data,),) = shown("shares", measured(*story), monkeypatch, "linked_view")
    assert data.colorings == {}


def test_where_no_head_is_ablated_they_are_ranked_by_their_share(story, monkeypatch):
    model, found = story
    monkeypatch.setattr(page, "baseline_ablation", lambda *_, **__: pytest.fail("it ran"))
    given = measured(model, found)
    for row in given.heads.itertuples():
        assert row[3] == pytest.approx(float(given.shares.by_prompt[row.layer, row.head].sum()))
    assert given.heads[SHARE].is_monotonic_decreasing and f"first heads by: {SHARE}" in text_of(model, found, "patterns")


def test_what_the_answer_loses_without_a_head_is_a_pass_in_which_it_sees_bos_alone():
    """In one pass over prompt, text and answer, with the scores of the prompt's other tokens at minus infinity."""
    model = tiny_text_model(attention="softmax", kv_shift=None, dtype=torch.float64)
    found = explain(model, PROMPT, TEXT, depth="units")
    claim, n, given = found.claims.iloc[found.about], found.n_prompt, measured(model, found, ablates=True)
    tokens = torch.cat([found.tokens, found.response_tokens])
    places = len(found.tokens) + torch.arange(int(claim["start"]), int(claim["stop"]))

    def log_p(hooks):
        logits = model.run_with_hooks(tokens[None], fwd_hooks=hooks)[0, places - 1]
        return logits.log_softmax(dim=-1).gather(-1, tokens[places][:, None]).sum()

    for layer, head, nats in given.heads[["layer", "head", given.by]].itertuples(index=False):

        def blind(scores, hook, head=head):
            scores[:, head, n:, 1:n] = -torch.inf
            return scores

        fall = log_p([]) - log_p([(f"blocks.{layer}.attn.hook_attn_scores", blind)])
        assert nats == pytest.approx(float(fall), abs=1e-9)
    assert given.heads[given.by].abs().max() > 1e-3


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tied_unembedding_counts_once(kind):
    tied, own = (tiny_hf_model(kind, tie_word_embeddings=tied) for tied in (True, False))
    counts = [n_parameters(HookedKVTransformer.from_pretrained(kind, hf_model=x, tokenizer=None)) for x in (tied, own)]
    assert counts[1] - counts[0] == own.num_parameters() - tied.num_parameters() == own.get_input_embeddings().weight.numel()


@pytest.mark.parametrize("family", ["qwen3_5", *(pytest.param(x, marks=pytest.mark.slow) for x in ("falcon_h1", "lfm2"))])
def test_a_section_that_does_not_run_on_the_model_says_why(family, tmp_path):
    """The dual model is of layers with attention alone; direct contributions need heads that write to the residual stream."""
    with float64():
        tiny_hf_model(family).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        model = load(tmp_path, device="cpu", dtype="float64")
        found = explain(model, "the cat sat on the mat. the dog sat on the log.", " the dog sat", depth="units")
        html = text_of(model, found, *SECTIONS)
    reasons = re.findall(r"<p class=\"note\">It is not shown for this model. (.*?)</p>", html)
    why = "a layer without attention" if family == "lfm2" else "dual_losses does not run on KVTransformerBridge"
    assert len(reasons) == 1 + (family != "qwen3_5") and why in reasons[-1]
    assert "exact to rounding" in html and ("3 layers of 4 or 6 heads" in html) == (family == "qwen3_5")


N_PROMPT, N_TEXT, N_ARCS = 940, 60, 2000
LARGEST = 1_500_000


def attention(*sizes: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of softmax over the keys up to the query, of normal scores of standard deviation 3."""
    scores = 3 * torch.randn(*sizes, generator=generator)
    n_queries, n_keys = sizes[-2:]
    later = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(n_keys - n_queries + 1)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1)


def of_size(n_layers: int, n_heads: int) -> dict:
    """What the page measures, with the numbers of a model of this many heads, on a prompt of 940 tokens and a text of 60."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    prompt, text = [f" w{i}" for i in range(N_PROMPT)], [f" t{i}" for i in range(N_TEXT)]
    grid, n_heads_all = (n_layers, n_heads), n_layers * n_heads
    places = pd.DataFrame([divmod(i, n_heads) for i in range(n_heads_all)], columns=["layer", "head"])
    pattern = attention(*grid, N_TEXT, N_PROMPT + N_TEXT, generator=generator)
    strongest = torch.arange(N_PROMPT - 64, N_PROMPT + N_TEXT)
    details = HeadDetails(
        prompt=prompt,
        text=text,
        queries=torch.arange(N_PROMPT, N_PROMPT + N_TEXT),
        pattern=pattern,
        prompt_shares=pattern.mean(dim=2)[..., :N_PROMPT],
        bias_shares=normal(*grid, N_TEXT).sigmoid(),
        strongest=strongest,
        among=attention(*grid, len(strongest), len(strongest), generator=generator),
    )
    shares = pattern[..., :N_PROMPT].double() * normal(*grid, N_TEXT, 1).abs() / n_heads_all
    linked = LinkedShares(
        prompt=prompt,
        text=text,
        by_prompt=shares.mean(dim=2),
        by_text=shares.sum(dim=3),
        between=shares.sum(dim=(0, 1)),
        next_tokens={name: [[(" word", 0.1234)] * 5] * N_TEXT for name in ("with the prompt", "converted", "without")},
    )
    depth = pd.DataFrame(
        [(layer, i, text[i], " with", " without") for layer in range(n_layers + 1) for i in range(N_TEXT)],
        columns=["layer", "position", "token", "guess_with", "guess_without"],
    )
    copies = pd.DataFrame(
        dict(zip(("layer", "head"), divmod(i % n_heads_all, n_heads), strict=True))
        | dict(position=i % N_TEXT, prompt_position=i * 7 % N_PROMPT, shifted=False)
        for i in range(N_ARCS)
    )
    numbers = {name: normal(n_heads_all).numpy() for name in (SHARE, "loss", "kl")}
    return {
        "details": details,
        "shares": linked,
        "heads": places.assign(**numbers).sort_values(SHARE, ascending=False),
        "prompt_by_depth": depth.assign(loss_change=normal(len(depth)).numpy()),
        "prompt_copies": copies.assign(attention=normal(N_ARCS).sigmoid().numpy()),
    }


def test_the_page_of_a_real_models_size_on_a_thousand_tokens_is_small(model, found, monkeypatch):
    n_layers, n_heads = 24, 14
    large = of_size(n_layers, n_heads)
    for name in ("details", "shares", "heads"):
        monkeypatch.setattr(page._Measured, name, large[name])
    for name in ("prompt_by_depth", "prompt_copies"):
        monkeypatch.setattr(page, name, lambda *args, found=large[name], **named: found)
    by_share = [name for name in SECTIONS if name not in ("heads", "dual")]
    html = explanation_page(model, found, by_share).to_html()
    assert "It is not shown" not in html and len(html.encode()) < LARGEST
    given = measured(model, found)
    html += "".join(piece.body for piece in SHOWN["heads"][1](given))
    assert f"layer {n_layers - 1}, head {n_heads - 1}" in html and len(html.encode()) < LARGEST
