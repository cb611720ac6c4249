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
# # A hundred and twenty prompts: batches and tables
#
# *How many facts fit into a bias?* One story cannot tell. A hundred and twenty can: forty each
# of 2, 10 and 18 facts, every one with a question that only the story answers. The model was trained on 2 to 10.

# %%
import json

import matplotlib.pyplot as plt
import pandas as pd
import torch

from kvlens.tasks import make_task

LENGTHS, N_STORIES = (2, 10, 18), 24

with open("stories.jsonl", "w", encoding="utf-8") as file:
    for n_facts in LENGTHS:
        task = make_task("facts", min_facts=n_facts, max_facts=n_facts, length=400)
        for number, story in enumerate(task.stories(N_STORIES, torch.Generator().manual_seed(n_facts), "heldout")):
            question = story.questions[0]
            text = task.built_tokenizer.decode(story.tokens[question.start : question.value_position + 1])
            record = {"id": f"{n_facts}-{number}-{question.sentence}", "prompt": story.prompt, "text": text}
            file.write(json.dumps(record) + "\n")
record

# %% [markdown]
# ## From the command line
#
# Every analysis is also a command. It takes a file of prompts and writes one Parquet file, a row group per prompt. Kill it at any
# moment and start it again: it goes on where it was. `--workers` shares the prompts out, `--engine ray` over a cluster.

# %%
# !kvlens analyse prompt_effect stories.jsonl --model facts-linear --out effect.parquet --workers 2 --threads 1 --prompts-per-job 12 2>&1 | tail -1

# %% [markdown]
# ## One tidy table
#
# A row an observation: this token of the text, of this prompt, under this condition. The id carries the rest.

# %%
table = pd.read_parquet("effect.parquet")
table[["facts", "story", "sentence"]] = table["prompt_id"].str.split("-", expand=True).astype(int).to_numpy()
assert table["prompt_id"].nunique() == len(LENGTHS) * N_STORIES
table.head(3)

# %% [markdown]
# First what must hold for all of them: a converted story gives the predictions of the story itself.

# %%
converted = table.query("condition == 'converted'")
assert converted["kl"].max() < 1e-4 and converted["argmax_agrees"].mean() > 0.999
print(f"largest KL(with the story || converted): {converted['kl'].max():.1e} nats, over {len(converted):,} predictions")

# %% [markdown]
# ## Group, look
#
# The answer is the last token of each text; the row before it holds its prediction.

# %%
answers = table[table["position"] == table.groupby("prompt_id")["position"].transform("max") - 1].copy()
answers["right"] = answers["predicted_token"] == answers["next_token"]
share = answers.groupby(["facts", "condition"])["right"].mean().unstack()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
share[["with_prompt", "converted", "without_prompt"]].plot(ax=axes, marker="o", style=["-", "--", "-"], ylim=(0, 1.02))
axes.set(xlabel="facts in the story", ylabel="share of right answers", xticks=LENGTHS);

# %% [markdown]
# With the story and converted the curves lie on each other. The bias has the same size for 2 facts and for 18, and what it holds
# fades slowly, also beyond the 10 facts that the model was trained on. Without the story the model guesses.

# %%
assert (share["converted"] - share["with_prompt"]).abs().max() < 0.02
assert share["converted"].min() > 0.7 and share["converted"][18] < share["converted"][2] - 0.05
assert share["without_prompt"].max() < 0.15
share.round(3)

# %% [markdown]
# Any analysis fits the same loop (`kvlens analyse` lists them), your own among them: `CONTRIBUTING.md` shows a whole one.
