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
# # Steering: adding, exchanging and scaling prompts
#
# *If a prompt is a tensor, what happens when prompts are added, exchanged or scaled?* The output of a head of linear attention is
#
# $$z_i = \frac{\phi(q_i)^T (A_i + b_{KV})}{\phi(q_i)^T (D_i + b_D)}$$
#
# so the bias is added in both the numerator and the denominator. `c * bias` gives the prompt the weight of c copies, and `a + b` is the sum
# of two prompts. With softmax attention $\phi(q)$ holds one exponential per key, and the rest is the same. But the prompts were converted
# separately, so the second has not seen the first, and a negative weight can make the denominator negative. What this does must be
# measured, with a control beside each measurement: the same operation where it should change nothing.

# %%
import warnings
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import bias_interactions, bias_singular_values

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("docs-linear")

prompts = {
    "frobnicator": "class Frobnicator: A frobnicator holds a list of widgets. The frobnicator sorts its widgets by color.",
    "gizmo": "def quux(gizmo, threshold): Quux a gizmo. If the gizmo exceeds the threshold, a GizmoError is raised.",
    "archive": "class Archive: An archive stores records by name. The archive is closed when the reader returns.",
}
texts = {
    "frobnicator": " The frobnicator sorts its widgets by color. The frobnicator holds a list of widgets.",
    "gizmo": " If the gizmo exceeds the threshold, a GizmoError is raised. Quux a gizmo.",
}
f, g, h = (convert_prompt(model, prompt) for prompt in prompts.values())


def losses(bias):
    """Mean loss of each text in nats, with the bias attached."""
    with model.kv_bias(bias):
        return {name: float(model(text, return_type="loss", prepend_bos=False)) for name, text in texts.items()}


# %% [markdown]
# ## Adding
#
# We use three made-up documents and texts about the first two. The table shows the mean loss of each text (columns) with each bias (rows).
# *f, then g* is the second prompt converted after the first, with `initial=f`: another bias than the sum, in which `g` neither has read `f` nor
# stands behind it, and the reference here. The controls are the third prompt, `h`, in place of `g`, and each text under the other's prompt.

# %%
both = convert_prompt(model, prompts["gizmo"], initial=f)
biases = {"nothing": f.zero_like(), "f": f, "g": g, "h": h, "f + g": f + g, "f + h": f + h, "f, then g": both}
table = pd.DataFrame({name: losses(bias) for name, bias in biases.items()}).T
table.round(2)

# %% [markdown]
# Any of the three documents makes both texts more likely; each text gains most from its own. The sum `f + g` helps both, and it is `g` that
# helps the gizmo's text, not just any second prompt: with `f + h` that text is less likely than with `f` alone. The sum comes within half a
# nat of converting both prompts in sequence.

# %%
gain = table.loc["nothing"] - table
assert gain.loc["f", "frobnicator"] > gain.loc[["g", "h"], "frobnicator"].max() + 0.5
assert gain.loc["g", "gizmo"] > gain.loc[["f", "h"], "gizmo"].max() + 0.5
assert gain.loc["f + g", "gizmo"] > gain.loc["f", "gizmo"] + 0.3 and gain.loc["f + h", "gizmo"] < gain.loc["f", "gizmo"]
assert gain.loc["f + g", "frobnicator"] < gain.loc["f", "frobnicator"] and gain.loc["f + g", "gizmo"] < gain.loc["g", "gizmo"]
assert (gain.loc["f + g"] - gain.loc["f, then g"]).abs().max() < 0.5
gain.round(2)

# %% [markdown]
# ## Subtracting what was added
#
# Subtraction undoes addition: `f + g - f` equals `g` up to rounding. The shift state (the last raw keys and values, which are not part
# of the sums) follows a rule: `a + b` keeps the shift state of b, `a - b` that of a. The control: subtracting another prompt
# does not give `g` back.

# %%
b_kv = g.stacked("b_kv")
errors = {name: float((back.stacked("b_kv") - b_kv).norm() / b_kv.norm()) for name, back in {"f + g - f": f + g - f, "f + g - h": f + g - h}.items()}
assert errors["f + g - f"] < 1e-6 and errors["f + g - h"] > 0.1
assert abs(losses(f + g - f)["gizmo"] - losses(g)["gizmo"]) < 1e-4
{name: f"relative error {error:.1e}" for name, error in errors.items()}

