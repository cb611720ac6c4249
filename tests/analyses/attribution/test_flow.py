"""The edges and switches of a drawn flow: each number against one hooked pass over prompt and text."""

import pytest
import torch
from analysis_models import VARIANTS, random_model, tokens
from kvlens.analyses.attribution import by_head, flow
from kvlens.analyses.attribution.explain import Explained
from kvlens.analyses.attribution.flow import SHIFT_STATE, answer_flow

from kvlens import KVShiftConfig
from kvlens.analyses import attribution_by_head, attribution_by_position, prompt_attribution
from kvlens.components import hidden_tokens_keep_positions

PROMPT, TEXT = tokens(13, 1), tokens(4, 2)
SPANS = [(0, 3), (3, 5), (5, 9), (9, 13)]
ANSWER, RIVAL = 5, 7
TOLERANCE = 1e-9
"""float64, log-probabilities of size 10 behind two layers whose weights are five times as large as usual."""
MODELS = {
    "linear": {},
    "linear, no shift": VARIANTS["rope before"],
    "softmax": dict(attention="softmax", kv_shift=KVShiftConfig(window=2, queries=True)),
}


def found_in(model, significant=(1, 2), rival=None) -> Explained:
    """An explanation in which the named units are significant, the first of them the leading one."""
    units = prompt_attribution(model, PROMPT, TEXT, by=SPANS, answer=ANSWER, rival=rival)
    units["p_adjusted"] = [0.01 if unit in significant else 1.0 for unit in range(len(units))]
    given = dict(by=[SPANS[significant[0]]], answer=ANSWER, rival=rival)
    heads, positions = attribution_by_head(model, PROMPT, TEXT, **given), attribution_by_position(model, PROMPT, TEXT, **given)
    p = (0.5, 0.5)
    return Explained("a", "b", p, p, units, heads, positions, significant[0], (ANSWER,), (RIVAL,))


@pytest.mark.parametrize("name", MODELS)
def test_every_row_is_what_a_hooked_pass_over_prompt_and_text_says(name, monkeypatch):
    monkeypatch.setattr(flow, "MOST_HEADS", 3)
    monkeypatch.setattr(flow, "MOST_POSITIONS", 5)
    monkeypatch.setattr(flow, "NOTICEABLE", 0.0)
    monkeypatch.setattr(by_head, "MEMORY_PER_PASS", 1)  # four rows at once
    model = random_model(**MODELS[name])
    table = answer_flow(model, PROMPT, TEXT, found_in(model))
    assert len(table) == 1 + 4 + 6 + 2 * (1 + 2 * 10 + 3 + 3 + 5 * 2 * (1 + 3))
    read = Passes(model)
    before = read.of(table.iloc[0])
    for row in table.itertuples():
        said = read.of(row)
        assert row.effect == pytest.approx(float(before[0] - said[0]), abs=TOLERANCE), row
        assert row.p_answer == pytest.approx(float(said[0].exp()), abs=TOLERANCE)
        assert row.p_rival == pytest.approx(float(said[1].exp()), abs=TOLERANCE)
    assert table["effect"].abs().max() > 0.01


