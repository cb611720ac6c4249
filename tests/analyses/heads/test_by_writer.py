"""Why a head attends, and what it copies: the tables are those of a slow, obvious form and of a circuit known by construction,
they add up to the scores and outputs of the pass, and their runs are those of hooks.
"""

import itertools
import math

import pandas as pd
import pytest
import torch
from analysis_models import SHARP, tokens, two_layer_circuit
from kvlens.analyses.declaration import Record
from kvlens.analyses.heads.writers import head_by_writer
from precision import LAW, float64, relative_error
from small_models import model_of, shared
from tiny_hf import D_VOCAB
from tiny_text_model import PROMPT as WORDS
from tiny_text_model import TEXT as NEXT_WORDS
from tiny_text_model import softmax

from kvlens import convert_prompt
from kvlens.analyses import attention_under_bias, what_is_copied, why_attends
from kvlens.ops.rotary import naive_rotate

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
BOTH = torch.cat([PROMPT, TEXT])
LAYER, HEAD = 1, 3
NAIVE = ["learned", "RMS, gated", "rotary, grouped", "soft-capped", "qk norm", "scaled by layer", "side by side", "folded LN"]
OTHERS = ["adjacent rotary", "sinusoidal", "no positions", "alibi", "alibi, grouped", "shifted", "shifted, grouped", "local",
          "sinks", "split", "no norm", "no norm, attention only"]  # fmt: skip
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "gptj", "gpt_neox", "opt", "phi3", "mixtral", "gpt_oss", "deepseek_v3"]
HYBRIDS = ["qwen3_5", "jamba", "nemotron_h", "falcon_h1_direct"]

pytestmark = pytest.mark.usefixtures("without_gradients")


def matrix(table, column="score"):
    """Of the pairs, by query writer and key writer."""
    pairs = table[table["side"] == "pair"]
    return pairs.pivot_table(index="query_writer", columns="key_writer", values=column, fill_value=0.0)


def whole(table, side, column):
    return table.loc[table["side"] == side, column].sum()


# --- the slow form: writer by writer, key by key, from the weights ---


def naive_writers(model, cache, layer):
    """name -> [pos, d_model]."""
    found = {"token embedding": cache["hook_embed"][0]}
    if "hook_pos_embed" in cache:
        found["positional embedding"] = cache["hook_pos_embed"][0]
    for m in range(layer):
        for head in range(model.cfg.n_heads):
            found[f"head {m}.{head}"] = cache[f"blocks.{m}.attn.hook_z"][0, :, head] @ model.blocks[m].attn.W_O[head]
        found[f"mlp {m}"] = cache[f"blocks.{m}.hook_mlp_out"][0]
    return found


def naive_read(model, cache, x, name, position, layer, head, with_biases):
    """The query ("q"), key or value of one vector at one position, with the scales of the pass."""
    block, attn = model.blocks[layer], model.blocks[layer].attn
    n_kv = model.cfg.n_key_value_heads or model.cfg.n_heads
    kv_head = head // (model.cfg.n_heads // n_kv)
    norm, scale = block.ln1, cache[f"blocks.{layer}.ln1.hook_scale"].reshape(len(BOTH), -1)[position, :1]
    x = (x - x.mean() if norm.centers else x) / scale * getattr(norm, "w", 1.0)
    x = x + (getattr(norm, "b", 0.0) if with_biases else 0.0)
    x = x @ getattr(attn, f"W_{name.upper()}")[head] + with_biases * getattr(attn, f"b_{name.upper()}")[head]
    if name == "v":
        return x
    if model.cfg.use_qk_norm:
        scales = cache[f"blocks.{layer}.attn.{name}_norm.hook_scale"].reshape(len(BOTH), -1)
        x = x / scales[position, head if name == "q" else kv_head] * getattr(attn, f"{name}_norm").w
    if model.cfg.positional_embedding_type == "rotary":
        n = model.cfg.rotary_dim
        frequencies = 10000.0 ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
        x = naive_rotate(x, position, frequencies, model.cfg.rotary_adjacent_pairs)
    return x


