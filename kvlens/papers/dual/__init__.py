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
| eq. 12-13, app. D.1: regularized attention | `kvlens.model.attention_variant.Regularised` |
| lemma D.1: alpha that makes the attention block of full rank | `kvlens.ops.attention_variants.full_rank_limit` |
| eq. 14, app. D.2: augmented keys and values | `kvlens.model.attention_variant.Augmented` |
| eq. 15 and 34, app. D.3: negative samples | `kvlens.model.attention_variant.Negative`, `kvlens.ops.attention_variants.naive_negative` |
| eq. 33, app. D.1: the ridge solution instead of the step | `kvlens.model.attention_variant.Ridge`, `kvlens.ops.attention_variants.ridge_attention` |
| eq. 20-23, theorem B.1: a whole transformer layer | `kvlens.dual.DualLayer`, `kvlens.ops.dual_layers.fold_mlp`; `kvlens.papers.dual.dual_layer` |
| eq. 24-25, theorem B.2: several attention layers, PrefixLM | `kvlens.ops.dual_layers.dual_of_prefix_lm`, `kvlens.ops.dual_layers.through_layers` |
| sec. 5, app. E: the variants on regression | `kvlens.papers.dual.dual_variants` |
| app. E.5: the variants in a BERT, keys and values augmented beside the projections | `kvlens.dual.bert`, ``parallel`` of `kvlens.model.attention_variant.Augmented`; `kvlens.papers.dual.bert_variants` |
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

from kvlens.papers.paper_claims import claims_table, read_claims

