"""``weights-to-prompt``: virtual keys with the same effect as a given change of the weights (ICLCA's slides, second half).

The slides ask whether a change of the weights, delta-W, can be turned into a prompt. They conjecture that any change of
attention can be approximated by b_KV alone, and any change of an MLP by attention, with enough keys. This is measured on a
real model.

The changes come from context distillation (:mod:`~kvlens.conversion.distillation`): the weights of attention
(Q, K, V, O) or of the MLPs learn a prompt. If distillation were perfect, the prompt itself would be a solution. Two ways to
find one are compared: *given keys*, chosen among keys of other texts, with values in closed form (`imitation`); and *free
keys*, where gradient steps on the logits then change keys, weights and values. Beside them as many tokens are tuned at the
embedding, by as many such steps: the bias that they leave in each layer is one that a prompt could leave.

    left = || imitated - changed || / || original - changed ||       of the logits, on texts that no fit has seen

1 means no imitation at all. The prompt itself, shown next to the curves, need not be below 1, since the weights learn part of
it and other things as well. "Up to r keys per head" is the fit, among all with at most r keys, that is best on texts held out
from fitting, so that more keys can hurt only through the noise of that choice. The number of texts is limited as well: the
change and its imitation are both learned from ``n_texts`` of them, and with more texts less is left. As a null, the same fit is
applied to changes whose sign is drawn at random for each text.

The closed form goes layer by layer; the layers below have their virtual keys already. Let m be the residual stream after a
layer's attention, and x(m) the stream after its MLP; primes mark the changed model. At every position of the texts attention
has to add the t with

    x(m + t) = x'(m')        t = m' - m if the MLP is unchanged, otherwise Gauss-Newton steps from there

so a change of W_Q, W_K, W_V, W_O and a change of the MLP are treated alike. r virtual keys c_r of weight w (a token has weight
1) take the share s_ir = w exp(q_i.c_r / scale) / (n_i + sum_r w exp(q_i.c_r / scale)) of a head's attention from its own output
z_i. Their contribution is linear in their values u_r:

    sum_i | sum_h sum_r s_ihr (u_hr - z_ih) W_O_h - t_i |^2  + ridge  -> min

for all heads of the layer together, by conjugate gradients on the normal equations. Shares are at most 1, so the contribution
is bounded on any text. Ridge and weight are chosen on held-out texts, and a layer whose keys do not help there keeps keys of
negligible weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.conversion import convert_prompt
from kvlens.conversion.distillation import TEXTS_PER_STEP, distill_prompt
from kvlens.conversion.gradients import Changes, descend
from kvlens.conversion.prompt_pass import as_batch
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.model import HookedKVTransformer
from kvlens.model.streaming import observed
from kvlens.ops.landmarks import Products, Statistics
from kvlens.ops.pursuit import choose_keys
from kvlens.ops.softmax_features import virtual_key_scores
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment, hooked_model
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.iclca.logits import sampled

PARTS = {"attention": ".attn.", "mlp": ".mlp."}
"""The part of the model that changes, and the substring of its parameters' names."""
NAMES = {"attention": "attention", "mlp": "the MLPs"}
"""In words."""
SHOWN = 10
"""Gradient steps between two evaluations on the held-out texts."""
FREE_RATE = 2e-2
"""Of Adam's first step, for keys, values, log-weights and embeddings alike."""
Freed = tuple[list[Tensor], Callable[[], KVBias]]
"""What gradient steps change, and the bias that is made of it."""
GIVEN, FREE, NULL, PROMPT, TUNED = "given keys", "free keys", "given keys, null", "the prompt itself", "tuned embeddings"
RIDGES, SHARES = (1.0, 1e-1, 1e-2, 1e-3), (0.3, 0.1, 0.03, 0.01, 0.003)
"""The candidates: the ridge relative to the mean diagonal of the normal equations, and the approximate mean share of a head's
attention that its keys take together, in equal parts. (With the same weight for all keys, those with large scores dominate.)"""
OFF = 1e-4
"""The share of inactive keys: small enough to have no effect, large enough for gradient steps to start from."""
NEWTON_STEPS, DAMPING, CG_STEPS = 2, 1e-2, 40
ROWS_AT_ONCE = 256
HELD_OUT = 4
"""One in this many texts is held out."""


