"""A trained model from elsewhere: its greedy text must be the published one (softmax, GQA, adjacent-pair RoPE)."""

import torch
from precision import LAW
from small_models import relative_error

from kvlens import HookedKVTransformer, KVShiftConfig, convert_prompt


def load_stories260k(folder):
    return HookedKVTransformer.from_llama2c(folder / "stories260K.bin", folder / "tok512.bin", device="cpu")


def greedy(model, n):
    start = torch.tensor([[1]])
    return model.generate(start, max_new_tokens=n, do_sample=False, stop_at_eos=False, verbose=False)[0, 1:].tolist()


def test_greedy_text_is_the_published_one(outside_data):
    model = load_stories260k(outside_data)
    published = (outside_data / "stories260K-greedy.txt").read_text(encoding="utf-8")
    assert model.tokenizer.decode(greedy(model, 200)).strip() == published.strip()


def test_its_weights_under_linear_attention_convert_exactly(outside_data):
    trained = load_stories260k(outside_data)
    model = HookedKVTransformer.from_hooked_transformer(
        trained, attention="linear", kv_shift=KVShiftConfig(init="identity"), dtype=torch.float64
    )
    x = torch.randint(3, 512, (1, 90), generator=torch.Generator().manual_seed(0))
    with model.kv_bias(convert_prompt(model, x[:, :60])):
        new = model(x[:, 60:])
    assert relative_error(new, model(x)[:, 60:]) < LAW
