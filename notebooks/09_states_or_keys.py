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
# # States or keys: a hybrid model
#
# *Where does a hybrid keep a prompt?* In most new models three of four layers are recurrent: they keep a matrix per head, to which each token
# writes and from which it removes, and only the other layers attend to earlier tokens. After a prompt such a model holds three kinds
# of things: the **states** of the recurrent layers, the last inputs of their **short convolutions**, and the **keys** and values of the
# attention layers. `convert_prompt` returns all of them as one `KVBias`.
#
# The model is `facts-hybrid`: Transformers' own class `Qwen3_5ForCausalLM`, with a recurrent layer (gated delta rule) before and after one
# attention layer, trained to answer questions about made-up stories.

# %%
from dataclasses import replace
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens import KVTransformerBridge, convert_prompt
from kvlens.analyses import state_memory
from kvlens.tasks import make_task
from kvlens.tasks.stories import text_of_words

torch.set_grad_enabled(False)
model = KVTransformerBridge.from_zoo("facts-hybrid")
task = make_task("facts", min_facts=4, max_facts=4, length=72)
stories = task.stories(200, torch.Generator().manual_seed(9), "heldout")
bias = convert_prompt(model, torch.tensor([stories[0].tokens[: stories[0].n_prompt_tokens]]))
print(stories[0].prompt)
bias

# %% [markdown]
# ## The conversion is exact
#
# With the bias attached, the model reads the questions alone and predicts what it predicts after the story.

# %%
tokens = torch.tensor([stories[0].tokens])
with model.kv_bias(bias):
    converted = model(tokens[:, bias.n_prompt_tokens :])
difference = float((converted - model(tokens)[:, bias.n_prompt_tokens :]).abs().max())
assert difference < 1e-4
print(f"largest difference of the logits: {difference:.1e}")


# %% [markdown]
# ## Swap one part
#
# For each of 200 stories that the model never saw, take the first question, and a *counterfactual* story: the same, but the sentence that
# states the answer gives another value. One part of the story's bias is replaced by the counterfactual's. The effect is the fall of
# the answer's log-probability, in nats. As a null, the counterfactual changes the value in a sentence that the question is not about.
# The last columns are the converse: everything *but* this part comes from the counterfactual.


# %%
def changed(story, sentence):
    """The story with another value, which it does not name, in one sentence."""
    fact, words = story.sentences[sentence].fact, [list(each.words) for each in story.sentences]
    named = {each.fact.value for each in story.sentences}
    words[sentence][-2] = next(value for value in fact.kind.values if value not in named)
    return text_of_words([word for each in words for word in each])


def with_parts(bias, other, parts):
    """``bias`` with some parts of ``other``: ("state", layer), ("convolution", layer) or ("keys", layer)."""
    layers = list(bias.layers)
    for number, theirs in enumerate(other.layers):
        if ("state", number) in parts:
            layers[number] = layers[number].with_state_of(theirs)
        if ("convolution", number) in parts:
            layers[number] = replace(layers[number], last=theirs.last)
        if ("keys", number) in parts:
            layers[number] = theirs
    return bias.with_layers(layers)


questions = [story.questions[0] for story in stories]
texts = [story.tokens[story.n_prompt_tokens : q.value_position] for story, q in zip(stories, questions)]
last = torch.tensor([len(text) - 1 for text in texts])
text = torch.tensor([row + [model.tokenizer.pad_token_id] * (int(last.max()) + 1 - len(row)) for row in texts])
answers = torch.tensor([story.tokens[q.value_position] for story, q in zip(stories, questions)])
rows = torch.arange(len(stories))


def predicted(bias):
    """The log-probabilities of each story's next token after its question."""
    with model.kv_bias(bias):
        return model(text)[rows, last].log_softmax(-1)


def converted(prompts):
    return convert_prompt(model, prompts, prepend_bos=True)