CLAIMS = read_claims(r"""
th. 3.1, figs. 3, 11, 12 | after one step the dual model's prediction "is exactly equivalent to the ICL inference result"
    dual-equivalence | holds | linear, trigonometric and exponential task, three kernels: largest relative difference 6.6e-16; with the labels in another order 0.61, 0.09 and 0.13 (median) | after one step the dual model predicts; a wrong training set is recognized
    tests/dual/test_dual_model.py | holds | heads of every kind of model here, at 1e-11 in float64, and every shipped model |
sec. 3.2 | of the heads of a model, those with a large step carry in-context learning (ours)
    dual-heads | inconclusive | 33 of 36 rank correlations over the heads of six models are not significant; three are, and positive: log of the loss' decrease with the effect of ablation 0.38 (`bigram-linear`), share of the step with ablation and with induction 0.66 (`docs-shift`). About 0.7 of 36 would be by chance | heads with a large step
th. 3.2, eq. 11, app. C | the generalization error is at most O(w rho sqrt(d_o Tr K_S) / N + rho^2 sqrt(log(1 / delta) / N))
    tests/dual/test_bound.py::test_the_measured_error_is_below_the_bound_and_falls | holds | 200 draws of 10, 40 and 160 demonstrations from a list of 500 tokens, so that the error is known: at most 0.010, 0.005 and 0.003 of the bound, taken without a constant, which is therefore loose here |
sec. 3.3 | "as the number of demonstration (and therefore the number of demonstration tokens) increases, the generalization error decreases"
    tests/dual/test_bound.py::test_the_measured_error_is_below_the_bound_and_falls | holds | mean error 1.18, 0.39 and 0.11 for these numbers: about as 1 / N, where the bound falls as the root of that |
app. C.2 | "as the ratio of negative samples increases, the generalization error decreases"
    tests/dual/test_bound.py::test_the_first_negative_raises_the_bound_and_more_lower_it | does not hold | kvlens' bound, which is another one (see below), rises with the first negative and falls with more: its logarithm is 6.28 without, 6.50 with one and 6.43 with 16 on a head of `facts-linear` |
eq. 13, app. D.1 | regularized attention is one step of the regularized loss
    tests/ops/test_attention_variants.py::test_regularized_is_one_step_of_the_regularized_loss | holds | at 1e-11 in float64 |
app. D.1, lemma D.1 | "There exists some" alpha' "such that, for any" 0 < alpha < alpha', "the attention block will become full-rank"
    tests/ops/test_attention_variants.py::test_a_small_alpha_makes_any_pattern_full_rank | holds | patterns of rank 6 of 7, causal and not: full rank for alpha of either sign up to 0.9 of alpha', which is the smallest eigenvalue's size but 0 |
eq. 33 | ridge attention is the optimum of the ridge loss
    tests/ops/test_attention_variants.py::test_ridge_against_the_loops_and_the_weights_written_out | holds | at 1e-11 in float64 |
sec. 5, fig. 3 | "when" alpha < 0, regularized attention "converges faster"
    dual-variants | holds | linear task, log of the held-out error over the nearer plain layer's, mean over training, alpha -0.5: -5.79, -6.66 to -4.92 | with alpha < 0 it converges faster
sec. 5, fig. 3 | with alpha > 0 "the regularized models converges a poorer result"
    dual-variants | does not hold | linear task, the same of the last error, alpha 0.5: -4.25, -5.65 to -2.85: better | with alpha > 0 the layer converges
sec. 5, fig. 3 | augmented keys alone show "slightly faster convergence"
    dual-variants | inconclusive | linear task, mean over training: -0.15, -0.82 to 0.52; 1.10 would have been found in 80 % | augmented keys alone converge slightly faster
sec. 5, fig. 3 | keys augmented by two layers: "a better solution"
    dual-variants | inconclusive | linear task, last error: -1.00, -2.33 to 0.32; 2.19 would have been found in 80 % | a two-layer augmentation of keys
sec. 5, fig. 3 | negatives: "the potential to achieve slightly faster convergence with appropriate settings"
    dual-variants | inconclusive | linear task, the best of four settings on six other seeds (k 3, beta 0.5), mean over training: -0.31, -1.37 to 0.75; 1.75 would have been found in 80 % | negatives in a suitable setting
app. E.3, fig. 13 | on the linear task "a combination of regularized and augmented modifications is sufficient"
    dual-variants | holds | linear task, last error: -5.91, -7.03 to -4.80 | regularised and augmented together suffice
app. E.3, fig. 13 | on the other two tasks combinations are worse than single changes
    dual-variants | inconclusive | last error over that of the nearer of alpha -0.5 and augmented keys: trigonometric task, both together -0.014, -0.031 to 0.002, with negatives as well +0.007, -0.026 to 0.040; exponential task, both -0.034, -0.100 to 0.032; 0.027, 0.054 and 0.109 would have been found in 80 % | combinations are worse; the paper makes no claim
    dual-variants | does not hold | exponential task, all three: -0.106, -0.189 to -0.024: better; 0.180 of the variance is left, alpha -0.5 alone leaves 0.233, augmented keys alone 0.204 | combinations are worse
app. E.1 | several tasks at once: "challenging for a single attention layer", "disordered predictions"
    dual-variants | holds | linear task, another W for each sequence: 0.69 of the variance left, where one W leaves 0.039 and 0.024; log of the ratio +3.32, 2.09 to 4.55 | several tasks at once
app. E.1, figs. 6 to 8 | with more random features "the approximation performance gradually improves"
    random-features | holds | the output's squared error falls with the number of features, 12 to 3,072, to the power 0.83 (independent), 0.84 (orthogonal), 0.78 (simplex), 600 draws | approximation gradually improves
app. E.1 | "Orthogonal random features or simplex random features can be chosen to achieve better performance theoretically"
    random-features | holds | squared error 18 % lower than with independent ones (log of the ratio 0.20, 0.18 to 0.22), 600 draws; 14 to 21 % at each of five numbers of features | orthogonal random features can do better
    random-features | holds | simplex: 18 % lower than with orthogonal ones (0.20, 0.19 to 0.22), 600 draws; 33 % at 12 features, 6 % at 3,072 | simplex random features can do better
app. E.2.1, fig. 11 | negatives are "worse than the normal model" on the trigonometric task
    dual-variants | holds | last error: +0.079, 0.058 to 0.100 | negatives are worse on the task
app. E.2.1, fig. 11 | augmented values "significantly degrade the model's performance" on the trigonometric task
    dual-variants | holds | last error: +0.156, 0.045 to 0.268 | augmented values degrade the task
app. E.2.1, fig. 11 | with a suitable alpha regularized attention converges "slightly faster" on the trigonometric task
    dual-variants | inconclusive | mean over training, alpha -0.1, the best of five on six other seeds: +0.002, -0.001 to 0.006, so no gain of more than 0.1 % is likely; 0.006 would have been found in 80 % | with a suitable alpha it converges slightly faster
app. E.2.2 | with a suitable alpha regularized attention "converges faster and achieves better result" on the exponential task
    dual-variants | holds | mean over training, alpha 0.5, the best of five on six other seeds: -0.83, -0.96 to -0.70; at the end 0.085 of the variance is left, where plain layers leave 0.211 | with a suitable alpha it converges faster
app. E.2.2, fig. 12 | augmented keys alone are better on the exponential task
    dual-variants | inconclusive | last error: -0.024, -0.167 to 0.118; 0.24 would have been found in 80 % | augmented keys alone are better on the task
app. E.2.2, fig. 12 | augmented values alone are better on the exponential task
    dual-variants | inconclusive | last error: -0.079, -0.312 to 0.154; 0.39 would have been found in 80 % | augmented values alone are better on it
app. E.2.2 | keys and values augmented together: "the training process becomes unstable" on the exponential task
    dual-variants | holds | at the paper's rate of 0.005, one sequence a step, 10,000 steps: the held-out error rises again further than plain attention's with all of 8 seeds, by 0.06 to 0.43 of its logarithm (sum of all rises; mean 0.22, 0.12 to 0.33). With eight other seeds inconclusive (0.23, -0.04 to 0.50). No run diverges | keys and values augmented together become unstable
th. B.1, fig. 14 | a layer of attention and FFN is one step of its dual model
    dual-layer | holds | largest relative difference 1.4e-15; in shipped models with GELU, norm and residual 2.0e-15, where the tangent at the query leaves half of the cases more than 0.75 of the MLP's output to the bias | after one step the dual model with labels W_FFN v; with the tangent at the query; 0 for ReLU
app. B.1, E.4, fig. 14 | W_FFN W_V "exhibits clear low-rank property" where the FFN is narrow, and has full rank where it is wide
    dual-layer | holds | d_model 12 less the bound: 7.4 (7.1 to 7.7) for FFNs of at most d_model, 0 from 4 d_model on, over eight seeds | where the MLP is wide; where the MLP is narrow
th. B.2, eq. 24-25 | several attention layers are a sequence of dual models
    tests/dual/test_dual_layer.py::test_layers_in_a_row_under_prefix_lm_attention | holds | at 1e-11 in float64, for several learning rates |
app. E.5, table 1 | "the best augmented models achieve better performance than the original model across all four datasets"
    bert-variants --model FOLDER | inconclusive | the method alone: a BERT of 6 layers and width 384, 256 sentences from templates, acceptable or not, as GLUE and BERT-base are not at hand. Matthews' correlation on sentences of other templates and words, less plain fine-tuning's (0.37): +0.01, -0.14 to 0.16 (six seeds); 0.27 would have been found in 80 % | augmented values are better
app. E.5 | "except for RTE, the best regularized models outperform the original model"
    bert-variants --model FOLDER | inconclusive | the same, alpha -0.1: -0.07, -0.28 to 0.14; 0.38 would have been found | regularized attention with a small alpha
app. E.5 | "when the absolute value of" alpha "is too large, the model's performance declines significantly"
    bert-variants --model FOLDER | inconclusive | the same, alpha 0.5: -0.01, -0.21 to 0.20; 0.38 would have been found | with too large an alpha
app. E.5 | "the best negative models only outperform the original model on CoLA and STS-B"
    bert-variants --model FOLDER | inconclusive | the same, k 0.2, beta 0.1: -0.09, -0.28 to 0.10; 0.36 would have been found | negatives are better on CoLA
app. E.5 | values alone are "more effective than other methods" of augmentation; combinations are "slightly inferior" to it
    - | not tested | of each variant one setting is fine-tuned, and no combination |
app. F, eq. 35 | von Oswald et al.'s weights are one step of gradient descent on the regression
    gradient-descent | holds | largest relative difference 5.7e-16 over 100 tasks; the step leaves 0.82 of the answer's error (median) | the layer is one step of gradient descent; one step, no more
app. F, eq. 36-37 | and one step of the dual model, whose labels are the residuals
    gradient-descent | holds | largest relative difference 5.8e-16 | the layer is one step of its dual model
""")  # noqa: E501
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{claims_table(CLAIMS)}"
