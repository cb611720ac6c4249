"""Every load is compared with Transformers, since a bridge that leaves something out gives plausible but wrong numbers.

Unless ``verify=False``, the bridge reads a short text four times: plain; with every hook point hooked; and its second half
under the converted first half, without and with hooks. The logits must be Transformers' own, from before the bridge took the
model, up to the square root of the rounding of one operation: 0.03 % in float32, 3 % in float16, 9 % in bfloat16. A smaller
error goes unnoticed, so load a model of an untested family in float32 once. Nor is it noticed how a window of more than 120
tokens is applied.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import PreTrainedModel

from kvlens.bridge.parts import fingerprint_of, text_config
from kvlens.bridge.table import SUPPORTED
from kvlens.errors import KVLensError, first_line
from kvlens.kv_bias import KVBias
from kvlens.kv_bias.exact import PromptBatch, exact_bias

SHORTEST, LONGEST, BEYOND = 16, 128, 8
"""Tokens of a text: at least, at most, and more than the window has."""
IN_HALF = 4
"""Texts in half precision, where a rounding may send a token to another expert: the one with the least error counts, and its
median token."""
ELSE = f"Try another release of TransformerLens, or take one of the tested families: {SUPPORTED}"


def _rounding(model: PreTrainedModel) -> float:
    """Return the rounding error of the coarsest dtype that a model computes in; in Transformers parts are always float32."""
    return max(torch.finfo(dtype).eps for dtype in {torch.float32, *(weight.dtype for weight in model.parameters())})


def texts_of(model: PreTrainedModel) -> Int[Tensor, "text pos"]:
    """The texts on which a model is compared, given the Transformers model."""
    config = text_config(model)
    n_ctx = int(getattr(config, "max_position_embeddings", None) or LONGEST)
    window = getattr(config, "sliding_window", None) or 0
    n = min(n_ctx, window + BEYOND if SHORTEST < window + BEYOND <= LONGEST else SHORTEST)
    n_texts = 1 if _rounding(model) < 1e-6 else IN_HALF
    tokens = torch.arange(n_texts * n, device=next(model.parameters()).device) % int(config.vocab_size)
    return tokens.view(n_texts, n)


@torch.no_grad()
def logits_of_transformers(model: PreTrainedModel) -> Float[Tensor, "text pos d_vocab"]:
    """What Transformers makes of the texts, without dropout.

    Raises:
        KVLensError: its numbers leave the range of its dtype.
    """
    was_training = model.training
    try:
        logits: Tensor = model.eval()(texts_of(model)).logits
    finally:
        model.train(was_training)
    if not bool(logits.isfinite().all()):
        raise KVLensError(
            f"KVTransformerBridge: {type(model).__name__} in {model.dtype}: Transformers' own logits are not finite; load it "
            "with a wider dtype, bfloat16 or float32"
        )
    return logits


@torch.no_grad()
def compare(model: TransformerBridge, expected: Float[Tensor, "text pos d_vocab"]) -> None:
    """Compare a bridge with the logits of Transformers.

    Args:
        model: a :class:`kvlens.KVTransformerBridge`.
        expected: of :func:`texts_of`.

    Raises:
        KVLensError: a pass fails, or its logits differ by more than rounding.
    """
    tokens = texts_of(model.original_model)
    was_training = model.original_model.training
    model.original_model.eval()
    what = "a plain pass"
    try:
        _check(model, what, model(tokens), expected)
        what = "a pass with hooks"
        _check(model, what, model.run_with_cache(tokens)[0], expected)
        what = "a converted prompt"
        half = tokens.shape[1] // 2
        if half:
            model._hold(_converted(model, tokens[:, :half]))
            _check(model, what, model(tokens[:, half:]), expected[:, half:])
            what = "a converted prompt with hooks"
            _check(model, what, model.run_with_cache(tokens[:, half:])[0], expected[:, half:])
    except KVLensError:
        raise
    except Exception as error:
        raise KVLensError(
            f"KVTransformerBridge: {what} fails on TransformerLens' bridge to {model.cfg.architecture} ({first_line(error)}). "
            f"{ELSE}"
        ) from error
    finally:
        model._hold(None)
        model.original_model.train(was_training)


@torch.no_grad()
def predictions(model: TransformerBridge) -> Float[Tensor, "text pos d_vocab"]:
    """Log-probabilities of a bridge on :func:`texts_of`, without a bias and without dropout."""
    was_training = model.original_model.training
    model.original_model.eval()
    try:
        with model.holding(None):
            logits: Tensor = model(texts_of(model.original_model))
        return logits.log_softmax(dim=-1)
    finally:
        model.original_model.train(was_training)


def check_processed(model: TransformerBridge, before: Float[Tensor, "text pos d_vocab"]) -> None:
    """Raise KVLensError where processing the weights has changed :func:`predictions`."""
    leave = "Load it again, and leave its weights as they are: enable_compatibility_mode(no_processing=True)"
    _check(model, "a pass with processed weights", predictions(model), before, leave)


def _converted(model: TransformerBridge, prompt: Int[Tensor, "text pos"]) -> KVBias:
    """The exact bias of a prompt; the fingerprint leaves out the weights, which take time to read."""
    read = PromptBatch(prompt, None, has_batch=True)
    return exact_bias(model.read_prompt(read), read, None, fingerprint_of(model, with_weights=False))


def _check(model: TransformerBridge, what: str, found: Tensor, expected: Tensor, instead: str = ELSE) -> None:
    rounding = _rounding(model.original_model)
    off, whole = ((x.double()).norm(dim=-1) for x in (found - expected, expected))
    if rounding < 1e-6:
        error = float(off.norm() / whole.norm())
    else:
        error = float((off / whole.clamp(min=torch.finfo(whole.dtype).tiny)).median(dim=-1).values.min())
    if not error <= rounding**0.5:
        raise KVLensError(
            f"KVTransformerBridge: TransformerLens' bridge does not compute what {model.cfg.architecture} computes: on "
            f"{found.shape[1]} tokens the logits of {what} differ from Transformers' by {error:.1%}, so whatever was measured "
            f"would be about another model. {instead}"
        )
