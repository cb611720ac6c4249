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
# # A prompt as weights
#
# *Can a prompt be taken out of the text and put into the model, exactly?* A head of linear attention keeps two running sums over its
# keys and values, and its output depends only on these sums and the query:
#
# $$A_i = A_{i-1} + \phi(k_i)\, v_i^T \qquad D_i = D_{i-1} + \phi(k_i) \qquad z_i = \frac{\phi(q_i)^T A_i}{\phi(q_i)^T D_i}$$
#
# So the only trace of a prompt in a head is $A$ and $D$ at the prompt's end. If the sums start from these values, the prompt is no longer
# needed: it has become a bias of the head, $b_{KV}$ and $b_D$. This notebook converts a story, asks questions about it, and finds the
# heads whose bias the answers depend on.

# %%
import tempfile
from textwrap import fill

import pandas as pd
import torch

from kvlens.analyses import bias_by_head, conversion_error, head_details, prompt_by_depth
from kvlens import HookedKVTransformer, convert_prompt
from kvlens.viz import colored_tokens, depth_map, head_heatmap

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("facts-linear")  # a model of two layers, trained on stories

story = (
    "The drum stands in the cellar. Mira keeps a goat. Pavel has a parrot. "
    "Look for the lamp in the attic. At night Kaya feeds a donkey."
)
questions = {
    " Where is the drum? The drum is in the": " cellar",
    " Where is the lamp? The lamp is in the": " attic",
    " Which animal does Pavel keep? Pavel keeps a": " parrot",
    " Which animal does Kaya keep? Kaya keeps a": " donkey",
}

# %% [markdown]
# ## Convert
#
# This takes one forward pass over the story. The bias also contains the story's last raw keys and values (the shift state), which KV
# shift mixes into the next token.

# %%
bias = convert_prompt(model, story)
bias

# %% [markdown]
# ## Ask
#
# We ask in three ways: with the story before the question, with the story converted (the model reads only the question), and without
# the story.


# %%
def answer(question, way):
    tokens = model.to_tokens(question, prepend_bos=way == "without")
    if way == "converted":
        with model.kv_bias(bias):
            return model(tokens)[0, -1]
    story_tokens = [model.to_tokens(story)] if way == "with" else []
    return model(torch.cat([*story_tokens, tokens], dim=1))[0, -1]


logits = {(question, way): answer(question, way) for question in questions for way in ("with", "converted", "without")}
answers = pd.Series({key: model.to_string(value.argmax()) for key, value in logits.items()}).unstack()
answers["right"] = answers.index.map(questions)
answers[["right", "with", "converted", "without"]]

# %% [markdown]
# With the story and with its conversion, all answers are correct; without it, the model guesses. The conversion is not an approximation:
# the logits differ only by float32 rounding.

# %%
assert (answers["with"] == answers["right"]).all() and (answers["converted"] == answers["right"]).all()
assert not (answers["without"] == answers["right"]).any()
errors = [float((logits[q, "converted"] - logits[q, "with"]).norm() / logits[q, "with"].norm()) for q in questions]
assert max(errors) < 1e-5
print(f"largest relative error of the logits: {max(errors):.1e}")

# %% [markdown]
# `conversion_error` measures this for every token of a text, and compares it with the rounding error of the unconverted model, measured
# against float64.

# %%
question = " Which animal does Pavel keep? Pavel keeps a"
exactness = conversion_error(model, story, question, bias=bias)
assert exactness["exact_to_rounding"].all()
exactness[["position", "token", "relative_error", "rounding_error", "exact_to_rounding"]].tail(3)

# %% [markdown]
# ## At which layer the answer appears
#
# `prompt_by_depth` applies the logit lens after each layer, with the story and without. At the last token, the story's answer appears after
# the first layer.

# %%
depths = prompt_by_depth(model, story, question)
last = depths[depths["position"] == depths["position"].max()].set_index("layer")["guess_with"]
assert last[0] != " parrot" and last[1] == last[2] == " parrot"
depth_map(depths, title="what the story has changed about each next token")

# %% [markdown]
# ## Which heads matter
#
# Remove the story from the bias of each head in turn, but keep BOS, and measure how much the predictions change: `ablation_kl` in
# the table, averaged over the question's tokens. Run this notebook and click a head in the map to see its pattern, the share of each story token
# in its output, and how much of its output comes from the story; what is stored here is a static picture. `save_html`, `save_png` and `save_svg` save
# the figure; it works offline.

# %%
table = bias_by_head(model, story, question, bias=bias)
head_heatmap(table, "ablation_kl", details=head_details(model, story, question, bias=bias), title="KL when the head lacks the story, nats")

# %% [markdown]
# The three heads with the largest effect:

