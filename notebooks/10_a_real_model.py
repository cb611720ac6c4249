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
# # A real model: why SmolLM2 gave its answer
#
# *Which sentence of a document led to the answer, what would the model have said without it, and which of its layers read it?* The model is
# SmolLM2-135M-Instruct, of 30 layers with 9 heads each. It is fetched from Hugging Face (270 MB), or, where the environment variable
# `KVLENS_REAL_MODELS` names a folder with `smollm2.gguf`, read from there. All numbers in the text are those of that file, whose weights are
# dequantized from 4 bits; the hub's own may give others, so that an assertion fails.
#
# On Colab, put the address of this repository, `git+https://...`, into the next cell.

# %%
import importlib.util
import subprocess
import sys

SOURCE = ""
if importlib.util.find_spec("kvlens") is None:
    assert SOURCE, "kvlens is not installed here: write the repository's address, or the path of a clone, into SOURCE"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", SOURCE], check=True)

# %%
import itertools
import math
import os
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import pandas as pd
import torch

import kvlens
from kvlens import Chat, convert_prompt
from kvlens.analyses import attention_under_bias
from kvlens.analyses import reading_layers
from kvlens.viz import attention_view_under_bias

torch.set_grad_enabled(False)
local = Path(os.environ.get("KVLENS_REAL_MODELS", "")) / "smollm2.gguf"
source = local if local.is_file() else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = kvlens.load(source, verify=False, download=True)

# %% [markdown]
# ## Why it answered, and what it would have said
#
# Each sentence of the document is removed, and the model answers again: once with the later tokens at their positions (a gap is kept), once with
# them moved up (the gap is closed). Then, one layer or set of layers at a time, the keys and values of the prompt without the cause take the place of the whole
# prompt's; all other layers keep theirs. A word is *lost* where the model says another one in its place and the log-odds between the two have moved by ln 4;
# words that differ by less are *near ties*. The layers without which the word is lost, and those that are enough for it, need not be the same.

# %%
minutes = "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros a month."
chat = Chat.ask("In which city will the new office be?", {"minutes.txt": minutes})
found = kvlens.explain(model, chat, about="Rotterdam", depth="layers", on_progress=lambda *done: None)
found

# %% [markdown]
# The page is made from a table of runs. What the model says without each sentence:

# %%
runs = found.statements
alone = runs[(runs["about"] == "units") & (runs["role"] == "each")]
print(found.response)
assert "Rotterdam" in found.response and [found.units["name"][unit] for unit in found.cause] == ["minutes.txt, sentence 2"]
alone[["parts", "verdict", "nats", "says"]]

# %% [markdown]
# ## The prompt as weights
#
# `convert_prompt` turns the prompt into a bias of the attention layers: for each head and each token of the prompt a key, a value and a weight. A text
# without the prompt then attends to them as it would to the prompt, exactly. A key-value cache holds the same keys and values; a bias can also be added,
# exchanged by layer or head, edited by hooks, and saved with the model's fingerprint.

# %%
prompt = chat.tokens(model)
words = model.to_tokens("The new office will be in Rotterdam", prepend_bos=False)
word = range(words.shape[1] - len(model.to_str_tokens(" Rotterdam", prepend_bos=False)), words.shape[1])
bias = convert_prompt(model, prompt)


def log_p(logits):
    """The log-probability of 'Rotterdam', all its tokens, behind the beginning of the answer."""
    return sum(float(logits[0, i - 1 - words.shape[1]].log_softmax(-1)[words[0, i]]) for i in word)


def under_bias(hooks=()):
    with model.kv_bias(bias):
        return log_p(model.run_with_hooks(words, fwd_hooks=list(hooks)))


whole = log_p(model(torch.cat([prompt[None], words], dim=1)))
assert abs(under_bias() - whole) < 1e-3
print(f"log-probability of 'Rotterdam' in nats: {whole:.4f} with the prompt, {under_bias():.4f} with its bias")

