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
import matplotlib.pyplot as plt
import torch

from analyses import bias_by_head
from kvlens import HookedKVTransformer, convert_prompt

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

# %%
table = bias_by_head(model, model.to_tokens(prompt)[0], tokens[0])
fig, ax = plt.subplots(figsize=(6, 3))
image = ax.imshow(table.pivot(index="layer", columns="head", values="ablation_kl"), cmap="Blues")
ax.set(xlabel="head", ylabel="layer", yticks=range(model.cfg.n_layers))
fig.colorbar(image, label="KL when the head forgets the prompt, nats")
plt.show()

# %% [markdown]
# ## Look at the pattern
#
# Linear attention has a pattern too, computed only when something asks for it. Its entries may be negative: RoPE turns the
# features after the feature map made them positive. The pattern shows the text alone; what a head reads from the prompt
# comes through the bias, and `hook_z_context` and `hook_z_bias` hold the two parts of its output.

# %%
names = [f"blocks.{layer}.attn.hook_{name}" for name in ("pattern", "z_context", "z_bias")]
with model.kv_bias(bias):
    _, cache = model.run_with_cache(tokens, names_filter=names)
pattern, context, from_prompt = (cache[name][0] for name in names)
labels = model.to_str_tokens(tokens[0])
largest = float(pattern.abs().max())
fig, axes = plt.subplots(1, len(pattern), figsize=(14, 3), sharey=True)
for index, ax in enumerate(axes):
    image = ax.imshow(pattern[index], cmap="RdBu", vmin=-largest, vmax=largest)
    ax.set_title(f"head {index}")
    ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=6)
axes[0].set_yticks(range(len(labels)), labels, fontsize=6)
fig.colorbar(image, ax=axes, fraction=0.01)
plt.show()
share = from_prompt.norm(dim=-1) / (from_prompt.norm(dim=-1) + context.norm(dim=-1))
print("share of each head's output that comes from the prompt, last token:", share[-1].numpy().round(2))

# %% [markdown]
# ## A tidy table

# %%
table.sort_values("ablation_kl", ascending=False).head(8)