@experiment(
    "ICLCA, slides, from delta-W to a prompt",
    "How much of a given change of the weights can virtual keys reproduce?",
    cost=("seconds", "about a quarter of an hour on two cores"),
    model="facts-gpt2",
    tokenizer=None,
    n_changes=(1, 6),
    n_prompt=(4, 48),
    n_texts=(2, 96),
    n_text=(5, 32),
    n_candidates=(4, 256),
    keys=([2], [1, 4, 16, 64]),
    free_steps=(2, 100),
    distil=dict(steps=(2, 100), learning_rate=(1e-3, 5e-4)),
)
def weights_to_prompt(settings: Settings, tell: Tell) -> Reproduction:
    """Imitate several weight changes with every number of keys."""
    model = hooked_model(settings["model"], tokenizer=settings["tokenizer"], device="cpu")
    check_imitable(model)
    rows: list[dict[str, object]] = []
    for seed in range(settings["n_changes"]):
        for part in PARTS:
            rows += [{"change": seed, "part": part, **row} for row in _imitate(model, part, settings, seed)]
            tell(f"change {seed + 1} of {settings['n_changes']}, {part}")
    changes = pd.DataFrame(rows)
    grouped = changes.groupby(["part", "way", "keys_per_head"], sort=False)["left"]
    table = grouped.agg(["mean", "min", "max"]).reset_index()
    return Reproduction(
        tables={"curve": table, "changes": changes},
        figure=lambda: draw(table),
        comparisons=[*compare(changes)],
        differences=[
            "The slides state the capacity as a hypothesis, for any change and without a number; here the changes are those "
            f"by which {settings['model']} learns prompts of {settings['n_prompt']} tokens in {settings['distil']['steps']} "
            "steps.",
        ],
    )


def _imitate(model: HookedKVTransformer, part: str, settings: Settings, seed: int) -> Iterator[dict[str, object]]:
    """A row for each way and number of keys, for one change of the weights."""
    generator = torch.Generator().manual_seed(1_000 * seed)
    prompt, learned = _prompt_and_texts(model, settings, generator)
    exact, learning = convert_prompt(model, prompt), settings["distil"]
    asked = dict(steps=learning["steps"], learning_rates=[learning["learning_rate"]], seed=seed)
    found = distill_prompt(model, exact, learned, rank=None, which=lambda name: PARTS[part] in name, **asked)
    changed = found.weights.merged(model)
    start = torch.full((2 * settings["n_texts"], 1), model.tokenizer.bos_token_id)
    fitted, unseen = sampled(changed, start, settings["n_text"] - 1, generator).split(settings["n_texts"])
    others = sampled(model, start[: settings["n_texts"]], settings["n_text"] - 1, generator)
    aim, before = _logits(changed, unseen), _logits(model, unseen)
    size = float((before - aim).norm() / aim.norm())

    def row(way: str, r: int, bias: KVBias) -> dict[str, object]:
        with model.holding(bias):
            left = float((_logits(model, unseen) - aim).norm() / (before - aim).norm())
        return {"way": way, "keys_per_head": r, "size_of_change": size, "left": left}

    yield row(PROMPT, len(prompt), exact)
    given, free, tuned = (Best(model, changed, held_out(fitted)) for _ in range(3))
    for r in settings["keys"]:
        fit = dict(r=r, n_candidates=settings["n_candidates"], generator=generator)
        bias = imitation(model, changed, fitted, others, **fit)
        yield row(GIVEN, r, given.of(bias))
        if settings["free_steps"]:
            free.of(bias)
            for way, best, freed in ((FREE, free, free_keys(bias)), (TUNED, tuned, free_embeddings(model, r, generator))):
                for later in descended(model, changed, freed, fitted, settings["free_steps"], generator):
                    best.of(later)
                yield row(way, r, best.bias)
    yield row(NULL, r, imitation(model, changed, fitted, others, flip=True, **fit))