# %% [markdown]
# In every pass the bias goes through hook points, with a row for each token r of the prompt. With s_r the score of a query against the prompt's key
# (`hook_b_keys`), and s_j, v_j those of the text itself, a head writes
#
# $$z = \frac{\sum_r e^{s_r} b_{kv}[r] + \sum_j e^{s_j} v_j}{\sum_r e^{s_r} b_d[r] + \sum_j e^{s_j}}$$
#
# where `hook_b_kv` has the prompt's values and `hook_b_d` ones. Zeros in both, at the tokens of a sentence, hide it from what reads the bias there. We hide the
# stating sentence from each layer in turn; the control is the sentence about the rent, which is longer. Falls are in log-odds, since the log-probability of a
# word that is nearly certain hardly moves at first.

# %%
spans = [range(*span) for span in found.units[["start", "stop"]].itertuples(index=False)]


def log_odds(log_p):
    return log_p - math.log1p(-math.exp(log_p))


def costs_of(hooks):
    """By how much the log-odds of 'Rotterdam' fall."""
    return log_odds(whole) - log_odds(under_bias(hooks))


def hidden(sentence, layers):
    """Hooks that take the tokens of a sentence out of the bias in some layers."""

    def forget(b, hook):
        b = b.clone()
        b[:, :, spans[sentence]] = 0
        return b

    return [(f"blocks.{layer}.attn.hook_b_{x}", forget) for layer in layers for x in ("kv", "d")]


layers = range(model.cfg.n_layers)
sentences = {"stating": 1, "rent": 2}
fall = pd.DataFrame({name: [costs_of(hidden(i, [layer])) for layer in layers] for name, i in sentences.items()})
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
fall.plot.bar(ax=axes, rot=0, width=0.9)
axes.set(xlabel="layer from which the sentence's tokens are hidden", ylabel="log-odds that 'Rotterdam' loses");

# %% [markdown]
# Layer 23 has the largest effect of a single layer: the word falls from 89 to 24 %. Hiding the sentence from all other layers costs more, and hiding it from
# every layer costs about as much as both together, 9.1 against 3.3 + 4.6. Taking it out of the prompt costs 10.3: hidden, the sentence is still in
# what the later tokens of the prompt have read of it.

# %%
reader = int(fall["stating"].idxmax())
others = [layer for layer in layers if layer != reader]
hide = {f"layer {reader}": [reader], "all other layers": others, "every layer": layers}
costs = pd.DataFrame({name: {key: costs_of(hidden(i, which)) for key, which in hide.items()} for name, i in sentences.items()})
removed = alone.set_index("parts")["nats"]
costs.loc["removed from the prompt"] = [log_odds(whole) - log_odds(whole - float(removed[str(i)])) for i in sentences.values()]
one, rest, all_layers = costs["stating"].iloc[:3]
assert 0.75 < (one + rest) / all_layers < 1 and costs["rent"].abs().max() < 0.5
assert reader == 23 and fall["stating"][reader] > 1.5 * fall["stating"][others].max() and fall["rent"].abs().max() < 0.2
costs.round(2)

# %% [markdown]
# ## What its heads attend to
#
# `hook_pattern` under a bias has the columns of the text alone, in which the row that predicts the word has a few percent of its attention. `attention_view_under_bias`
# adds those of the prompt's tokens (p0, p1, ...), and their rows. circuitsvis draws the heads of this layer: run it and hover over one to enlarge it. The
# fourth row from the end, that of "in", predicts the word.

# %%
attention_view_under_bias(model, prompt, words[0], reader, bias=bias)

# %%
looks = attention_under_bias(model, prompt, words[0], reader, bias=bias)
row = word[0] - 1 - words.shape[1]  # of the token that predicts the word, from the end
last = looks.pattern[:, row]
assert torch.allclose(last.sum(dim=-1), torch.ones(len(last)), atol=1e-4)
with model.kv_bias(bias):
    _, cache = model.run_with_cache(words, names_filter=f"blocks.{reader}.attn.hook_pattern")
in_text = cache[f"blocks.{reader}.attn.hook_pattern"][0, :, row].sum(dim=-1)
assert in_text.median() < 0.1 and last[:, spans[1]].sum(dim=-1).max() > 0.3
on = {f"{name} sentence": last[:, spans[i]].sum(dim=-1) for name, i in sentences.items()}
pd.DataFrame({"first token": last[:, 0], **on, "the answer itself": in_text}).rename_axis("head").round(3)