def naive_pairs(model, layer, head, query):
    """(query writer, key writer) -> score of every key; and (value writer, key) -> part of z."""
    _, cache = model.run_with_cache(BOTH[None])
    rule = model.blocks[layer].attn.score_rule()
    writers = naive_writers(model, cache, layer)
    written = sum((model.blocks[m].attn.b_O for m in range(layer)), torch.zeros(model.cfg.d_model, dtype=torch.float64))
    writers["biases"] = written.expand(len(BOTH), -1)

    def of(name, writer, position):
        return naive_read(model, cache, writers[writer][position], name, position, layer, head, writer == "biases")

    queries = {writer: of("q", writer, query) for writer in writers}
    pairs = {pair: torch.zeros(query + 1, dtype=torch.float64) for pair in itertools.product(writers, repeat=2)}
    z = {}
    for j in range(query + 1):
        keys = {writer: of("k", writer, j) for writer in writers}
        raw = float(sum(queries.values()) @ sum(keys.values())) / rule.scale
        held = rule.soft_cap * math.tanh(raw / rule.soft_cap) / raw if rule.soft_cap else 1.0
        for a, b in pairs:
            pairs[a, b][j] = queries[a] @ keys[b] / rule.scale * held
        for writer in writers:
            z[writer, j] = cache[f"blocks.{layer}.attn.hook_pattern"][0, head, query, j] * of("v", writer, j)
    scores = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, head, query, : query + 1]
    assert relative_error(sum(pairs.values()), scores) < LAW
    assert relative_error(sum(z.values()), cache[f"blocks.{layer}.attn.hook_z"][0, query, head]) < LAW
    return pairs, z, cache[f"blocks.{layer}.attn.hook_pattern"][0, head, query, : query + 1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", NAIVE)
def test_pairs_are_those_of_the_slow_form(row):
    model, query, key = shared(f"softmax, {row}"), 10, 4
    pairs, z, pattern = naive_pairs(model, LAYER, HEAD, query)
    table = why_attends(model, PROMPT, TEXT, LAYER, HEAD, query=query, key=key)
    scores, contrasts = matrix(table), matrix(table, "contrast")
    others = pattern.clone()
    others[key] = 0
    mean = others / others.sum()
    for column, found in ((lambda x: x[key], scores), (lambda x: x[key] - x @ mean, contrasts)):
        expected = torch.tensor([[float(column(pairs[a, b])) for b in found.columns] for a in found.index], dtype=torch.float64)
        assert relative_error(torch.tensor(found.to_numpy()), expected) < LAW
        assert found.abs().to_numpy().max() > 1e-3  # it matters
    assert set(table["query_writer"]) == {writer for writer, _ in pairs} | {"all"}
    read = head_by_writer(model, PROMPT, TEXT, LAYER, HEAD, query)
    for (writer, j), part in z.items():
        assert float((read.outputs()[read.writers.index(writer), j] - part).norm()) < LAW * float(sum(z.values()).norm())


# --- known by construction ---


def test_a_circuit_that_is_known():
    """Head 1.2 reads the token in the query, and in the key what head 0.1 wrote of the token before; it copies that token."""
    model, text = two_layer_circuit(), torch.tensor([5, 3, 7, 1, 3])
    table = why_attends(model, text, None, 1, 2)
    assert (table["key_position"] == 2).all()  # the token behind the first 3
    assert matrix(table).to_numpy().tolist() == [[pytest.approx(SHARP)]]
    assert matrix(table).index.tolist() == ["token embedding"]
    assert matrix(table).columns.tolist() == ["head 0.1"]
    assert whole(table, "key", "contrast") == pytest.approx(SHARP)  # other tokens have a score of 0
    run = table[table["side"] == "key"].iloc[0]
    assert (run["score_run"], run["attention_run"]) == (pytest.approx(SHARP), pytest.approx(1 - 1 / len(text)))
    copied = what_is_copied(model, text, None, 1, 2, answer=7)
    first = copied.groupby("side").first()
    assert first.loc["pair", ["value_writer", "key_position", "share"]].tolist() == ["token embedding", 2, pytest.approx(1)]
    assert first.loc["writer", "logit"] == pytest.approx(1 - 1 / model.cfg.d_vocab)
    assert first.loc["writer", "logit_run"] == pytest.approx(1 - 1 / model.cfg.d_vocab)  # nothing is behind it


# --- laws ---


def hooked(model):
    return [name for name, point in model.hook_dict.items() if point.has_hooks()]


def assert_adds_up(model, prompt, text, layer, head):
    """Every side of both tables, at a query in the middle and at the last, near and far keys."""
    part, seen, both = model.layers()[layer].parts[0], {}, torch.cat([prompt, text])
    before, before_hooks = model(both[None]), hooked(model)
    for name, point in (("scores", part.attn.hook_attn_scores), ("pattern", part.attention_points()["pattern"][0])):
        handle = point.register_forward_hook(lambda _, args, x, name=name: seen.update({name: x[0, head]}))
        model(both[None])
        handle.remove()
    for query, key in ((5, None), (5, 4), (len(both) - 1, len(both) - 3), (len(both) - 1, None)):
        table = why_attends(model, prompt, text, layer, head, query=query, key=key, n_run=2)
        j = table["key_position"][0]
        others = seen["pattern"][query].clone()
        others[j] = 0
        assert table["attention"][0] == pytest.approx(float(seen["pattern"][query, j]), rel=LAW, abs=LAW)
        for side in ("key", "query", "pair"):
            of_side = table.loc[table["side"] == side, "score"].to_numpy()
            assert abs(of_side.sum() - float(seen["scores"][query, j])) < LAW * max(1, abs(of_side).max())
        if part.sinks is None:
            scores = seen["scores"][query, : query + 1].nan_to_num(0, neginf=0)
            contrast = float(scores[j] - scores @ (others / others.sum())[: query + 1])
            for side in ("key", "query", "pair"):
                assert whole(table, side, "contrast") == pytest.approx(contrast, rel=LAW, abs=LAW * float(scores.abs().max()))
        copied = what_is_copied(model, prompt, text, layer, head, query=query, answer=3, n_run=2)
        for side in ("writer", "position", "pair"):
            assert whole(copied, side, "share") == pytest.approx(1, abs=LAW)
    assert torch.equal(model(both[None]), before)
    assert hooked(model) == before_hooks


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", [*NAIVE, *OTHERS])
def test_parts_add_up_to_scores_contrasts_and_outputs(row):
    slopes = {"alibi_slopes": (0.5, 0.25, 0.0, 1.0, 0.125, 2.0)} if row == "alibi, grouped" else {}  # as in the table of models
    assert_adds_up(shared(f"softmax, {row}", **slopes), PROMPT, TEXT, LAYER, HEAD)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_parts_add_up_on_the_bridge(family, bridge_of):
    with float64():
        model = bridge_of(family)
        layer = 1 if family in HYBRIDS else 2
        both = torch.randint(D_VOCAB, (12,), generator=torch.Generator().manual_seed(0))
        assert_adds_up(model, both[:7], both[7:], layer, 2 if family != "gptj" else 1)


def test_what_all_keys_share_is_no_part_of_the_contrast():
    """A bias of the keys adds the same to every score of a query: softmax does not see it, and the contrast neither."""
    before, after = (model_of("softmax", "learned", gain=5) for _ in range(2))
    after.blocks[LAYER].attn.b_K[HEAD] += 1.0
    tables = [why_attends(model, PROMPT, TEXT, LAYER, HEAD, key=4) for model in (before, after)]
    scores, contrasts, attention = ([f(t) for t in tables] for f in (
        lambda t: whole(t, "pair", "score"), lambda t: whole(t, "pair", "contrast"), lambda t: t["attention"][0]))  # fmt: skip
    assert abs(scores[0] - scores[1]) > 0.1
    assert contrasts[0] == pytest.approx(contrasts[1], rel=LAW)
    assert attention[0] == pytest.approx(attention[1], rel=LAW)


# --- runs are interventions ---


def hooked_run(model, changes, names):
    """One pass over both texts with some hook points' tensors replaced."""
    seen = {}
    hooks = [(name, lambda x, hook, new=new: new) for name, new in changes.items()]
    hooks += [(name, lambda x, hook: seen.update({hook.name: x})) for name in names]
    logits = model.run_with_hooks(BOTH[None], fwd_hooks=hooks)
    return logits, seen


@pytest.mark.parametrize("row", ["learned", "soft-capped"])
def test_a_writer_is_taken_out_of_this_heads_keys_queries_or_values_alone(row):
    model, key = shared(f"softmax, {row}"), 4
    _, cache = model.run_with_cache(BOTH[None])
    block, at = model.blocks[LAYER], f"blocks.{LAYER}"
    stream, writers = cache[f"{at}.hook_resid_pre"], naive_writers(model, cache, LAYER)
    table = why_attends(model, PROMPT, TEXT, LAYER, HEAD, key=key, n_run=3)
    copied = what_is_copied(model, PROMPT, TEXT, LAYER, HEAD, answer=3, rival=5, n_run=3)
    points = f"{at}.attn.hook_attn_scores", f"{at}.attn.hook_pattern"
    scores, pattern = (cache[name][0, HEAD, -1] for name in points)
    logits, ran = model(BOTH[None])[0, -1], 0
    mean = pattern.index_fill(0, torch.tensor(key), 0) / (1 - pattern[key])

    def without(writer, name):
        x = block.ln1(stream - writers[writer])
        new = cache[f"{at}.attn.hook_{name}"].clone()
        new[:, :, HEAD] = x @ getattr(block.attn, f"W_{name.upper()}")[HEAD] + getattr(block.attn, f"b_{name.upper()}")[HEAD]
        return {f"{at}.attn.hook_{name}": new}

    for side, name in (("key", "k"), ("query", "q")):
        for run in table[(table["side"] == side) & table["score_run"].notna()].itertuples():
            writer = run.key_writer if side == "key" else run.query_writer
            _, seen = hooked_run(model, without(writer, name), points)
            fall, attention = ((of - seen[point][0, HEAD, -1]) for of, point in zip((scores, pattern), points, strict=True))
            expected = float(fall[key] - fall @ mean), float(fall[key]), float(attention[key])
            assert (run.contrast_run, run.score_run, run.attention_run) == pytest.approx(expected, rel=1e-9, abs=LAW)
            ran += abs(run.score - run.score_run) > 1e-3  # norms divide by less
    for run in copied[copied["logit_run"].notna()].itertuples():
        changed, _ = hooked_run(model, without(run.value_writer, "v"), [])
        fall = logits - changed[0, -1]
        assert run.logit_run == pytest.approx(float(fall[3] - fall[5]), rel=1e-9, abs=LAW)
    assert ran
    assert copied["logit_run"].notna().sum() == 3


# --- under a bias ---


@pytest.mark.one_in(2)
@pytest.mark.parametrize("row", ["learned", "rotary, grouped", "alibi, grouped", "soft-capped", "sinks", "local", "qk norm"])
def test_an_exact_bias_gives_what_its_prompt_gives_but_for_the_writers_of_its_keys(row):
    assert_same_under_bias(shared(f"softmax, {row}"), PROMPT, TEXT, LAYER, key=5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "gpt_oss", "deepseek_v3"])
