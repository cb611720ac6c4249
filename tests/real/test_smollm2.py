"""A GGUF file and a converted prompt, on a real model, against Transformers.

The measure is Transformers' own model in float64: kvlens in float32 may be as far from it as Transformers in float32 is, twice
over, since it rounds other sums.
"""

import copy

import pytest
import torch

from kvlens import convert_prompt
from kvlens.analyses import why_attends

pytestmark = pytest.mark.usefixtures("without_gradients")

PROMPT = (
    "Minutes of the meeting of 3 May. The board met in Utrecht. The new office will be in Rotterdam, near the station. "
    "The budget is 1.5 million euros. The next meeting is in June."
)
TEXT = " In which city will the new office be? The new office will be in"


@pytest.fixture(scope="module")
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def tokens(smollm2):
    return smollm2.to_tokens(PROMPT), smollm2.to_tokens(TEXT, prepend_bos=False)


@pytest.fixture(scope="module")
def expected(plain_smollm2, tokens):
    """Log-probabilities of the text after the prompt, in float64."""
    double = copy.deepcopy(plain_smollm2).double()
    return double(torch.cat(tokens, dim=1)).logits[:, tokens[0].shape[1] :].log_softmax(-1)


def error(logits, expected):
    return float((logits.double().log_softmax(-1) - expected).norm() / expected.norm())


def test_a_gguf_file_computes_what_transformers_computes_of_it(smollm2, plain_smollm2, tokens, expected):
    both, start = torch.cat(tokens, dim=1), tokens[0].shape[1]
    assert error(smollm2(both)[:, start:], expected) <= 2 * error(plain_smollm2(both).logits[:, start:], expected)
    assert smollm2.to_string(expected[0, -1].argmax()) == " Rot"  # terdam


def test_a_converted_prompt_is_as_exact_as_transformers_own_cache(smollm2, plain_smollm2, tokens, expected):
    prompt, text = tokens
    cache = plain_smollm2(prompt, use_cache=True).past_key_values
    by_cache = error(plain_smollm2(text, past_key_values=cache).logits, expected)
    bias = convert_prompt(smollm2, prompt)
    with smollm2.kv_bias(bias):
        assert error(smollm2(text), expected) <= 2 * by_cache
    assert error(plain_smollm2(text, past_key_values=bias.to_cache()).logits, expected) <= 2 * by_cache
    both, options = torch.cat(tokens, dim=1), dict(max_new_tokens=8, do_sample=False)
    options["attention_mask"] = torch.ones_like(both)
    continued = plain_smollm2.generate(both, past_key_values=bias.to_cache(), **options)
    assert torch.equal(continued, plain_smollm2.generate(both, **options))
    assert error(smollm2(text), expected) > 1e3 * by_cache  # without the prompt it says something else


def test_tokenizer_and_chat_template_come_from_the_file(smollm2):
    messages = [{"role": "user", "content": "Hello"}]
    text = smollm2.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert smollm2.tokenizer.decode(ids) == text and max(ids) < smollm2.cfg.d_vocab


MINUTES = "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros a month."


def test_who_wrote_what_the_head_that_finds_the_city_reads(smollm2):
    chat = [{"role": "user", "content": f"{MINUTES}\n\nIn which city will the new office be?"}]
    table = why_attends(smollm2, chat, "The new office will be in", 18, 6, key="Rotterdam")
    assert (table["key_token"] == " Rot").all()
    assert table["attention"][0] > 0.9
    assert table.loc[table["side"] == "pair", "score"].sum() == pytest.approx(8.5055, abs=0.01)  # of four bits a weight
    key, query = (table[table["side"] == side] for side in ("key", "query"))
    assert key["key_writer"].tolist()[:2] == ["head 16.0", "head 17.8"]
    assert query["query_writer"].tolist()[:3] == ["head 16.1", "mlp 0", "head 16.2"]
    assert (key["attention_run"][:2] > 0.9).all()  # without either the head looks elsewhere
    massive = key[key["key_writer"] == "mlp 11"].iloc[0]  # it writes the first token, which is most of that token's norm
    assert massive["contrast_run"] < 1.3 * massive["contrast"] < 0