# %% [markdown]
# ## Exchanging: `a.toward(b, c)`
#
# Two stories, `a` and `b`, differ in one word, Pavel's animal. `a.toward(b, c)` is `a + c * (b - a)`: nothing is exchanged at c = 0, the bias is the other
# story's at c = 1, and beyond it goes further in the same direction. (Prompts of different lengths can be exchanged, too; the text then begins behind
# the longer one.) We measure the probability of the old and the new animal as the answer to a question about Pavel, for six pairs of animals, on a linear
# and on a softmax model.
#
# Two controls: the question about Kaya, whose animal is the same in both stories; and a third story `d`, in which *Kaya's* animal is
# exchanged instead, under which Pavel's animal should stay the old one.

# %%
models = {name: HookedKVTransformer.from_zoo(name) for name in ("facts-linear", "facts-gpt2")}
story = "Mira keeps a goat. Pavel has a {}. At night Kaya feeds a {}."
question = " Which animal does {0} keep? {0} keeps a"
animals = ["parrot", "dog", "horse", "swan", "camel", "hamster"]
degrees = [0, 0.5, 1, 1.5, 2, 3, 5, 10]


def p(model, bias, who, animal):
    """Probability of an animal as the answer. The warning that some of these biases cause is shown below."""
    with model.kv_bias(bias), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(question.format(who), prepend_bos=False)
    return float(logits[0, -1].softmax(-1)[model.to_single_token(" " + animal)])


rows = []
for name, facts in models.items():
    for old, new in zip(animals, animals[1:] + animals[:1], strict=True):
        a, b, d = (convert_prompt(facts, story.format(*pair)) for pair in [(old, "donkey"), (new, "donkey"), (old, "fox")])
        for c in degrees:
            exchanged, elsewhere = a.toward(b, c), a.toward(d, c)
            answers = {"new": p(facts, exchanged, "Pavel", new), "old": p(facts, exchanged, "Pavel", old)}
            controls = {"Kaya's": p(facts, exchanged, "Kaya", "donkey"), "old, by d": p(facts, elsewhere, "Pavel", old)}
            rows.append({"model": name, "c": c, **answers, **controls})
exchange = pd.DataFrame(rows)
medians = exchange.groupby(["model", "c"]).median()
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for ax, name in zip(axes, models, strict=True):
    for column, style in zip(medians, ("-", "-", "--", ":"), strict=True):
        ax.plot(range(len(degrees)), medians.loc[name, column], style, marker=".", label=column)
    ax.set(title=name, xlabel="c, in a + c (b - a)", xticks=range(len(degrees)), xticklabels=degrees)
axes[0].set(ylabel="probability, median of 6 pairs")
axes[1].legend();

# %% [markdown]
# From c = 1 to 2 the new animal is the answer in all pairs on both models, with a probability above 0.9, and both controls keep theirs above 0.85.
# Beyond, the operation does more than was asked: on the linear model Kaya's answer is lost first, on the softmax model the new answer itself.

# %%
worst = exchange.groupby(["model", "c"]).min()
assert (worst.loc[(slice(None), [1, 1.5, 2]), "new"] > 0.9).all()
assert (worst.loc[(slice(None), [0, 0.5, 1, 1.5, 2]), ["Kaya's", "old, by d"]] > 0.85).all().all()
assert (worst.loc[(slice(None), 0), "old"] > 0.9).all() and exchange.query("c >= 1")["old"].max() < 0.1
assert medians.loc[("facts-linear", 5), "Kaya's"] < 0.5 and medians.loc[("facts-gpt2", 10), "new"] < 0.5
worst.round(3)

# %% [markdown]
# ## Where it ends: negative normalizers
#
# With c from 0 to 1 the weights $1 - c$ and $c$ are not negative. Beyond, a normalizer (the denominator above) can be, and then a head does not average
# values. The hook point `hook_normalizer` shows it, for softmax its logarithm, which is NaN there. For one pair: the share of the question's normalizers,
# of all layers and heads, that are below 0, and what the model writes. Two more biases stand below: `-1 * a`, and `b - a` by itself.