# %% [markdown]
# Most heads attend to the first token or to the sentence, several to both, and two to the sentence about the rent nearly as much; attention alone does not say
# which of them matter. So each layer, each group of heads that share their keys, and each head gets the keys and values of the prompt without the sentence in
# turn, and everything else those of the whole prompt.

# %%
sentence_text = {"stating": "The new office will be in Rotterdam.", "rent": "The rent is 12,500 euros a month."}
tables = {}
for name, text in sentence_text.items():
    part = reading_layers(model, chat, "The new office will be in", answer=" Rotterdam", without=[text]).set_index(["part", "layer", "head"])
    tables[name] = part["fall"].map(lambda nats: log_odds(whole) - log_odds(whole - nats))
parts = pd.DataFrame(tables).sort_index()
first = [("all", -1, -1), ("layer", 23, -1), ("layer", 29, -1)]
first += [("group", 23, group) for group in range(3)] + [(part, *parts.loc[part, "stating"].idxmax()) for part in ("group", "head")]
in_23 = parts.loc[("head", 23), "stating"]
assert parts.loc["layer", "stating"].idxmax() == (23, -1) and in_23.max() < parts.loc[("layer", 23, -1), "stating"] / 3
assert parts.drop("all", level="part")["rent"].abs().max() < 0.5
parts.loc[first].round(2)

# %%
print(f"heads of layer 23: at most {in_23.max():.2f} each, {in_23.sum():.2f} together; without the rent, any part: {parts['rent'].abs().max():.2f}")

# %% [markdown]
# Layer 23 takes 3.6, its three groups of three heads 1.4, 0.5 and 0.6, and none of its nine heads more than 0.6: the reading is spread over the layer. Of all
# single heads one of layer 29 takes most, 1.8, which is what the whole layer takes. Without the sentence about the rent all layers together take -0.3.

# %% [markdown]
# ## Thirty questions
#
# Is it this layer for other questions, too? There are six kinds of facts, with five values each. For each question we write a second document with another
# value, and as a control one in which only the month of the rent differs. `exchange_layers` gives a batch of biases in which one layer at a time comes from
# the other document, so that all thirty layers are tried in one pass. The answer begins once in the document's words, behind which the value stands there,
# and once in other words (of which only "is a" stands in front of a value as well).

# %%
KINDS = {
    "city": ("The new office will be in {}.", "In which city will the new office be?", "They will move to", "Paris London Rome Madrid Berlin"),
    "color": ("The door of the hall was painted {}.", "In which color was the door of the hall painted?", "Its color is", "red green blue yellow purple"),
    "day": ("The team will meet on {}.", "On which day will the team meet?", "They will see each other on", "Monday Tuesday Thursday Friday Sunday"),
    "person": ("The key was given to {}.", "Who was given the key?", "The person who has it is", "Mary Peter Alice George Laura"),
    "thing": ("The box in the cellar is full of {}.", "What is in the box in the cellar?", "There are", "books apples sand wine paper"),
    "work": ("The guide of the tour is a {}.", "Which profession does the guide of the tour have?", "By profession, he is a", "teacher doctor farmer lawyer student"),
}
n_values = int(os.environ.get("KVLENS_NOTEBOOK_VALUES", 5))  # of each kind; fewer take less time
one_layer = torch.cat([torch.zeros(1, model.cfg.n_layers), torch.eye(model.cfg.n_layers)]).bool()  # the first row exchanges none


def bias_of(fact, question, month="May"):
    return convert_prompt(model, Chat.ask(question, {"minutes.txt": f"Everybody was there. {fact} The rent is due in {month}."}).tokens(model))


rows = []
for kind, (fact, question, paraphrase, values) in KINDS.items():
    values, begins = values.split(), {"the document's": fact.removesuffix(" {}."), "other": paraphrase}
    for value, other in list(zip(values, values[1:] + values[:1], strict=True))[:n_values]:
        own, answer, rival = bias_of(fact.format(value), question), model.to_single_token(" " + value), model.to_single_token(" " + other)
        seconds = {"value": bias_of(fact.format(other), question), "month": bias_of(fact.format(value), question, "June")}
        for (name, second), (begun, text) in itertools.product(seconds.items(), begins.items()):
            with model.kv_bias(own.exchange_layers(second, one_layer)):
                p = model(model.to_tokens(text, prepend_bos=False).expand(len(one_layer), -1))[:, -1].log_softmax(-1)
            is_said = bool(p[0, answer] > p[0, rival])  # more likely than the other value while all layers read the own document
            falls, flips = p[0, answer] - p[1:, answer], (p[1:, rival] > p[1:, answer]) & is_said
            found_there = {"p": float(p[0, answer].exp()), "is_said": is_said, "kind": kind, "value": value, "what": name, "words": begun}
            rows += [found_there | {"layer": i, "fall": float(falls[i]), "flips": bool(flips[i])} for i in layers]
