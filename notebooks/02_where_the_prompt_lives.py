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
# # Where the prompt lives
#
# *Which head holds which fact?* In a made-up story the ground truth is known. So claims about heads
# can be checked: take the head's memory away, and the answer must go; give it another story's memory, and that answer must come.
#
# The output of a head is a sum over the prompt's tokens, exactly, also after the prompt has become a bias:
#
# $$z_i = \frac{1}{n_i} \sum_j \phi(q_i)^T \phi(k_j)\, v_j + \text{(the text's own part)}$$

# %%
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
    """The answer, and the probability of every token, when only these heads keep the story."""
    with model.kv_bias(bias.select(heads=kept)):
        p = model(question, prepend_bos=False)[0, -1].softmax(-1)
    return model.to_string(p.argmax()), p


# %% [markdown]
# ## Which sentence made it say so
#
# The first question comes before heads: take each sentence away, everything else in its place, and ask again. A total effect is by how
# many nats the answer's log-probability stands higher with the sentence than without.

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
# One sentence each, and no other. Whose memory holds it? That is the rest of this notebook; `attribution_by_head` answers it for one
# sentence at a time, `kvlens explain` in one line.
#
# ## Take a head's memory away
#
# For every question and head: by how much the probability of the right answer falls when this head forgets the story.

# %%
rows = {}
for answer, question in questions.items():
    _, whole = says(question, heads)
    token = model.to_single_token(answer)
    rows[answer] = {f"{l}.{h}": float(whole[token] - says(question, [k for k in heads if k != (l, h)])[1][token]) for l, h in heads}
fall = pd.DataFrame(rows).T
figure, axes = plt.subplots(figsize=(6.5, 2.4), layout="constrained")
image = axes.imshow(fall, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
axes.set(xticks=range(len(heads)), xticklabels=fall.columns, yticks=range(len(fall)), yticklabels=fall.index, xlabel="layer.head that forgets")
figure.colorbar(image, label="fall of the answer's probability");

# %% [markdown]
# Three heads of the first layer hold nearly all of it: 0.1 both places and the donkey, 0.2 the parrot; 0.0 stands beside 0.1.

# %%
holders = [(0, 0), (0, 1), (0, 2)]
others = [head for head in heads if head not in holders]
assert fall.loc[[" cellar", " attic", " donkey"], "0.1"].min() > 0.6 and fall.loc[" parrot", "0.2"] > 0.9
assert fall[[f"{layer}.{head}" for layer, head in others]].mean().abs().max() < 0.1
fall.round(2)

# %% [markdown]
# ## The answer goes
#
# Without these three heads every answer goes; without any single other head all of them stay.

# %%
gone = pd.DataFrame({answer: {"all heads": says(q, heads)[0], "without 0.0, 0.1, 0.2": says(q, others)[0]} for answer, q in questions.items()}).T
assert (gone["all heads"] == gone.index).all() and (gone["without 0.0, 0.1, 0.2"] != gone.index).all()
assert all(says(q, [head for head in heads if head != one])[0] == answer for one in others for answer, q in questions.items())
gone

# %% [markdown]
# ## Swap a memory
#
# If these heads hold the facts, their memory of *another* story must bring that story's answers. Biases are tensors: take the
# three heads from one and all the others from the other.

# %%
swaps = {"cellar": "tower", "attic": "stable", "parrot": "rabbit", "donkey": "fox"}
other_story = story
for old, new in swaps.items():
    other_story = other_story.replace(old, new)
mixed = bias.select(heads=others) + convert_prompt(model, other_story).select(heads=holders)
with model.kv_bias(mixed):
    swapped = {answer: model.to_string(model(q, prepend_bos=False)[0, -1].argmax()) for answer, q in questions.items()}
new_answers = sum(swapped[answer] == " " + swaps[answer.strip()] for answer in questions)
assert new_answers == len(questions) and not any(swapped[answer] == answer for answer in questions)
pd.Series(swapped, name="answer with the other story's memory in heads 0.0, 0.1, 0.2").to_frame()

# %% [markdown]
# The five other heads still hold the first story, and the model answers from the second.
#
# ## One head at a time
#
# `activation_patching` does the same swap head by head: it puts the first story's memory into the model that holds the other one.
# `recovered` is 0 where that changes nothing and 1 where the first story's answer is back; head -1 is the whole layer.

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
# All of it is in the first layer, in heads 0.1 and 0.2; for the attic in 0.1 alone.
#
# ## From the word in the story to the answer
#
# Which word does head 0.1 read at the end of a question? `bias_positions` splits its output into what each token of the story gave.

# %%
words = {}
for answer, question in questions.items():
    end = model.to_tokens(question, prepend_bos=False).shape[1] - 1
    given = bias_positions(model, story, question, at=[end]).query("layer == 0 and head == 1 and part == 'prompt'")
    words[answer] = given.set_index("token")["output_share"].nlargest(2)
assert all(answer in most.index for answer, most in words.items())
assert words[" attic"].idxmax() == " attic" and words[" parrot"].idxmax() == " parrot"
pd.DataFrame({answer: [f"{word} {share:.2f}" for word, share in most.items()] for answer, most in words.items()}).T

# %% [markdown]
# The answer's own word is always among the two that give most. How does it become a prediction? `layer_contributions` splits the
# answer's logit at the end of the question into what each part of the model wrote.

# %%
parts = {}
for answer, question in questions.items():
    table = layer_contributions(model, bias, question, tokens=[answer], next_token=False)
    parts[answer] = table[table["position"] == table["position"].max()].set_index(["layer", "component"])["logit"]
parts = pd.DataFrame(parts)
assert (parts.loc[(0, "mlp")] > 0.6 * parts.sum()).all() and parts.loc[(0, "attention_bias")].max() < 1
parts.round(2)

# %% [markdown]
# The heads that hold the story write next to nothing into the logit themselves. What they fetch is turned into the answer by the MLP
# behind them.
