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
# # Where the prompt lives
#
# *Through which heads does a fact reach the answer?* In a made-up story the ground truth is known, so claims about heads can be checked:
# without the bias of these heads the answer must be lost, and with another story's bias in them the model must give that story's answer.
#
# The output of a head is exactly a sum over the prompt's tokens, also after the prompt has become a bias:
#
# $$z_i = \frac{1}{n_i} \sum_j \phi(q_i)^T \phi(k_j)\, v_j + \text{(the text's own part)}$$

# %%
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import activation_patching, bias_positions, layer_contributions, prompt_attribution

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("facts-linear")
story = "The drum stands in the cellar. Mira keeps a goat. Pavel has a parrot. Look for the lamp in the attic. At night Kaya feeds a donkey."
questions = {
    " cellar": " Where is the drum? The drum is in the",
    " attic": " Where is the lamp? The lamp is in the",
    " parrot": " Which animal does Pavel keep? Pavel keeps a",
    " donkey": " Which animal does Kaya keep? Kaya keeps a",
}
bias = convert_prompt(model, story)
heads = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]


def says(question, kept):
    """The answer and the probabilities of all tokens when only these heads keep the story's bias."""
    with model.kv_bias(bias.select(heads=kept)):
        p = model(question, prepend_bos=False)[0, -1].softmax(-1)
    return model.to_string(p.argmax()), p


# %% [markdown]
# ## Which sentence led to the answer
#
# Before looking at heads: remove one sentence at a time, keep everything else at its position, and ask again. The total effect of a
# sentence is the answer's log-probability with it minus the log-probability without it, in nats.

# %%
effects = {}
for answer, question in questions.items():
    table = prompt_attribution(model, story, question, answer=answer)
    effects[answer] = table.set_index("unit_text")["total_effect"]
effects = pd.DataFrame(effects)
assert all(answer.strip() in effects[answer].idxmax() for answer in questions)  # the sentence that states it, every time
assert all(effects[answer].max() > 3 and effects[answer].nsmallest(4).abs().max() < 0.1 for answer in questions)
effects.round(3)

# %% [markdown]
# Each answer depends on exactly one sentence. The rest of this notebook is about the heads through which it does; `attribution_by_head` finds
# them for one sentence at a time, and `kvlens explain` in one command.
#
# ## Ablate a head's bias
#
# For every question and head: how much does the probability of the correct answer fall when this head's bias is removed?

# %%
rows = {}
for answer, question in questions.items():
    _, whole = says(question, heads)
    token = model.to_single_token(answer)
    rows[answer] = {f"{l}.{h}": float(whole[token] - says(question, [k for k in heads if k != (l, h)])[1][token]) for l, h in heads}
