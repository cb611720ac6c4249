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
# # The dual model: attention as one step of gradient descent
#
# *In what sense does a head learn from its context, and can one see it in the figures?* Consider a head at one query as a linear model $f(z) = W \phi(z)$. The tokens before the
# query are demonstrations, with inputs $\phi(k_j)$ and labels $v_j$. One step of gradient descent on
#
# $$L(W) = -\frac{1}{\eta D} \sum_{j} v_j^T\, W \phi(k_j)$$
#
# (which aligns the prediction at each key with its value) takes $W_0$ to $W_1 = W_0 + \frac{1}{D} \sum_j v_j \phi(k_j)^T$, and the head's
# output equals $f(q)$ after that step, exactly and for every learning rate $\eta$ (DUAL, theorem 3.1).

# %%
import dataclasses

import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import HookedKVTransformer
from kvlens.analyses import dual_bound, dual_demonstrations, dual_losses
from kvlens.viz import dual_view

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("facts-linear", dtype=torch.float64)
text = "The drum stands in the cellar. Pavel has a parrot. At night Kaya feeds a donkey. Which animal does Pavel keep? Pavel keeps a"
tokens = model.to_tokens(text)[0]

# %% [markdown]
# ## The equality, for every head and query
#
# The table has one row per head and query. `equivalence_error` is the difference between the head's output and the linear model after the
# step.

# %%
table = dual_losses(model, tokens)
assert table["equivalence_error"].max() < 1e-10
table[["layer", "head", "position", "token", "log_loss_drop", "step_share", "equivalence_error"]].tail(4)

# %% [markdown]
# Only float64 rounding remains.
#
# ## What the step does
#
# $L$ is linear in $W$ and has no minimum, so the decrease of the loss spans many orders of magnitude and is given as a logarithm. Two
# quantities are scale-free: the share of the output that comes from the step (the rest comes from $W_0$, the token itself), and the cosine
# between the prediction $W \phi(k_j)$ and its label $v_j$, before and after the step. Beside each figure the table has a null, the same with
# *shuffled* values: the keys stay, and their labels have nothing to do with them.

# %%
figures = ["step_share", "cosine_before", "cosine_after"]
by_layer = table.groupby(["layer", "head"])[[name + null for name in figures for null in ("", "_shuffled")]].mean()
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
untrained = HookedKVTransformer(dataclasses.replace(model.cfg, seed=0))
null = dual_losses(untrained, tokens)
for name, rows in {"trained": table, "untrained": null}.items():
    axes[0].hist(rows["log_loss_drop"], bins=30, alpha=0.6, label=name)
axes[0].set(xlabel="log of the decrease in loss, learning rate 1", ylabel="heads and queries")
axes[0].legend(loc="upper right")
labels = [f"{layer}.{head}" for layer, head in by_layer.index]
axes[1].plot(labels, by_layer["cosine_before"], "o", label="before the step")
axes[1].plot(labels, by_layer["cosine_after"], "*", markersize=10, label="after it")
axes[1].plot(labels, by_layer["cosine_after_shuffled"], "x", label="after it, values shuffled")
axes[1].set(xlabel="layer.head", ylabel="mean cosine of prediction and label", ylim=(-0.15, 1.35))
axes[1].legend(loc="upper left");

# %% [markdown]
# Every step lowers the loss, as it must: the decrease is a squared norm, whatever the values are. Below, the same figures of a model of the
# same shape that was never trained, beside those with shuffled values.

# %%
assert table[["log_loss_drop", "log_loss_drop_shuffled"]].notna().all(axis=None)
drops = pd.DataFrame(
    {
        (name, values): found["log_loss_drop" + suffix].quantile([0.1, 0.5, 0.9])
        for name, found in {"trained": table, "untrained": null}.items()
        for values, suffix in {"own": "", "shuffled": "_shuffled"}.items()
    }
).T.rename_axis(["model", "values"])
assert (drops[0.5].max() - drops[0.5].min() < 0.5) and drops[0.1].max() < drops[0.5].min()  # nothing tells the rows apart
drops.round(1)

# %% [markdown]
# From a large drop of a dual loss nothing follows about learning: a model that never learned anything has drops of the same size, and so has
# either model with values that do not belong to their keys. A drop is large where many keys with large features have long values.

# %% [markdown]
# What of the cosines? After the step, the predictions of every head are better aligned with their labels. This does not show that a head has learned anything: to
# the prediction at $k_j$ the step adds, with the other values, $v_j$ itself, so that the cosine rises in almost any head. By how much does it
# rise with shuffled values, and in a model of the same shape that was never trained?

# %%
def rises(model):
    means = dual_losses(model, tokens).groupby(["layer", "head"]).mean(numeric_only=True)
    return pd.DataFrame({name or "own": means["cosine_after" + name] - means["cosine_before" + name] for name in ("", "_shuffled")})


compared = pd.concat({"trained": rises(model), "untrained": rises(untrained)}, axis=1)
assert (compared > 0).all(axis=None)
excess = {name: compared[name, "own"] - compared[name, "_shuffled"] for name in ("trained", "untrained")}
assert excess["untrained"].mean() > excess["trained"].mean() > 0
compared.round(2)

# %% [markdown]
# It rises in every head of both, with either values. With a head's own values it mostly rises by more, because similar tokens have similar keys
# and similar values, for which no training is needed: in the untrained model the difference is larger still. The equality above holds for any
# attention, trained or not, and these figures do not tell the two apart.
#
# ## Which demonstrations contribute to the answer
#
# At the last token the model is about to name the animal. `dual_demonstrations` splits each head's step by demonstration, and
# `dual_view` shows both tables in one figure: a map of the heads (stored here as a picture) and, below it when you run this, how much each token
# contributes to the step and to the output of the selected head.

# %%
shares = dual_demonstrations(model, tokens)
dual_view(table, shares, query=model.to_string(tokens[-1]))

# %% [markdown]
# The contributions of the demonstrations to a head's output add up to the contribution of the whole step. In which head do the tokens "Pavel"
# and "parrot" have the largest share?

# %%
at_the_end = table[table["position"] == len(tokens) - 1].set_index(["layer", "head"])["step_share"]
assert (shares.groupby(["layer", "head"])["output_share"].sum() - at_the_end).abs().max() < 1e-10
named = shares[shares["token"].str.strip().isin(["Pavel", "parrot"])].groupby(["layer", "head"])["output_share"].sum()
assert named.max() > 1.5 * 4 / len(tokens)  # there are four such tokens: well above an even split
named.nlargest(3).round(3).to_frame("share of the output")

# %% [markdown]
# ## How well the step generalizes
#
# There is a bound on the error of the step on unseen tokens (DUAL, theorem 3.2). `dual_bound` computes its terms as the training
# set grows to all tokens before the query. Like most such bounds it is far above the actual error, but how it changes is
# informative.

# %%
bound = dual_bound(model, tokens, layer=1, head=2)
assert (bound["log_bound"][1:].diff().dropna() < 0).all()
bound[["n_demonstrations", "log_complexity", "log_confidence", "log_bound"]].round(2)

# %% [markdown]
# After the first few demonstrations, each further one lowers the bound.
#
# ## Answer
#
# A head's output is that of a linear model after one step of gradient descent on the context, exactly, and the step splits by demonstration:
# in that sense it learns. But this holds for any attention, and no figure here that was compared (the drop of the loss, the share of the step,
# the cosines) tells trained heads from untrained ones: none of them shows that training made a head learn from its context.
