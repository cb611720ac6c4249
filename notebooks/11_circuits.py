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
# # Circuits: how SmolLM2 finds the indirect object
#
# *"When Michael and Daniel went to the store, Michael gave a drink to" - which heads and MLPs make SmolLM2 continue with " Daniel" rather than with
# " Michael", and what does the head that matters most do?* In GPT-2 small, heads that attend to the indirect object copy it ("name movers": Wang et al.
# 2022). We look for the circuit of another model by attribution to edges (EAP-IG: Hanna et al. 2024), run what is found, and ask the head itself.
#
# SmolLM2-135M-Instruct has 30 layers of 9 heads. It is fetched from Hugging Face (270 MB), or, where the environment variable `KVLENS_REAL_MODELS`
# names a folder with `smollm2.gguf`, read from there. All numbers in the text are those of that file, whose weights are dequantized from 4 bits.
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
from textwrap import fill

import pandas as pd
import torch

import kvlens
from kvlens.analyses import circuit, faithfulness, what_is_copied, why_attends
from kvlens.viz import circuit_view

torch.set_grad_enabled(False)
local = Path(os.environ.get("KVLENS_REAL_MODELS", "")) / "smollm2.gguf"
source = local if local.is_file() else "HuggingFaceTB/SmolLM2-135M-Instruct"
model = kvlens.load(source, verify=False, download=True)

# %% [markdown]
# ## Pairs of prompts
#
# In the corrupted prompt the second sentence has a third name, so that nothing says who receives the drink. What is measured is the logit of the indirect
# object (IO) less that of the subject (S). Eight pairs choose the circuit, and eight others, of other names and words, measure it.

# %%
NAMES = "Michael Jessica Matthew Jennifer Joshua Daniel David James".split()


def pairs(template, second, third):
    found = []
    for i in range(len(NAMES)):
        a, b, c = (NAMES[(i + step) % len(NAMES)] for step in (0, second, third))
        subject, other = (a, b) if i % 2 else (b, a)
        found.append((template.format(a, b, subject), template.format(a, b, c), " " + other, " " + subject))
    clean, corrupted, answers, rivals = map(list, zip(*found))
    return dict(prompt=clean, corrupted=corrupted, answer=answers, rival=rivals)


chosen_on = pairs("When {} and {} went to the store, {} gave a drink to", 5, 2)
measured_on = pairs("After {} and {} finished their work at the office, {} gave a ring to", 3, 6)
pd.DataFrame(chosen_on).set_axis(["clean", "corrupted", "IO", "S"], axis=1).head(3)

# %% [markdown]
# ## Which parts carry the difference?
#
# An edge leads from what writes to the residual stream (the embedding, a head, an MLP) to what reads it there (a head's queries, keys or values, an MLP,
# the logits). Its `estimate` is by how much the metric falls if this edge alone carries what it does on the corrupted prompt, to first order: all edges
# at once, from a few passes. `confirm=5` runs the five largest, each cut alone: `metric_fall`.

# %%
found = circuit(model, **chosen_on, confirm=5)
print(f"{found.n_units('edges'):,} edges")
found.edges.head(10)[["writer", "reader", "input", "estimate", "metric_fall"]].round(2)

# %% [markdown]
# An estimate is not an effect: compare the two columns. Of the nodes, whose estimates are sums over their edges, these have the largest:

# %%
heads = found.nodes[found.nodes["head"] >= 0].nlargest(6, "estimate")
best = heads.iloc[0]
assert best["node"] == "23.3" and "20.0" in set(heads["node"])
heads[["node", "layer", "head", "estimate", "kept"]].round(2)

# %% [markdown]
# ## How much do they keep?
#
# A circuit of *n* edges is run: all other edges carry what they do on the corrupted prompt. Its faithfulness f is its metric on a scale from 0 (corrupted)
# to 1 (clean). The circuits are chosen on the first eight pairs; the second column is of the other eight.

# %%
n_edges = [20, 50, 100, 200]
own = found.at_sizes(n_edges).table
others = faithfulness(found, [(n + 0.5) / found.n_units("edges") for n in n_edges], order="signed", pairs=measured_on)
sizes = pd.DataFrame({"edges": n_edges, "f, the same pairs": own["faithfulness"], "f, other pairs": others.table["faithfulness"]}).set_index("edges")
assert sizes.loc[20].max() < 0.5 < sizes.loc[50].min() and (sizes.loc[200] - 1).abs().max() < 0.2
sizes.round(2)