origins = [q.origins[0] for q in questions]
original = converted([story.prompt for story in stories])
others = {
    "answer": converted([changed(story, origin) for story, origin in zip(stories, origins)]),
    "unrelated": converted([changed(story, (origin + 1) % 4) for story, origin in zip(stories, origins)]),
}
PARTS = [("state", 0), ("convolution", 0), ("keys", 1), ("state", 2), ("convolution", 2)]
whole = predicted(original)
right = whole.argmax(-1) == answers


def fall(bias):
    """Of the answer's log-probability, in nats, where the whole story gives the right answer."""
    return (whole - predicted(bias))[rows, answers][right]


swaps = {(about, "everything"): fall(other) for about, other in others.items()}
for about, other in others.items():
    for part in PARTS:
        swaps[about, "{} of layer {}".format(*part)] = fall(with_parts(original, other, [part]))
converse = {}
for part in PARTS:
    rest = [other for other in PARTS if other != part]
    converse["{} of layer {}".format(*part)] = fall(with_parts(original, others["answer"], rest))
effects = pd.DataFrame(
    {
        "swapped": {name: float(x.median()) for (about, name), x in swaps.items() if about == "answer"},
        "null": {name: float(x.median()) for (about, name), x in swaps.items() if about == "unrelated"},
        "null, 95th percentile": {name: float(x.quantile(0.95)) for (about, name), x in swaps.items() if about == "unrelated"},
        "all others swapped": {name: float(x.median()) for name, x in converse.items()},
    }
)
print(f"{int(right.sum())} of {len(stories)} answers are right")
effects.round(3)

# %% [markdown]
# The answer is in the **keys and values** of the attention layer, and nowhere else: with the counterfactual's keys the answer is lost as if
# everything had been swapped; with the story's own keys and everything else swapped, nothing changes. The states hold a part of the
# prompt too, but no part of it that these answers are read from.

# %%
table = effects
assert table.loc["keys of layer 1", "swapped"] > 0.95 * table.loc["everything", "swapped"] > 5
assert table.drop(["everything", "keys of layer 1"])["swapped"].abs().max() < 0.05
assert abs(table.loc["keys of layer 1", "all others swapped"]) < 0.05
assert table.loc["keys of layer 1", "swapped"] > 20 * table.loc["keys of layer 1", "null, 95th percentile"]
figure, axes = plt.subplots(figsize=(6.5, 2.6), layout="constrained")
names = ["{} of layer {}".format(*part) for part in PARTS]
quantiles = {name: swaps["answer", name].quantile(torch.tensor([0.05, 0.5, 0.95])).tolist() for name in names}
low, middle, high = (list(column) for column in zip(*quantiles.values()))
axes.errorbar(middle, names, xerr=[[m - l for m, l in zip(middle, low)], [h - m for m, h in zip(middle, high)]], fmt="o", capsize=3)
axes.set(xlabel="fall of the answer's log-probability, nats (median, 5th to 95th percentile)")
axes.invert_yaxis();

# %% [markdown]
# ## What the states are for
#
# The states matter while the story is *read*. Below, what one recurrent layer reads from its state is set to zero, in the pass over the story
# alone, or in the pass over the question alone. The share of right answers says which of the two needs it.


# %%
def without(z, hook):
    return torch.zeros_like(z)


def share_right(log_p):
    return float((log_p.argmax(-1) == answers).double().mean())


prompts = [story.prompt for story in stories]
rows_of = {}
for layer in (0, 2):
    name = f"blocks.{layer}.attn.hook_z"
    story_pass = convert_prompt(model, prompts, prepend_bos=True, fwd_hooks=[(name, without)])
    with model.hooks(fwd_hooks=[(name, without)]):
        question_pass = share_right(predicted(original))
    story_without = share_right(predicted(story_pass))
    rows_of[f"layer {layer}"] = {"none": share_right(whole), "in the story": story_without, "in the question": question_pass}
reading = pd.DataFrame(rows_of).T
assert (reading["none"] > 0.95).all() and (reading.loc["layer 0", ["in the story", "in the question"]] < 0.5).all()
assert (reading.loc["layer 2", ["in the story", "in the question"]] > 0.9).all()
reading.round(3)

