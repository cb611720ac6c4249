# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The dual model: attention as one step of learning
#
# *In what sense does a head learn from its context?* Read a head at one query as a linear model $f(z) = W \phi(z)$. Tokens before the
# query are demonstrations: inputs $\phi(k_j)$, labels $v_j$. One step of gradient descent on
#
# $$L(W) = -\frac{1}{\eta D} \sum_{j} v_j^T\, W \phi(k_j)$$
#
# (make the prediction at each key point along its value) takes $W_0$ to $W_1 = W_0 + \frac{1}{D} \sum_j v_j \phi(k_j)^T$, and the head's
# output is $f(q)$ after that step. Exactly, for every learning rate $\eta$ (DUAL, theorem 3.1).

# %%
import matplotlib.pyplot as plt
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
# One row per head and query: what the step does, and how far the model after one step is from the head's own output.

# %%
table = dual_losses(model, tokens)
assert table["equivalence_error"].max() < 1e-10
table[["layer", "head", "position", "token", "log_loss_drop", "step_share", "equivalence_error"]].tail(4)

# %% [markdown]
# What is left is the rounding of float64.
#
# ## What the step does
#
# $L$ is linear in $W$ and has no minimum, so its drop spans many orders of magnitude and is told as a logarithm. Two figures without a
# scale say more: the share of the output that the step makes (the rest is $W_0$, the token's own), and the cosine between the
# prediction $W \phi(k_j)$ and its label $v_j$, before and after.

# %%
by_layer = table.groupby(["layer", "head"])[["step_share", "cosine_before", "cosine_after"]].mean()
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for layer, rows in table.groupby("layer"):
    axes[0].hist(rows["log_loss_drop"], bins=30, alpha=0.6, label=f"layer {layer}")
axes[0].set(xlabel="log of the loss's drop, learning rate 1", ylabel="heads and queries")
axes[0].legend(loc="upper right")
labels = [f"{layer}.{head}" for layer, head in by_layer.index]
axes[1].plot(labels, by_layer["cosine_before"], "o", label="before the step")
axes[1].plot(labels, by_layer["cosine_after"], "*", markersize=10, label="after it")
axes[1].set(xlabel="layer.head", ylabel="mean cosine of prediction and label")
axes[1].legend(loc="upper right");

# %% [markdown]
# Every step lowers the loss, as it must: its drop is a squared length. And after it, the predictions of every head point
# more along their labels than before.

# %%
assert table["log_loss_drop"].notna().all()
assert (by_layer["cosine_after"] > by_layer["cosine_before"]).all()
by_layer.round(2)

# %% [markdown]
# ## Which demonstrations make the answer
#
# At the last token the model is about to say which animal. `dual_demonstrations` splits each head's step by demonstration, and
# `dual_view` puts both tables into one picture: the map of the heads, and under it, for the head that is chosen, what every token
# gives to the step and to the output.

# %%
shares = dual_demonstrations(model, tokens)
dual_view(table, shares, query=model.to_string(tokens[-1]))

# %% [markdown]
# The parts of a head's output that its demonstrations make add up to what the whole step makes. In which head do the tokens "Pavel"
# and "parrot" make the largest share?

# %%
at_the_end = table[table["position"] == len(tokens) - 1].set_index(["layer", "head"])["step_share"]
assert (shares.groupby(["layer", "head"])["output_share"].sum() - at_the_end).abs().max() < 1e-10
named = shares[shares["token"].str.strip().isin(["Pavel", "parrot"])].groupby(["layer", "head"])["output_share"].sum()
assert named.max() > 1.5 * 4 / len(tokens)  # four such tokens stand before the last: well above an even split
named.nlargest(3).round(3).to_frame("share of the output")

# %% [markdown]
# ## How well the step generalizes
#
# For the step as a whole there is a bound on its error on unseen tokens (DUAL, theorem 3.2). `dual_bound` computes its terms as the
# training set grows to all tokens before the query. Like most such bounds it is far above anything that happens; what can be read
# off is how it changes.

# %%
bound = dual_bound(model, tokens, layer=1, head=2)
assert (bound["log_bound"][1:].diff().dropna() < 0).all()
bound[["n_demonstrations", "log_complexity", "log_confidence", "log_bound"]].round(2)

# %% [markdown]
# With more than a few demonstrations it falls with every further one.