# %%


def share_below_zero(model, bias, text):
    """Share of the normalizers below 0."""
    seen = []
    softmax = model.cfg.attention == "softmax"
    hooks = [(lambda name: name.endswith("hook_normalizer"), lambda n, hook: seen.append(n.isnan() if softmax else n < 0))]
    with model.kv_bias(bias), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.run_with_hooks(text, prepend_bos=False, fwd_hooks=hooks)
    return float(torch.stack(seen).double().mean())


def written(model, bias, text):
    """What the model writes after a text."""
    with model.kv_bias(bias), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = model.generate(text, prepend_bos=False, max_new_tokens=14, do_sample=False, verbose=False)
    return whole.removeprefix(text)


ask = question.format("Pavel")
rows = []
for name, facts in models.items():
    a, b = (convert_prompt(facts, story.format(animal, "donkey")) for animal in ("parrot", "dog"))
    steered = {f"a.toward(b, {c})": a.toward(b, c) for c in (0, 1, 2, 10)} | {"-1 a": -1 * a, "b - a": b - a, "nothing": a.zero_like()}
    for words, bias in steered.items():
        rows.append({"model": name, "bias": words, "below 0": share_below_zero(facts, bias, ask), "text": written(facts, bias, ask)})
wrote = pd.DataFrame(rows).set_index(["model", "bias"])
pd.options.display.max_colwidth = 100
wrote.assign(**{"below 0": wrote["below 0"].map("{:.1%}".format)})

# %% [markdown]
# At c = 2 a few are negative on the softmax model, and the answer holds; at c = 10 its text falls apart. Under `-1 * a`, which one might take for "the
# opposite of the story", all or most are negative, and neither model writes sentences. `b - a` by itself happens to leave all of the linear model's
# positive, and breaks the softmax model. A pass that reads such a bias warns, once, with the share.
#
# **A real model bears less than these.** With SmolLM2-135M-Instruct and system prompts for cheerful and gloomy answers, c from 0 to 1 leads from one to
# the other; at c = 1.2 it repeats itself, at 1.5 it writes nonsense, with only 1.5 % of the normalizers below 0. So stay between 0 and 1, where nothing
# can be negative, and read what the model writes.

# %%
assert (wrote.query("bias in ['a.toward(b, 0)', 'a.toward(b, 1)', 'nothing']")["below 0"] == 0).all()
assert wrote.loc[("facts-linear", "b - a"), "below 0"] == 0 and wrote.loc[("facts-gpt2", "b - a"), "below 0"] > 0.05
assert (wrote.query("bias == '-1 a'")["below 0"] > 0.3).all() and (wrote.query("bias == 'a.toward(b, 2)'")["below 0"] < 0.02).all()
for name, facts in models.items():
    with facts.kv_bias(-1 * convert_prompt(facts, story.format("parrot", "donkey"))), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        facts(ask, prepend_bos=False)
    assert len(warned) == 1
    print(f"{name}: {warned[0].message}")

# %% [markdown]
# ## Scaling
#
# A factor makes the prompt count for less or more. The control is another prompt at the same factor (dotted). The dashed line is the loss without
# a prompt.

# %%
scales = [0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3]
knobs = {x: pd.DataFrame([losses(c * bias) for c in scales], index=pd.Index(scales, name="c")) for x, bias in {"f": f, "g": g, "h": h}.items()}
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
for ax, (name, own) in zip(axes, {"frobnicator": "f", "gizmo": "g"}.items(), strict=True):
    for x, knob in knobs.items():
        ax.plot(knob[name], "-" if x == own else ":", marker=".", label=f"c x {x}")
    ax.axhline(table.loc["nothing", name], color="gray", linestyle="--", linewidth=0.8)
    ax.set(title=f"text about the {name}", xlabel="c", xscale="log", xticks=scales, xticklabels=scales)
    ax.legend()
axes[0].set_ylabel("loss, nats");