def test_an_exact_bias_on_the_bridge(family, bridge_of):
    with float64():
        model = bridge_of(family)
        both = torch.randint(D_VOCAB, (12,), generator=torch.Generator().manual_seed(0))
        assert_same_under_bias(model, both[:7], both[7:], 1, key=5)


def assert_same_under_bias(model, prompt, text, layer, key):
    bias, head = convert_prompt(model, prompt), 2
    ways = [(prompt, text), (bias, text)]
    tokens_, exact = (why_attends(model, *way, layer, head, key=key) for way in ways)
    with model.kv_bias(bias):
        attached = why_attends(model, text, None, layer, head, key=key)
    pd.testing.assert_frame_equal(attached, exact, check_exact=True)
    near = dict(rel=LAW, abs=LAW)
    for side, column in itertools.product(("key", "query", "pair"), ("score", "contrast")):
        assert whole(exact, side, column) == pytest.approx(whole(tokens_, side, column), **near)
    queries = [table[table["side"] == "query"].set_index("query_writer") for table in (tokens_, exact)]
    numbers = ["score", "contrast", "score_run", "contrast_run", "attention_run", "attention"]
    pd.testing.assert_frame_equal(*(table[numbers].sort_index() for table in queries), rtol=LAW, atol=LAW)
    assert exact.loc[exact["side"] == "key"].loc[lambda x: x["score"] != 0, "key_writer"].tolist()[:1] == ["the prompt"]
    of_tokens, of_bias = (what_is_copied(model, *way, layer, head, answer=3) for way in ways)
    assert set(of_bias["key_token"]) >= {"key 0", "key 6"} or model.layers()[layer].parts[0].score_rule().window
    positions = [t[t["side"] == "position"].set_index("key_position")[["logit", "share"]] for t in (of_tokens, of_bias)]
    pd.testing.assert_frame_equal(*(table.sort_index() for table in positions), rtol=1e-9, atol=LAW)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("row", ["learned", "rotary, grouped", "alibi"])