# %%
top = table.nlargest(3, "ablation_kl")[["layer", "head", "ablation_kl", "loss_change", "zero_kl", "bias_share"]]
assert top["ablation_kl"].iloc[0] > 0.5 and (top["ablation_kl"] > 0.1).all() and table["ablation_kl"].min() < 0.01  # some heads matter, some do not
top

# %% [markdown]
# ## Hook it
#
# In every forward pass the bias goes through `hook_b_kv` and `hook_b_d`, where you can scale, patch or ablate it. (In a softmax model its keys go
# through `hook_b_keys`; to put another prompt's bias into a head, patch all three, and with a KV shift the last rows, `hook_last_k`, `hook_last_v` and `hook_last_q`, too.) Here we set the whole bias of the top head to zero,
# including BOS. The table has the same number as `zero_kl`, a mean over the tokens.

# %%
layer, head = (int(top.iloc[0][name]) for name in ("layer", "head"))


def forget(b, hook):
    b = b.clone()
    b[:, head] = 0
    return b


with model.kv_bias(bias):
    whole = model(question, prepend_bos=False).log_softmax(-1)
    hooks = [(f"blocks.{layer}.attn.{name}", forget) for name in ("hook_b_kv", "hook_b_d")]
    ablated = model.run_with_hooks(question, prepend_bos=False, fwd_hooks=hooks).log_softmax(-1)
by_hand = float((whole.exp() * (whole - ablated)).sum(-1).mean())
assert abs(by_hand - top.iloc[0]["zero_kl"]) < 1e-3
print(f"layer {layer}, head {head}: {by_hand:.3f} nats by hand, {top.iloc[0]['zero_kl']:.3f} in the table")

# %% [markdown]
# ## What comes from the story, and what from the question
#
# A head's output `hook_z` is the sum of `hook_z_bias` (from the story) and `hook_z_context` (from the question).

# %%
names = [f"blocks.{layer}.attn.hook_z{part}" for part in ("_bias", "_context", "")]
with model.kv_bias(bias):
    _, cache = model.run_with_cache(question, prepend_bos=False, names_filter=names)
from_story, from_question, z = (cache[name][0] for name in names)
assert torch.allclose(from_story + from_question, z, atol=1e-5)
share = (from_story.norm(dim=-1) / (from_story.norm(dim=-1) + from_question.norm(dim=-1))).mean(dim=-1)
colored_tokens(model.to_str_tokens(question, prepend_bos=False), share, title=f"share of the story in layer {layer}", unit="mean over heads")

# %% [markdown]
# ## Your own model
#
# `from_pretrained` loads a Hugging Face folder from your disk, offline. Such models have softmax attention, for which the conversion
# keeps every key (`method="exact"`, the default) or approximates the prompt with a few (notebook 05). Here the folder contains a tiny GPT-2
# with random weights, so that this cell runs anywhere; replace it with your own path.

# %%
import transformers

transformers.utils.logging.disable_progress_bar()  # its progress bars look like errors in a notebook
config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, n_positions=128, n_ctx=128, vocab_size=model.cfg.d_vocab)
torch.manual_seed(0)
folder = tempfile.mkdtemp(suffix="-my-gpt2")
transformers.GPT2LMHeadModel(config).save_pretrained(folder)
model.tokenizer.save_pretrained(folder)

mine = HookedKVTransformer.from_pretrained(folder)
with_story = mine(torch.cat([mine.to_tokens(story), mine.to_tokens(question, prepend_bos=False)], dim=1))[0, -1]
mine_bias = convert_prompt(mine, story)
with mine.kv_bias(mine_bias):
    converted = mine(question, prepend_bos=False)[0, -1]
assert torch.allclose(converted, with_story, atol=1e-4)

# %% [markdown]
# Which heads matter in this model? The same call as above:

# %%
carry = bias_by_head(mine, story, question, bias=mine_bias).nlargest(3, "ablation_kl")
assert len(carry) == 3 and (carry["ablation_kl"] > 0).all()
carry[["layer", "head", "ablation_kl"]]

# %% [markdown]
# With random weights the effects are close to zero.
#
# ## Answer

# %%
right = {way: int((answers[way] == answers["right"]).sum()) for way in ("with", "converted", "without")}
random_error = float((converted - with_story).norm() / with_story.norm())
print(fill(f"""Yes. With the story in the weights the model gives {right["converted"]} of {len(answers)} right answers, as with the story in the text ({right["with"]}); without it, {right["without"]}.
The logits of both differ by {max(errors):.0e} of their size at most, which is float32 rounding; in the random softmax model by {random_error:.0e}.
Heads differ in how much the answers depend on them: taking the story from head {layer}.{head} changes the predictions by {top.iloc[0]["ablation_kl"]:.2f} nats, from the median head by {table["ablation_kl"].median():.3f}.""", 100))