# %% [markdown]
# With its own prompt a text's loss falls quickly at first and hardly changes beyond c = 1. With another prompt it falls too, up to some part of
# that prompt, and then rises again: from c = 1 to 3 each text becomes less likely under both others.

# %%
own, others = knobs["f"]["frobnicator"], [knobs["g"]["frobnicator"], knobs["h"]["frobnicator"]]
assert own.is_monotonic_decreasing and own.loc[0.25] - own.loc[1] > 3 * (own.loc[1] - own.loc[2])
assert (knobs["g"]["gizmo"].loc[1:] - knobs["g"]["gizmo"].loc[1]).abs().max() < 0.1
others += [knobs["f"]["gizmo"], knobs["h"]["gizmo"]]
assert all(other.loc[1:].is_monotonic_increasing and other.idxmin() < 1 for other in others)
pd.DataFrame({(name, x): knob[name] for name in texts for x, knob in knobs.items()}).round(2)

# %% [markdown]
# ## What a sum misses
#
# `bias_interactions` compares two prompts head by head. `aligned_error` is the relative error of the sum in $b_{KV}$, compared with converting the second
# prompt after the first; for this comparison, the second prompt of the sum is converted at its later positions.

# %%
compared = bias_interactions(model, prompts["frobnicator"], prompts["gizmo"])
by_layer = compared.groupby("layer")[["b_kv_cosine", "aligned_error"]].median()
assert compared.query("layer == 0")["aligned_error"].max() < 1e-5 and by_layer["aligned_error"][1:].min() > 0.3
by_layer.round(3)

# %% [markdown]
# In the first layer, the control, the sum is exact: its keys and values depend on single tokens. In later layers they also depend on earlier
# tokens, so the sum is an approximation.
#
# ## How many directions a prompt uses
#
# A head's $b_{KV}$ is a matrix. `bias_singular_values` shows how much of it lies in its leading singular directions. The controls are a prompt of
# random tokens of the same length, and a matrix of random numbers of the same size.

# %%


def top_four(bias):
    """Share of the energy in the four leading directions: the median over heads."""
    values = bias_singular_values(model, bias)
    return values[values["index"] < 4].groupby(["layer", "head"])["energy_share"].sum().median()


generator = torch.Generator().manual_seed(0)
at_random = convert_prompt(model, torch.randint(5, model.cfg.d_vocab, (f.n_prompt_tokens,), generator=generator))
sizes = torch.linalg.svdvals(torch.randn(100, f.d_phi, model.cfg.d_head, generator=generator)) ** 2
shares = {"f": top_four(f), "random tokens": top_four(at_random), "random numbers": float((sizes[:, :4].sum(dim=1) / sizes.sum(dim=1)).median())}
assert shares["f"] > 0.85 and shares["random tokens"] > shares["f"] and shares["random numbers"] < 0.5
pd.Series(shares).round(2)

# %% [markdown]
# A few directions hold most of the bias. But a prompt of random tokens has even fewer: this comes from the model's features, not from what the
# prompt says.
#
# ## Answer

# %%
at = {name: worst.loc[(name, [1, 1.5, 2]), :].min() for name in models}
sum_error = (gain.loc["f + g"] - gain.loc["f, then g"]).abs().max()
print(fill(f"""Added, both prompts act: each text's loss is within {sum_error:.2f} nats of what it is with one prompt converted after the other; the sum is not the same, as neither prompt has read the other.
Exchanged by degrees from 1 to 2, the answer is the other story's in every pair, with a probability of at least {min(x["new"] for x in at.values()):.2f}, and what
should stay keeps at least {min(x[["Kaya's", "old, by d"]].min() for x in at.values()):.2f}; at 10 the models fail. Scaled up from 1 to 3, a text gains {own.loc[1] - own.loc[3]:.2f} nats at most from its own prompt and loses up
to {max(other.loc[3] - other.loc[1] for other in others):.2f} by others. Negative weights are no opposite: under -1 * a, {100 * wrote.xs("-1 a", level="bias")["below 0"].min():.0f} % or more of the normalizers are negative, and the model writes no sentence.""", 100))