table = pd.DataFrame(rows)
by_question = table.set_index(["what", "words", "kind", "value", "layer"])["fall"].unstack("layer")

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=(3, 1))
shown = by_question.loc["value", "the document's"]
most = float(shown.abs().max().max())
image = axes[0].imshow(shown, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
axes[0].set(yticks=range(n_values // 2, len(shown), n_values), yticklabels=KINDS, title="nats that the answer loses when one layer reads the other document")
figure.colorbar(image, ax=axes[0])
for (what, begun), style in {("value", "the document's"): "-", ("value", "other"): "--", ("month", "the document's"): ":"}.items():
    axes[1].plot(by_question.loc[what, begun].median(), style, marker=".", label=f"another {what}, {begun} words")
axes[1].set(xlabel="layer", ylabel="nats, median")
axes[1].legend();

# %%
of_values = table[table["what"] == "value"]
there = of_values[of_values["layer"] == reader].set_index(["words", "kind", "value"])
elsewhere = of_values[of_values["layer"] != reader].groupby(["words", "kind", "value"])
summary = pd.DataFrame({"p": there["p"], "own value first": there["is_said"], "fall": there["fall"], "next layer": elsewhere["fall"].max(), "other value wins": there["flips"], "by another layer": elsewhere["flips"].any()})
summary["strongest"] = summary["fall"] > summary["next layer"]
assert summary["strongest"].mean() >= 0.8 and by_question.loc["month"].abs().median().max() < 0.1
columns = ["own value first", "strongest", "other value wins", "by another layer"]
counts = summary.groupby("words")[columns].sum().join(summary.groupby("words")["fall"].describe()[["count", "min", "50%", "max"]])
counts.join(summary.groupby("words")[["p", "next layer"]].median()).round(2)

# %%
print(f"another month: the largest change of any answer by any layer is {by_question.loc['month'].abs().max().max():.2f} nats")
by_question.loc["value", "the document's"].groupby("kind").median()[[22, 23, 24, 28, 29]].round(2)

# %% [markdown]
# Layer 23 is the strongest of thirty in 30 of 30 questions if the answer begins with the document's words, and in 30 of 30 if it begins with others: the
# value is copied from the document, and not only as what follows the words that stood before it. With this one layer exchanged, the other document's value becomes
# likelier than the own one in 28 of 30 and 24 of the 29 in which the own one was likelier before; with any other single layer in 0 and 3. The control's medians are below
# 0.1 nats, its largest change is 0.9. Limits: the effect is small for some questions (from 0.4 nats); there are six templates, short documents with the fact in
# the second sentence, single words as answers, and their beginnings are given. The layer reads all of the exchanged prompt, not just the fact. And it does not
# act alone: no single layer lost the answer above, 22 and 23 together did, and 23 and 29 alone were enough for it. What SmolLM2 and Qwen2.5-Coder read in
# other tasks, with intervals, is in `tests/benchmarks/results/reading.md`: SmolLM2 in layers 18 and 23, Qwen in several, most often 16.
#
# ## Answer

# %%
without = alone.set_index("parts").loc[str(found.cause[0]), "says"]
together = runs.loc[(runs["about"] == "layers") & (runs["role"] == "breaking"), "parts"].iloc[0].replace("+", " and ")
print(fill(f"""{found.units["name"][found.cause[0]]} led to "{found.response}"; without it the model says "{without}" Layer {reader} reads it most: hidden from this layer alone it
costs {one:.1f} of the {all_layers:.1f} nats of log-odds that it costs hidden from all, and no layer alone loses the answer: {together} together do. In {int(summary["strongest"].sum())} of {len(summary)} cases of
other questions the same layer is the strongest of {model.cfg.n_layers}.""", 100))
