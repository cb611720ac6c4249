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
# # Functions learned in context: which algorithm is it?
#
# A prompt contains examples of a function, $(x_1, y_1, \dots, x_n, y_n, x')$, and the model must predict $f(x')$. Every prompt has its
# own $f$, so the weights cannot store the function: training has to find an *algorithm*. *Which one?*
#
# Here $f(x) = w x$ with a random $w$ and noisy $y$. There are two candidates:
#
# $$\hat w_{\text{least squares}} = \frac{\sum x_j y_j}{\sum x_j^2} \qquad\qquad \hat w_{\text{ridge}} = \frac{\sum x_j y_j}{\sum x_j^2 + \sigma^2}$$
#
# Least squares uses only the examples. Ridge regression also uses the typical size of $w$ and of the noise: with
# $w \sim N(0, 1)$ and noise of variance $\sigma^2$, no predictor has a smaller mean squared error.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens.papers.lecture.equivariance import equivariance_table
from kvlens.papers.lecture.regression_baselines import least_squares, ridge
from kvlens.tasks import make_task
from kvlens.training import build_model, train

NOISE = 0.5
task = make_task("regression", dimensions=1, n_points=6, noise=NOISE)
model = build_model(task, {"n_layers": 2, "d_model": 64, "d_head": 16, "d_mlp": 64})
result = train(model, task, steps=300, batch_size=64, learning_rate=5e-3, weight_decay=0.0, eval_every=30, progress=False)

figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.plot(result.heldout["step"], result.heldout["loss"])
axes.set(xlabel="training step", ylabel="held-out squared error");

# %% [markdown]
# ## Against least squares and ridge
#
# The error of each predictor on two thousand new functions, by the number of examples it has seen. Always predicting 0 gives an error of 1.

# %%
test = task.heldout(2000, seed=1)
x, y = (part.double() for part in task.points_and_values(test.inputs))
truth = test.targets[:, 0::2].double()
with torch.no_grad():
    predictions = {
        "transformer": model(test.inputs)[:, 0::2].double(),
        "least squares": least_squares(x, y),
        "ridge": ridge(x, y, penalty=NOISE**2),
    }
error = pd.DataFrame({name: ((p - truth) ** 2).mean(0) for name, p in predictions.items()}).rename_axis("examples seen")

figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
error.plot(ax=axes, logy=True, marker=".", ylim=(0.03, 3), ylabel="mean squared error");

# %% [markdown]
# After one example the error of least squares is off the chart, because it divides by a very small number whenever $x_1$ is small. Ridge does
# not, and the transformer follows ridge. We can also compare the predictions with each other: for any number of examples, the
# transformer's are closer to ridge's.

# %%
distance = pd.DataFrame(
    {name: ((predictions["transformer"] - predictions[name]) ** 2).mean(0) for name in ("least squares", "ridge")}
).rename_axis("examples seen")
assert (distance["ridge"][1:] < distance["least squares"][1:]).all()
assert error["least squares"][1] > 3 and error["transformer"][1] < 0.6  # always predicting 0 gives 1
assert (error["transformer"][1:] < 1.3 * error["ridge"][1:] + 0.08).all()
distance.round(3)

# %% [markdown]
# The model learned an algorithm that includes the sizes of $w$ and of the noise in the training data. It is not *exactly* ridge: the
# distance is not zero, and outside the training distribution the two may differ. `kvlens reproduce function-classes` examines this in
# more detail, for several classes of functions.
#
# ## Does the model see the order of its input?
#
# Without positional embeddings and with bidirectional attention, a transformer is equivariant to permutations $\pi$ of the positions:
# $T(\pi X) = \pi T(X)$ (LECTURE, section 3). Positional embeddings break this. So does a causal mask alone, which is why a decoder can
# use the order of its input even without positional embeddings.

# %%
sizes = {"n_layers": 2, "d_model": 32, "d_head": 8, "act_fn": "relu"}
orders = equivariance_table(sizes, n_positions=9, d_input=2, n_prompts=16, n_models=3).query("dtype == 'float64'")
orders = orders.groupby(["attention_dir", "positions"], sort=False)["deviation"].max().rename("largest |T(pi X) - pi T(X)| / |T(X)|")
assert orders["bidirectional", "none"] < 1e-12 and (orders.drop(("bidirectional", "none")) > 1e-2).all()
orders.to_frame()

# %% [markdown]
# ## The examples are read through keys and values
#
# Hooks work on a regressor as on any other model. Here every position of one layer attends only to itself. If the error rises to that of a
# model without examples, the information about the examples passed through that layer's keys and values.


# %%
def own_value_only(pattern, hook):
    """Let every position attend only to itself."""
    return torch.eye(pattern.shape[-1]).expand_as(pattern)


cut = {"intact": error["transformer"].iloc[-1]}
for layer in range(2):
    with torch.no_grad(), model.transformer.hooks([(f"blocks.{layer}.attn.hook_pattern", own_value_only)]):
        cut[f"layer {layer} cut"] = float(((model(test.inputs)[:, 0::2].double() - truth) ** 2).mean(0)[-1])
figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
axes.bar(list(cut), list(cut.values()))
axes.axhline(1, color="gray", linewidth=0.8)
axes.set(ylabel="squared error, 5 examples");

# %% [markdown]
# Both layers are needed: with either one cut, the model is about as bad as one that has seen no examples (the gray line).

# %%
assert all(value > 0.7 for name, value in cut.items() if name != "intact") and cut["intact"] < 0.2
{name: round(float(value), 3) for name, value in cut.items()}
