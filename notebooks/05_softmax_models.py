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
# # Softmax models: how small can a prompt get?
#
# *How much is lost when a softmax model's prompt is reduced to a few stored keys?* Softmax attention weights a key by $\exp(q \cdot k)$,
# which is not a finite sum of products of a function of $q$ and a function of $k$. So the only exact bias is the one that keeps every key:
#
# $$z_i = \frac{\sum_{j \le i} e^{s_{ij}} v_j + \phi(q_i)^T b_{KV}}{\sum_{j \le i} e^{s_{ij}} + \phi(q_i)^T b_D} \qquad\quad \phi(q) = \left[e^{q \cdot c_1 / s}, \dots, e^{q \cdot c_r / s}\right]$$
#
# with $r$ *virtual keys* $c$ per head. With all keys of the prompt it is exact. With fewer, the keys are a selection, with fitted weights in
# $b_D$ and fitted values in $b_{KV}$.

# %%
from textwrap import fill

import circuitsvis
import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import attention_under_bias
from kvlens.viz import attention_view_under_bias

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("facts-gpt2")  # trained on made-up stories, like the model of notebook 01, but with softmax attention
story = "The drum stands in the cellar. Mira keeps a goat. Pavel has a parrot. Look for the lamp in the attic. At night Rosa feeds a camel."
question = " Which animal does Pavel keep? Pavel keeps a"
story_tokens, question_tokens = model.to_tokens(story), model.to_tokens(question, prepend_bos=False)
with_story = model(torch.cat([story_tokens, question_tokens], dim=1))[0, -question_tokens.shape[1] :].double().log_softmax(-1)
without = model(model.to_tokens(question))[0, -question_tokens.shape[1] :].double().log_softmax(-1)


def distance(log_p):
    """Mean KL from the predictions with the story, nats."""
    return float((with_story.exp() * (with_story - log_p)).sum(-1).mean())


def converted(bias):
    with model.kv_bias(bias):
        return model(question_tokens)[0].double().log_softmax(-1)


# %% [markdown]
# ## Every key: exact

# %%
exact = convert_prompt(model, story)
assert distance(converted(exact)) < 1e-5 < distance(without)
print(exact)
print(f"KL: {distance(converted(exact)):.1e} nats converted, {distance(without):.2f} without the story")

# %% [markdown]
# ## Fewer keys
#
# `method="landmark"` selects keys, fits their weights and values in closed form, and then moves the keys, each head for itself (100 gradient steps), on
# queries that the model itself produces. `bias.fit` gives the error of the logits on held-out text, and how much of the story's effect is lost.
# `method="random"` uses random positive features, as in Performers, here as many features as keys.
#
# The queries come from text that might follow the story. By default each call generates new text with the model; to compare many biases of
# the same prompt, generate it once and pass it to all of them.

# %%
torch.manual_seed(0)
writing = dict(max_new_tokens=64, stop_at_eos=False, return_type="tokens", verbose=False)
follows = model.generate(story_tokens.repeat(24, 1), **writing)[:, story_tokens.shape[1] :]
sizes = [2, 4, 8, 16, 24]
rows = []
for method in ("landmark", "random"):
    for size in sizes:
        bias = convert_prompt(model, story, method=method, n_features=size, reference=follows, seed=0)
        rows.append({"method": method, "size": size, "kl": distance(converted(bias)), "bias": bias})
table = pd.DataFrame(rows)
figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
table.pivot(index="size", columns="method", values="kl").plot(ax=axes, marker=".", logy=True)
axes.axhline(distance(without), color="gray", linewidth=0.8)
axes.set(xlabel=f"stored keys (or features) per head; the story has {story_tokens.shape[1]} tokens", ylabel="KL(with story || converted), nats");

# %% [markdown]
# The gray line is the model without the story. Two fitted keys per head already recover most of the story's effect, and the error falls with
# each further step. Random features would need many more features than the story has tokens, which makes them useless here.

# %%
kl = table.pivot(index="size", columns="method", values="kl")
assert kl["landmark"].is_monotonic_decreasing and kl["landmark"].iloc[0] < 0.2 * distance(without)
assert (kl["landmark"].iloc[-2:] < kl["random"].iloc[-2:]).all()
fit = table.query("method == 'landmark'")["bias"].iloc[-1].fit
print(f"{fit.answers.summary()}; {fit.recall.summary()}")
kl.map("{:.1e}".format)

# %% [markdown]
# Which tokens of the question suffer with two keys? Token by token, the KL of the next token's prediction, by circuitsvis:

# %%
two = table.set_index(["method", "size"])["bias"]["landmark", 2]
errors = (with_story.exp() * (with_story - converted(two))).sum(-1)
assert abs(float(errors.mean()) - kl["landmark"].iloc[0]) < 1e-6
circuitsvis.tokens.colored_tokens(model.to_str_tokens(question, prepend_bos=False), errors)

# %% [markdown]
# ## What the question attends to
#
# `hook_pattern` under a bias has the columns of the question alone. `attention_view_under_bias` adds those of the story's tokens (p0, p1, ...), and circuitsvis
# draws the heads of a layer in one call: first with every key, then with four, each at the token from which it was moved. Run it and hover over a head to
# enlarge it; what is stored here are static pictures.

# %%
attention_view_under_bias(model, story, question, layer=1, title="layer 1, every key")

# %%
four = table.set_index(["method", "size"])["bias"]["landmark", 4]
attention_view_under_bias(model, story, question, layer=1, bias=four, title="layer 1, four fitted keys")

# %%
patterns = {name: attention_under_bias(model, story, question, 1, bias=bias) for name, bias in {"exact": exact, "four": four}.items()}
last = {name: found.pattern[:, -1, : found.n_prompt] for name, found in patterns.items()}  # the last token's, to the story
assert all(torch.allclose(found.pattern[:, -1].sum(-1), torch.ones(model.cfg.n_heads), atol=1e-4) for found in patterns.values())
assert ((last["four"] != 0).sum(-1) <= 4).all() and ((last["exact"] != 0).sum(-1) == story_tokens.shape[1]).all()
pd.DataFrame({f"attention to the story, {name}": row.sum(-1) for name, row in last.items()}).round(2)

# %% [markdown]
# A fitted key is not the token: its weight in $b_D$ and its value in $b_{KV}$ are fitted, so that a head's output can come near that of all keys with hardly any
# weight, which is what a pattern shows, on the story. Read the pattern of fitted keys as what the smaller bias computes, not as what the model attends to.
#
# ## Your own models
#
# Load a Hugging Face folder as in notebook 01, a llama2.c checkpoint with `HookedKVTransformer.from_llama2c(path, tokenizer_path)`.
# `convert_prompt` is called in the same way for all of them.
#
# ## Answer

# %%
lost = kl["landmark"] / distance(without)
said = table[table["method"] == "landmark"].set_index("size")["bias"].map(lambda bias: model.to_string(converted(bias)[-1].argmax()))
right = said[said == model.to_string(with_story[-1].argmax())].index
print(fill(f"""Of the story's effect on the question's tokens ({distance(without):.2f} nats), {100 * lost[2]:.1f} % is lost with 2 of {story_tokens.shape[1]} keys per head, {100 * lost[8]:.2f} % with 8, and {lost[24]:.0e}
with 24; with every key nothing but rounding ({distance(converted(exact)):.0e} nats). The answer is right with {", ".join(map(str, right))} keys. As many random features lose {100 * kl["random"].min() / distance(without):.0f} % or more.
This is one story and one question: `bias.fit` says what each prompt lost; what larger models lose is in `tests/benchmarks/results/fewer_keys.md`.""", 100))