def _prompt_and_texts(
    model: HookedKVTransformer, settings: Settings, generator: torch.Generator
) -> tuple[Int[Tensor, " prompt"], Int[Tensor, "text pos"]]:
    """A prompt sampled from the model, and texts for fine-tuning its weights on it."""
    bos = torch.tensor([[model.tokenizer.bos_token_id]])
    prompt = sampled(model, bos, settings["n_prompt"] - 1, generator)
    whole = sampled(model, prompt.expand(settings["n_texts"], -1), settings["n_text"], generator)
    return prompt[0], torch.cat([bos.expand(settings["n_texts"], -1), whole[:, prompt.shape[1] : -1]], dim=1)


@torch.no_grad()
def _logits(model: HookedKVTransformer, texts: Int[Tensor, "text pos"]) -> Float[Tensor, "text pos vocab"]:
    """Logits minus their mean, which changes no prediction."""
    logits = model(texts, attention_mask=torch.ones_like(texts))
    return logits - logits.mean(dim=-1, keepdim=True)


class Best:
    """The bias with which ``model`` comes closest to ``changed`` on some texts, among all that were tried."""

    bias: KVBias

    def __init__(self, model: HookedKVTransformer, changed: HookedKVTransformer, texts: Int[Tensor, "text pos"]):
        self.model, self.texts, self.aim, self.least = model, texts, _logits(changed, texts), float("inf")

    def of(self, bias: KVBias) -> KVBias:
        """The best bias so far, including ``bias``."""
        with self.model.holding(bias):
            off = float((_logits(self.model, self.texts) - self.aim).norm())
        if off < self.least:
            self.least, self.bias = off, bias
        return self.bias


def free_keys(bias: KVBias) -> Freed:
    """Keys, weights and values of ``bias``."""
    one = as_batch(bias, 1)
    state = Changes.of(one)
    return state.free(), lambda: state.bias(one).select_prompt(0)


def free_embeddings(model: HookedKVTransformer, r: int, generator: torch.Generator) -> Freed:
    """Embeddings of ``r`` tokens before the text, which start as those of random ones, and what they leave in each layer."""
    soft = model.W_E[torch.randint(len(model.W_E), (r,), generator=generator)].detach().clone().requires_grad_()
    put = [("hook_embed", lambda x, hook: soft.expand(x.shape))]
    return [soft], lambda: convert_prompt(model, torch.zeros(r, dtype=torch.long), fwd_hooks=put, detach=False)


def descended(
    model: HookedKVTransformer,
    changed: HookedKVTransformer,
    freed: Freed,
    texts: Int[Tensor, "text pos"],
    steps: int,
    generator: torch.Generator,
) -> Iterator[KVBias]:
    """Gradient steps on the squared error of the logits, over tensors and the bias that is made of them.

    Yields the bias after every :data:`SHOWN` steps, and at the end. The texts that are :func:`held_out` are not read.
    """
    texts = texts[: -len(held_out(texts))]
    aim, before = _logits(changed, texts), _logits(model, texts)
    free, bias = freed

    def loss_on(rows: Int[Tensor, " row"]) -> Float[Tensor, ""]:
        with model.holding(bias()):
            logits = model(texts[rows], attention_mask=torch.ones_like(texts[rows]))
        off = logits - logits.mean(dim=-1, keepdim=True) - aim[rows]
        return off.square().sum() / (before[rows] - aim[rows]).square().sum()

    descent = descend(
        free,
        loss_on,
        n_rows=len(texts),
        rows_per_step=TEXTS_PER_STEP,
        steps=steps,
        learning_rate=FREE_RATE,
        generator=generator,
    )
    for step, _ in enumerate(descent, start=1):
        if step % SHOWN == 0 or step == steps:
            with torch.no_grad():
                now = bias()
            yield now


