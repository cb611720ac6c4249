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
# # A real model: why SmolLM2 gave its answer
#
# *Which sentence of a document led to the answer, what would the model have said without it, and which of its layers read it?* The model is
# SmolLM2-135M-Instruct, of 30 layers with 9 heads each. It is fetched from Hugging Face (270 MB), or, where the environment variable
# `KVLENS_REAL_MODELS` names a folder with `smollm2.gguf`, read from there. The text below was written from that file, whose weights are
# dequantized from 4 bits.
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
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import kvlens
from kvlens import Chat, convert_prompt
from kvlens.analyses import attention_under_bias as attention_by_head
from kvlens.viz import attention_under_bias

torch.set_grad_enabled(False)
local = Path(os.environ.get("KVLENS_REAL_MODELS", "")) / "smollm2.gguf"
source = local if local.is_file() else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = kvlens.load(source, verify=False, download=True)

# %% [markdown]
# ## Why it answered, and what it would have said
#
# Each sentence of the document is removed, and the model answers again. Then each layer reads the prompt without the cause, and the others
# read it whole.

# %%
minutes = "Everybody was there on Tuesday. The new office will be in Rotterdam. The rent is 12,500 euros a month."
chat = Chat.ask("In which city will the new office be?", {"minutes.txt": minutes})
found = kvlens.explain(model, chat, about="Rotterdam", on_progress=lambda *done: None)
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
# `convert_prompt` turns the prompt into a bias, which is exact: behind it, the beginning of the answer is read as behind the prompt itself.

# %%
prompt = chat.tokens(model)
begun = model.to_tokens("The new office will be in", prepend_bos=False)
city = int(model.to_tokens(" Rotterdam", prepend_bos=False)[0, 0])
bias = convert_prompt(model, prompt)


def log_p(bias, hooks=()):
    """The log-probability of the city's first token behind the beginning of the answer."""
    with model.kv_bias(bias):
        return float(model.run_with_hooks(begun, fwd_hooks=list(hooks))[0, -1].log_softmax(-1)[city])


whole = float(model(torch.cat([prompt[None], begun], dim=1))[0, -1].log_softmax(-1)[city])
assert abs(log_p(bias) - whole) < 1e-3
print(f"log-probability of the city: {whole:.4f} with the prompt, {log_p(bias):.4f} with its bias")

# %% [markdown]
# In every pass the bias goes through hook points, with a row for each token of the prompt: `hook_b_kv` has its values and `hook_b_d` its weights.
# Zeros at the tokens of a sentence hide it from what reads the bias there. We hide the stating sentence from each layer in turn; the control
# is the sentence about the rent, which is longer.

# %%
spans = [range(*span) for span in found.units[["start", "stop"]].itertuples(index=False)]


def hidden(sentence, layers):
    """Hooks that take the tokens of a sentence out of the bias in some layers."""

    def forget(b, hook):
        b = b.clone()
        b[:, :, spans[sentence]] = 0
        return b

    return [(f"blocks.{layer}.attn.hook_b_{x}", forget) for layer in layers for x in ("kv", "d")]


layers = range(model.cfg.n_layers)
fall = pd.DataFrame({name: [whole - log_p(bias, hidden(i, [layer])) for layer in layers] for name, i in {"stating": 1, "rent": 2}.items()})
everywhere = {name: whole - log_p(bias, hidden(i, layers)) for name, i in {"stating": 1, "rent": 2}.items()}
figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
fall.plot.bar(ax=axes, rot=0, width=0.9)
axes.set(xlabel="layer from which the sentence's tokens are hidden", ylabel="nats that the city loses")
everywhere

# %% [markdown]
# One layer stands out, and the last one comes second. Hiding the sentence's tokens everywhere costs 6.4 nats, less than removing the sentence, which cost 8.1:
# tokens behind it have read it, and keep what they read.

# %%
reader = int(fall["stating"].idxmax())
assert reader == 23 and fall["stating"][reader] > 2 * fall["stating"].drop(reader).max() and fall["rent"].abs().max() < 0.1
removed = float(alone["nats"].max())
assert 10 * abs(everywhere["rent"]) < everywhere["stating"] < removed
print(f"layer {reader}: {fall['stating'][reader]:.2f} nats; the next layer: {fall['stating'].drop(reader).max():.2f}")

# %% [markdown]
# ## What its heads attend to
#
# `hook_pattern` under a bias has the columns of the text alone, which hold only a few percent of each row. `attention_under_bias` adds those of the prompt's
# tokens (p0, p1, ...). circuitsvis draws the heads of this layer; hover over one to enlarge it. The last row is the token that predicts the city.

# %%
attention_under_bias(model, prompt, begun[0], reader, bias=bias)