fall = pd.DataFrame(rows).T
figure, axes = plt.subplots(figsize=(6.5, 2.4), layout="constrained")
image = axes.imshow(fall, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
axes.set(xticks=range(len(heads)), xticklabels=fall.columns, yticks=range(len(fall)), yticklabels=fall.index, xlabel="ablated head (layer.head)")
figure.colorbar(image, label="drop in the answer's probability");

# %% [markdown]
# Without the bias of head 0.1 the probabilities of both locations and of the donkey fall by more than 0.6, without that of 0.2 the parrot's
# by more than 0.9. Head 0.0 matters to some answers; each of the others changes the four by less than 0.1 on average.

# %%
chosen = [(0, 0), (0, 1), (0, 2)]
others = [head for head in heads if head not in chosen]
assert fall.loc[[" cellar", " attic", " donkey"], "0.1"].min() > 0.6 and fall.loc[" parrot", "0.2"] > 0.9
assert fall[[f"{layer}.{head}" for layer, head in others]].mean().abs().max() < 0.1
fall.round(2)

# %% [markdown]
# ## Ablate all three
#
# Without these three heads every answer is lost. Without any single one of the other heads, all answers stay the same.

# %%
gone = pd.DataFrame({answer: {"all heads": says(q, heads)[0], "without 0.0, 0.1, 0.2": says(q, others)[0]} for answer, q in questions.items()}).T
assert (gone["all heads"] == gone.index).all() and (gone["without 0.0, 0.1, 0.2"] != gone.index).all()
assert all(says(q, [head for head in heads if head != one])[0] == answer for one in others for answer, q in questions.items())
gone

# %% [markdown]
# ## Swap the bias of these heads
#
# If the facts act through these heads, giving them the bias of *another* story must produce that story's answers. Biases are tensors, so we
# can take the three heads from one story and all other heads from the other.

# %%
swaps = {"cellar": "tower", "attic": "stable", "parrot": "rabbit", "donkey": "fox"}
other_story = story
for old, new in swaps.items():
    other_story = other_story.replace(old, new)
mixed = bias.select(heads=others) + convert_prompt(model, other_story).select(heads=chosen)
with model.kv_bias(mixed):
    swapped = {answer: model.to_string(model(q, prepend_bos=False)[0, -1].argmax()) for answer, q in questions.items()}
new_answers = sum(swapped[answer] == " " + swaps[answer.strip()] for answer in questions)
assert new_answers == len(questions) and not any(swapped[answer] == answer for answer in questions)
pd.Series(swapped, name="answer with the other story's bias in heads 0.0, 0.1, 0.2").to_frame()

# %% [markdown]
# The other five heads still have the first story's bias, but the model answers from the second story.
#
# ## One head at a time
#
# `activation_patching` does the same swap for one head at a time: it patches the first story's bias into the model that has the second one's.
# `recovered` is 0 if this changes nothing and 1 if it fully restores the first story's answer; head -1 is the whole layer.

# %%
recovered = pd.DataFrame(
    {
        answer: activation_patching(
            model, story, other_story, q, points=["b_kv"], answer=answer, rival=" " + swaps[answer.strip()]
        ).set_index(["layer", "head"])["recovered"]
        for answer, q in questions.items()
    }
).drop((-1, -1))
assert (recovered.loc[(0, -1)] - 1).abs().max() < 0.2 and recovered.loc[(1, -1)].abs().max() < 0.1
recovered.round(2)

# %% [markdown]
# All of the effect is in the first layer, in heads 0.1 and 0.2; for the attic only in 0.1.
#
# ## From the word in the story to the answer
#
# Which word does head 0.1 read at the end of a question? `bias_positions` splits its output into the contributions of the story's tokens.

# %%
words = {}
for answer, question in questions.items():
    end = model.to_tokens(question, prepend_bos=False).shape[1] - 1
    given = bias_positions(model, story, question, at=[end]).query("layer == 0 and head == 1 and part == 'prompt'")
    words[answer] = given.set_index("token")["output_share"].nlargest(2)
assert all(answer in most.index for answer, most in words.items())
assert words[" attic"].idxmax() == " attic" and words[" parrot"].idxmax() == " parrot"
shown = {answer: [f"{word} {share:.2f}" for word, share in most.items()] for answer, most in words.items()}
pd.DataFrame(shown, index=["largest share of the output", "second"]).T

# %% [markdown]
# The answer itself is always among the two tokens that contribute most. How does it become a prediction? `layer_contributions` splits
# the answer's logit at the end of the question into the contributions of the model's components.

# %%
parts = {}
for answer, question in questions.items():
    table = layer_contributions(model, bias, question, tokens=[answer], next_token=False)
    parts[answer] = table[table["position"] == table["position"].max()].set_index(["layer", "component"])["logit"]
parts = pd.DataFrame(parts)
assert (parts.loc[(0, "mlp")] > 0.6 * parts.sum()).all() and parts.loc[(0, "attention_bias")].max() < 1
parts.round(2)

# %% [markdown]
# The direct contribution of the first layer's heads is close to zero. The MLP after them turns what they retrieve into the answer.
#
# ## Answer

# %%
strongest = fall.idxmax(axis=1)
through = ", ".join(f"{answer.strip()} {head} ({fall.loc[answer, head]:.2f})" for answer, head in strongest.items())
print(fill(f"""Through a few heads of layer 0. The head without which each answer loses most of its probability: {through}.
Without the story in {len(chosen)} heads, 0.0 to 0.2, {int((gone["without 0.0, 0.1, 0.2"] != gone.index).sum())} of {len(gone)} answers are lost; with another story in layer 0 alone,
{100 * recovered.loc[(0, -1)].min():.0f} % or more of the way to its answers is made. The heads do not write the answer themselves: the MLP of layer 0
gives {100 * (parts.loc[(0, "mlp")] / parts.sum()).min():.0f} % or more of its logit, the heads' share of the story there at most {100 * (parts.loc[(0, "attention_bias")] / parts.sum()).max():.1f} %.""", 100))