# --- given keys, in closed form ---


class LayerPass(NamedTuple):
    """One layer on some texts: queries and keys as scored, outputs, log-normalizers, the stream before and after the MLP."""

    q: Float[Tensor, "text pos head d_head"]
    k: Float[Tensor, "text pos kv_head d_head"]
    z: Float[Tensor, "head row d_head"]
    log_n: Float[Tensor, "text pos head"]
    middle: Float[Tensor, "row d_model"]
    after: Float[Tensor, "row d_model"]


class WeightedKeys(NamedTuple):
    """Virtual keys of one layer, their weights (a token has weight 1), and their values."""

    keys: Float[Tensor, "kv_head r d_head"]
    weights: Float[Tensor, "kv_head r"]
    values: Float[Tensor, "kv_head r d_head"]


def check_imitable(model: HookedKVTransformer) -> None:
    """Raise KVLensError unless :func:`imitation` supports the model's layers."""
    cfg, missing = model.cfg, []
    if cfg.attention != "softmax":
        missing.append("softmax attention")
    if cfg.attn_only or cfg.parallel_attn_mlp or cfg.use_normalization_before_and_after:
        missing.append("blocks of attention, then an MLP, each normed once before")
    if cfg.use_attention_sinks:
        missing.append("attention without sinks")
    if model.tokenizer is None or model.tokenizer.bos_token_id is None:
        missing.append("a tokenizer with a BOS, from which it writes its own texts")
    if missing:
        raise KVLensError(f"weights-to-prompt: the model must have {', and '.join(missing)}; {cfg.model_name} does not")


@torch.no_grad()
def see(model: HookedKVTransformer, layer: int, tokens: Int[Tensor, "text pos"]) -> LayerPass:
    """Run the texts up to a layer, in the model's own dtype."""
    got: dict[str, Tensor] = {}
    names = [f"blocks.{layer}.{name}" for name in ("attn.hook_z", "attn.hook_attn_scores", "hook_resid_mid", "hook_resid_post")]
    hooks = [(name, lambda x, hook: got.__setitem__(hook.name, x.detach())) for name in names]
    with observed(model) as seen, model.hooks(fwd_hooks=hooks):
        model(tokens, attention_mask=torch.ones_like(tokens), stop_at_layer=layer + 1)
    z, scores, middle, after = (got[name] for name in names)
    q, k, _ = seen[layer]
    log_n = rearrange(scores.logsumexp(dim=-1), "t h p -> t p h")
    return LayerPass(q, k, rearrange(z, "t p h d -> h (t p) d"), log_n, middle.flatten(0, 1), after.flatten(0, 1))


def wanted(model: HookedKVTransformer, layer: int, ours: LayerPass, changed: LayerPass) -> Float[Tensor, "row d_model"]:
    """t: what attention must add so that the block ends where the changed model's does."""
    block = model.blocks[layer]

    def after(middle: Float[Tensor, " d_model"]) -> Float[Tensor, " d_model"]:
        stream = middle[None, None]
        return (stream + block.mlp(block.ln2(stream)))[0, 0]

    t = changed.middle - ours.middle
    for _ in range(NEWTON_STEPS):
        place = ours.middle + t
        off = changed.after - torch.vmap(after)(place)
        if float(off.norm()) <= 1e-6 * float(changed.after.norm()):
            break
        slope = torch.vmap(torch.func.jacrev(after), chunk_size=ROWS_AT_ONCE)(place)
        normal = slope.mT @ slope
        size = DAMPING * normal.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
        normal = normal + size[:, None, None] * torch.eye(len(place[0])).to(normal)
        t = t + torch.linalg.solve(normal, slope.mT @ off[..., None]).squeeze(-1)
    return t


