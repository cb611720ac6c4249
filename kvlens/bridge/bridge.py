"""KVTransformerBridge: a TransformerBridge whose attention reads a converted prompt.

The bridge's own forward pass runs unchanged. While a bias is attached, each pass gets positions after the prompt, and softmax
attention finds the bias's keys behind the text's (:mod:`kvlens.bridge.softmax`).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.model_bridge import TransformerBridge
from transformers import Cache, PreTrainedModel
from transformers.utils import ModelOutput, TransformersKwargs

from kvlens.base.text import without_own_bos
from kvlens.bridge.comparison import check_processed, compare, predictions
from kvlens.bridge.keywords import EARLIER, cache_among, hidden, take_earlier_names, text_positions, with_cache
from kvlens.bridge.load import loaded, wrapped
from kvlens.bridge.parts import ends_of, fingerprint_of, layers_of, parts_of_bridge
from kvlens.bridge.quick import quicken
from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.checks import ensure
from kvlens.components import Normalizers, check_batch, is_hooked
from kvlens.dtypes import dtype_of
from kvlens.errors import KVLensError, check_known
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.model.fingerprint import WeightsThen, look_again
from kvlens.model.inputs import check_hook_names, check_input, check_tokens
from kvlens.model.protocol import PromptBatch, PromptReading, QueriesRead
from kvlens.tokenizer import warn_of_unknown_words
from kvlens.zoo import folder_of

RETURNS = Literal["logits", "loss", "both", "predictions", "logits_and_cache"] | None
"""What a pass can return."""
Seen = dict[tuple[int, str], Tensor]
"""What passed certain points, by layer and name."""


class KVTransformerBridge(TransformerBridge):
    """A :class:`transformer_lens.model_bridge.TransformerBridge` in every respect, with a KV bias.

    After ``enable_compatibility_mode()`` its hook points have the names, shapes and values of TransformerLens 3, norms folded,
    as far as TransformerLens' bridge has them; prompts are then to be converted again.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from kvlens import KVTransformerBridge, convert_prompt
    >>> config = GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=32, n_ctx=32, vocab_size=11)
    >>> model = KVTransformerBridge.boot_transformers(GPT2LMHeadModel(config).eval())
    >>> prompt, text = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6]])
    >>> with model.kv_bias(convert_prompt(model, prompt)):
    ...     converted = model(text)
    >>> torch.allclose(converted, model(torch.cat([prompt, text], dim=1))[:, 5:], atol=1e-5)
    True
    """

    @classmethod
    def boot_transformers(  # type: ignore[override]
        cls, model_name: str | Path | PreTrainedModel, *args: object, verify: bool | None = None, **options: object
    ) -> "KVTransformerBridge":
        """As TransformerLens'.

        Args:
            model_name: a folder in Hugging Face's format, a name on the hub, or a loaded Transformers model, which is wrapped
                in place (TransformerLens puts its components into it).
            args, options: as TransformerLens', ``device_map`` among them; ``tokenizer`` goes with a loaded model, and a folder
                without one makes a model of token ids.
            verify: False leaves out the comparison with Transformers' own pass (:mod:`kvlens.bridge.comparison`), which takes
                half of the time of loading.

        Raises:
            KVLensError: nothing can be loaded, KV biases are not yet supported for the architecture, or the bridge does not
                compute what Transformers computes (:mod:`kvlens.bridge.comparison`).
        """
        read = wrapped if isinstance(model_name, PreTrainedModel) else loaded
        bridge, expected = read(model_name, *args, verify=verify is not False, **options)
        model = cls.of(bridge)
        if expected is not None:
            compare(model, expected)
        return model

    @classmethod
    def from_zoo(
        cls,
        name: str = "facts-hybrid",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        verify: bool | None = None,
    ) -> "KVTransformerBridge":
        """A small trained model that ships with kvlens in Transformers' format, by name; see :func:`kvlens.zoo.names`.

        Strings get a BOS by default, as in its training.

        Raises:
            KVLensError: no such model, one that :meth:`kvlens.HookedKVTransformer.from_zoo` loads, or a damaged file.
        """
        dtype = torch.float32 if dtype is None else dtype_of(dtype, "dtype")
        model = cls.boot_transformers(folder_of(name), device=device, dtype=dtype, verify=verify)
        model.cfg.default_prepend_bos = True
        return model

    @classmethod
    def of(cls, bridge: TransformerBridge) -> "KVTransformerBridge":
        """Change the class of ``bridge`` to this one, in place, and return the same object.

        It is not compared with Transformers, whose model it has changed; :meth:`boot_transformers` compares what it loads.

        Raises:
            KVLensError: KV biases are not yet supported for the architecture.
        """
        if isinstance(bridge, cls):
            return bridge
        parts = parts_of_bridge(bridge)
        recurrent = any(isinstance(part, RecurrentLayer) for part in parts)
        bridge.cfg.attention = "hybrid" if recurrent else "softmax"
        bridge.cfg.kv_shift = bridge.cfg.attention_variant = None
        bridge.cfg.has_position_limit = True
        if any(isinstance(part, SoftmaxLayer) for part in parts):
            # generate then takes Transformers' own cache, as for Qwen3.5; of OLMo-Hybrid, TransformerLens asks for a class of
            # caches that Transformers 5 no longer has, and cannot generate without a cache
            bridge.cfg.is_stateful = False
        take_earlier_names(bridge.original_model)
        quicken(bridge)
        bridge.__class__ = cls
        bridge.__dict__.update(_parts=parts, _attached=None, _handles=[], _pass_handles=[], _bos_unattached=None)
        bridge.__dict__.update(_weights_then=None, _normalizers=None)
        bridge.clear_hook_registry()
        bridge._initialize_hook_registry()
        driver = bridge._driver
        driver.supported_hook_points = frozenset(bridge._hook_registry) - driver.non_fireable_hook_points
        assert isinstance(bridge, cls)
        return bridge

    # --- the bias --------------------------------------------------------------------------------------------------------

    @property
    def attached_kv_bias(self) -> KVBias | None:
        """The bias that forward passes currently read, None without one."""
        return self.__dict__["_attached"]

    @property
    def prepends_bos(self) -> bool:
        """Whether strings get a BOS by default when no bias is attached."""
        before = self.__dict__["_bos_unattached"]
        return bool(getattr(self.cfg, "default_prepend_bos", True) if before is None else before)

    def fingerprint(self) -> Fingerprint:
        """Structure and weights of this model, against which biases are checked."""
        return fingerprint_of(self)

    def attach_kv_bias(self, bias: KVBias) -> None:
        """Let every forward pass, including generation, start from ``bias``, replacing any attached bias.

        While it is attached, strings get no BOS by default, since the prompt had one. A pass warns, once, if the weights are
        no longer those of the bias, as far as :class:`kvlens.model.fingerprint.WeightsThen` sees it, and if normalizers of
        softmax attention are below 0.

        Raises:
            KVLensError: the bias belongs to another model (the error names the field that differs), a number in it is not
                finite, or it leaves no position for a text.
        """
        self._check_fits(bias)
        self._hold(bias)

    def _check_fits(self, bias: KVBias) -> None:
        bias.fingerprint.check(self.fingerprint(), f"attach_kv_bias: {self.cfg.architecture}")
        bias.check_finite(f"attach_kv_bias: {self.cfg.architecture}")
        self._check_room(int(torch.as_tensor(bias.position_offset).max()), 1)

    def detach_kv_bias(self) -> None:
        """Undo :meth:`attach_kv_bias`; does nothing if no bias is attached."""
        self._hold(None)

    @contextlib.contextmanager
    def kv_bias(self, bias: KVBias) -> Iterator["KVTransformerBridge"]:
        """``with model.kv_bias(bias): ...``; afterwards the bias attached before is attached again."""
        self._check_fits(bias)
        with self.holding(bias):
            yield self

    def _hold(self, bias: KVBias | None) -> None:
        state = self.__dict__
        for handle in state["_handles"]:
            handle.remove()
        state["_attached"], state["_handles"] = bias, []
        state["_weights_then"] = None if bias is None else WeightsThen(self)
        normalizers = state["_normalizers"] = None if bias is None else Normalizers()
        for part in state["_parts"]:
            if isinstance(part, SoftmaxLayer):
                part.forget(normalizers)
        if state["_bos_unattached"] is not None:
            self.cfg.default_prepend_bos, state["_bos_unattached"] = state["_bos_unattached"], None
        if bias is not None:
            state["_bos_unattached"] = bool(getattr(self.cfg, "default_prepend_bos", True))
            self.cfg.default_prepend_bos = False
            state["_handles"] = [
                self.original_model.register_forward_pre_hook(self._before_pass, with_kwargs=True),
                self.original_model.register_forward_hook(self._after_pass, always_call=True),
            ]
            if next(self.original_model.parameters()).dtype == torch.float16:
                state["_handles"].append(self.original_model.register_forward_hook(self._check_logits))

    def _before_pass(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> tuple[object, dict[str, object]]:
        """Set positions after the prompt, and attach the bias in every layer, for one pass of the Transformers model."""
        self._after_pass()
        bias = self.attached_kv_bias
        assert bias is not None
        self.__dict__["_weights_then"] = look_again(self, bias, self.__dict__["_weights_then"])
        positions = text_positions(args, kwargs)
        batch = _batch_of(args, kwargs)
        check_batch(bias.n_rows, batch)
        offset = bias.position_offset
        offset = offset.to(positions.device)[:, None] if isinstance(offset, Tensor) else offset
        behind = positions + offset
        self._check_room(int(behind.max()), 0)
        parts = self.__dict__["_parts"]
        self.__dict__["_pass_handles"] = [handle for part in parts for handle in part.join(bias, positions)]
        return args, {**kwargs, "position_ids": behind.expand(batch, -1)}

    def _after_pass(self, *of_pass: object) -> None:
        """Take the bias out of every layer; after a pass that came to its end, raise KVLensError unless each has read it."""
        handles: list[RemovableHandle] = self.__dict__["_pass_handles"]
        while handles:
            handles.pop().remove()
        if self.__dict__["_normalizers"] is not None:
            self.__dict__["_normalizers"].tell()
        unread = [part.layer for part in self.__dict__["_parts"] if isinstance(part, SoftmaxLayer) and part.is_unread]
        if unread and of_pass and of_pass[-1] is not None:
            raise KVLensError(
                f"{self.cfg.architecture}: the attention of layers {unread} did not read the attached bias: something computed "
                "it in another way than the bridge's components do. Undo what replaced it, or detach the bias"
            )

    def _check_logits(self, module: nn.Module, args: object, output: ModelOutput) -> None:
        """Raise KVLensError where a pass in float16 left that dtype's range: its logits are then NaN."""
        if bool(output.logits.isnan().any()):
            raise KVLensError(
                f"{self.cfg.architecture} in torch.float16: the logits under the attached bias are NaN, since activations "
                "exceed 65,504, the largest number of this dtype; load the model with dtype=torch.bfloat16 or torch.float32"
            )

    def _check_room(self, position: int, more: int) -> None:
        """Raise KVLensError where ``position``, or so many tokens behind it, is beyond the model's."""
        if position + more > self.cfg.n_ctx - 1 + bool(more):
            raise KVLensError(
                f"{self.cfg.architecture}: position {position} (including the attached prompt) exceeds n_ctx={self.cfg.n_ctx}: "
                "shorten the text, or convert a shorter prompt"
            )

    def process_weights(self, *args: object, **kwargs: object) -> None:
        """As in TransformerLens. A bias from before does not fit any more: convert the prompt again.

        Raises:
            KVLensError: the predictions are no longer those of before, as TransformerLens 4 leaves GPT-OSS.
        """
        before = predictions(self)
        super().process_weights(*args, **kwargs)
        check_processed(self, before)

    def to_tokens(self, input: str | list[str], prepend_bos: bool | None = None, *args: object, **kwargs: object) -> Tensor:  # noqa: A002
        """As in TransformerLens, but BOS is put once before a text that begins with it; warns of words that are not known."""
        wanted = getattr(self.cfg, "default_prepend_bos", True) if prepend_bos is None else prepend_bos
        read = without_own_bos(self.tokenizer, input) if wanted and self.tokenizer is not None else input
        tokens: Tensor = super().to_tokens(read, prepend_bos, *args, **kwargs)
        warn_of_unknown_words(self.tokenizer, input, tokens)
        return tokens

    # --- what conversion asks --------------------------------------------------------------------------------------------

    check_tokens = check_tokens

    def read_prompt(self, prompt: PromptBatch, with_queries: bool = False) -> PromptReading:
        """See :meth:`kvlens.model.protocol.KVModel.read_prompt`."""
        tokens, mask, keeps_positions = prompt.tokens, prompt.mask, prompt.keeps_positions
        if self.attached_kv_bias is None:
            self._check_room(tokens.shape[1] - 1 if mask is None or keeps_positions else int(mask.sum(dim=1).max()) - 1, 0)
        seen: Seen = {}
        last = self.blocks[len(self.blocks) - 1].hook_out
        with ExitStack() as stack:
            for part in self.__dict__["_parts"]:
                wanted = with_queries and isinstance(part, SoftmaxLayer)
                _until_exit(stack, part.observe(seen, "kvq") if wanted else part.observe(seen))
            _until_exit(stack, [last.register_forward_hook(lambda *of_pass: seen.__setitem__((-1, "x"), of_pass[-1]))])
            self.read(tokens, **({} if mask is None else hidden(mask, keeps_positions)))

        def seen_in(layers: Sequence[int], name: str) -> list[Tensor]:
            return [seen[layer, name].to(tokens.device) for layer in layers]

        layers = [part.layer for part in self._attention()]
        recurrent = {
            part.layer: part.kept(seen, tokens.device) for part in self.__dict__["_parts"] if isinstance(part, RecurrentLayer)
        }
        queries = seen_in(layers, "q") if with_queries else None
        return PromptReading(seen_in(layers, "k"), seen_in(layers, "v"), seen[-1, "x"], queries, recurrent=recurrent)

    @torch.no_grad()
    def read_queries(self, tokens: Int[Tensor, "batch pos"], layers: range | None = None) -> list[QueriesRead]:
        """See :meth:`kvlens.model.protocol.KVModel.read_queries`; z before a gate, in float32 or better.

        Raises:
            KVLensError: a layer scores keys in another way than its ``score_rule()`` says.
        """
        seen: Seen = {}
        every = self._attention()
        some = every if layers is None else [every[i] for i in layers]
        with ExitStack() as stack:
            for part in some:
                _until_exit(stack, part.observe(seen, ("q", "k", "scores", "z", "gate", "log_n")))
            self.read(tokens)
        read = []
        for part in some:
            q, k, scores, z, log_n = (seen[part.layer, name] for name in ("q", "k", "scores", "z", "log_n"))
            if not part.scores_as_said(q, k, scores):
                raise KVLensError(
                    f"{self.cfg.architecture}: layer {part.layer} does not score keys by q.k / scale, with a soft cap and a "
                    'window where it has them, so kvlens cannot fit a bias to it: use method="exact"'
                )
            z = z.to(log_n)
            read.append(QueriesRead(q.to(log_n), z / seen.get((part.layer, "gate"), torch.ones_like(z)).to(z), log_n))
        return read

    def next_logits(
        self, tokens: Int[Tensor, "batch pos"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "batch d_vocab"], Cache | None]:
        """See :meth:`kvlens.model.protocol.KVModel.next_logits`."""
        output = self.original_model(tokens, **with_cache({"use_cache": True}, cache))
        return output.logits[:, -1], cache_among(output)

    @contextlib.contextmanager
    def holding(self, bias: KVBias) -> Iterator[None]:
        """See :meth:`kvlens.model.protocol.KVModel.holding`."""
        before, weights_then = self.attached_kv_bias, self.__dict__["_weights_then"]
        self._hold(bias)
        try:
            yield
        finally:
            self._hold(before)
            self.__dict__["_weights_then"] = weights_then

    def _attention(self) -> list[SoftmaxLayer]:
        return [part for part in self.__dict__["_parts"] if isinstance(part, SoftmaxLayer)]

    def read(self, tokens: Int[Tensor, "batch pos"], **options: object) -> None:
        """A pass for what its hooks see."""
        self(tokens, return_type=None, use_cache=False, **options)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """As in TransformerLens; with ``return_type=None`` logits are computed at the last position alone, unless hooked."""
        given = _given(TransformerBridge.forward, self, args, kwargs)
        self._check_pass(given)
        with contextlib.ExitStack() as stack:
            if given.get("return_type", "") is None and not is_hooked(self.unembed.hook_in, self.unembed.hook_out):
                cut = self.unembed.hook_in.register_forward_hook(lambda module, args, output: output[:, -1:])
                stack.callback(cut.remove)
            return super().forward(*args, **kwargs)

    def _check_pass(self, given: dict[str, object]) -> None:
        """Raise KVLensError unless a pass can start from these arguments, and Transformers' model knows each of them."""
        text, mask = given["input"], given.get("attention_mask")
        is_stream = given.get("start_at_layer") is not None or (isinstance(text, Tensor) and text.is_floating_point())
        of_tokens = mask if not isinstance(mask, Tensor) or mask.dim() < 4 else None  # 4: of queries and keys
        check_input(self, text, of_tokens, cache_among(given))
        if isinstance(text, Tensor) and not is_stream:
            self.check_tokens(text)
        ensure("forward: return_type", RETURNS, given.get("return_type"))
        taken = _taken(*(type(part).forward for part in (self.original_model, self.original_model.base_model)))
        check_known(f"{type(self).__name__}.forward: no argument", given, taken)

    def logits_on(
        self,
        text: Int[Tensor, "batch pos"],
        n_last: int,
        *,
        before: Int[Tensor, "batch before_pos"] | None = None,
        kept: Bool[Tensor, "batch before_pos"] | None = None,
        keeps_positions: bool = True,
        residuals: list[Tensor] | None = None,
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """See :meth:`kvlens.KVModel.logits_on`."""
        tokens = text if before is None else torch.cat([before, text], dim=1)
        options = {"attention_mask": torch.ones_like(tokens)}
        if kept is not None and before is not None and not bool(kept.all()):
            options = hidden(torch.cat([kept, torch.ones_like(text, dtype=torch.bool)], dim=1), keeps_positions)
        hooks = [("unembed.hook_in", lambda x, hook: x[:, -n_last:])]
        if residuals is not None:
            last = self.cfg.n_layers - 1
            names = [*(f"blocks.{layer}.hook_in" for layer in range(last + 1)), f"blocks.{last}.hook_out"]
            hooks += [(name, lambda x, hook: residuals.append(x[:, -n_last:].clone())) for name in names]
        with self._by_mixers(len(options) > 1), self.hooks(fwd_hooks=hooks):
            logits: Tensor = self(tokens, **options)
        return logits

    def logits_of(
        self, residual: Float[Tensor, "batch pos d_model"], layer: int | None = None, n_last: int | None = None
    ) -> Float[Tensor, "batch n_last d_vocab"]:
        """See :meth:`kvlens.KVModel.logits_of`: a pass over any tokens, in which the residual stream is replaced."""
        last = self.cfg.n_layers - 1
        name = f"blocks.{last}.hook_out" if layer in (None, last + 1) else f"blocks.{layer}.hook_in"
        anything = torch.zeros(residual.shape[:2], dtype=torch.long, device=residual.device)
        with self.hooks(fwd_hooks=[(name, lambda x, hook: residual.to(x))]):
            return self.logits_on(anything, residual.shape[1] if n_last is None else n_last)

    layers, ends = layers_of, ends_of

    @contextlib.contextmanager
    def _by_mixers(self, wanted: bool) -> Iterator[None]:
        """Inside, recurrent layers are computed by their mixers: Transformers' kernels let hidden tokens act on the state."""
        recurrent = [part for part in self.__dict__["_parts"] if wanted and isinstance(part, RecurrentLayer)]
        for part in recurrent:
            part.always_by_mixer = True
        try:
            yield
        finally:
            for part in recurrent:
                part.always_by_mixer = False

    # --- names of hooks ----------------------------------------------------------------------------------------------------

    def _initialize_hook_registry(self) -> None:
        """Add the hook points of layers by kvlens' names to TransformerLens': a mixer's are no part of the module tree."""
        super()._initialize_hook_registry()
        points = {name: point for part in self.__dict__.get("_parts", ()) for name, point in part.hook_points().items()}
        ours = {id(point) for point in points.values()}
        for name in [name for name, point in self._hook_registry.items() if id(point) in ours]:
            del self._hook_registry[name]
        for name, point in points.items():
            point.name = name
            self._hook_registry[name] = point

    def run_with_cache(self, *args: object, **kwargs: object) -> Any:
        """Behaves as in TransformerLens; ``names_filter`` must name hook points that exist."""
        given = _given(TransformerBridge.run_with_cache, self, args, kwargs)
        check_input(self, given["input"], None, None)  # which TransformerLens reads before the pass
        names = given.get("names_filter")
        check_hook_names(names, self.hook_dict)
        given["names_filter"] = list(names) if isinstance(names, tuple) else names  # TransformerLens reads lists alone
        return super().run_with_cache(**given)

    def run_with_hooks(self, *args: object, **kwargs: object) -> Any:
        """Behaves as in TransformerLens; hooks must name hook points that exist."""
        self._check_hooks(_given(TransformerBridge.run_with_hooks, self, args, kwargs))
        return super().run_with_hooks(*args, **kwargs)

    def hooks(self, *args: object, **kwargs: object) -> AbstractContextManager[object]:
        """Behaves as in TransformerLens; hooks must name hook points that exist."""
        self._check_hooks(_given(TransformerBridge.hooks, self, args, kwargs))
        return super().hooks(*args, **kwargs)

    def _check_hooks(self, given: dict[str, Any]) -> None:
        for which in ("fwd_hooks", "bwd_hooks"):
            check_hook_names([name for name, _ in given.get(which, ()) if isinstance(name, str)], self.hook_dict)


_signature = functools.cache(inspect.signature)


def _given(
    method: Callable[..., object], model: TransformerBridge, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """The arguments of a call of a model's method, by name."""
    given = _signature(method).bind(model, *args, **kwargs)
    return {name: value for name, value in given.arguments.items() if name not in ("self", "kwargs")} | given.kwargs


@functools.cache
def _taken(*passes: Callable[..., object]) -> tuple[str, ...]:
    """The arguments of a pass: TransformerLens', the Transformers model's, and those that it takes without naming them."""
    own = [name for one in (TransformerBridge.forward, *passes) for name in inspect.signature(one).parameters]
    further = [
        "use_cache",
        "cache",
        "cache_position",
        *EARLIER,
        "use_past_kv_cache",
        "one_zero_attention_mask",
        *TransformersKwargs.__annotations__,
    ]
    return tuple(name for name in dict.fromkeys([*own, *further]) if name not in ("self", "kwargs"))


def _until_exit(stack: ExitStack, handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        stack.callback(handle.remove)


def _batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    given = args[0] if args else kwargs.get("input_ids")
    return (kwargs["inputs_embeds"] if given is None else given).shape[0]
