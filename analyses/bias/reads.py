"""What the text reads from a prompt in one layer, split by prompt position, from passes over [prompt; text].

    z_i = inherited_i + sum_j A_ij v'_j + shift_state_i + text_i        A_ij = phi~(q_i) . phi~(k'_j) gamma^{M+i-j} / n_i

A_ij is the attention of the unconverted model from text position i to prompt position j. The conversion changes no query, no
key and no normalizer, and b_KV is a sum over the prompt's positions, so inherited_i + sum_j A_ij v'_j is what the converted
model reads from its bias (``hook_z_bias``): no bias is built here. The other terms:

- *inherited*: the contribution of a bias that the prompt continued (an attached one, a trained one); its tokens can no longer
  be separated;
- *shift state*: what a value shift carries over the end of the prompt: the first ``window`` values of the text include the
  prompt's last raw values, and every position that attends there reads them. It is in z_context, not in z_bias. (The key
  shift carries over as well, but inside phi, which is not linear: only an ablation can show its effect.)

With a value shift v'_j = sum_s beta_s v_{j-s} mixes the values of several tokens, and there are two answers to "which
position". ``attended``: the position j that is attended to, with its mixed value. ``source``: the token p whose raw value is
read, with the weight sum_s beta_s A_{i,p+s} over p + s < M; contributions of earlier tokens to the prompt's first values are
then inherited. Both have the same sum.

In augmented attention values are an MLP of the shifted ones, and no longer a sum over tokens. ``source`` is refused there, and
what a shift carries over the end of the prompt counts as part of the text.

For softmax attention A is the pattern itself: the exact shares of the prompt's own keys, which ``method="exact"`` keeps and
the other methods approximate. It is computed whole, and its memory grows with the square of the length.

A long prompt of linear attention is read in segments (:mod:`kvlens.analyses.segments`): first the text's side, then the
prompt's keys and values, one segment at a time. A shifted value also mixes neighbors across the end of a segment, so the last
``window`` keys are kept for the next segment.

Other models than HookedKVTransformer hand over whole layers from one pass over both,

    z_i = inherited_i + gate_i * sum_j A_ij v'_j + text_i

A is then the pattern of a softmax layer, and of a recurrent layer its exact effective attention, A_ij = qbar_i . kbar_j with
the carried queries and keys: b_KV = sum_j kbar_j v_j^T. A gate on the heads' outputs belongs to every part; a norm behind z,
and a gate behind that, are held as in direct logit attribution.

Source: ICLCA eq. 13 and 19; the shift state, the decay and the two views are kvlens'.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError, KVModel
from kvlens.model import read_attention, read_attention_and_scale

from ..logit_attribution import final_scale, final_scale_name
from ..segments import Found, Looks, OnProgress, rows_at

View = Literal["attended", "source"]
VIEWS = get_args(View)


class TextReads(NamedTuple):
    """The text's side of one layer's attention to everything before it, in float64.

    ``queries`` include the normalizer and gamma^{i+1}; their product with a stretch's keys is the pattern. Outputs that are not
    due to a prompt position are separate fields; None if the model has none. ``gate`` is what the sum over prompt positions is
    multiplied by to be a part of z, ``factor`` what z is multiplied by before W_O.
    """

    queries: Float[Tensor, "text head d_phi"]
    z: Float[Tensor, "text head d_head"]
    inherited: Float[Tensor, "text head d_head"] | None
    shift_state: Float[Tensor, "text head d_head"] | None
    gate: Float[Tensor, "text head d_head"] | None = None
    factor: Float[Tensor, "text head d_head"] | None = None

    def at(self, positions: list[int]) -> "TextReads":
        """The reads at some positions of the text."""
        return TextReads(*(None if x is None else x[positions] for x in self))  # type: ignore[arg-type]


class Stretch(NamedTuple):
    """Keys and values of consecutive prompt positions in one layer, in float64; ``keys`` include gamma^{M-1-j}."""

    first: int
    keys: Float[Tensor, "pos head d_phi"]
    values: Float[Tensor, "pos head d_head"]


class LayerwiseReading:
    """A prompt and the text after it, read layer by layer: the text's side first, then the prompt's.

    Args:
        model: the model, with the bias attached that the prompt continues.
        prompt, text: tokens [pos].
        by: ``attended`` or ``source``.
        segment_length: as in :func:`kvlens.run_in_segments`.
        on_progress: called with the fraction done.

    Raises:
        KVLensError: attention that is not a sum over positions, or ``source`` if values are not a sum over tokens.
    """

    def __init__(
        self,
        model: HookedKVTransformer,
        prompt: Int[Tensor, " prompt_pos"],
        text: Int[Tensor, " text_pos"],
        *,
        by: str = VIEWS[0],
        segment_length: int | None = None,
        on_progress: OnProgress | None = None,
    ):
        cfg = self.cfg = model.cfg
        self.model, self.by = model, by
        self.n_prompt, self.n_all = len(prompt), len(prompt) + len(text)
        window, augments = _mixed_values(model, by)
        self.value = "hook_v_augmented" if augments else "hook_v_shifted" if window else "hook_v"
        self.window = 0 if augments else window
        self.mixes_tokens = self.window > 0
        kind = "rot" if cfg.rotates_after else "phi"
        self.query = f"hook_{kind}_q" if cfg.attention == "linear" else "hook_pattern"
        self.key: str | None = f"hook_{kind}_k" if cfg.attention == "linear" else None
        values = [self.value, "hook_v", "hook_v_shift_coef", "hook_last_v"] if self.mixes_tokens else [self.value]
        features = [self.query] if self.key is None else [self.query, self.key]
        self.looks = Looks(
            model,
            torch.cat([prompt, text]),
            [*features, *values, "hook_normalizer", "hook_z_bias", "hook_z"],
            again=values if self.key is None else [self.key, *values],
            after_layers=final_scale_name(model),
            segment_length=segment_length,
            on_progress=on_progress,
        )

    def text(self) -> tuple[list[TextReads], Float[Tensor, "text 1"]]:
        """The text's side of every layer, and the final norm's scale there."""
        m, n, w = self.n_prompt, self.n_all, self.window
        text = torch.arange(m, n)
        edges = torch.cat([torch.arange(min(w, m)), torch.arange(m, min(m + w, n))])
        of_scale = final_scale_name(self.model)
        leaf = of_scale.rsplit(".", 1)[-1]
        positions = dict.fromkeys((self.query, "hook_normalizer", "hook_z", "hook_z_bias", leaf), text)
        positions |= {} if self.key is None else {self.key: edges}
        *layers, behind = rows_at(self.looks, {**positions, "hook_v": torch.arange(max(0, m - w), m)})
        scale = final_scale(self.model, {of_scale: behind[leaf]})
        return [self._text_reads(layer, of) for layer, of in enumerate(layers)], scale.double()

    def visit_prompt(self, visit: Callable[[int, Stretch], None]) -> None:
        """Call ``visit(layer, stretch)`` on every layer's keys and values, stretch by stretch, positions in order."""
        waiting: dict[int, Stretch] = {}

        def look(layer: int, first: int, found: Found) -> None:
            if layer == self.cfg.n_layers or first >= self.n_prompt:
                return
            stretch = self._stretch(layer, first, found)
            if self.by == "source" and self.mixes_tokens:
                coef = self._per_query_head(layer, found["hook_v_shift_coef"].double(), dim=0)
                stretch, waiting[layer] = self._by_source(stretch, waiting.get(layer), coef)
            if len(stretch.keys):
                visit(layer, stretch)

        self.looks.look(look)

    def _stretch(self, layer: int, first: int, found: Found) -> Stretch:
        """The stretch of a segment that belongs to the prompt; with raw values if ``by`` is "source"."""
        n = min(len(found[self.value]), self.n_prompt - first)
        values = found["hook_v" if self.mixes_tokens and self.by == "source" else self.value][:n].double()
        keys = found[self.key][:n].double() if self.key else None
        positions = torch.arange(first, first + n, device=values.device)
        return Stretch(first, self._keys(layer, keys, positions), self._per_query_head(layer, values))

    def _keys(self, layer: int, keys: Tensor | None, positions: Tensor) -> Float[Tensor, "pos head d_phi"]:
        """Keys in feature space, multiplied by gamma^{M-1-j}; with softmax, one feature per position."""
        if keys is None:
            n_features = min(self.n_prompt + self.window, self.n_all)
            one_hot = positions[:, None] == torch.arange(n_features, device=positions.device)
            return one_hot.double()[:, None].expand(-1, self.cfg.of_layer(layer).n_heads, -1)
        keys, gamma = self._per_query_head(layer, keys), self.cfg.of_layer(layer).decay_per_head()
        return keys if gamma is None else keys * (gamma.to(keys) ** (self.n_prompt - 1 - positions)[:, None])[..., None]

    def _by_source(self, new: Stretch, waiting: Stretch | None, coef: Tensor) -> tuple[Stretch, Stretch]:
        """Regroup positions by source token as far as the following keys are known; return these and the pending rest.

        Token p is read with the key sum_s beta_s k_{p+s}, over p + s in the prompt.
        """
        is_last = new.first + len(new.keys) == self.n_prompt
        if waiting is not None:
            new = Stretch(waiting.first, torch.cat([waiting.keys, new.keys]), torch.cat([waiting.values, new.values]))
        n_ready = len(new.keys) if is_last else max(0, len(new.keys) - self.window)
        ready = Stretch(new.first, _keys_by_source(new.keys, coef)[:n_ready], new.values[:n_ready])
        return ready, Stretch(new.first + n_ready, new.keys[n_ready:].clone(), new.values[n_ready:].clone())

    def _text_reads(self, layer: int, of: dict[str, Tensor]) -> TextReads:
        """Build the reads from the rows that :meth:`text` collected."""
        of = {name: x.double() for name, x in of.items()}
        queries, n = of[self.query], of.get("hook_normalizer")
        if self.key is None:
            queries = queries[..., : self.n_prompt + self.window]
        else:
            queries = queries / (self.model.blocks[layer].attn.attn_scale if n is None else n[..., None])
            gamma = self.cfg.of_layer(layer).decay_per_head()
            if gamma is not None:
                passed = torch.arange(1, len(queries) + 1, device=queries.device)[:, None]
                queries = queries * (gamma.to(queries) ** passed)[..., None]
        reads = TextReads(queries, of["hook_z"], of.get("hook_z_bias"), shift_state=None)
        return self._with_shift_state(layer, reads, of) if self.mixes_tokens else reads

    def _with_shift_state(self, layer: int, reads: TextReads, of: dict[str, Tensor]) -> TextReads:
        """Add what values carry over the prompt's end, and, if ``by`` is "source", over its beginning."""
        m, w = self.n_prompt, self.window
        n_first, n_after = min(w, m), min(w, self.n_all - m)
        device = reads.queries.device
        positions = torch.cat([torch.arange(n_first), torch.arange(m, m + n_after)]).to(device)
        first, after = self._keys(layer, of[self.key] if self.key else None, positions).split([n_first, n_after])
        coef = self._per_query_head(layer, of["hook_v_shift_coef"], dim=0)
        before = of.get("hook_last_v", torch.zeros_like(of["hook_v"][:1])).expand(w, -1, -1)
        raw = self._per_query_head(layer, torch.cat([before, of["hook_v"]]))
        reads = reads._replace(shift_state=_through_shift_state(reads.queries, after, raw[-w:], coef))
        if self.by == "attended" or reads.inherited is None:
            return reads
        edge = first.new_zeros(w, *first.shape[1:])
        weights = torch.einsum("thf,whf->twh", reads.queries, _keys_by_source(torch.cat([edge, first]), coef)[:w])
        return reads._replace(inherited=reads.inherited + torch.einsum("twh,whd->thd", weights, raw[:w]))

    def _per_query_head(self, layer: int, x: Tensor, dim: int = 1) -> Tensor:
        return x.repeat_interleave(self.cfg.of_layer(layer).n_heads // x.shape[dim], dim=dim)


class OnePassReading:
    """Reads the same as :class:`LayerwiseReading` from one pass over both, where the model hands over whole layers.

    Args:
        model: with what the prompt continues attached.
        prompt, text: tokens [pos].
        with_logits: whether logits will be attributed, for which heads must write to the residual stream directly.

    Raises:
        KVLensError: they do not.
    """

    def __init__(
        self,
        model: KVModel,
        prompt: Int[Tensor, " prompt_pos"],
        text: Int[Tensor, " text_pos"],
        with_logits: bool,
    ):
        self.model, self.n_prompt = model, len(prompt)
        self.scale = torch.ones(len(text), 1, dtype=torch.float64, device=text.device)
        if with_logits:
            self.layers, self.scale = read_attention_and_scale(model, prompt, text)
        else:
            self.layers = read_attention(model, prompt, text)

    def text(self) -> tuple[list[TextReads], Float[Tensor, "text 1"]]:
        """The text's side of every layer, and the final norm's scale there."""
        layers = [(of.pattern.transpose(0, 1), of.z, of.z_bias, None, of.gate, of.factor) for of in self.layers]
        return [TextReads(*of) for of in layers], self.scale

    def visit_prompt(self, visit: Callable[[int, Stretch], None]) -> None:
        """Hand every layer's values to ``visit(layer, stretch)``; a position's key is the position."""
        for layer, of in enumerate(self.layers):
            keys = torch.eye(self.n_prompt, dtype=of.values.dtype, device=of.values.device)
            visit(layer, Stretch(0, keys[:, None].expand(-1, of.values.shape[1], -1), of.values))


def _mixed_values(model: HookedKVTransformer, by: str) -> tuple[int, bool]:
    """How many earlier tokens a value mixes, and whether an MLP follows; KVLensError if values cannot be split by token."""
    shift, variant = model.cfg.kv_shift, model.cfg.attention_variant
    window = shift.window if shift is not None and shift.values else 0
    augments = variant is not None and variant.augmented is not None and variant.augmented.values
    if variant is not None and (variant.negative is not None or variant.ridge is not None):
        raise KVLensError(
            "this model's heads do not read a sum of A_ij v_j (negative samples, or ridge attention), so their output cannot "
            "be split by prompt position"
        )
    if window and augments and by == "source":
        raise KVLensError(
            "by='source': this model's values are an MLP of mixed tokens (augmented attention), so they cannot be split by "
            "token; use by='attended'"
        )
    return window, augments


def _keys_by_source(keys: Float[Tensor, "pos head d_phi"], coef: Float[Tensor, "head taps"]) -> Float[Tensor, "pos head d_phi"]:
    """sum_s beta_s k_{p+s}, with zeros after the last key."""
    edge = keys.new_zeros(coef.shape[1] - 1, *keys.shape[1:])
    return torch.einsum("phfs,hs->phf", torch.cat([keys, edge]).unfold(0, coef.shape[1], 1), coef)


def _through_shift_state(
    queries: Float[Tensor, "text head d_phi"],
    keys: Float[Tensor, "first head d_phi"],
    raw: Float[Tensor, "window head d_head"],
    coef: Float[Tensor, "head taps"],
) -> Float[Tensor, "text head d_head"]:
    """What the text reads of raw values before it: text value i includes sum_{s>i} beta_s raw_{i-s}, ``raw`` ending at -1."""
    padded = torch.cat([raw, torch.zeros_like(raw)])
    carried = torch.einsum("whds,hs->whd", padded.unfold(0, coef.shape[1], 1), coef.flip(-1))[: len(keys)]
    pattern = torch.einsum("thf,whf->htw", queries, keys).tril()
    return torch.einsum("htw,whd->thd", pattern, carried)
