"""Scores that were read from a model, kept in a file as they come, so that an interrupted explanation resumes where it stopped.

An explanation reads the same passes in the same order whenever model, texts and options are the same. So the n-th result in the
file (:mod:`kvlens.files.unfinished`) is the n-th reading: its number of tokens and its log-probabilities. Texts that the model
writes and prompts that it converts are not kept; they are a small part.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import kvlens
from kvlens import KVLensError, KVModel
from kvlens.files import Unfinished, hold_unfinished

Keep = str | Path | Unfinished | None
"""Where scores are kept: a file, or one that the caller holds (:func:`kvlens.files.work_on`); None keeps none."""
RUNS_THE_MODEL = ("kvlens.", "transformer_lens.", "transformers.")
"""Packages that register hooks of their own on the models of a bridge."""
_kept: ContextVar["Kept | None"] = ContextVar("kept scores", default=None)


@dataclass
class Account:
    """How much was read, in units of one pass over prompt and text."""

    n_tokens_per_pass: int
    n_tokens: int = 0
    on_tokens: Callable[[int], None] | None = None

    def count(self, n_tokens: int) -> None:
        """Add tokens that went through the model, and tell ``on_tokens`` how many there are by now."""
        self.n_tokens += n_tokens
        if self.on_tokens is not None:
            self.on_tokens(self.n_tokens)

    @property
    def n_passes(self) -> float:
        """So many passes over prompt and text would have read as many tokens."""
        return self.n_tokens / self.n_tokens_per_pass


@dataclass
class Kept:
    """A file of an explanation's readings, in order, and how many of them were recalled."""

    file: Unfinished
    n_recalled: int = 0


@contextmanager
def keeping(keep: Keep, model: KVModel, **of: Any) -> Iterator[None]:
    """Inside, every reading of an answer's probability is kept in the file, or comes from it; with None nothing is.

    Args:
        keep: the file. It stays when the block ends, for its caller to delete.
        model: that is asked, with nothing attached.
        of: everything else that readings depend on: tensors, dataclasses, sequences, and objects with a ``repr`` that says all.

    Raises:
        KVLensError: the file is damaged, or of another explanation, or another process is at work on it; or something is
            attached to the model that a file cannot name: a bias, or a hook.
    """
    if keep is None:
        yield
        return
    _check_nothing_attached(model)
    versions = {"kvlens": kvlens.__version__, "torch": torch.__version__}
    computed = {"dtype": str(model.W_E.dtype), "device": model.W_E.device.type, "model": model.fingerprint().to_json()}
    with nullcontext(keep) if isinstance(keep, Unfinished) else hold_unfinished(keep) as file:
        file.begin({**{name: _in_full(value) for name, value in of.items()}, **versions, **computed})
        token = _kept.set(Kept(file))
        try:
            yield
        finally:
            _kept.reset(token)


def _has_hooks_of_a_user(part: nn.Module) -> bool:
    """Whether a hook was added to a hook point, or registered by code outside of what runs the model."""
    hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    modules = (f"{getattr(getattr(hook, 'func', hook), '__module__', '')}." for hook in hooks)
    return bool(getattr(part, "fwd_hooks", None)) or not all(module.startswith(RUNS_THE_MODEL) for module in modules)


def _check_nothing_attached(model: KVModel) -> None:
    if model.attached_kv_bias is not None:
        raise KVLensError("kept scores: the model has a bias attached; detach it first (model.detach_kv_bias())")
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    hooked = [name for name, part in parts if _has_hooks_of_a_user(part)]
    if hooked:
        raise KVLensError(
            f"kept scores: the model has a hook on {', '.join(hooked[:3])}, and a file cannot say what it does: a later run "
            "without it, or with another, would take its scores for its own. Remove it (model.reset_hooks()), or leave out keep"
        )


def _in_full(value: Any) -> Any:
    """As JSON's types; a tensor's ``repr`` would leave numbers out."""
    if isinstance(value, Tensor):
        return value.tolist()
    if is_dataclass(value):
        return {field.name: _in_full(getattr(value, field.name)) for field in fields(value)}
    return [_in_full(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def recalled(take: Callable[[], Float[Tensor, "row answer"]], account: Account) -> Float[Tensor, "row answer"]:
    """What ``take`` reads: from the file where it is there, else taken now and appended. Its tokens are counted either way."""
    kept = _kept.get()
    if kept is None:
        return take()
    kept.n_recalled += 1
    if kept.n_recalled <= len(kept.file.results):
        n_tokens, shape, values = kept.file.results[kept.n_recalled - 1]
        account.count(n_tokens)
        return torch.tensor(values, dtype=torch.float64).reshape(shape)
    before, found = account.n_tokens, take()
    kept.file.append([account.n_tokens - before, list(found.shape), found.flatten().tolist()])
    return found