# %%
looks = attention_by_head(model, prompt, begun[0], reader, bias=bias)
last = looks.pattern[:, -1]
assert torch.allclose(last.sum(dim=-1), torch.ones(len(last)), atol=1e-4)
with model.kv_bias(bias):
    _, cache = model.run_with_cache(begun, names_filter=f"blocks.{reader}.attn.hook_pattern")
own = cache[f"blocks.{reader}.attn.hook_pattern"][0, :, -1].sum(dim=-1)
assert own.median() < 0.1 and last[:, spans[1]].sum(dim=-1).max() > 0.3
pd.DataFrame({"first token": last[:, 0], "stating sentence": last[:, spans[1]].sum(dim=-1), "the answer itself": own}).round(3)

# %% [markdown]
# Most heads attend to the first token or to the sentence, and several to both; attention alone does not say which of them matter. (`kvlens.explain(...,
# depth="heads")` exchanges them.)

# %% [markdown]
# ## Thirty questions
#
# Is it this layer for other questions, too? There are six kinds of facts, with five values each. For each question we write a second document with another
# value, and as a control one in which only the month of the rent differs. `exchange_layers` gives a batch of biases in which one layer at a time comes from
# the other document, so that all thirty layers are tried in one pass.

# %%
KINDS = {
    "city": ("The new office will be in {}.", "In which city will the new office be?", "The new office will be in", "Paris London Rome Madrid Berlin"),
    "color": ("The door of the hall was painted {}.", "In which color was the door of the hall painted?", "The door of the hall was painted", "red green blue yellow purple"),
    "day": ("The team will meet on {}.", "On which day will the team meet?", "The team will meet on", "Monday Tuesday Thursday Friday Sunday"),
    "person": ("The key was given to {}.", "Who was given the key?", "The key was given to", "Mary Peter Alice George Laura"),
    "thing": ("The box in the cellar is full of {}.", "What is in the box in the cellar?", "The box in the cellar is full of", "books apples sand wine paper"),
    "work": ("The guide of the tour is a {}.", "Which profession does the guide of the tour have?", "The guide of the tour is a", "teacher doctor farmer lawyer student"),
}
n_values = int(os.environ.get("KVLENS_NOTEBOOK_VALUES", 5))  # of each kind; fewer take less time
one_layer = torch.cat([torch.zeros(1, model.cfg.n_layers), torch.eye(model.cfg.n_layers)]).bool()  # the first row exchanges none


def bias_of(fact, question, month="May"):
    return convert_prompt(model, Chat.ask(question, {"minutes.txt": f"Everybody was there. {fact} The rent is due in {month}."}).tokens(model))


rows = []
for kind, (fact, question, begin, words) in KINDS.items():
    values, text = words.split(), model.to_tokens(begin, prepend_bos=False).expand(len(one_layer), -1)
    for value, other in zip(values[:n_values], values[1:] + values[:1], strict=False):
        own, answer = bias_of(fact.format(value), question), model.to_single_token(" " + value)
        seconds = {"value": bias_of(fact.format(other), question), "month": bias_of(fact.format(value), question, "June")}
        for name, second in seconds.items():
            with model.kv_bias(own.exchange_layers(second, one_layer)):
                p = model(text)[:, -1].log_softmax(-1)[:, answer]
            rows += [{"kind": kind, "value": value, "what": name, "layer": i, "fall": float(p[0] - p[1 + i])} for i in layers]
table = pd.DataFrame(rows)
by_question = table.set_index(["what", "kind", "value", "layer"])["fall"].unstack("layer")

# %%
figure, axes = plt.subplots(2, 1, figsize=(8, 6), layout="constrained", sharex=True, height_ratios=(3, 1))
image = axes[0].imshow(by_question.loc["value"], aspect="auto", cmap="Blues", vmin=0)
ticks = range(n_values // 2, len(by_question.loc["value"]), n_values)
axes[0].set(yticks=ticks, yticklabels=KINDS, title="nats that the answer loses when one layer reads the other document")
figure.colorbar(image, ax=axes[0])
for name, style in {"value": "-", "month": ":"}.items():
    axes[1].plot(by_question.loc[name].median(), style, marker=".", label=f"another {name}, median")
axes[1].set(xlabel="layer", ylabel="nats")
axes[1].legend();

# %%
strongest = by_question.loc["value"].idxmax(axis=1)
assert (strongest == reader).mean() >= 0.8 and by_question.loc["month"].abs().median().max() < 0.1
print(f"layer {reader} is the strongest in {(strongest == reader).sum()} of {len(strongest)} questions")
by_question.loc["value"].groupby("kind").median()[[22, 23, 24, 28, 29]].round(2)

# %% [markdown]
# Layer 23 is the strongest of thirty in all thirty questions, whatever the fact is about: this is where the answer's last token picks up the fact. Three limits.
# The questions are short and their answers single words. The first words of the answer are given, so only the word itself is at stake; for the whole answer
# above, layers 22 and 23 had to be exchanged together. And other models read elsewhere, or in several layers: `kvlens.explain` says which for each answer.
