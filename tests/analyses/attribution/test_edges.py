"""Edges between heads are those of path patching written out pass by pass; what is refused, and what the order is worth.

A circuit built by hand, on which the answer's sentences, heads and positions are known, and every effect has a formula.
"""

import math
from collections import Counter

import pytest
import torch
from analysis_models import tokens
from pandas.testing import assert_frame_equal
from small_models import sharp

from kvlens import explain
from kvlens.analyses import attribution_by_edge, attribution_by_head, attribution_by_position, prompt_attribution
from kvlens.components import hidden_tokens_keep_positions
from kvlens.model.config import KVShiftConfig
from kvlens.papers.kvsa.constructed_models import model_of_zeros

EXACT = 1e-10
PROMPT, TEXT, SPAN = tokens(9), tokens(4, seed=1), (2, 5)
OTHER = tokens(3, seed=2)
MODELS = {
    "gqa decay": {},
    "rope after": dict(n_layers=3),
    "softmax, shifted": {},
    "softmax, rotary, grouped": dict(parallel_attn_mlp=True, gated_mlp=True),
    "softmax, norms behind heads": {},
}


def run(model, text, hooks, keep=(), mask=None, prompt=PROMPT):
    """log p of every token behind prompt and text, and what passed some hook points."""
    seen = {}

    def see(x, hook):
        seen[hook.name] = x.clone()

    mask = torch.ones(1, len(prompt) + len(text), dtype=torch.long) if mask is None else mask
    with hidden_tokens_keep_positions(True):
        logits = model.run_with_hooks(
            torch.cat([prompt, text])[None], attention_mask=mask, fwd_hooks=[*hooks, *((name, see) for name in keep)]
        )
    return logits[0].log_softmax(dim=-1), seen


def naive_effect(model, row, *, answer, replaced: bool, through_mlps: bool) -> float:
    """Two passes over all tokens through all layers, by whole tensors."""
    text, n = torch.cat([TEXT, answer[:-1]]), len(answer)
    layers = range(model.cfg.n_layers)
    z = [f"blocks.{layer}.attn.hook_z" for layer in layers]
    mlps = [] if through_mlps else [f"blocks.{layer}.hook_mlp_out" for layer in layers]
    mask, prompt = torch.ones(1, len(PROMPT) + len(text), dtype=torch.long), PROMPT.clone()
    gone = slice(*SPAN)
    if replaced:
        prompt[gone] = OTHER
    else:
        mask[:, gone] = 0
    point = f"blocks.{row.receiver_layer}.attn.hook_{row.input}"
    before, own = run(model, text, [], [*z, *mlps, point])
    _, theirs = run(model, text, [], z, mask, prompt)
    sender = z[row.sender_layer]
    if not replaced:
        theirs[sender][:, gone] = 0
    at = slice(0, len(PROMPT)) if row.where == "prompt" else slice(len(PROMPT), None)
    patched = {name: own[name].clone() for name in (*z, *mlps)}
    patched[sender][:, at, row.sender_head] = theirs[sender][:, at, row.sender_head]
    _, changed = run(model, text, [(name, lambda x, hook: patched[hook.name]) for name in patched], [point])
    mixed = own[point].clone()
    mixed[:, :, row.receiver_head] = changed[point][:, :, row.receiver_head]
    after, _ = run(model, text, [(point, lambda x, hook: mixed)])
    scores = [x[torch.arange(len(x) - n, len(x)), answer].sum() for x in (before, after)]
    return float(scores[0] - scores[1])


