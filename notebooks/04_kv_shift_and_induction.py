# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One layer that copies: KV shift and induction
#
# *Can a single attention layer implement an induction head?* After "... A B ... A", an induction head predicts B. A single plain layer
# cannot do this: its query must find the token **after** an earlier A, but that token's key contains no information about the token before it.
# Two layers can: a previous-token head writes "I come after A" into the residual stream, and a head in the next layer looks for it.
#
# KV shift (KVSA: Xu, Cheng, Wang, Chen 2024) gives each head two numbers for its keys and two for its values:
#
# $$\hat k_i = \alpha_1 k_i + \alpha_2 k_{i-1} \qquad\qquad \hat v_i = \beta_1 v_i + \beta_2 v_{i-1}$$
#
# With $\alpha = (0, 1)$ each token has the key of its predecessor, and with $\beta = (1, 0)$ it keeps its own value: this is an
# induction head in one layer. The numbers are learned, and we will watch them during training.

# %%
from textwrap import fill

import matplotlib.pyplot as plt
import torch

from kvlens import HookedKVTransformer
from kvlens.analyses import composition, induction_heads, induction_verdicts, prompt_copies
from kvlens.ops.induction import landscape_loss
from kvlens.ops.kv_shift import effective_pattern
from kvlens.tasks import make_task
from kvlens.training import build_model, train

# %% [markdown]
# ## Train one layer
#
# In this task, each sequence repeats a block of random tokens, so the next token can only be predicted by looking it up in an earlier
# copy. `watch` records the shift coefficients at every evaluation.

# %%
task = make_task("induction", vocab_size=128, length=48)
size = {"n_layers": 1, "d_model": 64, "d_head": 16, "attn_only": True}
settings = dict(steps=60, batch_size=32, learning_rate=8e-3, eval_every=3, eval_sequences=48, progress=False)

shifted = build_model(task, {**size, "kv_shift": True})
learned = train(shifted, task, **settings, watch="shift_coef")
plain = train(build_model(task, size), task, **settings)

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for name, result in {"with KV shift": learned, "plain": plain}.items():
    axes.plot(result.heldout["step"], result.heldout["accuracy"], label=f"one layer, {name}")
axes.set(xlabel="training step", ylabel="held-out accuracy", ylim=(0, 1.02))
axes.legend();

# %% [markdown]
# The shifted layer learns to copy within about forty steps. With the same training, the plain layer can do little better than guess among
# the tokens of the block.

# %%
accuracy = {name: round(float(result.heldout["accuracy"].iloc[-1]), 3) for name, result in {"shifted": learned, "plain": plain}.items()}
assert accuracy["shifted"] > 0.98 and accuracy["plain"] < 0.3
accuracy

# %% [markdown]
# ## The path through the loss landscape
#
# For a single head with identity weights and random embeddings, the loss is known in closed form (KVSA theorem 3). The plot shows it
# as a function of $\alpha_1 - \alpha_2$ (left: the predecessor's key) and $\beta_1 - \beta_2$ (top: the token's own value). The induction
# head is the upper left corner. The lines are the four heads of our model, from the first evaluation, after three steps (dot), to the end of training (star).

# %%
coefficients = learned.watched.assign(
    kind=learned.watched["parameter"].str.extract("attn.(.)_shift", expand=False),
    head=learned.watched["index"] // 2,
    tap=learned.watched["index"] % 2,
).pivot_table(index=["head", "step"], columns=["kind", "tap"], values="value")
paths = coefficients.diff(axis=1)[[("k", 1), ("v", 1)]].mul(-1).droplevel(1, axis=1)  # alpha_1 - alpha_2, beta_1 - beta_2

ticks = torch.linspace(-1.2, 1.2, 60, dtype=torch.float64)
y, x = torch.meshgrid(ticks, ticks, indexing="ij")
loss = landscape_loss(torch.stack([1 + x, 1 - x], -1) / 2, torch.stack([1 + y, 1 - y], -1) / 2, T=24)

figure, axes = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
shades = axes.contourf(x, y, loss, levels=20, cmap="Greys")
figure.colorbar(shades, label="loss of the landscape, nats")
for head, path in paths.groupby("head"):
    (line,) = axes.plot(path["k"], path["v"], label=f"head {head}")
    axes.plot(path["k"].iloc[0], path["v"].iloc[0], "o", color=line.get_color())
    axes.plot(path["k"].iloc[-1], path["v"].iloc[-1], "*", markersize=12, color=line.get_color())
axes.set(xlabel=r"$\alpha_1 - \alpha_2$", ylabel=r"$\beta_1 - \beta_2$")
axes.legend();

# %% [markdown]
# The heads that end with keys left of zero and values above zero do the copying. The others do not need to move: one induction head
# is enough.

# %%
ends = paths.groupby("head").last()
nearest = ((ends["k"] + 1) ** 2 + (ends["v"] - 1) ** 2).idxmin()
assert ends.loc[nearest, "k"] < -0.6 and ends.loc[nearest, "v"] > 0.3  # it got to the corner
assert float(loss[-6:, :6].mean()) < float(loss[:6, -6:].mean())  # and the loss is lower there than in the opposite corner
ends.assign(nearest_to_the_corner=ends.index == nearest)

# %% [markdown]
# ## Which head copies?
#
# `induction_heads` runs the model on repeated random tokens and measures where each head attends: one row per head and kind of attention.
# `induction_verdicts` has one row per head. The *verdict* is based on the attention pattern: "prefix matching" is attention to the token after
# the earlier copy. The *role* is what the shift coefficients alone make of a head. For this model they agree. Neither says that the model needs
# the head. With `ablations=True` a head is called "induction" if the loss rises without it, and without what it reads there.

