"""Weights are processed as in TransformerLens, but in less memory."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_hf import tiny_hf_model
from transformer_lens.weight_processing import ProcessWeights

from kvlens import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.base.weights import pieces, processed_end
from kvlens.pretrained import load_pretrained_parts

STEPS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices")
KINDS = ["gpt2", "gpt_neox", "llama", "qwen2", "bloom", "gptj", "opt", "mixtral", "apertus"]
LEFT_OUT = [("refactor_factored_attn_matrices",), ("fold_ln", STEPS[4]), ("center_unembed", STEPS[4])]
CASES = [*((kind, ()) for kind in KINDS), *((kind, left_out) for kind in ("gpt2", "llama") for left_out in LEFT_OUT)]


@pytest.mark.parametrize(("kind", "left_out"), CASES)
def test_piece_by_piece_equals_all_at_once(kind, left_out):
    """Layers and embeddings to the bit; the unembedding, whose sums have another order, up to float32's rounding of them."""
    dtype = (torch.float32, torch.bfloat16)[CASES.index((kind, left_out)) % 2]
    steps = {step: step not in left_out for step in STEPS}
    steps["refactor_factored_attn_matrices"] &= kind in ("gpt2", "opt")  # it is not for rotary positions
    parts = load_pretrained_parts("x", hf_model=tiny_hf_model(kind), dtype=dtype, device="cpu")
    cfg = HookedKVTransformerConfig.from_tl(parts.cfg)
    weights = HookedKVTransformer(cfg).fill_missing_keys(dict(parts.state_dict))
    before = {name: weight.clone() for name, weight in weights.items()}
    expected = ProcessWeights.process_weights(dict(before), cfg, **steps)
    found = {}
    for names, process in pieces(cfg, weights):
        found |= process({name: weights[name] for name in names}, steps)
    folded = {"ln_final.w", "ln_final.b"} if steps["fold_ln"] else set()  # TransformerLens leaves ones and zeros
    assert expected.keys() - folded <= found.keys() <= expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in found)
    ends = [name for name in found if name.startswith("unembed.")]
    assert all(torch.equal(found[name], expected[name]) for name in found if name not in ends)
    for name in ends:
        off = (found[name].double() - expected[name].double()).norm()
        assert off <= 10 * torch.finfo(dtype).eps * expected[name].double().norm()  # a few roundings of each number
    assert all(torch.equal(weights[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("kind", ["LN", "RMS"])
@pytest.mark.parametrize("final_rms", [True, False])
def test_the_processed_unembedding_gives_the_same_log_probabilities_in_float64(kind, final_rms):
    cfg = HookedKVTransformerConfig(
        n_layers=1, d_model=6, d_head=3, n_ctx=5, d_vocab=11, act_fn="relu", normalization_type=kind, final_rms=final_rms
    )
    draw = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, w_u, b_u, w, b = draw(5, 6), draw(6, 11), draw(11), draw(6), draw(6)
    b = 0.0 * b if kind == "RMS" or final_rms else b
    centered = x if kind == "RMS" or final_rms else x - x.mean(-1, keepdim=True)
    normal = centered / (centered.square().mean(-1, keepdim=True) + cfg.eps).sqrt()
    before = (normal * w + b) @ w_u + b_u
    given = {"unembed.W_U": w_u.clone(), "unembed.b_U": b_u.clone(), "ln_final.w": w, "ln_final.b": b}
    found = processed_end(cfg, dict(given), dict.fromkeys(STEPS, True))
    after = normal @ found["unembed.W_U"] + found["unembed.b_U"]
    torch.testing.assert_close(after.log_softmax(-1), before.log_softmax(-1), rtol=0, atol=1e-11)
    assert float(after.mean(-1).abs().max()) < 1e-11 < float(before.mean(-1).abs().min())
    assert torch.equal(given["unembed.W_U"], w_u)


def test_parameters_are_the_models_own():
    """Neither shared with the model that they come from, nor left as a view of it."""
    hf_model = tiny_hf_model("gpt2")
    for processing in (True, False):
        options = dict.fromkeys(STEPS[:4], processing)
        model = HookedKVTransformer.from_pretrained("x", hf_model=hf_model, device="cpu", **options)
        theirs = {weight.untyped_storage().data_ptr() for weight in hf_model.parameters()}
        assert all(weight.is_contiguous() and weight.requires_grad for weight in model.parameters())
        assert theirs.isdisjoint(weight.untyped_storage().data_ptr() for weight in model.parameters())
        assert len({weight.data_ptr() for weight in model.parameters()}) == len(list(model.parameters()))


SCRIPT = """
import resource, sys
import torch
from kvlens import HookedKVTransformer, KVTransformerBridge

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

cls, folder, dtype = sys.argv[1:]
load = HookedKVTransformer.from_pretrained if cls == "hooked" else KVTransformerBridge.boot_transformers
load(sys.argv[2] + "/tiny", device="cpu")  # what is imported or set up once is there
before = peak()
load(sys.argv[2] + "/m", device="cpu", dtype=getattr(torch, dtype))
print((peak() - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="ru_maxrss has other units and meanings elsewhere")
@pytest.mark.parametrize(
    ("front_end", "stored", "dtype", "most"),
    [
        ("hooked", torch.float32, "float32", 2.2),
        ("hooked", torch.bfloat16, "float32", 2.2),
        ("hooked", torch.bfloat16, "bfloat16", 1.3),
        ("bridge", torch.float32, "float32", 1.3),
    ],
)
def test_peak_memory_of_loading(front_end, stored, dtype, most, tmp_path):
    """Against the weights in float32, with the pages of the file that are in memory; a tied vocabulary is a tenth of them."""
    sizes = dict(hidden_size=768, intermediate_size=2112, num_hidden_layers=8, vocab_size=8000, max_position_embeddings=64)
    model = tiny_hf_model("llama", **sizes, tie_word_embeddings=True).to(stored)
    model.save_pretrained(tmp_path / "m")
    tiny_hf_model("llama").save_pretrained(tmp_path / "tiny")
    weights = 4 * sum(weight.numel() for weight in model.parameters()) / 2**20
    command = [sys.executable, "-c", SCRIPT, front_end, str(tmp_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(done.stdout) < most * weights
