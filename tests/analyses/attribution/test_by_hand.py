"""A circuit built by hand, on which the answer's sentences, heads, positions and edges are known, and effects have formulas."""

import math
from collections import Counter

import pytest
import torch

from kvlens import explain
from kvlens.analyses import attribution_by_head, attribution_by_position, circuit, prompt_attribution
from kvlens.model.config import KVShiftConfig
from kvlens.papers.kvsa.constructed_models import model_of_zeros

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
def by_hand(sigma):
    return built(sigma)


def mean_of(tokens: list[int]) -> dict[int, float]:
    """Logits of an answer that is the mean of these tokens."""
    return {token: STRENGTH * n / len(tokens) for token, n in Counter(tokens).items()}


def outer_effect(by_hand) -> float:
    """Of the sentence that says where the box is."""
    found = log_p({CELLAR: STRENGTH}, CELLAR)
    if by_hand.cfg.attention == "linear":
        return found - log_p({}, CELLAR)
    prompt = STORY.tolist()  # without it the note at "box" is the mean of all tokens up to there
    return found - log_p(mean_of(prompt[:2] + prompt[4 : NOTE + 1]), CELLAR)


def test_both_sentences_are_the_cause_and_no_other_and_the_text_reads_one_of_them(by_hand):
    """What was noted while the prompt was read has no knockout effect."""
    table = prompt_attribution(by_hand, STORY, ASKED, by=SPANS, answer=CELLAR)
    assert int(by_hand(torch.cat([STORY, ASKED])[None])[0, -1].argmax()) == CELLAR
    effects, knockout = table["total_effect"].tolist(), table["knockout_effect"].tolist()
    assert effects[OUTER] == pytest.approx(outer_effect(by_hand), abs=BY_FORMULA)
    assert set(table["total_effect"].nlargest(2).index) == {OUTER, INNER}
    assert max(abs(effects[unit]) for unit in (0, 2, 4)) < BY_FORMULA
    if by_hand.cfg.attention == "linear":
        assert effects[INNER] == pytest.approx(outer_effect(by_hand), abs=BY_FORMULA)
    assert abs(knockout[OUTER]) < BY_FORMULA < 1.0 < knockout[INNER]


def test_the_one_head_that_reads_the_note_has_the_whole_effect(by_hand):
    heads = attribution_by_head(by_hand, STORY, ASKED, by=SPANS, answer=CELLAR)
    # With softmax and without the inner sentence nothing is found, and the text's own note, of L0H0, counts like any other.
    for unit in (OUTER, INNER) if by_hand.cfg.attention == "linear" else (OUTER,):
        of_unit = heads[(heads["unit"] == unit) & (heads["part"] == "head")].set_index(["layer", "head"])
        whole = of_unit["whole"].iloc[0]
        assert whole > 1.0
        expected = [0.0, 0.0, whole, 0.0]  # L0H0 wrote the note, into the prompt; the text reads it through L1H0
        assert of_unit["swap"].tolist() == pytest.approx(expected, abs=BY_FORMULA)
        assert of_unit["converse"].tolist() == pytest.approx([whole - effect for effect in expected], abs=BY_FORMULA)
        assert of_unit["interaction"].abs().max() < BY_FORMULA
    assert heads[heads["unit"].isin([0, 2, 4])]["swap"].abs().max() < BY_FORMULA


def test_the_note_is_the_one_position_that_is_read(by_hand):
    table = attribution_by_position(by_hand, STORY, ASKED, by=SPANS, answer=CELLAR, each_layer=True)
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
    if by_hand.cfg.attention == "linear":
        assert inner["swap"].max() == pytest.approx(inner["whole"].iloc[0], abs=BY_FORMULA)
        assert inner.set_index("prompt_position")["swap"].drop(NOTE).abs().max() < BY_FORMULA


def test_an_explanation_of_the_circuit_is_its_sentences_its_layer_and_its_head(by_hand):
    """Either sentence loses the answer, and no other; the layer and the head that read the note do, too."""
    found = explain(by_hand, STORY, torch.tensor([KEY]), by=SPANS, answer=torch.tensor([CELLAR]), depth="heads")

    def lost(about: str) -> list[str]:
        """By log-probability: what is said instead may be the same token, as in the linear circuit all are equal then."""
        each = found.rows(about, "each")
        return each.loc[(each["nats"] > 1.0) & (each["gap"] == "kept"), "parts"].tolist()

    assert lost("units") == [str(OUTER), str(INNER)]
    assert set(found.cause) <= {OUTER, INNER} and (found.cause or by_hand.cfg.attention == "linear")
    if (by_hand.cfg.attention == "linear" and found.cause) or found.cause == (OUTER,):
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("input_", "where", "asked", "answer", "unit"),
    [("v", "prompt", KEY, CELLAR, OUTER), ("q", "text", KEY, CELLAR, INNER), ("k", "prompt", CELLAR, BOX, OUTER)],
)
def test_the_edge_that_carries_the_note_is_found_and_no_other(input_, where, asked, answer, unit, sigma):
    """The note is "cellar", at the "box" of "key box", or "box", at the text's "key"."""
    model, text = reads_the_note_by(input_, sigma), torch.tensor([asked])
    assert int(model(torch.cat([STORY, text])[None])[0, -1].argmax()) == answer
    found = circuit(model, STORY, text=text, without=[SPANS[unit]], answer=answer, confirm=10**6)
    edges = found.edges.query("writer_head >= 0 and reader_head >= 0")
    edge = edges.loc[edges["metric_fall"].idxmax()]
    assert edge[["writer", "reader", "input"]].tolist() == ["0.0", "1.0", input_] and edge["metric_fall"] > 1.0
    others = edges.drop(edge.name)
    assert len(others) == 2 * 2 * 3 - 1 and others["metric_fall"].abs().max() < BY_FORMULA
    assert (edge["metric_fall_in_prompt"] > 1.0) if where == "prompt" else (abs(edge["metric_fall_in_prompt"]) < BY_FORMULA)
    assert others["metric_fall_in_prompt"].abs().max() < BY_FORMULA
    if sigma is None:
        whole, empty = found.measured(found.graph.edges, torch.zeros_like(found.kept)).flatten()
        assert edge["metric_fall"] == pytest.approx(float(whole - empty), abs=BY_FORMULA)
        assert where == "text" or edge["metric_fall_in_prompt"] == pytest.approx(edge["metric_fall"], abs=BY_FORMULA)
        assert others["estimate"].abs().max() < BY_FORMULA < edge["estimate"]