def log_ratios(
    model: HookedKVTransformer, layer: int, seen: LayerPass, keys: Float[Tensor, "kv_head r d_head"]
) -> Float[Tensor, "head row r"]:
    """log of exp(q_i.c_r / scale) / n_i: a key of weight 1 relative to the context."""
    rule, n_texts, pos = model.blocks[layer].attn.score_rule(), *seen.log_n.shape[:2]
    distance = torch.ones(1, *keys.shape[:2], dtype=torch.long)
    scores = virtual_key_scores(seen.q, keys[None], rule, distance, torch.arange(pos).expand(n_texts, -1))
    return rearrange(scores - seen.log_n[..., None], "t p h r -> h (t p) r").double()


def shares(
    log_ratios: Float[Tensor, "head row r"], weights: Float[Tensor, "kv_head r"] | None = None, alone: bool = False
) -> Float[Tensor, "head row r"]:
    """s: the share of each head's attention that each key takes, from the context and from the others unless ``alone``."""
    if weights is not None:
        log_ratios = log_ratios + weights.log().repeat_interleave(len(log_ratios) // len(weights), dim=0)[:, None]
    whole = log_ratios if alone else log_ratios.logsumexp(dim=-1, keepdim=True)
    return (log_ratios + torch.nn.functional.logsigmoid(-whole)).exp()


def even_weights(log_ratios: Float[Tensor, "head row r"], kv_heads: int, share: float) -> Float[Tensor, "kv_head r"]:
    """Weights with which every key, alone, would take ``share / r`` of the attention on average, by bisection."""
    rows = rearrange(log_ratios, "(g s) i r -> g (s i) r", g=kv_heads)
    low, high = (torch.full_like(rows[:, 0], x) for x in (-100.0, 100.0))
    for _ in range(24):
        middle = (low + high) / 2
        above = (rows + middle[:, None]).sigmoid().mean(dim=1) > share / rows.shape[-1]
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high.exp()


class Fit:
    """The least squares of one layer for one set of keys: sums over the rows, then a solution for every ridge."""

    def __init__(self, s: Tensor, z: Tensor, w_o: Tensor, t: Tensor, kv_heads: int):
        self.kv_heads, self.group, w_o = kv_heads, len(s) // kv_heads, w_o.double()
        self.start = _mean(z, kv_heads)
        target = t - brought(self.start.expand(-1, s.shape[2], -1), s, z.double(), w_o)
        self.right = self._by_group(einsum(s, target @ w_o.mT, "h i r, h i d -> h r d"))
        self.cross = einsum(s, s, "h i r, k i q -> h k r q")
        self.metric = einsum(w_o, w_o, "h d m, k e m -> h k d e")
        self.gram = self._by_group(torch.stack([self.cross[h, h] for h in range(len(s))]))
        self.size = self._by_group(torch.stack([self.metric[h, h] for h in range(len(s))])) / self.group

    def solve(self, ridge: float) -> Float[Tensor, "kv_head r d_head"]:
        """The best ``u``, by conjugate gradients, preconditioned head by head."""
        diagonal = (x.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None] for x in (self.gram, self.size))
        gram_size, metric_size = (x.clamp(min=torch.finfo(torch.float64).tiny) for x in diagonal)
        one = torch.eye(self.gram.shape[-1]).double(), torch.eye(self.size.shape[-1]).double()
        left = torch.linalg.inv(self.gram + ridge * gram_size * one[0])
        right = torch.linalg.inv(self.size + ridge * metric_size * one[1])
        u, rest = torch.zeros_like(self.right), self.right.clone()
        step = ahead = left @ rest @ right
        length = float((rest * ahead).sum())
        for _ in range(CG_STEPS):
            if length <= 1e-20:
                break
            turned = self._normal(step) + ridge * gram_size * metric_size * step
            share = length / float((step * turned).sum())
            u, rest = u + share * step, rest - share * turned
            ahead = left @ rest @ right
            before, length = length, float((rest * ahead).sum())
            step = ahead + (length / before) * step
        return u

    def _normal(self, u: Tensor) -> Tensor:
        moved = einsum(self._by_head(u), self.metric, "k q d, k h d e -> h k q e")
        return self._by_group(einsum(self.cross, moved, "h k r q, h k q e -> h r e"))

    def _by_head(self, u: Tensor) -> Tensor:
        return u.repeat_interleave(self.group, dim=0)

    def _by_group(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.kv_heads, -1)).sum(dim=1)


