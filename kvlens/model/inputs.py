"""What is checked before a pass: tokens and their number, hook names, and the thread; and how a cache is filled.

Errors say what was expected.

**Hook names**: an unknown name, which TransformerLens ignores, is an error that suggests the nearest hook point. A hook on a
point that exists but does not fire, such as ``hook_b_kv`` without a bias, causes a warning when the model runs: a bias may
be attached until then. A function hooked to several points, or a cache of several (or all, as with a bare ``run_with_cache``),
causes a warning only if none of them fires.

**Threads**: a KV bias belongs to one thread at a time, and forward passes of several threads run in turn. An attached bias is
part of the model: a second thread that attached its own, or ran with another thread's bias, would silently get wrong numbers,
so this raises an error. So it does when the thread that attached the bias has ended: until another thread detaches or replaces
it, no thread reads it. Hooks belong to the model in the same way but are not checked: give every thread a copy
(``copy.deepcopy(model)``). A tokenizer holds the padding and truncation of the call that it serves, and the tables of positions
grow during a pass; so calls take turns.

**Caching** with ``pos_slice`` needs each hook point's position axis. TransformerLens takes the second-to-last axis, except for
``hook_q``, ``hook_k``, ``hook_v``, ``hook_z``, ``hook_result``. This would slice the heads of ``hook_phi_q``, the features of
``hook_b_kv``, and with ``use_split_qkv_input`` the heads of ``ln1.hook_scale``. Some matrices have one row per position of each
text (a router's weights), or per position and head (``q_norm``). The shape of the block's residual stream tells which row
belongs to which position; the rows stay in one axis.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import Slice, SliceInput
from transformers import PreTrainedTokenizerBase

from kvlens.arguments import check_characters, check_tokenizer
from kvlens.base import HookedTransformer
from kvlens.errors import KVLensError, brief, check_known, warn
from kvlens.kv_bias import KVBias
from kvlens.model.config import HookedKVTransformerConfig
from kvlens.model.protocol import KVModel

NOT_TOKENS = (torch.bool, torch.uint8)
"""Integer dtypes that torch treats as masks, not as indices."""


def check_input(model: KVModel, given: object, attention_mask: object, past: object) -> None:
    """Raise KVLensError unless a forward pass can start from ``given``, and the mask matches its positions.

    Args:
        model: of either front end.
        given: text, tokens, or the residual stream.
        attention_mask: 1 at real tokens, or None.
        past: a cache of what came before, or None.
    """
    if not isinstance(given, Tensor):
        check_text("forward", given)
        check_tokenizer("forward", model)
    if attention_mask is None:
        return
    positions = None
    if isinstance(given, Tensor) and past is None:  # with a cache, the mask covers the whole text
        positions = [1, *given.shape] if given.dim() == 1 else list(given.shape[:2])
    if not isinstance(attention_mask, Tensor) or (positions is not None and list(attention_mask.shape) != positions):
        wanted = "[batch, pos]" if positions is None else str(positions)
        raise KVLensError(f"forward: attention_mask must be a tensor {wanted}, a value per token, got {brief(attention_mask)}")


def check_text(what: str, given: object) -> None:
    """Raise KVLensError unless ``given`` is a string or a non-empty list of strings, without surrogate characters."""
    texts = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise KVLensError(
            f"{what}: expected a string, a list of strings, or token ids as a tensor [pos] or [batch, pos], got {brief(given)}"
        )
    for text in texts:
        check_characters(what, text)


def check_tokens(model: KVModel, tokens: Tensor) -> None:
    """Raise KVLensError unless ``tokens``, of any shape, is not empty and holds integers below the model's ``cfg.d_vocab``."""
    n = model.cfg.d_vocab
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype in NOT_TOKENS:
        raise KVLensError(f"tokens must be integers (int64 or int32), got {tokens.dtype}")
    if tokens.numel() == 0:
        raise KVLensError("the text is empty: give at least one token (a bias replaces a prompt, not the text)")
    least, largest = map(int, tokens.aminmax())
    if least < 0 or largest >= n:
        raise KVLensError(f"token ids must lie in 0..{n - 1} (d_vocab={n}), got {least}..{largest}")


def check_left_padding(
    tokenizer: PreTrainedTokenizerBase, tokens: Int[Tensor, "batch pos"], mask: Int[Tensor, "batch pos"]
) -> None:
    """Raise KVLensError if rows end in padding (new tokens follow the last position), or if padding would be read as text."""
    pads_are_their_own = tokenizer.pad_token_id not in (None, tokenizer.bos_token_id, tokenizer.eos_token_id)
    read_as_text = pads_are_their_own and bool(((tokens[:, 0] == tokenizer.pad_token_id) & mask[:, 0].bool()).any())
    if read_as_text or not bool(mask[:, -1].all()):
        raise KVLensError(
            "generate: rows must be padded on the left, so that the new token follows the text: give strings (which are padded "
            "on the left), or tokens padded on the left together with padding_side='left'"
        )