# %%
table, ablated = (induction_verdicts(shifted, n_repeated=20, ablations=ablations) for ablations in (False, True))
table = table.assign(with_ablations=ablated["verdict"], loss_change=ablated["ablation_loss_change"])
matching, copying = table[table["verdict"] == "prefix matching"], table[table["with_ablations"] == "induction"]
assert len(copying) and set(matching["role"]) == {"prefix matching"} and nearest in set(copying["head"])
table[["layer", "head", "verdict", "with_ablations", "loss_change", "role", "alpha_1", "alpha_2", "beta_1", "beta_2"]].round(2)

# %%
scores = induction_heads(shifted, n_repeated=20).set_index(["kind", "layer", "head"])
scores.loc[["prefix_matching", "duplicate_token"], ["score", "score_key"]].round(2)

# %% [markdown]
# The `score` of `prefix_matching` is the attention to the token *after* the earlier copy. The `score_key` of `duplicate_token` shows which
# token's key attracted this attention: the earlier copy itself. This is how the head works: it matches one token and reads the next.
#
# `prompt_copies` looks for this in your own prompt and text: for every token of the text that also occurs in the prompt, how much does each
# head attend to the token that followed it there? `shifted` marks the cases where the head uses its key shift.

# %%
block = torch.randperm(128, generator=torch.Generator().manual_seed(0))[:20]
copies = prompt_copies(shifted, block, block).groupby("head")[["attention", "shifted"]].mean()
assert copies["attention"].max() > 0.7 and copies["attention"].idxmax() in set(copying["head"])
copies.round(2)

# %% [markdown]
# ## Why the raw pattern can mislead
#
# With KV shift, the attention pattern is over *shifted* keys and values, and each of these mixes two tokens. So the pattern no longer shows
# which tokens are read. The effective pattern over tokens does:
#
# $$E_{it} = \beta_1 A_{it} + \beta_2 A_{i,\,t+1}$$
#
# `docs-shift`, a small language model that ships with kvlens, has a head with $\beta \approx (-0.3, 1.0)$ in its last layer.
# What does it read?

# %%
model = HookedKVTransformer.from_zoo("docs-shift")
layer, head = 3, 1
tokens = model.to_tokens("Return a list of the names of all widgets. The names of the widgets are sorted, and the list")
names = [f"blocks.{layer}.attn.hook_{name}" for name in ("pattern", "v_shift_coef")]
with torch.no_grad():
    _, cache = model.run_with_cache(tokens, names_filter=names)
raw, beta = (cache[name] for name in names)
read = effective_pattern(raw, beta)[0, head]
raw = raw[0, head]

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
for panel, pattern, title in zip(axes, (raw, read), ("raw pattern", "tokens read"), strict=True):
    image = panel.imshow(pattern, cmap="RdBu", vmin=-1, vmax=1)
    panel.set(title=f"layer {layer}, head {head}: {title}", xlabel="key token")
axes[0].set_ylabel("query token")
figure.colorbar(image, ax=axes, label="weight");

# %% [markdown]
# The raw pattern is on the diagonal, as if each token attended to itself. In fact the head reads the *previous* token, and subtracts a
# little of the token's own value.


# %%
def mean_at_lag(pattern, lag):
    return round(float(pattern.diagonal(-lag)[1:].mean()), 3)


looks = {lag: mean_at_lag(raw, lag) for lag in (0, 1)}
reads = {lag: mean_at_lag(read, lag) for lag in (0, 1)}
assert looks[0] > 2 * looks[1]  # raw: itself
assert reads[1] > 0.2 > reads[0]  # effective: the previous token
{"raw, at lag": looks, "read, at lag": reads}

# %% [markdown]
# This is why `induction_heads` gives every score three times: for the raw pattern, for the values that are read (`score_value`), and for
# the keys that attract the attention (`score_key`).

# %%
row = induction_heads(model).set_index(["layer", "head", "kind"]).loc[(layer, head, "previous_token")]
assert row["score_value"] > 3 * row["score"]
row[["score", "score_value", "score_key"]]

# %% [markdown]
# ## Which heads work together?
#
# Without a shift, an induction head needs a previous-token head in an earlier layer. `composition` scores every pair of heads from the weights:
# how much of the earlier head's output does the later head's query (Q), key (K) or value (V) read? Random matrices would score
# about as high as the median of the table.

# %%
pairs = composition(model)
assert pairs["score"].max() > 2 * pairs["score"].median()
pairs.nlargest(3, "score").round(3)

# %% [markdown]
# A high score suggests where to look, but proves nothing: whether a pair of heads has an effect on a text must be tested by ablation
# (notebook 02).
#
# ## Answer

# %%
copying = copying.set_index("head")
print(fill(f"""Yes, with KV shift: after {settings["steps"]} steps one layer predicts {100 * accuracy["shifted"]:.0f} % of the held-out tokens, a plain one {100 * accuracy["plain"]:.0f} %.
You can tell by three things that agree on heads {" and ".join(map(str, copying.index))}: the learned coefficients (head {nearest}: alpha_2 {copying.loc[nearest, "alpha_2"]:.2f}, beta_1 {copying.loc[nearest, "beta_1"]:.2f}),
the attention to the token after the earlier copy ({scores.loc[[("prefix_matching", 0, head) for head in copying.index], "score"].min():.2f} or more), and the loss without the head (+{copying["loss_change"].min():.2f} nats or more).""", 100))
