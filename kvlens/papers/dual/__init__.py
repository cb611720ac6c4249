r"""DUAL: the output of a head is one step of gradient descent on a representation-learning loss.

Ren, Liu 2024, *Towards Understanding How Transformers Learn In-context Through a Representation Learning Lens*.

# The idea in three lines

Consider a head at one query. Split the tokens that it sees into demonstrations $H_D$ and tokens on the query's side $H_T$. Write
$\kappa(k, q)$ for the unnormalized score and $D$ for the normalizer. The dual model $f(z) = W\, \phi(z)$ starts from the tokens in $H_T$ and
makes one step:

$$W_0 = \frac{1}{D} \sum_{j \in H_T} v_j\, \phi(k_j)^T, \qquad L(W) = -\frac{1}{\eta D} \sum_{j \in H_D} v_j^T\, W \phi(k_j), \qquad W_1 = W_0 - \eta\, \frac{\partial L}{\partial W}$$

Then $f(q)$ with $W_1$ is the head's output at the query, exactly, for every learning rate $\eta$ (theorem 3.1).

# Symbols

| paper | here |
|---|---|
| $X$, the demonstration tokens; $X'$, the query tokens | ``n_demonstrations`` and ``query_pos`` of `kvlens.dual.DualModel.from_head` |
| $\phi$, the feature map of the softmax kernel | ``kernel``: "exact" needs no feature map, because everything is expressed through the kernel: `kvlens.ops.dual.softmax_kernel`, `kvlens.ops.dual.feature_kernel` |
| $D$, a constant | the head's own normalizer at the query: `kvlens.dual.DualModel.normalizer` |
| $W_V x$ and $\phi(W_K x)$: labels and inputs | `kvlens.dual.DualModel.labels`, `kvlens.dual.DualModel.inputs` |
| $\eta$ | ``eta`` of `kvlens.dual.DualModel.step` |

# Equations

| equation | here |
|---|---|
| eq. 1 and 5-7: softmax attention through a kernel | `kvlens.ops.dual.softmax_kernel`, `kvlens.ops.softmax_attention.naive_softmax_attention` |
| eq. 3-4: a linear layer after gradient descent is linear attention | `kvlens.ops.dual.weight_after`, `kvlens.ops.dual.predict` |
| eq. 8: the dual model | `kvlens.dual.DualModel` |
| eq. 9, theorem 3.1 (app. A): loss, step, equality | `kvlens.ops.dual.naive_dual` (the reference implementation), `kvlens.ops.dual.dual_loss`, `kvlens.dual.DualModel.after_one_step`; for all heads `kvlens.analyses.dual_losses`, `kvlens.analyses.dual_demonstrations`; `kvlens.papers.dual.dual_equivalence` |
| eq. 10-11, theorem 3.2 (app. C): generalization bound | `kvlens.ops.dual_layers.bound_terms`, `kvlens.dual.DualModel.bound`; for a growing number of demonstrations, also with negative samples, `kvlens.analyses.dual_bound` |
| eq. 12-13, app. D.1: regularized attention | `kvlens.components.attention_variant.Regularised` |
| lemma D.1: alpha that makes the attention block of full rank | `kvlens.ops.attention_variants.full_rank_limit` |
| eq. 14, app. D.2: augmented keys and values | `kvlens.components.attention_variant.Augmented` |
| eq. 15 and 34, app. D.3: negative samples | `kvlens.components.attention_variant.Negative`, `kvlens.ops.attention_variants.naive_negative` |
| eq. 33, app. D.1: the ridge solution instead of the step | `kvlens.components.attention_variant.Ridge`, `kvlens.ops.attention_variants.ridge_attention` |
| eq. 20-23, theorem B.1: a whole transformer layer | `kvlens.dual.DualLayer`, `kvlens.ops.dual_layers.fold_mlp`; `kvlens.papers.dual.dual_layer` |
| eq. 24-25, theorem B.2: several attention layers, PrefixLM | `kvlens.ops.dual_layers.dual_of_prefix_lm`, `kvlens.ops.dual_layers.through_layers` |
| sec. 5, app. D.2, D.3 and E: the variants on regression, a convolution, other negatives | `kvlens.papers.dual.dual_variants` |
| app. E.5: the variants in a BERT, keys and values augmented beside the projections | `kvlens.dual.bert`, ``parallel`` of `kvlens.components.attention_variant.Augmented`; `kvlens.papers.dual.bert_variants` |
| app. E.1: random features | `kvlens.papers.dual.random_features` |
| app. E.4: rank of $W_{FFN} W_V$ | `kvlens.ops.dual_layers.rank_bound` |
| app. F, eq. 35-38: linear regression by one step | `kvlens.papers.dual.gradient_descent` |

# Misprints and open points

| place | printed | correct |
|---|---|---|
| eq. 9 and 19 | $D$ is a constant that normalizes the scores | for linear attention with RoPE after the feature map it is the head's own normalizer, with $\phi$ unrotated; using the rotated one is wrong by a factor of 19 to 260 on real models |
| theorem B.1 | the labels become $W_{FFN} v_j$ | $W_0$ must become $W_{FFN} W_0$ as well: keeping it gives an error of 30 % |
| app. B.1 | neither residual connections nor LayerNorm | the norm's scale is frozen; the residual stream and the other heads become part of the bias |
| eq. 15 and 34 against the remark in sec. 5 | one set of negatives for each label in one, for each query in the other | the two differ by 46 %: ``per="label"`` or ``per="query"`` |
| eq. 12-13 against app. D.1 | $W_0$ scaled by $1 - \alpha$ in one, the token's own value subtracted in the other | these are two models, with different names here |
| eq. 9 | called a cosine similarity | it is linear in $W$ and has no minimum; its decrease is reported as a logarithm, together with cosines and the share of the output |
| app. C.2, the bound with negative samples | falls as the share of negatives grows | kvlens' own (`kvlens.ops.dual_layers`, over the effective features $\phi(k_j) - \beta\, \overline{\phi(k_n)}$, $\lvert v \cdot f \rvert \le (1 + \beta) \rho^2$) rises with the first negative and falls with more: its logarithm is 6.28 without, 6.50 with one and 6.43 with 16 on a head of ``facts-linear`` |
| theorem 3.2 | $O(\cdot)$ without constants, for tokens drawn independently | tokens of text are not independent, so the value is not a guarantee |
"""  # noqa: E501

from kvlens.papers.paper_claims import read_claims, table_in

CLAIMS = read_claims(__file__)
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{table_in(__file__)}"
