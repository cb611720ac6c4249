"""Statements run again by other means: passes over prompt and text, with masks and with keys and values written over; no bias.

`HookedPasses` runs TransformerLens' hooks on a `HookedKVTransformer`; `TransformersPasses` runs Transformers' own model with an
attention function of its own, and tokens that are taken out of the prompt. The verdict is written from its definition.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from kvlens.analyses.attribution.explain import SHIFT_STATE
from kvlens.analyses.bias.parts import Part
from torch import Tensor

from kvlens.components import hidden_tokens_keep_positions

Span = tuple[int, int]


def second_verdict(whole: Tensor, now: Tensor, answer: list[int], rival: int | None = None, half: float = 0.5) -> str:
    """As the definition reads, from log-probabilities [answer_pos, d_vocab] with the whole prompt and under an intervention."""
    n = range(len(answer))
    p, q = (math.exp(sum(float(x[i, answer[i]]) for i in n)) for x in (whole, now))
    if rival is None and all(int(whole[i].argmax()) == answer[i] for i in n):
        wrong = [i for i in n if int(now[i].argmax()) != answer[i]]
        overtaken = False
        if wrong:
            i = wrong[0]
            before, after = (x[i, answer[i]] - x[i] for x in (whole, now))
            overtaken = bool(((after < 0) & (before - after > math.log(4))).any())
        return "lost" if q < half * p or overtaken else "kept" if not wrong and q >= half * p else "changed"
    if len(answer) > 1:
        raise ValueError("an answer of one token is expected")
    rival = int(whole[0].argmax()) if rival is None else rival
    odds, odds_now = (float(x[0, answer[0]] - x[0, rival]) for x in (whole, now))
    share, share_now = (1 / (1 + math.exp(-x)) for x in (odds, odds_now))
    if odds <= 0:
        gained = share_now > 2 * share or (odds_now > 0 and odds_now - odds > math.log(4))
        return "gained" if gained else "lost" if share_now < half * share else "kept"
    if share_now < half * share or (odds_now < 0 and odds - odds_now > math.log(4)):
        return "lost"
    return "kept" if odds_now > 0 else "changed"


class HookedPasses:
    """Passes of a `HookedKVTransformer` in which the text reads, of each prompt position and head, one prompt's keys and values
    or another's: they are written over those of the pass, and what a prompt lacks is hidden from the text.

    Grouped keys are shared by heads that may read different prompts: there the heads' outputs are computed anew, by softmax.

    Args:
        model: linear or softmax.
        prompt, text: [pos].
        spans: of the units.
    """

    def __init__(self, model: Any, prompt: Tensor, text: Tensor, spans: list[Span]):
        self.model, self.prompt, self.spans = model, prompt, spans
        self.together, self.seen = torch.cat([prompt, text])[None], {}
        self.layers = range(model.cfg.n_layers)
        shift = model.cfg.kv_shift
        self.raw = ["q", "k", "v"] if shift is not None else []
        self.grouped = model.cfg.n_kv_heads != model.cfg.n_heads
        rotary = model.cfg.positional_embedding_type == "rotary"
        keys = "rot_k" if self.grouped and rotary else "k"
        self.read = ["k_shifted", "v_shifted"] if shift is not None else [keys, "v"]
        self.query = "rot_q" if rotary else "q"
        if self.grouped and (shift is not None or model.cfg.attention != "softmax"):
            raise ValueError("grouped keys are expected in plain softmax attention")

    def names(self, projections: Iterable[str]) -> list[str]:
        return [f"blocks.{layer}.attn.hook_{x}" for layer in self.layers for x in projections]

    def without(self, units: Iterable[int], positions: str = "kept") -> Tensor:
        """The logits behind the text, without units."""
        gone = self.gone(units)
        if positions == "closed":
            left = torch.cat([~gone, torch.ones(self.together.shape[1] - len(gone), dtype=torch.bool)])
            return self.model(self.together[:, left])[0, -1].double()
        mask = torch.cat([~gone, torch.ones(self.together.shape[1] - len(gone), dtype=torch.bool)])[None].long()
        with hidden_tokens_keep_positions(True):
            return self.model(self.together, attention_mask=mask)[0, -1].double()

    def gone(self, units: Iterable[int]) -> Tensor:
        found = torch.zeros(len(self.prompt), dtype=torch.bool)
        for unit in units:
            found[slice(*self.spans[unit])] = True
        return found

    def lacking(self, units: frozenset[int]) -> tuple[dict[str, Tensor], Tensor]:
        """What a pass over the prompt without units computes, and which positions are gone."""
        if units not in self.seen:
            gone, found = self.gone(units), {}
            mask = torch.cat([~gone, torch.ones(self.together.shape[1] - len(gone), dtype=torch.bool)])[None].long()
            looks = [(name, lambda x, hook: found.update({hook.name: x.clone()})) for name in self.names(self.raw + self.read)]
            with hidden_tokens_keep_positions(True):
                self.model.run_with_hooks(self.together, attention_mask=mask, fwd_hooks=looks)
            behind = (~gone).long().argsort(stable=True)  # what the text's first tokens are shifted by: the last that are read
            for name in self.names(self.raw):
                found[name][:, : len(gone)] = found[name][:, behind]
            self.seen[units] = found, gone
        return self.seen[units]

    def exchanged(
        self, removed: Iterable[int], heads: list[str], positions: list[str], *, inside: bool = False, others: bool = False
    ) -> Tensor:
        """The logits behind the text, which reads the prompt; of heads, or at positions, the prompt without ``removed``."""
        (here, gone), (there, also_gone) = self.lacking(frozenset()), self.lacking(frozenset(removed))
        cfg, n = self.model.cfg, len(self.prompt)
        group = cfg.n_heads // cfg.n_kv_heads
        own, shifts = torch.zeros(2, cfg.n_layers, cfg.n_heads, dtype=torch.bool)  # keys and values, and the shift state
        for part in map(Part.of_code, heads):
            which = slice(part.head * group, (part.head + 1) * group) if part.kind == "shift_state" else part.head
            (shifts if part.kind == "shift_state" else own)[part.layer, which] = True
        at = torch.tensor([str(position) in positions for position in range(n)])
        in_places = SHIFT_STATE in positions
        changed = own[:, None] & at[:, None] if inside else own[:, None] | at[:, None]  # layer, pos, head
        shift_state = shifts & in_places if inside else shifts | in_places
        if others:
            changed, shift_state = ~changed, ~shift_state
        hidden = torch.where(changed, also_gone[:, None], gone[:, None])

        def write(x: Tensor, hook: Any) -> Tensor:
            layer, projection = int(hook.name.split(".")[1]), hook.name.rpartition("hook_")[2]
            which = changed[layer] if projection in self.read else shift_state[layer].expand(n, -1)
            x[:, :n] = torch.where(which[..., None], there[hook.name][:, :n], here[hook.name][:, :n])
            return x

        def hide(x: Tensor, hook: Any) -> Tensor:
            layer = int(hook.name.split(".")[1])
            if cfg.attention == "linear":
                x[:, :n] = torch.where(hidden[layer][..., None], 0.0, x[:, :n])
            else:
                x[:, :, n:, :n] = torch.where(hidden[layer].T[:, None], -torch.inf, x[:, :, n:, :n])
            return x

        weights = "phi_k" if cfg.attention == "linear" else "attn_scores"
        hooks: list[Any] = [(name, write) for name in self.names(self.raw + self.read)]
        hooks += [(name, hide) for name in self.names([weights])]
        if self.grouped:
            hooks = self._anew(here, there, changed, hidden)
        mask = torch.ones_like(self.together)
        return self.model.run_with_hooks(self.together, fwd_hooks=hooks, attention_mask=mask)[0, -1].double()

    def _anew(self, here: dict[str, Tensor], there: dict[str, Tensor], changed: Tensor, hidden: Tensor) -> list[Any]:
        """Hooks that compute each head's output on the text: softmax(q k / scale) v, over keys chosen by head and position."""
        seen: dict[str, Tensor] = {}
        n, group = len(self.prompt), self.model.cfg.n_heads // self.model.cfg.n_kv_heads

        def keep(x: Tensor, hook: Any) -> None:
            seen[hook.name] = x.clone()

        def anew(z: Tensor, hook: Any) -> Tensor:
            layer = int(hook.name.split(".")[1])
            stem = hook.name.removesuffix("hook_z")

            def of(name: str) -> Tensor:
                name = f"{stem}hook_{name}"
                both = [x[name][0].repeat_interleave(group, dim=1) for x in (there, here)]
                of_prompt = torch.where(changed[layer][..., None], *(x[:n] for x in both))
                return torch.cat([of_prompt, seen[name][0, n:].repeat_interleave(group, dim=1)])

            keys, values = (of(name) for name in self.read)
            scores = torch.einsum("qhd,khd->hqk", seen[f"{stem}hook_{self.query}"][0, n:], keys)
            scores = scores / self.model.blocks[layer].attn.attn_scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(n + 1)
            scores = scores.masked_fill(later, -torch.inf)
            scores[:, :, :n] = scores[:, :, :n].masked_fill(hidden[layer].T[:, None], -torch.inf)
            z = z.clone()
            z[0, n:] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
            return z

        return [*((name, keep) for name in self.names([self.query, *self.read])), *((name, anew) for name in self.names(["z"]))]


