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
# # Many prompts: batches and tables
#
# *How many facts fit into a bias?* One story is not enough to find out. We use 120 stories, forty each with 2, 10 and 18 facts,
# each with a question that can only be answered from the story. The model was trained on stories of 2 to 10 facts.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
import torch

import kvlens
from kvlens.tasks import make_task

LENGTHS, N_STORIES = (2, 10, 18), 40
folder = Path(tempfile.mkdtemp(prefix="kvlens-"))  # a new one for every run

with open(folder / "stories.jsonl", "w", encoding="utf-8") as file:
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
# Every analysis is also a command. It takes a file of prompts and writes one Parquet file, with a row group per prompt. If it is interrupted,
# run it again and it resumes. `--workers 8` distributes the prompts over eight processes, `--engine ray` over a cluster.

# %%
command = "kvlens analyse prompt_effect stories.jsonl --model facts-linear --out effect.parquet --threads 1"
done = subprocess.run([sys.executable, "-m", *command.split()], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
assert done.returncode == 0, done.stdout
print(done.stdout.splitlines()[-1])

# %% [markdown]
# ## One tidy table
#
# Each row is one observation: a token of the text, a prompt and a condition. We put the other information into the prompt's id.

# %%
table = kvlens.read_table(folder / "effect.parquet")  # where a file is damaged, pandas.read_parquet may return other numbers
table[["facts", "story", "sentence"]] = table["prompt_id"].str.split("-", expand=True).astype(int).to_numpy()
assert table["prompt_id"].nunique() == len(LENGTHS) * N_STORIES
table.head(3)

# %% [markdown]
# First we check that all converted stories give the same predictions as the stories themselves.

# %%
converted = table.query("condition == 'converted'")
assert converted["kl"].max() < 1e-4 and converted["argmax_agrees"].mean() > 0.999
print(f"largest KL(with the story || converted): {converted['kl'].max():.1e} nats, over {len(converted):,} predictions")

# %% [markdown]
# ## Group and plot
#
# The answer is the last token of each text; the row before it has its prediction.

# %%
answers = table[table["position"] == table.groupby("prompt_id")["position"].transform("max") - 1].copy()
answers["right"] = answers["predicted_token"] == answers["next_token"]
by_length = answers.groupby(["facts", "condition"])["right"]
share, standard_error = by_length.mean().unstack(), by_length.sem().unstack()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
conditions = ["with_prompt", "converted", "without_prompt"]
share[conditions].plot(ax=axes, yerr=standard_error[conditions], marker="o", style=["-", "--", "-"], ylim=(-0.02, 1.05))
axes.set(xlabel="facts in the story", ylabel="share of correct answers", xticks=LENGTHS);

# %% [markdown]
# The curves with the story and with its conversion coincide, although the bias has the same size for 2 and for 18 facts. For stories of 2
# facts the model answers nearly every question. For 18 facts, nearly twice as many as in training, it still answers most of them, but fewer
# than for 2: the difference is more than two standard errors (the bars). Forty stories per length do not support stronger conclusions.
# Without the story the model guesses.

# %%
right, uncertain = share["converted"], standard_error["converted"]
assert (right - share["with_prompt"]).abs().max() < 0.02
assert right[2] > 0.9 and right[18] - 2 * uncertain[18] > 0.5
assert right[2] - right[18] > 2 * (uncertain[2] ** 2 + uncertain[18] ** 2) ** 0.5
assert share["without_prompt"].max() < 0.15
share.round(3)

# %% [markdown]
# You can run any analysis in this way (`kvlens analyse` lists them, and `README.md` in this folder says which one answers which question),
# including your own: `CONTRIBUTING.md` has a complete example.
#
# ## Answer

# %%
share_of = {n: f"{100 * right[n]:.0f} % (standard error {100 * uncertain[n]:.0f})" for n in LENGTHS}
print(fill(f"""At least {LENGTHS[-1]}, in the sense that the bias loses none that the model can use: the converted story gives the same answers as the story itself for
{int((answers[answers["condition"] == "converted"]["right"].to_numpy() == answers[answers["condition"] == "with_prompt"]["right"].to_numpy()).sum())} of {len(LENGTHS) * N_STORIES} stories. How many the model answers falls with the number of facts: {", ".join(f"{share_of[n]} with {n}" for n in LENGTHS)}.
Without the story it answers {100 * share["without_prompt"].max():.0f} %.""", 100))