# %% [markdown]
# Without the first layer neither the story nor the question can be read: this layer joins neighboring words, so that the key at the value's
# word tells what it belongs to. The last layer is not needed for these answers.
#
# ## How long a state remembers
#
# `state_memory` measures how much of each token is still in a state after the prompt: 1 is all of it. Tokens fade because of the decay, and
# because later tokens with similar keys remove them.

# %%
memory = pd.concat([state_memory(model, torch.tensor([story.tokens[: story.n_prompt_tokens]])) for story in stories[:20]])
survival = memory[memory["distance"] < 24].groupby(["layer", "head", "distance"])["survival"].mean()
figure, axes = plt.subplots(1, 2, figsize=(7, 2.6), layout="constrained", sharey=True)
for ax, layer in zip(axes, (0, 2)):
    for head in range(4):
        ax.plot(survival.loc[layer, head], label=f"head {head}")
    ax.set(title=f"layer {layer}", xlabel="tokens before the end of the prompt")
axes[0].set_ylabel("survival")
axes[1].legend();
fades = survival.unstack("distance")[1].unstack("head")
assert (fades.loc[0] < 0.2).all() and (fades.loc[2] > 0.7).all()

# %% [markdown]
# The first layer forgets a token at once: it works as a filter over neighboring tokens, and its state after the story is next to nothing. The
# last layer remembers for many tokens, although no answer is read from what it remembers. A state that holds a prompt need
# not be used.
#
# ## Steering
#
# States can be added and subtracted as any other bias. Adding the counterfactual's states and subtracting the story's own should turn the
# answer into the counterfactual's if it were kept there. We do this with the states, once and up to ten times over, and then exchange
# the keys.

# %%
new_answers = others["answer"]
new_words = [changed(story, origin).rstrip(".").split(". ")[origin].split()[-1] for story, origin in zip(stories, origins)]
targets = torch.tensor([model.to_single_token(" " + word) for word in new_words])


def steered(factor):
    """The story's states and ``factor`` times the difference between the counterfactual's states and these."""
    moved = original + factor * (new_answers - original)
    return original.with_layers([own.with_state_of(other) for own, other in zip(original.layers, moved.layers)])


biases = {f"states, factor {factor}": steered(factor) for factor in (1, 3, 10)}
biases |= {"keys exchanged": with_parts(original, new_answers, [("keys", 1)])}
rows_of = {}
for name, bias in biases.items():
    log_p = predicted(bias)
    change = (log_p - whole)[rows, targets].median()
    says_new = float((log_p.argmax(-1) == targets).double().mean())
    rows_of[name] = {"gain of the new answer, nats": float(change), "says the new answer": says_new, "says the old answer": share_right(log_p)}
steering = pd.DataFrame(rows_of).T
assert steering.loc["keys exchanged", "says the new answer"] > 0.9
assert steering.loc["states, factor 1", "says the new answer"] < 0.05
steering.round(3)

# %% [markdown]
# The states do not steer the answer, the keys do. For a hybrid it is therefore worth asking this question before its states are edited,
# stored or compressed: what is causal may be a small part of what a prompt leaves.
#
# ## Answer

# %%
states = effects.loc[["state of layer 0", "state of layer 2"], "swapped"].abs().max()
print(fill(f"""In the keys and values of its one attention layer. Another story's there take {effects.loc["keys of layer 1", "swapped"]:.1f} nats from the answer, as much as another story's everything
({effects.loc["everything", "swapped"]:.1f}); another's states take less than {max(states, 0.001):.3f}. Nor do states steer: with ten times the difference added the new answer is said in {100 * steering.loc["states, factor 10", "says the new answer"]:.0f} %
of the stories, with its keys in {100 * steering.loc["keys exchanged", "says the new answer"]:.0f} %. The states are needed to read: without those of layer 0 while the story is read {100 * reading.loc["layer 0", "in the story"]:.0f} % of the answers are right.""", 100))
