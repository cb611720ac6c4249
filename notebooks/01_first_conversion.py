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
# # A prompt as weights
#
# A linear-attention head keeps a running sum of its keys and values. Everything that a prompt leaves behind in the head is
# that sum - so the prompt can be taken out of the text and put into the model, exactly. This notebook converts a prompt, reads
# the result through hooks, takes it apart by head, and looks at the pattern.

# %%
import torch

from analyses import bias_by_head, head_details
from kvlens import HookedKVTransformer, convert_prompt
from kvlens.viz import attention_view, coloured_tokens, head_heatmap

torch.set_grad_enabled(False)
model = HookedKVTransformer.from_zoo("docs-linear")
model.cfg

# %% [markdown]
# ## Convert
#
# `convert_prompt` costs one forward pass over the prompt. The bias holds, per layer and head, the sum of keys times values
# (`b_KV`) and the sum of keys (`b_D`), and the prompt's last raw keys and values, which the KV shift mixes into the first
# token of whatever comes next.

# %%
prompt = "class Widget: Base class of all widgets. A widget has a colour and a name. The colour of a widget"
text = " must be a string. The widget"

bias = convert_prompt(model, prompt)
bias

# %% [markdown]
# The model without the prompt, with the bias attached, gives the logits of the model with the prompt. What is left is the
# rounding of float32.

# %%
tokens = model.to_tokens(text, prepend_bos=False)
with_prompt = model(torch.cat([model.to_tokens(prompt), tokens], dim=1))[:, -tokens.shape[1] :]
with model.kv_bias(bias):
    converted = model(tokens)
print("relative error", float((converted - with_prompt).norm() / with_prompt.norm()))
print("without the prompt", float((model(tokens) - with_prompt).norm() / with_prompt.norm()))

# %% [markdown]
# ## Hook
#
# The bias passes through `hook_b_kv` and `hook_b_d` at every forward pass: ablate it, scale it, patch it there.


# %%
def without_head(head):
    def ablate(b, hook):
        b = b.clone()
        b[:, head] = 0
        return b

    return ablate


layer, head = 1, 0
with model.kv_bias(bias):
    hooks = [(f"blocks.{layer}.attn.{name}", without_head(head)) for name in ("hook_b_kv", "hook_b_d")]
    ablated = model.run_with_hooks(tokens, fwd_hooks=hooks)
print("changed by", float((ablated - converted).norm() / converted.norm()))

# %% [markdown]
# ## Which heads carry the prompt
#
# The same for every head at once, in one table: KL from the converted model to the one whose head has forgotten the prompt.
#
# The map shows one column of the table, and any other on demand. Click a head: below appear its attention pattern, the share of
# each prompt token in its output, and how much of its output the bias makes up at each token of the text. It needs no network,
# and `save_html`, `save_png` and `save_svg` write it to a file.

# %%
prompt_tokens = model.to_tokens(prompt)[0]
table = bias_by_head(model, prompt_tokens, tokens[0], bias=bias)
details = head_details(model, prompt_tokens, tokens[0], bias=bias)
head_heatmap(table, "ablation_kl", details=details, title="KL when the head forgets the prompt, nats")

# %% [markdown]
# ## Look at the pattern
#
# Linear attention has a pattern too, computed only when something asks for it. Its entries may be negative: RoPE turns the
# features after the feature map made them positive. Here is that of the original model over prompt and text, in circuitsvis. The
# converted model has the lower right part of it as its own pattern; what stands below the prompt's tokens, it reads from the bias.

# %%
attention_view(
    [*details.prompt, *details.text],
    details.pattern[layer],
    queries=details.queries,
    n_prompt=len(details.prompt),
    title=f"layer {layer}",
)

# %% [markdown]
# `hook_z_context` and `hook_z_bias` hold the two parts of a head's output: what comes from the text, and what from the prompt.

# %%
names = [f"blocks.{layer}.attn.hook_z_{part}" for part in ("bias", "context")]
with model.kv_bias(bias):
    _, cache = model.run_with_cache(tokens, names_filter=names)
from_prompt, context = (cache[name][0].norm(dim=-1) for name in names)
share = (from_prompt / (from_prompt + context)).mean(dim=-1)
coloured_tokens(details.text, share, title=f"share of the prompt in layer {layer}'s attention", unit="mean over heads")

# %% [markdown]
# ## A tidy table
#
# Every analysis returns one: a row an observation, a column a variable.

# %%
table.sort_values("ablation_kl", ascending=False, ignore_index=True).head(8)
