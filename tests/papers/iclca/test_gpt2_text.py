"""``gpt2-text``: text in every way from a folder in GPT-2's own format, held against transformers' own logits."""

import json

import pandas as pd
import pytest
import torch
import transformers
from precision import LAW, relative_error

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, convert_prompt
from kvlens.__main__ import main
from kvlens.papers.iclca import gpt2_text
from kvlens.papers.iclca.gpt2_text import EVERY, EXACT, FACTS, LANDMARK, RANDOM, WITH, WITHOUT
from kvlens.tasks.facts import FactsTask, guess_in_story


@pytest.fixture(scope="module")
def gpt2(outside_data, tmp_path_factory):
    """(folder, model): a random GPT-2 of two small layers with the real tokenizer, as transformers writes it."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = transformers.GPT2TokenizerFast(
        vocab=str(outside_data / "gpt2-vocab.json"), merges=str(outside_data / "gpt2-merges.txt")
    )
    config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, vocab_size=len(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data * 5 if ".attn." in name else parameter.data + 0.5 * ("ln_f.bias" in name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


@pytest.fixture(scope="module")
def outcome(gpt2, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "o"
    assert main(["reproduce", "gpt2-text", "--model", str(gpt2[0]), "--scale", "tiny", "--out", str(out)]) == 0
    return json.loads((out / "summary.json").read_text()), pd.read_parquet(out / "texts.parquet")


@torch.no_grad()
def hf_logits(model, tokens: list[int], n: int) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, -n:].double()


def test_text_and_errors_are_those_of_transformers(gpt2, outcome):
    _, model, tokenizer = gpt2
    summary, texts = outcome
    assert summary["settings"]["model"] == str(gpt2[0])
    first = texts[texts["pair"] == 0].set_index("way")
    assert (first["prompt"] == FACTS[0][0]).all()
    prompt, text = map(tokenizer.encode, FACTS[0])
    bos = [tokenizer.bos_token_id]
    written = []
    for _ in range(4):
        written.append(int(hf_logits(model, bos + prompt + text + written, 1).argmax()))
    assert first.loc[WITH, "generated"] == first.loc[EXACT, "generated"] == tokenizer.decode(written)
    n = len(text) + 4
    old, new = hf_logits(model, bos + prompt + text + written, n), hf_logits(model, bos + text + written, n)
    expected = float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())
    # the command computes in float32, which is off by some 1e-7 of the logits: 1e-5 of a difference of a hundredth of them
    assert first.loc[WITHOUT, "relative_error"] == pytest.approx(expected, rel=1e-4) and expected > 0.01
    old, new = (x - x.mean(-1, keepdim=True) for x in (old, new))
    assert first.loc[WITHOUT, "relative_error_centered"] == pytest.approx(
        float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean()), rel=1e-4
    )
    assert first.loc[WITHOUT, "next_token_agrees"] == pytest.approx(float((new.argmax(-1) == old.argmax(-1)).double().mean()))


def test_all_keys_are_exact_and_fewer_are_not(outcome):
    texts = outcome[1]
    error = texts.groupby("way")["relative_error"].max()
    assert error[WITH] == 0 and error[EXACT] < 1e-5 < 1e-4 < error[LANDMARK]  # some 1e-7 in float32, and far above it
    assert set(texts["way"]) == {WITH, WITHOUT, EXACT, LANDMARK, RANDOM, EVERY}
    assert (texts.loc[texts["way"] == EXACT, "tokens_alike"] == 4).all()


def test_every_token_has_the_features_that_the_prompt_has():
    """In the first layer, whose keys are the same, the bias is that of the model with linear attention."""
    sizes = dict(n_layers=2, n_heads=4, n_key_value_heads=2, d_model=16, d_head=4, n_ctx=20, d_vocab=9, act_fn="gelu", seed=3)
    model, prompt = HookedKVTransformer(HookedKVTransformerConfig(**sizes, dtype=torch.float64)), torch.arange(6)
    bias = convert_prompt(model, prompt, method="random", n_features=8, reference=torch.arange(4)[None], verbose=False)
    linear = gpt2_text.linearized(model, bias)
    expected = convert_prompt(linear, prompt)
    found, theirs = bias.layers[0].attention, expected.layers[0].attention
    ours = found.times(found.log_scale[0].exp())
    assert relative_error(ours.b_kv.repeat_interleave(2, dim=1), theirs.b_kv) < LAW  # one for each query head
    assert relative_error(ours.b_d.repeat_interleave(2, dim=1), theirs.b_d) < LAW
    assert linear(prompt[None]).isfinite().all() and expected.layers[1].attention.b_kv.norm() > 0.01


def texts_table(random: float, landmark: float, exact: float = 1e-7) -> pd.DataFrame:
    errors = {WITH: 0.0, WITHOUT: 0.2, EXACT: exact, LANDMARK: landmark, RANDOM: random, EVERY: 0.25}
    rows = [
        dict(pair=p, way=way, relative_error=e * (1 + 0.01 * p), relative_error_centered=e, next_token_agrees=1 - e)
        for way, e in errors.items()
        for p in range(6)
    ]
    return pd.DataFrame(rows)


def test_claims_can_hold_and_fail():
    good = list(gpt2_text.compare(texts_table(random=0.1, landmark=0.05)))
    assert [c.holds for c in good if c.tested] == [True] * 6
    assert [c.paper for c in good[:2]] == [0.1656, 0.0917] and not good[0].tested
    bad = list(gpt2_text.compare(texts_table(random=0.3, landmark=0.4, exact=0.01)))
    assert [c.holds for c in bad if c.tested] == [False] * 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "n_pairs"], "expected NAME=VALUE"),
        (["--set", "texts=fact"], "did you mean 'facts'"),
        (["--model", "docs-linear"], "with linear attention the conversion is always exact"),
        (["--model", "docs-gpt"], "neither a shipped model"),
        (["--tokenizer", "tok512.bin"], "for a llama2.c checkpoint"),
    ],
)
def test_settings_that_are_refused(words, message, tmp_path, capsys):
    assert main(["reproduce", "gpt2-text", "--scale", "tiny", "--out", str(tmp_path / "o"), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "o").exists()


def test_an_experiment_without_a_model_refuses_one(tmp_path, capsys):
    assert main(["reproduce", "landscape", "--scale", "tiny", "--out", str(tmp_path / "o"), "--model", "docs-gpt2"]) == 2
    assert "does not run on an existing model" in capsys.readouterr().err


def test_chance_is_one_in_the_values_of_its_kind():
    stories = FactsTask(min_facts=6, max_facts=6, length=160).stories(40, torch.Generator().manual_seed(1))
    one_kind = [story for story in stories if len({s.fact.kind for s in story.sentences}) == 1]
    assert len(one_kind) > 3 and guess_in_story(one_kind) == pytest.approx(1 / 6)
    three = [story for story in stories if len({s.fact.kind for s in story.sentences}) == 3]
    assert len(three) > 3 and guess_in_story(three) == pytest.approx(1 / 2)
