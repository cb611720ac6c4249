r"""KVSA: keys and values are mixed with those of the previous token, so that one layer can implement an induction head.

Xu, Cheng, Wang, Chen 2024, *KV Shifting Attention Enhances Language Modeling*.

# The idea in three lines

Each head learns two numbers for its keys and two for its values,

$$\hat k_i = \alpha_1 k_i + \alpha_2 k_{i-1}, \qquad \hat v_i = \beta_1 v_i + \beta_2 v_{i-1}$$

and attends with these.

With $\alpha = (0, 1)$ and $\beta = (1, 0)$ a query finds the token *after* an earlier occurrence of its own
token, and copies it: an induction head, in one layer.

# Symbols

| paper | here |
|---|---|
| $\alpha_1, \alpha_2$ (keys) | columns 0 and 1 of ``k_shift_coef``; hook point ``hook_k_shift_coef`` |
| $\beta_1, \beta_2$ (values) | columns 0 and 1 of ``v_shift_coef``; hook point ``hook_v_shift_coef`` |
| Shift: drop the last token, prepend zero | `kvlens.ops.kv_shift.kv_shift`; the zeros are its ``state``, which a converted prompt replaces |
| $\hat K$, $\hat V$ | hook points ``hook_k_shifted``, ``hook_v_shifted``; ``hook_k``, ``hook_v`` stay the raw projections |
| $\sigma$; $M$, the causal mask | TransformerLens' ``attn_scale``; the causal mask |
| $m$, $p^{(1)}$, $p^{(2)}$: ALiBi slopes | ``slope`` of `kvlens.ops.induction.induction_head` |
| vanilla | a model without a `kvlens.KVShiftConfig` |

# Equations

| equation | here |
|---|---|
| eq. 1-3, property 1: virtual heads $A^{h2} A^{h1}$ | tests of the paper's page, on a model (claims 1 and 2) |
| eq. 4-6: KV shifting attention | `kvlens.ops.kv_shift.naive_kv_shift` (the reference implementation), `kvlens.ops.kv_shift.kv_shift`; in a model ``kv_shift=`` `kvlens.KVShiftConfig` |
| sec. 2.2: initialization, $\alpha_1, \beta_1 \sim U(0, 1)$, the others 1 minus them | `kvlens.ops.kv_shift.initial_shift_parameter` with ``init="uniform"`` |
| sec. 4.7: gate, clamp, only keys or only values, windows | ``parametrization``, ``keys``, ``values``, ``window`` of `kvlens.KVShiftConfig`; `kvlens.ops.kv_shift.coefficients_from_parameter` |
| definition 1, eq. 7: the function IH | `kvlens.ops.induction.naive_induction_head`, `kvlens.ops.induction.induction_head` |
| theorem 1, eq. 8: two plain layers approach IH; theorem 2, eq. 9: one shifted head is IH | `kvlens.papers.kvsa.induction_exact` |
| theorem 3, eq. 10-12, app. C: the loss landscape | `kvlens.ops.induction.naive_landscape_loss`, `kvlens.ops.induction.landscape_loss` |
| figure 1: depth and width | `kvlens.papers.kvsa.induction_depth`, `kvlens.papers.kvsa.induction_width`; task `kvlens.tasks.InductionTask` (app. D) |
| sec. 3.2 and 5: heads that start near (0, 1), locating induction heads | `kvlens.papers.kvsa.induction_heads` |
| figure 2, sec. 3.2 with $T = 2$: gradient descent on the landscape | `kvlens.papers.kvsa.landscape` |
| figure 3, sec. 3.3: n-grams | `kvlens.papers.kvsa.ngram`, task `kvlens.tasks.NgramTask` |
| figure 5, sec. 4.4: learning rates | `kvlens.papers.kvsa.learning_rate` |
| figures 6 and 7, sec. 4.5: sizes | `kvlens.papers.kvsa.scaling` |
| table 4, sec. 4.6: the trained coefficients | `kvlens.papers.kvsa.coefficients` |
| figure 8, sec. 4.7: variants | `kvlens.papers.kvsa.variants` |
| figure 9, app. H: hops | `kvlens.papers.kvsa.hops`, task `kvlens.tasks.HopsTask` |
| table 7, app. I: arithmetic | `kvlens.papers.kvsa.arithmetic`, task `kvlens.tasks.ArithmeticTask` |
| app. J: queries shifted too, the shift elsewhere | ``queries=True`` of `kvlens.KVShiftConfig`, `kvlens.papers.kvsa.induction_width` |

# Settings as printed, and here

| setting | sec. 4.1, table 6, app. G (1.5 billion parameters) | `variants`, `learning-rate` and `scaling`, scale small |
|---|---|---|
| layers, width, MLP | 28, 2,048, 5,504 | 2, 64 (32 and 128 in `scaling`), four times the width |
| blocks | Llama's: RMSNorm, a gated MLP with SiLU | LayerNorm, an MLP with GELU |
| vocabulary | 36,000 | 300 |
| context | 2,048 tokens | 64 tokens |
| base of RoPE | 100,000 | 10,000 |
| tokens | 10 billion | 1.2 million |
| learning rate | 2e-4, constant after 1,000 steps of warm-up | the best of 5e-3 and 1e-2, a cosine to a tenth of it after 2 % of the steps |
| AdamW | betas 0.9 and 0.95, weight decay 0.1 | betas 0.9 and 0.99, weight decay 0.01 |
| clipping | not mentioned | gradients at a norm of 1; none for fig. 5c |

`kvlens.papers.kvsa.models` has table 6 whole, as configs and training settings (``PRINTED_SIZES``); with two embeddings these models have 1.565, 2.889,
6.772, 13.058 and 19.014 billion parameters, the shift included. Those of training that do not depend on size are set by ``--set 'training={"schedule": "constant", "betas": [0.9, 0.95], "weight_decay": 0.1,
"max_grad_norm": Infinity}'``; fig. 5c was run so. The toy models of app. G train at 2e-4 after 1,000 steps, 4,096 sequences a step; `induction-depth` and `induction-width`
take 128.

# Misprints and open points

| place | printed | correct |
|---|---|---|
| app. F, inference code | after the prefill, the *shifted* last key and value are kept as the previous ones | the raw ones must be kept; otherwise decoding differs from the full forward pass |
| table 5 and eq. 10 | rows $i-1$ and $T$ hold $e^{\alpha_2}$ | $e^{\alpha_1}$; then the loss agrees with direct simulation to 1e-15 |
| fig. 6, caption | steps of 0.5M tokens (1.5 and 6.7 billion parameters) and 1M (13 billion) | 1M and 2M: sec. 4.1, and table 6's GPUs times sequences |
| sec. 4.1 | 1,000 steps of warm-up; "Llama's original vocabulary size of 36000" | 600 and 3,000 at 2.9 and 19 billion (table 6); Llama's is 32,000 |
| definition 1, theorem 2 | IH sums over $s = 2, \dots, L-1$ | attention also sees $s = 1$ and $s = L$; the equality holds for the sum over all visible tokens |
| app. A, the bound | $4 \lVert I / \sigma \rVert e^{-p} / (1 - e^{-p})$ for any input | of entries of at most 1 in size; $R$ in size, $R^3$ times that |
| app. E, code of figure 2 | ``a2+beta2``, and a call with one argument too many | ``a2*beta2``, as in eq. 10 |
| the first token | has no predecessor: zeros | its shifted value is $\beta_1$ times its own value, which is why ``fold_value_biases`` is refused for shifted models |
"""  # noqa: E501

from kvlens.papers.paper_claims import read_claims, table_in

CLAIMS = read_claims(__file__)
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{table_in(__file__)}"