@pytest.mark.parametrize("through_mlps", [True, False])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_every_effect_is_that_of_path_patching_written_out(name, through_mlps):
    model, replaced, answer = sharp(name, **MODELS[name]), through_mlps, torch.tensor([3, 7])
    given = dict(by=[SPAN], answer=answer, replace_by={SPAN: OTHER} if replaced else None, through_mlps=through_mlps)
    table = attribution_by_edge(model, PROMPT, TEXT, n_confirmed=None, **given)
    n, kv, layers = model.cfg.n_heads, model.cfg.n_key_value_heads or model.cfg.n_heads, model.cfg.n_layers
    assert len(table) == math.comb(layers, 2) * 2 * n * (n + 2 * kv) and table["effect"].abs().max() > 0.01
    assert not table.duplicated(["sender_layer", "sender_head", "where", "receiver_layer", "receiver_head", "input"]).any()
    for row in table.iloc[:: max(1, len(table) // 12)].itertuples():
        expected = naive_effect(model, row, answer=answer, replaced=replaced, through_mlps=through_mlps)
        assert row.effect == pytest.approx(expected, abs=EXACT)
    fewer = attribution_by_edge(model, PROMPT, TEXT, n_confirmed=5, **given)
    table.loc[5:, "effect"] = math.nan
    assert_frame_equal(fewer, table, rtol=0, atol=EXACT)


def test_the_estimate_is_the_effect_where_changes_are_small():
    """The estimate's error falls with the square of what the senders write, and the effect in proportion to it."""
    errors = []
    for size in (1e-4, 1e-5):
        model = sharp(attention="softmax", kv_shift=None)
        with torch.no_grad():
            model.blocks[0].attn.W_O.mul_(size)
        table = attribution_by_edge(model, PROMPT, TEXT, by=[SPAN], answer=3, n_confirmed=None)
        errors.append(((table["estimate"] - table["effect"]).abs().max(), table["effect"].abs().max()))
    assert errors[1][0] < 0.02 * errors[0][0] and errors[0][0] < 0.01 * errors[0][1]


def test_a_rival_is_subtracted_and_units_are_separate():
    model = sharp()

    def table(by=(SPAN, (6, 8)), **given):
        found = attribution_by_edge(model, PROMPT, TEXT, by=list(by), n_confirmed=None, **given)
        return found.sort_values(list(found.columns[: found.columns.get_loc("estimate")]), ignore_index=True)

    rival = torch.tensor([4, 1])
    both, answer, other = (table(**given) for given in (dict(answer=3, rival=rival), dict(answer=3), dict(answer=rival)))
    for column in ("estimate", "effect", "whole"):
        assert both[column].tolist() == pytest.approx((answer[column] - other[column]).tolist(), abs=EXACT)
    alone = table([(6, 8)], answer=3)
    assert_frame_equal(alone.assign(unit=1), answer.query("unit == 1").reset_index(drop=True))


BOX, CELLAR, SACK, BARN, KEY, COIN, REST = range(7)
N_TOKENS, STRENGTH = 8, 6.0
FACTS = [(SACK, BARN), (BOX, CELLAR), (COIN, SACK), (KEY, BOX), (REST, 7)]
STORY = torch.tensor([token for fact in FACTS for token in fact])
SPANS = [(2 * i, 2 * i + 2) for i in range(len(FACTS))]
OUTER, INNER = 1, 3
NOTE = 7
"""Position of "box" in "key box"."""
ASKED = torch.tensor([KEY])
BY_FORMULA = 1e-12


def log_p(logits: dict[int, float], token: int) -> float:
    """Of a token, where all that are not named have the logit 0."""
    whole = sum(math.exp(logits.get(t, 0.0)) for t in range(N_TOKENS))
    return logits.get(token, 0.0) - math.log(whole)


@torch.no_grad()
def two_hop_circuit(embeddings, strength, sigma=None):
    """Reads facts of two tokens, subject and value, and answers a subject with the value of its value.

    After "box cellar, key box" the token "key" is answered by "cellar". The stream has four parts of d features: the token, the
    note, the answer, and one that is never read. Head 0 of the first layer looks up each token as a subject and writes the
    value that it finds into the note: at the "box" of "key box" it writes "cellar". Head 0 of the second layer looks up the
    current token as a subject and copies the note found there into the answer. Head 1 of either layer reads the same and writes
    to the part that is never read. The unembedding reads the answer.

    Args:
        embeddings: orthonormal.
        strength: the logit of an answer that was found; that of every other token is 0.
        sigma: None for linear attention without normalizer, whose look-up is exact: a missing token contributes nothing. A
            number for softmax of that temperature: a matching token has weight 1 - O(e^{-1 / sigma}), and without a match all
            visible positions have equal weight.

    Returns:
        The model, without positions.
    """
    d = embeddings.shape[1]
    kind = {} if sigma is not None else dict(attention="linear", feature_map="identity", normalizer="none")
    shift = KVShiftConfig(window=1, values=False)
    model = model_of_zeros(embeddings, 4 * d, d, 2, sigma or 1.0, kv_shift=shift, n_heads=2, **kind)
    token, note, answer, unread = (slice(part * d, (part + 1) * d) for part in range(4))
    one = torch.eye(d, dtype=embeddings.dtype)
    for layer, (read, write) in enumerate(((token, note), (note, answer))):
        attn = model.blocks[layer].attn
        attn.k_shift_coef.copy_(torch.tensor([[0.0, 1.0]]))
        attn.W_Q[:, token] = attn.W_K[:, token] = one
        attn.W_V[:, read] = one
        attn.W_O[0, :, write] = attn.W_O[1, :, unread] = one
    model.unembed.W_U[answer] = strength * embeddings.T
    return model


def built(sigma: float | None):
    embeddings = torch.linalg.qr(torch.randn(N_TOKENS, N_TOKENS, generator=torch.Generator().manual_seed(0)).double()).Q
    return two_hop_circuit(embeddings, STRENGTH, sigma)


@pytest.fixture(scope="module", params=[None, 0.02], ids=["linear", "softmax"])
def sigma(request):
    return request.param


@pytest.fixture(scope="module")
def circuit(sigma):
    return built(sigma)


def mean_of(tokens: list[int]) -> dict[int, float]:
    """Logits of an answer that is the mean of these tokens."""
    return {token: STRENGTH * n / len(tokens) for token, n in Counter(tokens).items()}


def outer_effect(circuit) -> float:
    """Of the sentence that says where the box is."""
    found = log_p({CELLAR: STRENGTH}, CELLAR)
    if circuit.cfg.attention == "linear":
        return found - log_p({}, CELLAR)
    prompt = STORY.tolist()  # without it the note at "box" is the mean of all tokens up to there
    return found - log_p(mean_of(prompt[:2] + prompt[4 : NOTE + 1]), CELLAR)


def test_both_sentences_are_the_cause_and_no_other_and_the_text_reads_one_of_them(circuit):
    """What was noted while the prompt was read has no knockout effect."""
    table = prompt_attribution(circuit, STORY, ASKED, by=SPANS, answer=CELLAR)
    assert int(circuit(torch.cat([STORY, ASKED])[None])[0, -1].argmax()) == CELLAR
    effects, knockout = table["total_effect"].tolist(), table["knockout_effect"].tolist()
    assert effects[OUTER] == pytest.approx(outer_effect(circuit), abs=BY_FORMULA)
    assert set(table["total_effect"].nlargest(2).index) == {OUTER, INNER}
    assert max(abs(effects[unit]) for unit in (0, 2, 4)) < BY_FORMULA
    if circuit.cfg.attention == "linear":
        assert effects[INNER] == pytest.approx(outer_effect(circuit), abs=BY_FORMULA)
    assert abs(knockout[OUTER]) < BY_FORMULA < 1.0 < knockout[INNER]


def test_the_one_head_that_reads_the_note_has_the_whole_effect(circuit):
    heads = attribution_by_head(circuit, STORY, ASKED, by=SPANS, answer=CELLAR)
    # With softmax and without the inner sentence nothing is found, and the text's own note, of L0H0, counts like any other.
    for unit in (OUTER, INNER) if circuit.cfg.attention == "linear" else (OUTER,):
        of_unit = heads[(heads["unit"] == unit) & (heads["part"] == "head")].set_index(["layer", "head"])
        whole = of_unit["whole"].iloc[0]
        assert whole > 1.0
        expected = [0.0, 0.0, whole, 0.0]  # L0H0 wrote the note, into the prompt; the text reads it through L1H0
        assert of_unit["swap"].tolist() == pytest.approx(expected, abs=BY_FORMULA)
        assert of_unit["converse"].tolist() == pytest.approx([whole - effect for effect in expected], abs=BY_FORMULA)
        assert of_unit["interaction"].abs().max() < BY_FORMULA
    assert heads[heads["unit"].isin([0, 2, 4])]["swap"].abs().max() < BY_FORMULA


def test_the_note_is_the_one_position_that_is_read(circuit):
    table = attribution_by_position(circuit, STORY, ASKED, by=SPANS, answer=CELLAR, each_layer=True)
    outer = table[(table["unit"] == OUTER) & (table["part"] == "position")]
    for layer, size in ((-1, 1.0), (0, 0.0), (1, 1.0)):
        swaps = outer[outer["layer"] == layer].set_index("prompt_position")["swap"]
        assert swaps[NOTE] == pytest.approx(size * outer["whole"].iloc[0], abs=BY_FORMULA)
        assert swaps.drop(NOTE).abs().max() < BY_FORMULA
        alone = outer["whole"].iloc[0] - outer[outer["layer"] == layer].set_index("prompt_position")["converse"]
        assert alone[NOTE] == pytest.approx(size * outer["whole"].iloc[0], abs=BY_FORMULA)
        assert alone.drop(NOTE).abs().max() < BY_FORMULA
    noted = outer[(outer["layer"] == -1) & (outer["prompt_position"] == NOTE)].iloc[0]
    assert not noted["in_unit"] and not noted["in_shift_window"]
    inner = table[(table["unit"] == INNER) & (table["part"] == "position") & (table["layer"] == -1)]
    assert inner.loc[inner["swap"].idxmax(), "prompt_position"] == NOTE
    if circuit.cfg.attention == "linear":
        assert inner["swap"].max() == pytest.approx(inner["whole"].iloc[0], abs=BY_FORMULA)
        assert inner.set_index("prompt_position")["swap"].drop(NOTE).abs().max() < BY_FORMULA


def test_an_explanation_of_the_circuit_is_its_sentences_its_layer_and_its_head(circuit):
    """Either sentence loses the answer, and no other; the layer and the head that read the note do, too."""
    found = explain(circuit, STORY, torch.tensor([KEY]), by=SPANS, answer=torch.tensor([CELLAR]), depth="heads")

    def lost(about: str) -> list[str]:
        """By log-probability: what is said instead may be the same token, as in the linear circuit all are equal then."""
        each = found.rows(about, "each")
        return each.loc[(each["nats"] > 1.0) & (each["gap"] == "kept"), "parts"].tolist()

    assert lost("units") == [str(OUTER), str(INNER)]
    assert set(found.cause) <= {OUTER, INNER} and (found.cause or circuit.cfg.attention == "linear")
    if (circuit.cfg.attention == "linear" and found.cause) or found.cause == (OUTER,):
        assert lost("layers") == ["1"] and lost("heads") == ["1.0"]


def test_nothing_is_lost_where_the_prompt_is_ignored(sigma):
    """With W_O = 0 no head writes anything."""
    model = built(sigma).requires_grad_(False)
    for block in model.blocks:
        block.attn.W_O.zero_()
    found = explain(model, STORY, ASKED, by=SPANS)
    assert set(found.statements["verdict"]) == {"same words"} and found.cause == ()


def reads_the_note_by(input_: str, sigma: float | None):
    """The circuit whose second layer reads the note as its values, or copies tokens, and the note asks or is asked for."""
    model, token, note = built(sigma).requires_grad_(False), slice(N_TOKENS), slice(N_TOKENS, 2 * N_TOKENS)
    attn = model.blocks[1].attn
    if input_ != "v":
        for weight in (attn.W_V, attn.W_Q if input_ == "q" else attn.W_K):
            weight[:, token], weight[:, note] = weight[:, note].clone(), weight[:, token].clone()
    if input_ == "k":
        attn.k_shift_coef.copy_(torch.tensor([[1.0, 0.0]]))
    return model


@pytest.mark.parametrize(
    ("input_", "where", "asked", "answer", "unit"),
    [("v", "prompt", KEY, CELLAR, OUTER), ("q", "text", KEY, CELLAR, INNER), ("k", "prompt", CELLAR, BOX, OUTER)],
)
def test_the_edge_that_carries_the_note_is_found_and_no_other(input_, where, asked, answer, unit, sigma):
    """The note is "cellar", at the "box" of "key box", or "box", at the text's "key"."""
    model, text = reads_the_note_by(input_, sigma), torch.tensor([asked])
    assert int(model(torch.cat([STORY, text])[None])[0, -1].argmax()) == answer
    table = attribution_by_edge(model, STORY, text, by=[SPANS[unit]], answer=answer, n_confirmed=None)
    edge = table.iloc[0]
    names = ["sender_layer", "sender_head", "where", "receiver_layer", "receiver_head", "input"]
    assert edge[names].tolist() == [0, 0, where, 1, 0, input_] and edge["effect"] > 1.0
    assert len(table) == 2 * 2 * 2 * 3 and table["effect"][1:].abs().max() < BY_FORMULA
    assert table["estimate"][1:].abs().max() < BY_FORMULA
    if sigma is None:
        assert edge["effect"] == pytest.approx(edge["whole"], abs=BY_FORMULA)
