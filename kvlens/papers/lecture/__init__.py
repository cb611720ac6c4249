r"""LECTURE: the transformer, and functions learned in context.

Vitercik 2024, Stanford MS&E 236 Lecture 16, *Transformers*.

# The question

A prompt contains examples of a function, $P = (x_1, f(x_1), \dots, x_N, f(x_N), x')$. The transformer $T$ was not trained on this $f$,
but should predict $T(P) \approx f(x')$. Then it has learned an algorithm rather than a function. Is it least squares? Ridge regression?

# Symbols and equations

| lecture | here |
|---|---|
| eq. 1: $T(P) \approx f(x')$ | `kvlens.tasks.RegressionTask`, `kvlens.model.HookedKVRegressor`; `kvlens.papers.lecture.function_classes` tests which algorithm it is |
| least squares, ridge | `kvlens.papers.lecture.regression_baselines` |
| eq. 2-4: attention weights, $Y = \mathrm{Softmax}(X X^T)\, X$ | `kvlens.ops.softmax_attention.naive_softmax_attention` with the same $X$ as queries, keys and values |
| sec. 2.1: $W^{(q)}, W^{(k)}, W^{(v)}$ | TransformerLens' ``W_Q``, ``W_K``, ``W_V`` |
| sec. 2.2: heads, $W^{(o)}$ | ``n_heads``, ``W_O`` |
| sec. 2.3: the layer, $\mathrm{MLP}(Y(X) + X)$ | ``normalization_type=None`` and ``attention_dir="bidirectional"`` in `kvlens.HookedKVTransformerConfig` |
| sec. 3: the layer is equivariant under permutations of its input | `kvlens.papers.lecture.equivariance` |
| sec. 3: positions as an index or as a share of the length | `kvlens.papers.lecture.equivariance` |
| sec. 3: learned and sinusoidal positions | ``positional_embedding_type="standard"`` or ``"sinusoidal"``; none at all is ``"none"`` |

# Differences between the notes and kvlens

| place | in the notes | here |
|---|---|---|
| eq. 3 and sec. 2.1 | scores are not divided by $\sqrt{D}$ | ``use_attn_scale=False`` gives that; the default divides, as models do in practice |
| sec. 2.3 | the layer's output is that of the MLP, without a residual connection around it | TransformerLens adds the MLP's output to the stream |
| sec. 3 | equivariance is stated for the layer | it requires bidirectional attention: a causal mask alone breaks it, even without positional embeddings (`kvlens.papers.lecture.equivariance` measures both) |
"""  # noqa: E501

from kvlens.papers.paper_claims import read_claims, table_in

CLAIMS = read_claims(__file__)
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{table_in(__file__)}"
