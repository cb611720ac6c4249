"""Statements run again by other means: passes over prompt and text, with masks and with keys and values written over; no bias.

`HookedPasses` runs TransformerLens' hooks on a `HookedKVTransformer`; `TransformersPasses` runs Transformers' own model with an
attention function of its own, tokens that are taken out of the prompt, and states of recurrent layers written over. The verdict
is written from its definition.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import torch
from kvlens.analyses.attribution.explain import SHIFT_STATE
from kvlens.analyses.bias.parts import CONVOLUTION_PART, Part
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


class _Read(NamedTuple):
    """What a pass of Transformers over a prompt, or over what is left of it, leaves.

    Attributes:
        gone: positions that were not read.
        cache: Transformers' own; None where nothing is left.
        recurrences: layer -> its final state, from values of which some are zero: [pos, head] -> [head, *].
    """

    gone: Tensor
    cache: Any
    recurrences: dict[int, Callable[[Tensor], Tensor]]


class TransformersPasses:
    """Passes of a Transformers model over the tokens that are left. Heads and positions of full attention are exchanged by a
    function of its own (`attention`), which is registered with Transformers. Those of a recurrent layer are exchanged in the
    state that the text continues from, which is linear in the values: the layer's own recurrence is run once more on what it
    was given, with the values of all other positions and heads zero.

    Args:
        plain: a model of Transformers, not bridged.
        prompt, text, spans: as for `HookedPasses`.
    """

    NAME = "second_opinion"
    RECURRENCES: ClassVar = {"torch_chunk_gated_delta_rule": 2, "mamba2_chunk_scan": 0}
    """Transformers' functions, and which of their arguments are the values, [batch, pos, head, d]."""

    def __init__(self, plain: Any, prompt: Tensor, text: Tensor, spans: list[Span]):
        import transformers as tf

        self.plain, self.prompt, self.text, self.spans = plain, prompt, text, spans
        self.chosen: tuple[Tensor, _Read, _Read] | None = None
        tf.AttentionInterface.register(self.NAME, self.attention)
        tf.AttentionMaskInterface.register(self.NAME, tf.masking_utils.eager_mask)
        self.read: dict[frozenset[int], _Read] = {}

    def gone(self, units: Iterable[int]) -> Tensor:
        found = torch.zeros(len(self.prompt), dtype=torch.bool)
        for unit in units:
            found[slice(*self.spans[unit])] = True
        return found

    def run(self, tokens: Tensor, at: Tensor, cache: Any = None, **options: Any) -> Any:
        mask = torch.ones(1, int(at[-1]) + 1 if cache is not None else len(tokens), dtype=torch.long)
        # without a mask, a gap in the positions begins another text
        with torch.no_grad():
            return self.plain(tokens[None], position_ids=at[None], attention_mask=mask, past_key_values=cache, **options)

    def without(self, units: Iterable[int], positions: str = "kept") -> Tensor:
        """The logits behind the text, without units."""
        left = torch.cat([~self.gone(units), torch.ones(len(self.text), dtype=torch.bool)])
        at = left.nonzero()[:, 0] if positions == "kept" else torch.arange(int(left.sum()))
        return self.run(torch.cat([self.prompt, self.text])[left], at, use_cache=False).logits[0, -1].double()

    def lacking(self, units: frozenset[int]) -> _Read:
        """A pass over the prompt without units."""
        if units not in self.read:
            gone, calls = self.gone(units), []
            with self._recurrences_told(calls):
                at = (~gone).nonzero()[:, 0]
                cache = self.run(self.prompt[~gone], at, use_cache=True).past_key_values if len(at) else None
            layers = [] if cache is None else [i for i, x in enumerate(cache.layers) if hasattr(x, "recurrent_states")]
            self.read[units] = _Read(gone, cache, dict(zip(layers, calls, strict=True)))
        return self.read[units]

    @contextmanager
    def _recurrences_told(self, calls: list[Callable[[Tensor], Tensor]]) -> Iterator[None]:
        """Each recurrence that is run is appended: a function of the values that are not zero, [pos, head]."""
        modeling = sys.modules[type(self.plain).__module__]

        def told(recurrence: Callable[..., Any], which: int) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                def again(nonzero: Tensor) -> Tensor:
                    given = [*args]
                    given[which] = torch.where(nonzero[None, ..., None], args[which], 0.0)
                    return recurrence(*given, **options)[1][0]

                calls.append(again)
                return recurrence(*args, **options)

            return run

        with ExitStack() as stack:
            for name, which in self.RECURRENCES.items():
                if hasattr(modeling, name):
                    stack.enter_context(patch.object(modeling, name, told(getattr(modeling, name), which)))
            yield

    def exchanged(self, removed: Iterable[int], heads: list[str], positions: list[str], *, others: bool = False) -> Tensor:
        """As `HookedPasses.exchanged`."""
        here, there = self.lacking(frozenset()), self.lacking(frozenset(removed))
        config, convolutions = self.plain.config.get_text_config(), set()
        states = {layer: here.cache.layers[layer].recurrent_states[0] for layer in here.recurrences}
        n_heads = max([config.num_attention_heads, *(state.shape[1] for state in states.values())])
        own = torch.zeros(config.num_hidden_layers, n_heads, dtype=torch.bool)
        for part in map(Part.of_code, heads):
            if part.kind == CONVOLUTION_PART:
                convolutions.add(part.layer)
            else:
                own[part.layer, part.head] = True
        at = torch.tensor([str(position) in positions for position in range(len(self.prompt))])
        changed = (own[:, None] | at[:, None]) != others  # layer, pos, head
        cache = copy.deepcopy(here.cache)
        for layer, recurrence in here.recurrences.items():
            held, which = cache.layers[layer], changed[layer, :, : states[layer].shape[1]]
            other = 0.0 if there.cache is None else there.recurrences[layer](which[~there.gone])
            held.recurrent_states[0][0] = recurrence(~which) + other
            if ((layer in convolutions) or SHIFT_STATE in positions) != others:
                inputs = held.conv_states[0]
                inputs.copy_(there.cache.layers[layer].conv_states[0] if there.cache is not None else 0 * inputs)
        self.chosen = changed, here, there
        with self._own_attention():
            found = self.run(self.text, len(self.prompt) + torch.arange(len(self.text)), cache, use_cache=True).logits[0, -1]
        self.chosen = None
        return found.double()

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        before = self.plain.config._attn_implementation
        self.plain.set_attn_implementation(self.NAME)
        try:
            yield
        finally:
            self.plain.set_attn_implementation(before)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """softmax(q k scaling) v on the text; of the prompt, keys and values chosen by head and position."""
        assert self.chosen is not None
        changed, *reads = self.chosen
        group, layer, n = query.shape[1] // key.shape[1], module.layer_idx, len(self.prompt)
        keys, values = (x[0].repeat_interleave(group, dim=0).double() for x in (key, value))  # head, pos, d
        of_head = changed[layer, :, : query.shape[1]].T
        hidden = torch.zeros_like(of_head)
        for read, which in zip(reads, (~of_head, of_head), strict=True):
            hidden |= which & read.gone
            for name, now in (("keys", keys), ("values", values)):
                full = torch.zeros_like(now[:, :n])
                if read.cache is not None:
                    full[:, ~read.gone] = getattr(read.cache.layers[layer], name)[0].repeat_interleave(group, dim=0).double()
                now[:, :n] = torch.where(which[..., None], full, now[:, :n])
        scores = torch.einsum("hqd,hkd->hqk", query[0].double(), keys) * scaling
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(n + 1), -torch.inf)
        scores[:, :, :n] = scores[:, :, :n].masked_fill(hidden[:, None], -torch.inf)
        return torch.einsum("hqk,hkd->qhd", scores.softmax(dim=-1), values)[None].to(query.dtype), None


def again(passes: Any, row: Any, n_units: int) -> Tensor:
    """The logits behind the text under the intervention that a row of ``Explained.statements`` names."""
    parts = row.parts.split("+") if row.parts else []
    if row.about == "units":
        units = {int(part) for part in parts}
        return passes.without(set(range(n_units)) - units if row.others else units, row.positions)
    removed = [int(unit) for unit in row.removed.split("+")]
    heads, positions = (parts, []) if row.about == "heads" else ([], parts)
    return passes.exchanged(removed, heads, positions, others=row.others)