def check_room(cfg: HookedKVTransformerConfig, bias: KVBias) -> None:
    """Raise KVLensError if a bias replaces so many tokens that no position is left for a text."""
    offset = int(torch.as_tensor(bias.position_offset).max())
    if cfg.has_position_limit and offset >= cfg.n_ctx:
        raise KVLensError(
            f"attach_kv_bias: the text after this bias would start at position {offset}, but the model has positions 0 to "
            f"{cfg.n_ctx - 1} (n_ctx={cfg.n_ctx}); convert a shorter prompt"
        )


def check_hook_names(names: object, hook_points: Collection[str]) -> None:
    """Raise KVLensError if ``names`` (one name or several) includes no existing hook point; suggests the nearest name."""
    check_known("no hook point", names if isinstance(names, (str, list, tuple)) else (), hook_points)


_LOCK = threading.Lock()
_REMEDY = "give every thread its own copy: copy.deepcopy(model)"


class OneThread:
    """Records which thread attached the bias, and which threads are in a forward pass. A copied model gets a new record."""

    def __init__(self) -> None:
        self._owner: threading.Thread | None = None  # the object: a new thread may get the number of one that has ended
        self._claims = 0
        self._running: Counter[int] = Counter()
        self.turn = threading.RLock()
        """Held during calls that read text or run a pass."""

    def __deepcopy__(self, memo: object) -> "OneThread":
        return OneThread()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[()]]:
        return OneThread, ()

    @contextlib.contextmanager
    def changes(self, what: str, attached: Callable[[], bool]) -> Iterator[bool]:
        """Make this thread the owner of the model inside the block, and afterwards too if ``attached`` returns True.

        Yields whether this thread may read what is attached: False if a thread that has ended left it.

        Raises:
            KVLensError: another thread has one attached, or is in a forward pass.
        """
        me, running = threading.current_thread(), threading.get_ident()
        with _LOCK:
            self._check_owner(what, me, may_replace=True)
            if any(thread != running for thread in self._running):
                raise KVLensError(f"{what}: another thread is in a forward pass of this model; {_REMEDY}")
            own = self._owner in (None, me)
            self._claims = self._claims + 1 if self._owner is me else 1
            self._owner = me
        try:
            yield own
        finally:
            with _LOCK:
                self._claims -= 1
                if self._claims <= 0 and not attached():
                    self._owner = None

    @contextlib.contextmanager
    def passes(self, attached: bool) -> Iterator[None]:
        """Enclose a forward pass; ``attached``: whether a bias is.

        Raises:
            KVLensError: the bias belongs to another thread.
        """
        me, running = threading.current_thread(), threading.get_ident()
        with _LOCK:
            self._check_owner("forward pass", me, may_replace=not attached)
            if attached and self._owner is None:
                self._owner = me  # a copied model with a bias belongs to the first thread that uses it
            self._running[running] += 1
        try:
            yield
        finally:
            with _LOCK:
                self._running[running] -= 1
                if not self._running[running]:
                    del self._running[running]

    def _check_owner(self, what: str, me: threading.Thread, *, may_replace: bool) -> None:
        """``may_replace``: whether what a thread that has ended left attached does not matter."""
        if self._owner is None or self._owner is me:
            return
        if self._owner.is_alive():
            raise KVLensError(f"{what}: another thread has a KV bias attached to this model; {_REMEDY}")
        if not may_replace:
            raise KVLensError(
                f"{what}: a thread that has ended left a KV bias attached to this model, which no other thread reads; "
                "model.detach_kv_bias() removes it, and attaching a bias in this thread replaces it"
            )


BY_QUERY = ("hook_attn_scores", "hook_pattern")
"""[batch, head, query, key]; all other tensors have positions in the second axis, if at all."""

WITHOUT_POSITIONS = ("hook_b_kv", "hook_b_d", "hook_b_keys", "hook_last_k", "hook_last_v", "hook_last_q")

WITHOUT_BATCH = ("shift_coef", ".experts.")
"""Parts of names of tensors without a batch axis: parameters, and the tokens that are routed to a single expert."""

IN_ROWS = (".q_norm.", ".k_norm.", ".hook_expert_")
"""Parts of names of tensors that may be matrices with the positions of all texts as rows."""

NamedHooks = list[tuple[str, Callable]]
Names = str | Iterable[str] | Callable[[str], bool] | None
"""Hook points: one, several, those of a filter, or all."""


