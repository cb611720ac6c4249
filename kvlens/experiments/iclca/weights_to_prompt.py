"""``weights-to-prompt``: virtual keys that act as a given change of the value weights does (ICLCA's slides, second half).

A change of W_V moves head h's output at place i by dz_i = sum_j p_ij x_j dW_V. Virtual keys with b_D = 0 leave the normaliser
alone and add phi(q_i).b_KV / n_i to the output, so that b_KV is a least-squares fit, linear in closed form:

    sum_i | psi_i b_KV - dz_i |^2 -> min        psi_ir = exp(q_i.c_r / scale) / n_i

on queries of reference texts. The keys c_r are taken by matching pursuit from those of other texts. The slides ask how much can
be had in this way, with r as large as one likes; here is the curve, on texts that the fit did not see.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.conversion.softmax.prompt_pass import observed
from kvlens.experiments.shared.judge import JUDGE
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.model import HookedKVTransformer
from kvlens.ops.landmarks import Statistics, choose_keys

RIDGE = 1e-6


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Imitate several changes of the weights with every number of keys."""
    rows = []
    for seed in range(settings["n_changes"]):
        model, changed = (HookedKVTransformer.from_zoo(settings["model"], device="cpu").double() for _ in range(2))
        texts = _sampled(model, 3 * settings["n_texts"], settings["n_text"], seed)
        fitted, unseen, others = texts.split(settings["n_texts"])
        _change_values(changed, others, settings["size"])
        pairs = [
            _layer_targets(model, changed, layer, fitted, others, settings["n_candidates"], seed) for layer in _layers(model)
        ]
        for r in settings["keys"]:
            bias = _imitation(model, [_fit(psi, dz, keys, r) for psi, dz, keys in pairs], r)
            rows.append({"change": seed, "keys_per_head": r, "left": _left(model, changed, bias, unseen)})
        tell(f"change {seed + 1} of {settings['n_changes']}")
    changes = pd.DataFrame(rows)
    table = changes.groupby("keys_per_head")["left"].agg(["mean", "min", "max"]).reset_index()
    return Outcome(
        tables={"curve": table, "changes": changes},
        figure=_draw(table),
        comparisons=[_compared(changes, r) for r in settings["keys"]],
        differences=[
            "The slides state the capacity as a hypothesis, for any change and without a number; here the change is one "
            f"gradient step on W_V of every layer, {settings['size']:.0%} of its size.",
        ],
    )


def _layers(model: HookedKVTransformer) -> range:
    return range(model.cfg.n_layers)


@torch.no_grad()
def _sampled(model: HookedKVTransformer, n: int, length: int, seed: int) -> Int[Tensor, "text pos"]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((n, 1), model.tokenizer.bos_token_id)
    for _ in range(length - 1):
        p = model(tokens, attention_mask=torch.ones_like(tokens))[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], dim=1)
    return tokens


def _change_values(model: HookedKVTransformer, texts: Tensor, size: float) -> None:
    """One gradient step on W_V of every layer, towards the texts in reverse order, ``size`` of the weights' norm."""
    model(texts.flip(1), attention_mask=torch.ones_like(texts), return_type="loss").backward()
    for block in model.blocks:
        weight = block.attn.W_V
        step = weight.grad * (size * weight.detach().norm() / weight.grad.norm())
        weight.data -= step
    model.zero_grad()
    model.requires_grad_(False)


@torch.no_grad()
def _layer_targets(
    model: HookedKVTransformer, changed: HookedKVTransformer, layer: int, texts: Tensor, others: Tensor, n: int, seed: int
) -> tuple[Float[Tensor, "head row key"], Float[Tensor, "head row d_head"], Float[Tensor, "head key d_head"]]:
    """psi of ``n`` candidate keys, and dz, on the changed model's own queries; the candidates."""
    q, _, z, log_n = _seen(changed, layer, texts)
    new, attn = changed.blocks[layer].attn.W_V.data, changed.blocks[layer].attn
    attn.W_V.data = model.blocks[layer].attn.W_V.data
    dz = z - _seen(changed, layer, texts)[2]
    attn.W_V.data = new
    candidates = rearrange(_seen(changed, layer, others)[1], "b p h d -> h (b p) d")
    chosen = torch.randperm(candidates.shape[1], generator=torch.Generator().manual_seed(seed))[:n]
    keys = candidates[:, chosen]
    scores = rearrange(q, "b p h d -> h (b p) d") @ keys.mT / attn.attn_scale
    psi = (scores - rearrange(log_n, "b h p -> h (b p) 1")).exp()
    return psi, rearrange(dz, "b p h d -> h (b p) d"), keys