class Passes:
    """Passes over prompt and text in which the text reads, of each prompt position and head, one prompt's keys and values or
    another's: they are written over those of the pass, and what a prompt lacks is hidden from the text."""

    def __init__(self, model):
        self.model, self.together, self.seen = model, torch.cat([PROMPT, TEXT])[None], {}
        shift = model.cfg.kv_shift
        self.raw = ["q", "k", "v"] if shift is not None else []
        self.read = ["k_shifted", "v_shifted"] if shift is not None else ["k", "v"]

    def lacking(self, units: frozenset) -> tuple[dict, torch.Tensor]:
        """What a pass over the prompt without units computes, and which positions are gone."""
        if units not in self.seen:
            gone, found = torch.zeros(len(PROMPT), dtype=torch.bool), {}
            for unit in units:
                gone[slice(*SPANS[unit])] = True
            mask = torch.cat([~gone, torch.ones(len(TEXT), dtype=torch.bool)])[None].long()
            looks = [(name, lambda x, hook: found.update({hook.name: x.clone()})) for name in self.names(self.raw + self.read)]
            with hidden_tokens_keep_positions(True):
                self.model.run_with_hooks(self.together, attention_mask=mask, fwd_hooks=looks)
            behind = (~gone).long().argsort(stable=True)  # what the text's first tokens are shifted by: the last that are read
            for name in self.names(self.raw):
                found[name][:, : len(PROMPT)] = found[name][:, behind]
            self.seen[units] = found, gone
        return self.seen[units]

    def names(self, projections):
        return [f"blocks.{layer}.attn.hook_{x}" for layer in range(2) for x in projections]

    def of(self, row) -> torch.Tensor:
        """log p of the answer and of the rival."""
        removed = frozenset(int(unit) for unit in row.removed.split("+") if unit)
        (here, gone), (there, also_gone) = self.lacking(removed), self.lacking(removed | ({row.unit} - {-1}))
        n, n_heads = len(PROMPT), self.model.cfg.n_heads
        heads = [tuple(map(int, head.split("."))) for head in row.heads.split("+") if head]
        of_heads = torch.tensor([[not heads or (layer, head) in heads for head in range(n_heads)] for layer in range(2)])
        positions = torch.tensor([row.position in ("", str(position)) for position in range(n)])
        changed = of_heads[:, None] & positions[:, None]  # layer, pos, head
        shift_state = of_heads & (row.position in ("", SHIFT_STATE))
        if row.others:
            changed, shift_state = ~changed, ~shift_state
        hidden = torch.where(changed, also_gone[:, None], gone[:, None])

        def write(x, hook):
            layer, projection = int(hook.name.split(".")[1]), hook.name.rpartition("hook_")[2]
            which = changed[layer] if projection in self.read else shift_state[layer].expand(n, -1)
            x[:, :n] = torch.where(which[..., None], there[hook.name][:, :n], here[hook.name][:, :n])
            return x

        def hide(x, hook):
            layer = int(hook.name.split(".")[1])
            if self.model.cfg.attention == "linear":
                x[:, :n] = torch.where(hidden[layer][..., None], 0.0, x[:, :n])
            else:
                x[:, :, n:, :n] = torch.where(hidden[layer].T[:, None], -torch.inf, x[:, :, n:, :n])
            return x

        weights = "phi_k" if self.model.cfg.attention == "linear" else "attn_scores"
        hooks = [(name, write) for name in self.names(self.raw + self.read)] + [(name, hide) for name in self.names([weights])]
        logits = self.model.run_with_hooks(self.together, fwd_hooks=hooks, attention_mask=torch.ones_like(self.together))
        return logits[0, -1].log_softmax(dim=-1)[[ANSWER, RIVAL]]


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_flow_agrees_with_the_tables_that_it_is_drawn_from(attention):
    """Grouped heads and shifted queries, and the score against a rival."""
    model = random_model(
        attention=attention, n_heads=6, d_model=36, n_key_value_heads=2, kv_shift=KVShiftConfig(window=2, queries=True)
    )
    found = found_in(model, significant=(2,), rival=RIVAL)
    table = answer_flow(model, PROMPT, TEXT, found, rival=RIVAL)
    removed = table[(table["unit"] == -1) & table["removed"].isin(list("0123"))]
    assert removed["effect"].tolist() == pytest.approx(found.units["total_effect"].tolist(), abs=TOLERANCE)
    heads = found.heads[found.heads["unit"] == 0]
    single = table[(table["position"] == "") & (table["heads"] != "") & ~table["heads"].str.contains("+", regex=False)]
    for others, column in ((False, "swap"), (True, "converse")):
        rows = single[single["others"] == others]
        assert rows["heads"].tolist() == [f"{layer}.{head}" for layer, head in zip(heads["layer"], heads["head"], strict=True)]
        assert rows["effect"].tolist() == pytest.approx(heads[column].tolist(), abs=TOLERANCE)
    positions = found.positions.assign(position=found.positions["prompt_position"].astype(str).replace("-1", SHIFT_STATE))
    positions = positions.set_index("position")
    for row in table[(table["position"] != "") & (table["heads"] == "")].itertuples():
        column = "converse" if row.others else "swap"
        assert row.effect == pytest.approx(positions.loc[row.position, column], abs=TOLERANCE)
    assert table["n_passes"].nunique() == 1


def test_without_a_significant_unit_nothing_is_measured():
    model = random_model()
    found = found_in(model)
    nothing = Explained("a", "b", (0.5, None), (0.5, None), found.units, found.heads, found.positions, None, (5,), (7,))
    assert len(answer_flow(model, PROMPT, TEXT, nothing)) == 0