def test_fewer_keys_than_the_prompt_had_have_weights(row):
    model = shared(f"softmax, {row}")
    bias = convert_prompt(model, PROMPT, method="landmark", n_features=3, key_steps=2, n_continuations=3, continuation_length=6)
    pattern = attention_under_bias(model, bias, TEXT, LAYER).pattern[HEAD, -1]
    read = [key for key in range(len(pattern)) if pattern[key] > 0]  # a fitted weight may be 0
    assert read[0] == 0  # one of the bias, and all of the text
    tables = [why_attends(model, bias, TEXT, LAYER, HEAD, key=key) for key in read]
    found, pattern = torch.tensor([table["attention"][0] for table in tables]), pattern[read]
    assert relative_error(found, pattern) < LAW
    assert any("key weights" in set(table["key_writer"]) for table in tables)
    scores = torch.tensor([whole(table, "pair", "score") for table in tables])
    assert relative_error((scores - scores[0]).exp(), pattern / pattern[0]) < LAW


# --- words, and the command line ---


def test_words_and_positions_name_tokens():
    model = softmax()
    by_word = why_attends(model, WORDS, NEXT_WORDS, 1, 2, query="green", key="purple")
    texts = model.to_str_tokens(WORDS), model.to_str_tokens(NEXT_WORDS, prepend_bos=False)
    both = [*texts[0], *texts[1]]
    assert by_word["query_token"][0].strip() in "green"
    assert by_word["key_token"][0].strip() in "purple"
    same = why_attends(
        model, WORDS, NEXT_WORDS, 1, 2, query=int(by_word["position"][0]) - len(both), key=int(by_word["key_position"][0])
    )
    pd.testing.assert_frame_equal(by_word, same)
    record = Record("a", WORDS, NEXT_WORDS)
    run = why_attends.analysis.run(model, record, layer=1, head=2, query="green", key=str(by_word["key_position"][0]))
    pd.testing.assert_frame_equal(by_word, run)
    most = why_attends(model, WORDS, NEXT_WORDS, 1, 2)
    read = head_by_writer(model, WORDS, NEXT_WORDS, 1, 2, None)
    assert most["position"][0] == len(both) - 1
    assert most["key_position"][0] == int(read.attention(read.own_scores).argmax())
    assert what_is_copied.analysis.run(model, Record("a", WORDS), layer=1, head=2)["answer"].notna().all()
