"""Names that stand for values, permanent hooks, and threads that share a model."""

import copy
import sys
import threading

import pytest
import torch
from precision import relative_error
from small_models import plain_model, small_model, tokens
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig, convert_prompt

SIZES = dict(n_layers=2, d_model=12, d_head=4, n_ctx=16, d_vocab=11, act_fn="gelu", device="cpu", seed=0)


def test_names_and_flags_stand_for_what_they_mean():
    cfg = HookedKVTransformerConfig(**SIZES, dtype="float64", kv_shift=True)
    assert (cfg.dtype, cfg.kv_shift) == (torch.float64, KVShiftConfig())
    assert HookedKVTransformerConfig(**SIZES, kv_shift=False).kv_shift is None
    assert HookedKVTransformerConfig(**SIZES, dtype="torch.bfloat16").dtype == torch.bfloat16
    assert tiny_text_model().to("float64", print_details=False).W_E.dtype == torch.float64
    assert convert_prompt(tiny_text_model(), PROMPT).to("torch.float64").stacked("b_d").dtype == torch.float64


def test_sinusoidal_positions_are_hooked():
    model, x = small_model(positional_embedding_type="sinusoidal"), tokens(3, 7)
    expected = model(x).log_softmax(-1)

    def in_place(value, hook):
        value.add_(1.0)

    with model.hooks(fwd_hooks=[("hook_pos_embed", in_place)]):
        assert not torch.equal(model(x).log_softmax(-1), expected)


# --- permanent hooks ---


def test_a_copy_keeps_permanent_hooks_in_their_order_and_no_others():
    plain = plain_model(dtype=torch.float64)
    plain.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value * 2, is_permanent=True)
    plain.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value + 1, is_permanent=True)
    x = tokens(2, 7)
    expected = plain(x)
    plain.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value * 0)
    with pytest.warns(UserWarning, match="the permanent hooks on blocks.0.hook_resid_pre are copied as the same functions"):
        copied = HookedKVTransformer.from_hooked_transformer(plain)
    assert relative_error(copied(x), expected) < 1e-11
    copied.reset_hooks()
    assert relative_error(copied(x), expected) < 1e-11


def test_saving_says_that_permanent_hooks_are_not_kept(tmp_path):
    model = tiny_text_model()
    model.save(tmp_path / "plain")
    model.add_hook("blocks.0.hook_resid_pre", lambda value, hook: value, is_permanent=True)
    with pytest.warns(UserWarning, match=r"permanent hooks \(on blocks.0.hook_resid_pre\) .* until they are added again"):
        model.save(tmp_path / "hooked")


def test_a_dtype_that_cannot_hold_the_numbers_is_refused(tmp_path):
    model = tiny_text_model()
    with torch.no_grad():
        model.embed.W_E.mul_(1e9)
    with pytest.raises(KVLensError, match="W_E: its largest number is .*, which float16 cannot hold"):
        model.save(tmp_path / "large", stored_dtype="float16")
    with torch.no_grad():
        model.embed.W_E.mul_(1e-30)
    with pytest.raises(KVLensError, match="W_E: its largest number is .*, which float16 cannot hold"):
        model.save(tmp_path / "small", stored_dtype="float16")
    bias = 1e9 * convert_prompt(tiny_text_model(), PROMPT)
    assert bias.to("bfloat16").stacked("b_kv").dtype == torch.bfloat16 and not any(tmp_path.iterdir())


# --- threads ---