def _seen(model: HookedKVTransformer, layer: int, texts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, z, log n) of one layer, queries and keys as they are scored."""
    at = f"blocks.{layer}.attn."
    names = [at + "hook_z", at + "hook_attn_scores"]
    with observed(model) as seen:
        _, cache = model.run_with_cache(texts, attention_mask=torch.ones_like(texts), names_filter=names)
    return seen[layer][0], seen[layer][1], cache[names[0]], cache[names[1]].logsumexp(dim=-1)


def _fit(
    psi: Tensor, dz: Tensor, keys: Tensor, r: int
) -> tuple[Float[Tensor, "head r d_head"], Float[Tensor, "head r d_head"]]:
    """(keys, b_KV) of the ``r`` candidates that explain most of dz."""
    gram, right = psi.mT @ psi, psi.mT @ dz
    sums = Statistics(gram, torch.zeros_like(gram[..., 0]), right, torch.zeros_like(gram[:, 0, 0]), psi.shape[1])
    index = choose_keys(sums, r).keys
    every = torch.arange(len(index))[:, None]
    small = gram[every[..., None], index[:, :, None], index[:, None]]
    ridge = RIDGE * small.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None].expand(-1, r)
    return keys[every, index], torch.linalg.solve(small + torch.diag_embed(ridge), right[every, index])


def _imitation(model: HookedKVTransformer, layers: list[tuple[Tensor, Tensor]], r: int) -> KVBias:
    """The bias of the fitted keys: b_D is 0, the text starts at position 0."""
    keys, b_kv = (torch.stack(part) for part in zip(*layers, strict=True))
    nothing = convert_prompt(model, torch.zeros(1, dtype=torch.long)).zero_like()  # no prompt: a boundary of zeros
    return replace(
        nothing,
        b_KV=b_kv,
        b_D=torch.zeros_like(b_kv[..., 0]),
        n_prompt_tokens=r,
        position_offset=0,
        features=VirtualKeys(keys, torch.ones(keys.shape[:3], dtype=torch.long)),
        log_scale=keys.new_zeros(keys.shape[:2]),
    )


@torch.no_grad()
def _left(model: HookedKVTransformer, changed: HookedKVTransformer, bias: KVBias, texts: Tensor) -> float:
    """||imitated - changed|| / ||original - changed|| of the logits, on texts that the fit did not see: 1 is no imitation."""
    mask = torch.ones_like(texts)
    aim, start = changed(texts, attention_mask=mask), model(texts, attention_mask=mask)
    with model.kv_bias(bias):
        return float((model(texts, attention_mask=mask) - aim).norm() / (start - aim).norm())


def _compared(changes: pd.DataFrame, r: int) -> Comparison:
    left = changes.loc[changes["keys_per_head"] == r, "left"]
    return Comparison(
        f"share of the change of the logits that {r} virtual keys per head leave over",
        None,
        float(left.mean()),
        "virtual keys take over part of a change of the weights (a share below 1)",
        JUDGE.above((1 - left).to_numpy()),
    )


def _draw(table: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(table["keys_per_head"], table["min"], table["max"], color="#1b7f4b", alpha=0.15, linewidth=0)
    axes.plot(table["keys_per_head"], table["mean"], marker="o", color="#1b7f4b", linewidth=2)
    axes.axhline(1, color="#555555", linestyle=":", linewidth=1.4)
    axes.set(xscale="log", yscale="log", xlabel="virtual keys per head", ylabel="share of the change that is left")
    axes.set_title("Virtual keys in the place of a change of W_V, on unseen text", loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _scale(**changes: Any) -> dict[str, Any]:
    common = dict(model="facts-gpt2", n_changes=8, n_texts=24, n_text=48, n_candidates=512, size=0.05)
    return {**common, "keys": [1, 4, 16, 64, 256], **changes}


EXPERIMENT = Experiment(
    name="weights-to-prompt",
    source="ICLCA, slides, from delta-W to a prompt",
    question="How much of a given change of the weights can virtual keys take over?",
    run=run,
    scales={
        "tiny": _scale(n_changes=2, n_texts=4, n_text=12, n_candidates=16, keys=[1, 8]),
        "small": _scale(),
        "paper": _scale(n_texts=64, n_candidates=1024, keys=[1, 4, 16, 64, 256, 512]),
    },
    cost={"tiny": "seconds", "small": "about ten minutes on two cores", "paper": "about half an hour on two cores"},
)
