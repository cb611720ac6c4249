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

from kvlens.papers.paper_claims import claims_table, read_claims

CLAIMS = read_claims(r"""
introduction, eq. 1 | T(P) is close to f(x') for functions that the transformer was not trained on
    function-classes | holds | linear functions: relative error 0.022 after 6 examples in 3 dimensions | with more examples than dimensions
    function-classes | holds | trained on another class, against the best of least squares, ridge and nearest neighbors: trigonometric functions 0.34 against 0.39, decision trees 0.36 against 0.74, two-layer ReLU networks 0.31 against 0.43 | a transformer trained on a class
    function-classes | inconclusive | exponential functions 0.16 against 0.18 | a transformer trained on a class
introduction | "Is it ridge regression, ordinary least-squares, or something else?"
    function-classes | inconclusive | which error curve is nearest: least squares' is, within the noise of the prompts; no gap tells it from ridge regression's | the error of a transformer trained on linear functions falls
    function-classes | does not hold | that it is least squares: its predictions are 0.029 and 0.031 (mean square, two trainings) from those of least squares, 0.017 and 0.019 from ridge regression's with penalty 0.03, the best of seven: less by 0.012, standard error 0.0015 and 0.0012 | the transformer predicts as least squares does
introduction | a transformer trained on linear functions does as well as least squares (after Garg et al.)
    function-classes | does not hold | largest gap of the relative error, over all numbers of examples: 0.117, where 0.05 is allowed | a transformer trained on linear functions does as well
introduction | outside of the training distribution it does as least squares does (after Garg et al.)
    function-classes | holds | 0.158 with points 3 times as far out and 0.028 in one orthant, 0.0095 as trained; with noise 2.36 after 3 examples (double descent) | points 3 times as far out; examples in one orthant; noise on the answers
    function-classes | does not hold | skewed covariance, which should be worse: 0.013, 0.0095 as trained | points with a skewed covariance
sec. 1 | a homonym's vector depends on its context
    tests/papers/lecture/test_function_classes.py::test_a_token_has_one_embedding_and_a_vector_for_each_context | holds | for any transformer with attention, by construction: one embedding, and behind the layers a vector for each context; without attention one vector |
sec. 3 | "the transformer architecture is equivariant with respect to input permutations"
    function-classes | holds | without a mask and positions, T(pi X) - pi T(X) is 1.2e-15 of T(X) at most, in float64 | the plain transformer is permutation equivariant
sec. 3 | positions "break permutation equivariance"
    function-classes | holds | learned positions: at least 0.32 of T(X); sinusoidal 0.44; a causal mask without positions, which the notes do not mention, 0.41 | learned positions make it; sinusoidal positions make it; a causal mask and no positions
sec. 3 | positions as an index 1, 2, 3 "may limit generalization to longer inputs"
    function-classes | inconclusive | not trained far enough: after 4,000 steps the error is 0.55 of always saying 0, where sinusoidal ones have 0.07; on longer prompts 0.73, and 0.99 where prompts of training have the indices of the end of longer ones, never seen | an index 1, 2, 3 as position limits; because of indices never seen
sec. 3 | positions as a number in (0, 1): "each position's encoding will depend on the entire sequence length"
    tests/papers/lecture/test_function_classes.py::test_the_numbers_of_positions_by_a_pencil | holds | by construction: the first of 3 positions is 1/4, of 5 is 1/6 |
    function-classes | does not hold | that it harms longer prompts: error 0.064 after 9 examples in prompts of 16 points, 0.052 in those of 10, as in training; 0.052 after 15 | a share of the length means; a share of the length does not carry over
sec. 3 | learned positions end with the training's length, sinusoidal ones do not
    function-classes | holds | all longer prompts are refused with learned positions, by construction | learned positions end where the table ends
    function-classes | inconclusive | sinusoidal: they are read, at an error of 0.22 after 15 examples, 0.07 after 9 in training; tested against twice that and 0.05 | sinusoidal positions have no limit
""")  # noqa: E501
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{claims_table(CLAIMS)}"