# %% [markdown]
# Two hundred of 70,651 edges give back the metric, on pairs that did not choose them, too. More edges can exceed it: they are taken by their signed
# estimates, so that the first hundreds are those that favor the indirect object, without those that work against it.
#
# ## The circuit
#
# In a notebook that runs, and on a page (`.save_html("circuit.html")`), the picture has a slider for the number of edges and for every node its attention, what it
# reads and who reads it; here it is drawn once. Layers are from bottom to top; a node stands at the token where its estimate is largest.

# %%
circuit_view(found, n_edges, title="Indirect objects")

# %% [markdown]
# The difference enters at the subject's second mention, where embedding, MLPs and heads up to layer 18 work on it; heads of layers 19 and 20 move
# something from there to the last token; it becomes part of the *queries* of heads in layer 23, which write to the logits.
#
# ## Why does head 23.3 attend, and what does it copy?
#
# `why_attends` splits the score of one query and key by who wrote what they are made of, and for the writers named first runs the head without them. The `contrast`
# is the score less the mean score of the other keys.

# %%
layer, head = int(best["layer"]), int(best["head"])
why = why_attends(model, chosen_on["prompt"][0], None, layer, head)
print(chosen_on["prompt"][0], "->", why["key_token"][0], "at", why["key_position"][0], f"with {why['attention'][0]:.2f} of the attention")
why[why["side"] != "pair"].groupby("side").head(5)[["side", "key_writer", "query_writer", "contrast", "contrast_run", "attention_run"]].round(2)

# %%
rows = []
for prompt, _, other, subject in zip(*chosen_on.values()):
    why = why_attends(model, prompt, None, layer, head, n_run=0)
    copied = what_is_copied(model, prompt, None, layer, head, answer=subject, n_run=0)
    there = copied[(copied["side"] == "position") & (copied["key_position"] == why["key_position"][0])].iloc[0]
    is_second = bool(why["key_position"][0] == max(copied.loc[copied["key_token"] == subject, "key_position"]))
    rows.append({"S": subject, "IO": other, "attends to": why["key_token"][0], "S, second mention": is_second, "attention": there["attention"], "adds to the logit of S": there["logit"]})
what = pd.DataFrame(rows)
what.round(2)

# %%
assert what["S, second mention"].all() and what["adds to the logit of S"].max() < -1 and what["attention"].min() > 0.5
what[["attention", "adds to the logit of S"]].describe().loc[["min", "50%", "max"]].round(2)

# %% [markdown]
# SmolLM2's most important head is no name mover: in 8 of 8 prompts 23.3 attends, from the last token, to the subject's second mention, with 0.55 to 0.71 of its
# attention, and what it copies from there *lowers* the subject's logit, by 1.6 to 3.1. Which token it attends to is decided by the contrast of keys, to which
# MLPs write most; note `mlp 11`, whose share of -1.08 is no effect: in the run without it the contrast hardly changes, as it makes up nearly all of the first token.
# What brings the subject's position to layer 23 is the heads of layers 19 and 20 and, before them, 17.4, through queries.
#
# Limits: one model with weights of 4 bits, one template for the choice and one for the measurement, sixteen pairs. The shares are exact sums in one pass; the columns
# `_run` are interventions, of one head alone.
#
# ## Answer

# %%
attended, added = what["attention"], what["adds to the logit of S"]
print(fill(f"""Those of the circuit of {n_edges[-1]} edges of {found.n_units("edges"):,}, which keeps {100 * sizes.loc[n_edges[-1], "f, other pairs"]:.0f} % of the metric on pairs that did not choose it; its heads with the largest estimates
are {", ".join(heads["node"])}. The first, {best["node"]}, is no name mover: in {int(what["S, second mention"].sum())} of {len(what)} prompts it attends to the subject's
second mention, with {attended.min():.2f} to {attended.max():.2f} of its attention, and lowers the subject's logit there, by {-added.max():.1f} to {-added.min():.1f}.""", 100))
