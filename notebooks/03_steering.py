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
# # Steering: adding, subtracting and scaling prompts
#
# *If a prompt is a tensor, what happens when prompts are added, subtracted or scaled?* The output of a head of linear attention is
#
# $$z_i = \frac{\phi(q_i)^T (A_i + b_{KV})}{\phi(q_i)^T (D_i + b_D)}$$
#
# so the bias is added in both the numerator and the denominator. `c * bias` gives the prompt the weight of c copies, and `a + b` contains both
# prompts. But the prompts were converted separately, so the second has not seen the first. How much this matters must be
# measured.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import bias_singular_values, circuits

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("docs-linear")

prompts = {
    "frobnicator": "class Frobnicator: A frobnicator holds a list of widgets. The frobnicator sorts its widgets by color.",
    "gizmo": "def quux(gizmo, threshold): Quux a gizmo. If the gizmo exceeds the threshold, a GizmoError is raised.",
}
texts = {
    "frobnicator": " The frobnicator sorts its widgets by color. The frobnicator holds a list of widgets.",
    "gizmo": " If the gizmo exceeds the threshold, a GizmoError is raised. Quux a gizmo.",
}
f, g = (convert_prompt(model, prompt) for prompt in prompts.values())
nothing = f.zero_like()


def losses(bias):
    """Mean loss of each text in nats, with the bias attached."""
    with model.kv_bias(bias):
        return {name: float(model(text, return_type="loss", prepend_bos=False)) for name, text in texts.items()}


# %% [markdown]
# ## Adding
#
# We use two made-up documents and a text about each. The table shows the mean loss of each text (columns) with each bias (rows). *f, then g*
# is the reference: the second prompt converted after the first.

# %%
both = convert_prompt(model, prompts["gizmo"], initial=f)
table = pd.DataFrame({name: losses(b) for name, b in {"nothing": nothing, "f": f, "g": g, "f + g": f + g, "f, then g": both}.items()}).T
table.round(2)

# %% [markdown]
# Each prompt helps its own text most. The sum helps both texts, but each less than its own prompt does, because the two share one
# normalizer. It comes within half a nat of converting both prompts in sequence.

# %%
gain = table.loc["nothing"] - table
assert gain.loc["f", "frobnicator"] > gain.loc["g", "frobnicator"] + 0.5 and gain.loc["g", "gizmo"] > gain.loc["f", "gizmo"] + 0.5
assert (gain.loc["f + g"] > 1).all()
assert gain.loc["f + g", "frobnicator"] < gain.loc["f", "frobnicator"] and gain.loc["f + g", "gizmo"] < gain.loc["g", "gizmo"]
assert (gain.loc["f + g"] - gain.loc["f, then g"]).abs().max() < 0.5
gain.round(2)

# %% [markdown]
# ## Subtracting
#
# Subtraction undoes addition: `f + g - f` equals `g` up to rounding. The shift state (the last raw keys and values, which are not part
# of the sums) follows a rule: `a + b` means "a, then b" and keeps the shift state of b; `a - b` keeps that of a.

# %%
back = f + g - f
error = float((back.b_KV - g.b_KV).norm() / g.b_KV.norm())
assert error < 1e-6 and abs(losses(back)["gizmo"] - losses(g)["gizmo"]) < 1e-4
print(f"relative error of f + g - f against g: {error:.1e}")

# %% [markdown]
# Subtracting a prompt that was *not* added makes the text about it less likely than with no prompt at all.

# %%
against = losses(-1 * f)["frobnicator"]
assert against > table.loc["nothing", "frobnicator"] + 0.5
print(f"with -f: {against:.2f} nats, with nothing: {table.loc['nothing', 'frobnicator']:.2f}")

# %% [markdown]
# ## Scaling
#
# A factor makes the prompt count for less or more. The dashed lines are the losses without a prompt.

# %%
scales = [0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
knob = pd.DataFrame([losses(c * f) for c in scales], index=pd.Index(scales, name="c"))
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
for name, column in knob.items():
    (line,) = axes.plot(column, marker=".", label=f"text about the {name}")
    axes.axhline(table.loc["nothing", name], color=line.get_color(), linestyle="--", linewidth=0.8)
axes.set(xlabel="c, in c x f", ylabel="loss, nats", xscale="log", xticks=scales, xticklabels=scales)
axes.legend();

# %% [markdown]
# The loss of the prompt's own text keeps falling, quickly at first and only a little beyond 1, because the share of the bias in a head's output
# cannot exceed 1. The other text has its lowest loss at about a *quarter* of the prompt, which tells the model that this is documentation;
# more of the prompt hurts it.

# %%
own, other = knob["frobnicator"], knob["gizmo"]
assert own.loc[:2].is_monotonic_decreasing
assert own.loc[0.25] - own.loc[1] > 3 * (own.loc[1] - own.loc[2])
assert 0.1 <= other.idxmin() <= 0.5 and other.loc[0.5:].is_monotonic_increasing
knob.round(2)

# %% [markdown]
# ## Which layers matter
#
# `select` keeps the bias of some layers or heads and sets the rest to zero. Here we remove one layer at a time.

# %%
layers = range(model.cfg.n_layers)
without = pd.Series({layer: losses(f.select(layers=[other for other in layers if other != layer]))["frobnicator"] for layer in layers})
lost = without - table.loc["f", "frobnicator"]
figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
axes.bar(lost.index.astype(str), lost)
axes.axhline(gain.loc["f", "frobnicator"], color="gray", linewidth=0.8)
axes.set(xlabel="ablated layer", ylabel="nats lost");

# %% [markdown]
# Every layer is needed. The effects do not add up to the total effect of the prompt (the gray line), because later layers read what earlier
# ones wrote. Notebook 02 is about single heads.

# %%
assert (lost > 0.1).all() and abs(lost.sum() - gain.loc["f", "frobnicator"]) > 0.3
lost.round(2).to_dict()

# %% [markdown]
# ## What a sum misses
#
# `circuits` compares two prompts head by head. `aligned_error` is the relative error of the sum in $b_{KV}$, compared with converting the second
# prompt after the first; for this comparison, the second prompt of the sum is converted at its later positions.

# %%
compared = circuits(model, *prompts.values())
by_layer = compared.groupby("layer")[["b_kv_cosine", "aligned_error"]].median()
assert compared.query("layer == 0")["aligned_error"].max() < 1e-5 and by_layer["aligned_error"][1:].min() > 0.3
by_layer.round(3)

# %% [markdown]
# In the first layer the sum is exact, because its keys and values depend on single tokens. In later layers they also depend on earlier
# tokens, so the sum is an approximation.
#
# ## How many directions a prompt uses
#
# A head's $b_{KV}$ is a matrix. `bias_singular_values` shows how much of it lies in its leading singular directions.

# %%
values = bias_singular_values(model, f)
strongest = values[values["index"] < 4].groupby(["layer", "head"])["energy_share"].sum()
assert strongest.median() > 0.85 and strongest.min() > 0.6
print(f"{f.n_prompt_tokens} tokens, {values['index'].max() + 1} directions; the top four have {strongest.median():.0%} of the energy (median over heads)")