def in_three_threads(work):
    """Call ``work`` with 0, 1 and 2 at once, the threads taking turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)


def in_a_thread(work):
    found = []

    def run():
        try:
            found.append(work())
        except KVLensError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_bias_belongs_to_the_thread_that_attached_it():
    model = tiny_text_model()
    bias = convert_prompt(model, PROMPT)
    with model.kv_bias(bias):
        expected = model(TEXT)
        for work in (lambda: model.attach_kv_bias(bias), model.detach_kv_bias, lambda: model(TEXT)):
            assert "another thread has a KV bias attached" in str(in_a_thread(work))
        assert model.attached_kv_bias is bias
        own = copy.deepcopy(model)
        assert torch.equal(in_a_thread(lambda: own(TEXT)), expected)
    assert torch.equal(in_a_thread(lambda: model(TEXT)), model(TEXT))


def test_a_thread_cannot_attach_during_another_threads_forward_pass():
    model = tiny_text_model()
    bias, refused = convert_prompt(model, PROMPT), []

    def attach_elsewhere(value, hook):
        refused.append(in_a_thread(lambda: model.attach_kv_bias(bias)))

    expected = model(TEXT)
    assert torch.equal(model.run_with_hooks(TEXT, fwd_hooks=[("blocks.1.hook_resid_pre", attach_elsewhere)]), expected)
    assert "another thread is in a forward pass" in str(refused[0])
    assert model.attached_kv_bias is None


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_threads_that_share_a_model_get_their_own_answer_or_none(attention):
    model = tiny_text_model(attention=attention)
    prompts = [PROMPT, TEXT, "Return the gadget. Frobnicate both."]
    expected = [convert_prompt(model, prompt).stacked("b_kv") for prompt in prompts]
    wrong = []

    def work(index):
        for _ in range(10):
            try:
                found = convert_prompt(model, prompts[index])
                if not torch.equal(found.stacked("b_kv"), expected[index]):
                    wrong.append(found)
                with model.kv_bias(found):
                    model(TEXT)
            except KVLensError as error:
                if "another thread" not in str(error):
                    wrong.append(error)

    in_three_threads(work)
    assert not wrong and model.attached_kv_bias is None
    in_a_thread(lambda: model(TEXT))  # nobody is left as its owner


def test_how_one_thread_reads_its_text_does_not_stay_in_the_model():
    """TransformerLens keeps prepend_bos in the model while it reads, and puts back what it found."""
    model = tiny_text_model()
    whole, bare = (model.to_tokens(TEXT, prepend_bos=bos) for bos in (True, False))
    expected, wrong = convert_prompt(model, PROMPT).stacked("b_kv"), []

    def work(index):
        for _ in range(30):
            found = model.to_tokens(TEXT, prepend_bos=False) if index else model.to_tokens(TEXT)
            wrong.extend([found] * (not torch.equal(found, bare if index else whole)))
            if not torch.equal(convert_prompt(model, PROMPT).stacked("b_kv"), expected):
                wrong.append(index)

    in_three_threads(work)
    assert not wrong and model.cfg.default_prepend_bos is True
    assert torch.equal(model.to_tokens(TEXT), whole)


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_the_bias_of_a_thread_that_has_ended_is_read_by_no_other(attention):
    model = tiny_text_model(attention=attention)
    bias, other, expected = convert_prompt(model, PROMPT), convert_prompt(model, TEXT), model(TEXT)
    in_a_thread(lambda: model.attach_kv_bias(bias))
    for work in (lambda: model(TEXT), lambda: convert_prompt(model, TEXT), lambda: model.generate(TEXT, verbose=False)):
        with pytest.raises(KVLensError, match="a thread that has ended left a KV bias attached"):
            work()
        for _ in range(3):  # new threads may get the old one's number
            assert "a thread that has ended left a KV bias attached" in str(in_a_thread(work))
    with model.kv_bias(other):  # replaces it, and brings nothing back
        model(TEXT)
    assert model.attached_kv_bias is None and torch.equal(model(TEXT), expected)
    in_a_thread(lambda: model.attach_kv_bias(bias))
    model.detach_kv_bias()
    assert model.attached_kv_bias is None and torch.equal(model(TEXT), expected)
    in_a_thread(lambda: model.attach_kv_bias(bias))
    model.attach_kv_bias(other)
    model(TEXT)