class TransformersPasses:
    """Passes of a Transformers model over the tokens that are left; heads and positions of full attention by a function of its
    own (`attention`), which is registered with Transformers.

    Args:
        plain: a model of Transformers, not bridged.
        prompt, text, spans: as for `HookedPasses`.
    """

    NAME = "second_opinion"

    def __init__(self, plain: Any, prompt: Tensor, text: Tensor, spans: list[Span]):
        import transformers as tf

        self.plain, self.prompt, self.text, self.spans = plain, prompt, text, spans
        self.chosen: dict[str, Any] = {}
        tf.AttentionInterface.register(self.NAME, self.attention)
        tf.AttentionMaskInterface.register(self.NAME, tf.masking_utils.eager_mask)
        self.caches: dict[frozenset[int], dict[int, tuple[Tensor, Tensor]]] = {}

    def without(self, units: Iterable[int], positions: str = "kept") -> Tensor:
        """The logits behind the text, without units."""
        gone = torch.zeros(len(self.prompt), dtype=torch.bool)
        for unit in units:
            gone[slice(*self.spans[unit])] = True
        left = torch.cat([~gone, torch.ones(len(self.text), dtype=torch.bool)])
        at = left.nonzero()[:, 0] if positions == "kept" else torch.arange(int(left.sum()))
        tokens = torch.cat([self.prompt, self.text])[left]
        with torch.no_grad():
            mask = torch.ones_like(tokens[None])  # without one, a gap in the positions begins another text
            options = dict(position_ids=at[None], attention_mask=mask, use_cache=False)
            return self.plain(tokens[None], **options).logits[0, -1].double()

    def lacking(self, units: frozenset[int]) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """Keys and values of each layer at all positions, zeros where they are gone."""
        gone = torch.zeros(len(self.prompt), dtype=torch.bool)
        for unit in units:
            gone[slice(*self.spans[unit])] = True
        if units not in self.caches:
            self.chosen = {"keep": {}}
            with self._own_attention():
                self.without(units)
            self.caches[units], self.chosen = self.chosen["keep"], {}
        return self.caches[units], gone

    def exchanged(self, removed: Iterable[int], heads: list[str], positions: list[str], *, others: bool = False) -> Tensor:
        """As `HookedPasses.exchanged`."""
        here, there = self.lacking(frozenset()), self.lacking(frozenset(removed))
        n_heads = self.plain.config.get_text_config().num_attention_heads
        own = torch.zeros(self.plain.config.get_text_config().num_hidden_layers, n_heads, dtype=torch.bool)
        for part in map(Part.of_code, heads):
            own[part.layer, part.head] = True
        at = torch.tensor([str(position) in positions for position in range(len(self.prompt))])
        changed = own[:, None] | at[:, None]
        self.chosen = {"here": here, "there": there, "changed": ~changed if others else changed}
        tokens = torch.cat([self.prompt, self.text])
        with torch.no_grad(), self._own_attention():
            found = self.plain(tokens[None], position_ids=torch.arange(len(tokens))[None], use_cache=False).logits[0, -1]
        self.chosen = {}
        return found.double()

    def _own_attention(self) -> Any:
        import contextlib

        @contextlib.contextmanager
        def switched() -> Any:
            before = self.plain.config._attn_implementation
            self.plain.set_attn_implementation(self.NAME)
            try:
                yield
            finally:
                self.plain.set_attn_implementation(before)

        return switched()

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """softmax(q k scaling) v, causal; of the prompt, keys and values chosen by head and position."""
        group = query.shape[1] // key.shape[1]
        keys, values = (x[0].repeat_interleave(group, dim=0).double() for x in (key, value))  # head, pos, d
        layer, n = module.layer_idx, len(self.prompt)
        if "keep" in self.chosen:
            self.chosen["keep"][layer] = keys, values
        scores_hidden = None
        if "changed" in self.chosen:
            changed = self.chosen["changed"][layer].T  # head, pos
            hidden = torch.zeros_like(changed)
            for (cache, gone), which in ((self.chosen["here"], ~changed), (self.chosen["there"], changed)):
                for now, kept in zip((keys, values), cache[layer], strict=True):
                    full = torch.zeros(now.shape[0], n, now.shape[2], dtype=now.dtype)
                    full[:, ~gone] = kept[:, : int((~gone).sum())]
                    now[:, :n] = torch.where(which[..., None], full, now[:, :n])
                hidden |= which & gone
            scores_hidden = hidden
        scores = torch.einsum("hqd,hkd->hqk", query[0].double(), keys) * scaling
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)
        if scores_hidden is not None:
            scores[:, n:, :n] = scores[:, n:, :n].masked_fill(scores_hidden[:, None], -torch.inf)
        out = torch.einsum("hqk,hkd->qhd", scores.softmax(dim=-1), values)
        return out[None].to(query.dtype), None


def again(passes: Any, row: Any, n_units: int) -> Tensor:
    """The logits behind the text under the intervention that a row of ``Explained.statements`` names."""
    parts = row.parts.split("+") if row.parts else []
    if row.about == "units":
        units = {int(part) for part in parts}
        return passes.without(set(range(n_units)) - units if row.others else units, row.positions)
    removed = [int(unit) for unit in row.removed.split("+")]
    heads, positions = (parts, []) if row.about == "heads" else ([], parts)
    return passes.exchanged(removed, heads, positions, others=row.others)