def held_out(texts: Int[Tensor, "text pos"]) -> Int[Tensor, "some_text pos"]:
    """The texts that are used for selection and not for fitting: one in :data:`HELD_OUT`, the last ones."""
    return texts[-max(1, len(texts) // HELD_OUT) :]


def imitation(
    model: HookedKVTransformer,
    changed: HookedKVTransformer,
    texts: Int[Tensor, "text pos"],
    candidates: Int[Tensor, "text pos"],
    r: int,
    generator: torch.Generator,
    n_candidates: int = 256,
    flip: bool = False,
) -> KVBias:
    """``r`` virtual keys per key-value head with which ``model`` imitates ``changed``, in closed form.

    Args:
        model, changed: models that differ only in the weights of attention and MLPs.
        texts: texts to fit on, except those that are :func:`held_out`, on which ridge and weights are chosen.
        candidates: texts that provide the candidate keys, ``n_candidates`` of them drawn for every head.
        flip: flip the sign of the target at random text by text, so that there is nothing to learn; for a null distribution.
    """
    layers: list[WeightedKeys] = []
    n_held_out = len(held_out(texts))
    for layer in range(model.cfg.n_layers):
        with model.holding(as_bias(model, layers, r)):
            ours, pool = see(model, layer, texts), see(model, layer, candidates).k
        t = wanted(model, layer, ours, see(changed, layer, texts))
        if flip:
            sign = torch.randint(0, 2, (len(texts), 1, 1), generator=generator) * 2 - 1
            t = (t.unflatten(0, texts.shape) * sign).flatten(0, 1)
        pool = rearrange(pool, "t p h d -> h (t p) d")
        drawn = pool[:, torch.randperm(pool.shape[1], generator=generator)[:n_candidates]]
        layers.append(_fit_layer(model, layer, ours, t, drawn, r, n_held_out * texts.shape[1]))
    return as_bias(model, layers, r)


def _fit_layer(
    model: HookedKVTransformer, layer: int, ours: LayerPass, t: Tensor, pool: Tensor, r: int, n_held_out: int
) -> WeightedKeys:
    """Choose keys, fit their values with every ridge, and keep the best on the last ``n_held_out`` rows, or none."""
    w_o, kv_heads, z = model.blocks[layer].attn.W_O.double(), model.cfg.n_kv_heads, ours.z.double()
    train, unseen = slice(None, -n_held_out), slice(-n_held_out, None)
    alone = shares(log_ratios(model, layer, ours, pool)[:, train], alone=True)
    keys = pool.gather(1, _chosen(alone, w_o, t[train], kv_heads, r))
    ratios = log_ratios(model, layer, ours, keys)
    mean = _mean(z, kv_heads).expand(-1, r, -1)
    off_weights, even = even_weights(ratios, kv_heads, OFF), even_weights(ratios, kv_heads, SHARES[0]) / SHARES[0]
    best, left = WeightedKeys(keys, off_weights.to(keys), mean.to(keys)), float(t[unseen].norm())
    for weights in (share * even for share in SHARES):
        s = shares(ratios, weights)
        fit = Fit(s[:, train], z[:, train], w_o, t[train], kv_heads)
        for u in map(fit.solve, RIDGES):
            off = float((brought(fit.start + u, s[:, unseen], z[:, unseen], w_o) - t[unseen]).norm())
            if off < left:
                best, left = WeightedKeys(keys, weights.to(keys), (fit.start + u).to(keys)), off
    return best


def _mean(z: Float[Tensor, "head row d_head"], kv_heads: int) -> Float[Tensor, "kv_head 1 d_head"]:
    return rearrange(z.double(), "(g s) i d -> g (s i) d", g=kv_heads).mean(dim=1, keepdim=True)


def brought(
    values: Float[Tensor, "kv_head r d_head"],
    s: Float[Tensor, "head row r"],
    z: Float[Tensor, "head row d_head"],
    w_o: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "row d_model"]:
    """What keys of these values add to the stream: sum_h sum_r s_ihr (u_hr - z_ih) W_O_h."""
    u = values.repeat_interleave(len(s) // len(values), dim=0)
    return ((s @ u - s.sum(dim=-1, keepdim=True) * z) @ w_o).sum(dim=0)


def _chosen(s: Tensor, w_o: Tensor, t: Tensor, kv_heads: int, r: int) -> Int[Tensor, "kv_head r d_head"]:
    """The keys whose shares explain most of the target, head by head, by matching pursuit."""
    by_group = rearrange(s, "(g s) i c -> g (s i) c", g=kv_heads)
    aim = rearrange(t.double() @ w_o.double().mT, "(g s) i d -> g (s i) d", g=kv_heads)
    gram = by_group.mT @ by_group
    nothing = torch.zeros_like(gram[..., 0])
    sums = Statistics(Products(gram), nothing, by_group.mT @ aim, nothing[:, 0], by_group.shape[1])
    return choose_keys(sums, r).keys[..., None].expand(-1, -1, w_o.shape[1])


def as_bias(model: HookedKVTransformer, layers: list[WeightedKeys], r: int) -> KVBias:
    """The keys as a bias with which a text starts at position 0; layers without keys have none."""
    cfg = model.cfg
    nothing = convert_prompt(model, torch.zeros(1, dtype=torch.long)).zero_like()  # no prompt: a shift state of zeros
    like = nothing.attention[0]
    empty = torch.zeros(cfg.n_kv_heads, r, cfg.d_head).to(like.b_kv)
    layers = [*layers, *[WeightedKeys(empty, empty[..., 0], empty)] * (cfg.n_layers - len(layers))]
    near = torch.ones(1, cfg.n_kv_heads, r, dtype=torch.long)
    parts = [
        replace(like, b_kv=(w[..., None] * values)[None], b_d=w[None], features=VirtualKeys(keys[None], near))
        for keys, w, values in layers
    ]
    return replace(nothing.with_attention(parts), record=None, n_prompt_tokens=r, position_offset=0)


# --- claims and figure ---


def compare(changes: pd.DataFrame) -> Iterator[Comparison]:
    """The share of the change that is left, by way and number of keys, tested over the changes; and the null."""
    for (part, way, r), rows in changes.groupby(["part", "way", "keys_per_head"], sort=False):
        left = rows["left"]
        name = f"share of a change of {NAMES[part]} that is left: {way}, {r} per head"
        if way == NULL:
            claim = "if there is nothing to learn, nothing is imitated (not below 1)"
        elif way == PROMPT:
            claim = "the weights that learned a prompt act on other texts as the prompt does (a share below 1)"
        else:
            what = "a prompt tuned at the embedding reproduces" if way == TUNED else "virtual keys reproduce"
            claim = f"{what} part of a change of the weights (a share below 1)"
        yield Comparison.tested_on(name, claim, left.to_numpy(), 1.0, below=way != NULL)
    wide = changes.pivot_table(index="change", columns=["part", "way", "keys_per_head"], values="left", sort=False)
    for part, way, r in wide.columns:
        if way == TUNED:
            less = wide[part, TUNED, r] - wide[part, FREE, r]
            name = f"share of a change of {NAMES[part]} that tuned embeddings leave, less that of free keys, {r} each"
            yield Comparison.tested_on(name, "a bias can be changed further than by a prompt's embeddings", less.to_numpy())


def draw(table: pd.DataFrame) -> Figure:
    """Plot the share left against keys per head, a panel for each part of the model."""
    title = "Virtual keys instead of a change of the weights, on unseen text: share of the change that is left"
    shown, lines = table.rename(columns={"min": "low", "max": "high"}), {"nothing imitated": 1.0}
    return draw_panels(shown, "keys_per_head", "mean", by="way", panel="part", title=title, lines=lines, log="x", ticks=True)
