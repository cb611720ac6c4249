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
# # Functions learned in context: least squares, or ridge regression?
#
# A prompt contains examples of a function, $(x_1, y_1, \dots, x_n, y_n, x')$, and the model must predict $f(x')$. Every prompt has its
# own $f$, so the weights cannot store the function: training has to find an *algorithm*. Here $f(x) = w x$ with a random $w$ and noisy
# $y$. *Which of two algorithms does a small transformer, trained for a few seconds, follow?*
#
# $$\hat w_{\text{least squares}} = \frac{\sum x_j y_j}{\sum x_j^2} \qquad\qquad \hat w_{\text{ridge}} = \frac{\sum x_j y_j}{\sum x_j^2 + \sigma^2}$$
#
# Least squares uses only the examples. Ridge regression also uses the typical size of $w$ and of the noise: with
# $w \sim N(0, 1)$ and noise of variance $\sigma^2$, no predictor has a smaller mean squared error.

# %%
import matplotlib.pyplot as plt
import pandas as pd
import torch

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
# The error of each predictor on two thousand new functions, by the number of examples it has seen. Always predicting 0 gives an error of
# about 0.9, the error with no example.

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
error.plot(ax=axes, logy=True, marker=".", ylim=(0.03, 3), ylabel="mean squared error")
error.round(3)

# %% [markdown]
# After one example the error of least squares is off the chart, because it divides by a very small number whenever $x_1$ is small. Ridge does
# not, and neither does the transformer, which is close to ridge there. With more examples it falls behind: from four on least squares has
# the smaller error of the two, and ridge has the smallest of all throughout.

# %%
assert error["least squares"][1] > 3 and error["transformer"][1] < 1.1 * error["ridge"][1]
assert (error["transformer"][:4] < error["least squares"][:4] + 0.02).all()
assert (error["transformer"][4:] > error["least squares"][4:]).all() and (error["ridge"] <= error.min(axis=1)).all()

# %% [markdown]
# ## Whose predictions are its own like?
#
# An error says how good a predictor is, and not which one. The mean squared distance between the predictions does.

# %%
distance = pd.DataFrame(
    {name: ((predictions["transformer"] - predictions[name]) ** 2).mean(0) for name in ("least squares", "ridge")}
).rename_axis("examples seen")
assert (distance["ridge"][1:] < distance["least squares"][1:]).all()
assert distance["ridge"][5] > 0.5 * error["ridge"][5]  # far from the same predictor
distance.round(3)

# %% [markdown]
# ## Answer
#
# Neither of them, but rather ridge than least squares: its predictions are closer to ridge's with any number of examples, and clearly so with
# one to three, where the size of $w$ and of the noise matter most. With five examples its distance from ridge is as large as ridge's own error:
# after so little training it uses what the training data has in common, and makes less of further examples than either algorithm does.
# `kvlens reproduce function-classes` trains longer, on several classes of functions.