def saving_hooks(
    names: Iterable[str],
    cache: dict[str, Tensor],
    pos_slice: Slice | SliceInput,
    device: torch.device | str | None,
    remove_batch_dim: bool,
) -> tuple[NamedHooks, NamedHooks]:
    """Forward and backward hooks that save the tensors at hook points, sliced by ``pos_slice``.

    Args:
        names: names of the hook points.
        cache: where tensors are saved.
        pos_slice, device, remove_batch_dim: as in ``run_with_cache``.
    """
    forwards = _Saver(cache, Slice.unwrap(pos_slice), device, remove_batch_dim)
    backwards = _Saver(cache, forwards.pos_slice, device, remove_batch_dim, "_grad", forwards.positions)
    fwd: NamedHooks = [(name, forwards) for name in names]
    bwd: NamedHooks = [(name, backwards) for name, _ in fwd]
    layers = {_block(name) for name, _ in fwd if any(part in name for part in IN_ROWS)}
    watching: NamedHooks = [(f"{block}.hook_resid_pre", forwards.note_positions) for block in sorted(layers)]
    return (fwd if forwards.pos_slice.mode == "identity" else watching + fwd), bwd


def saves(hook: object) -> bool:
    """Whether a hook function is one of those that :func:`saving_hooks` returns."""
    return isinstance(getattr(hook, "__self__", hook), _Saver)


@dataclass(repr=False, eq=False)  # TransformerLens names a hook by its repr, which would print the cache
class _Saver:
    """Saves the tensors of hook points under their names, followed by ``suffix``.

    ``positions`` holds the shape [batch, pos] of each block's residual stream, if it is needed to assign rows to positions.
    """

    cache: dict[str, Tensor]
    pos_slice: Slice
    device: torch.device | str | None
    remove_batch_dim: bool
    suffix: str = ""
    positions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, tensor: Tensor, hook: HookPoint) -> None:
        name = str(hook.name)
        kept, leaf = tensor.detach().to(self.device), name.rsplit(".", 1)[-1]
        has_batch = not any(part in name for part in WITHOUT_BATCH)
        if kept.dim() == 2 and any(part in name for part in IN_ROWS):
            has_batch = False
            if _block(name) in self.positions:
                kept = kept.unflatten(0, (*self.positions[_block(name)], -1))
                kept = self.pos_slice.apply(kept, dim=1).reshape(-1, kept.shape[-1])
        elif has_batch and leaf not in WITHOUT_POSITIONS:
            kept = self.pos_slice.apply(kept, dim=2 if leaf in BY_QUERY else 1)
        self.cache[name + self.suffix] = kept[0] if self.remove_batch_dim and has_batch else kept

    def note_positions(self, residual: Tensor, hook: HookPoint) -> None:
        """Record the numbers of texts and positions in a block."""
        self.positions[_block(str(hook.name))] = tuple(residual.shape[:2])


def _block(name: str) -> str:
    """The block of a hook point's name: ``blocks.3`` for ``blocks.3.attn.hook_q``."""
    return ".".join(name.split(".")[:2])


def ask_for(model: HookedTransformer, names: Names, hook: object = None) -> None:
    """Record a name that would not fire; several names, or those of a filter, only if none of them would.

    The same applies to the names that one function is hooked to in separate calls.
    """
    if names is None:
        return
    asked = [names] if isinstance(names, str) else list(filter(names, model.hook_dict)) if callable(names) else names
    if all(is_silent(model, name) for name in asked):
        model._may_be_silent += tuple((name, hook) for name in asked)


def warn_of_silent_hooks(model: HookedTransformer) -> None:
    """Warn about hooks requested by name since the last pass that do not fire in this one because no bias is attached."""
    asked, model._may_be_silent = model._may_be_silent, ()
    hooked = [(name, hook) for name, hook in asked if is_silent(model, name) and model.hook_dict[name].has_hooks()]
    called = {id(hook) for hook in _called(model)} if hooked else set()
    silent = sorted({name for name, hook in hooked if id(hook) not in called})
    if silent:
        more = f" and {len(silent) - 3} more" if len(silent) > 3 else ""
        warn(
            f"the hooks on {', '.join(silent[:3])}{more} are not called in this pass: no KV bias is attached "
            "(model.attach_kv_bias, or `with model.kv_bias(bias): ...`)"
        )


def is_silent(model: HookedTransformer, name: str) -> bool:
    """Whether a hook point does not fire because no bias is attached."""
    block, _, hook_point = name.rpartition(".attn.")
    return bool(block) and model.mod_dict[f"{block}.attn"].waits_for_a_bias(hook_point)


def _called(model: HookedTransformer) -> list[object]:
    """The functions that are hooked to a point that fires, of which there is no warning."""
    points = [point for name, point in model.hook_dict.items() if not is_silent(model, name)]
    hooks = [handle.user_hook for point in points for handle in (*point.fwd_hooks, *point.bwd_hooks)]
    return [hook for hook in hooks if hook is not None]
