"""Training of learned features (ICLCA's slides: phi_mlp; Hedgehog, Zhang et al. 2024).

phi(q) = exp(W_q q + a_q) for queries and phi(k) = exp(W_k k + a_k) for keys, all heads at once, so that phi(q).phi(k) is close
to exp(q.k / scale) where it counts: the loss is the squared error of every key's share of the normaliser, on the reference
queries. Both maps start as the plus and minus pairs of Hedgehog: random orthogonal directions, there and back.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from kvlens.conversion.softmax.teacher import Teacher
from kvlens.ops.feature_maps import draw_projections

STEPS, LEARNING_RATE, ROWS = 300, 2e-2, 256


class FeatureMap(NamedTuple):
    """exp(weight x + offset), for every layer and key-value head."""

    weight: Float[Tensor, "layer kv_head m d_head"]
    offset: Float[Tensor, "layer kv_head m"]


def train_features(teacher: Teacher) -> tuple[FeatureMap, FeatureMap]:
    """(queries' map, keys' map), trained on the texts that the teacher has seen."""
    model, options = teacher.model, teacher.options
    cfg, generator = model.cfg, torch.Generator().manual_seed(options.seed)
    m, scale = options.n_features, model.blocks[0].attn.score_rule().scale
    assert m is not None
    queries = teacher.read(teacher.whole, teacher.seen)
    group = cfg.n_heads // cfg.n_kv_heads
    q = torch.stack([rearrange(each.q, "b i (g s) d -> g (b i s) d", s=group) for each in queries])
    log_n = torch.stack([rearrange(each.log_n, "b i (g s) -> g (b i s)", s=group) for each in queries])
    keys = torch.stack([teacher.keys(i).keys.transpose(0, 1).flatten(1, 2) for i in range(cfg.n_layers)])
    half = [draw_projections(cfg.n_kv_heads, -(-m // 2), cfg.d_head, "orthogonal", generator) for _ in range(cfg.n_layers)]
    start = torch.stack([torch.cat([w, -w], dim=1)[:, :m] for w in half]).to(q) / scale**0.5
    with torch.inference_mode(False), torch.enable_grad():
        weights = [start.clone().requires_grad_(), start.clone().requires_grad_()]
        offsets = [torch.full_like(start[..., 0], -0.5 * torch.tensor(float(m)).log().item()).requires_grad_() for _ in "qk"]
        optimizer = torch.optim.Adam([*weights, *offsets], lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in tqdm(range(STEPS), desc="training features", disable=not options.verbose):
            rows = torch.randint(q.shape[2], (min(ROWS, q.shape[2]),), generator=generator).to(q.device)
            columns = torch.randint(keys.shape[2], (min(ROWS, keys.shape[2]),), generator=generator).to(q.device)
            loss = _loss(weights, offsets, q[:, :, rows].clone(), log_n[:, :, rows].clone(), keys[:, :, columns].clone(), scale)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return tuple(FeatureMap(w.detach(), a.detach()) for w, a in zip(weights, offsets, strict=True))  # type: ignore[return-value]


def _loss(weights: list[Tensor], offsets: list[Tensor], q: Tensor, log_n: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Mean over heads of the squared error of the shares, relative to the shares' own square."""
    log_q = q @ weights[0].mT + offsets[0][..., None, :]
    log_k = keys @ weights[1].mT + offsets[1][..., None, :]
    top_q, top_k = log_q.detach().amax(dim=-1, keepdim=True), log_k.detach().amax(dim=-1, keepdim=True)
    product = (log_q - top_q).exp() @ (log_k - top_k).exp().mT
    tiny = torch.finfo(product.dtype).tiny
    log_share = product.clamp(min=tiny).log() + top_q + top_k.mT - log_n[..., None]
    share = log_share.clamp(max=10.0).exp()  # a share is at most 1: what is far above pulls back by its clamp's edge
    true = (q @ keys.mT / scale - log_n[..., None]).exp()
    over = (log_share - 10.0).clamp(min=0.0)
    size = true.square().mean(dim=(-1, -2)).clamp(min=1e-12)
    return (((share - true).square() + over).mean(dim=(-1, -2)) / size).mean()
