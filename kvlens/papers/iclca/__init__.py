r"""ICLCA: a prompt becomes bias terms of linear attention, exactly.

Chen, Hu, Jin, Lee, Kawaguchi 2024, *Exact Conversion of In-Context Learning to Model Weights in Linearized-Attention Transformers*.

# The idea in three lines

A head of linear attention depends on earlier tokens only through two running sums,

$$A_i = A_{i-1} + \tilde\phi(k_i)\, v_i^T, \qquad D_i = D_{i-1} + \phi(k_i), \qquad z_i = \frac{\tilde\phi(q_i)^T A_i}{\phi(q_i)^T D_i}$$

where $\tilde\phi(x) = R_i\, \phi(x)$ includes the rotary matrix.

After a prompt of $M$ tokens, all information about it is in the pair $(A, D)$. A model that starts from this pair no longer needs the
prompt (their theorem 4.5):

$$b'_{KV} = R_{-M}\, b_{KV} + \sum_{j=1}^{M} R_{j-M}\, \phi(k'_j)\, v_j'^T, \qquad b'_D = b_D + \sum_{j=1}^{M} \phi(k'_j)$$

# Symbols

| paper | here |
|---|---|
| $X'$, the ICL prompt of $M$ tokens | the ``prompt`` of `kvlens.convert_prompt`; ``n_prompt_tokens`` of the `kvlens.KVBias` |
| $b_{KV}$, $b_D$ | ``b_KV`` and ``b_D`` of `kvlens.KVBias`; hook points ``hook_b_kv``, ``hook_b_d``, and ``hook_b_keys`` for a softmax bias |
| $\phi$ | `kvlens.components.FEATURE_MAPS`; hook points ``hook_phi_q``, ``hook_phi_k`` |
| $D_1(Q_i)^T D_2(X)$ | ``normalizer="kernel"``: $\phi(q_i)^T D_i$; ``"none"``: 1; hook point ``hook_normalizer`` |
| $R_{\Theta, m}$ | `kvlens.ops.rotary.rotate` by position $m$ |
| $A$, the key-value matrix | ``kv`` of `kvlens.ops.linear_attention.LinearAttentionState`; $D$ is its ``k_sum`` |
| $M_{old, ICL}$, $M_{old, no\ ICL}$, $M_{new, no\ ICL}$ | with the prompt; without; converted |

# Equations

| equation | here |
|---|---|
| sec. 4.1, app. A: other W_K and W_V instead of a bias | `kvlens.papers.iclca.direct_conversion` |
| definitions 3.2 and 3.3, eq. 3 and 5: linearized attention, masked | `kvlens.ops.linear_attention.naive_linear_attention` (the reference implementation), `kvlens.ops.linear_attention.parallel_linear_attention`, `kvlens.ops.linear_attention.chunked_linear_attention`, `kvlens.ops.linear_attention.recurrent_linear_attention`; without the mask `kvlens.ops.linear_attention.unmasked_linear_attention`, an op alone |
| eq. 6: the key-value matrix | `kvlens.ops.linear_attention.final_state` |
| eq. 9-11, theorem 4.1: plain linear attention | ``feature_map="identity"``, ``normalizer="none"`` |
| eq. 12-13: RoPE after the feature map, with bias | ``rotary_placement="after"``; the sum of `kvlens.ops.linear_attention.read_state` for the bias and the text's own part |
| eq. 14-16, theorem 4.5, and algorithm 1 (ICLCA) | `kvlens.convert_prompt`; one layer's step is `kvlens.ops.linear_attention.carry_state` |
| eq. 17-18 and algorithm 2 (ICLAA, app. D.1): softmax attention | `kvlens.convert_prompt` with ``method=`` "random" (theirs), "learned" with ``kernel=`` "phi_mlp" (that of the slides), "hedgehog" or "split" (kvlens' own), "elu_plus_one", "landmark" (after Attention Matching, Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284), "exact"; `kvlens.ops.softmax_attention.join_bias` |
| eq. 19: the recurrence; the bias is its initial state | `kvlens.ops.linear_attention.recurrent_linear_attention` |
| sec. 7: Mamba and H3 | `kvlens.ops.selective_scan`, which `kvlens.mixers.layers.Mamba1Mixer` runs on the bridge; `kvlens.ops.h3`, of which no public checkpoint class is known |
| app. D: the prompt's term in the FFN | `kvlens.ops.linear_attention.ffn_with_state` |
| eq. 22-24: the rotary matrix and its group law | `kvlens.ops.rotary.naive_rotate`; moving a state's origin is `kvlens.ops.linear_attention.rebase_state` |
| assumption 4.4 (1a): elu + 1; (1b): random features | `kvlens.ops.feature_maps.elu_plus_one`, `kvlens.ops.feature_maps.random_features` |
| assumption 4.4 (2): RetNet | ``feature_map="identity"``, ``normalizer="none"``; their RetNet has no decay. Here it can: `kvlens.ops.linear_attention.retnet_decay` |
| table 1: relative error of the logits | `kvlens.papers.iclca.conversion_error` |
| table 2, sec. 6.2: in-context accuracy on bigrams | `kvlens.papers.iclca.conversion_accuracy`, task `kvlens.tasks.BigramTask` |
| sec. 6.4, tables 3 to 5: text with the prompt, converted, and without | `kvlens.papers.iclca.gpt2_text`; by method and size `kvlens.papers.iclca.softmax_conversion`; next to methods of KV-cache compression `kvlens.papers.iclca.compaction` |
| figure 1, sec. 6.3: training with the bias terms | `kvlens.papers.iclca.trainable_bias` |

# Misprints and open points

| place | printed | correct |
|---|---|---|
| algorithm 1, step (d) | the prompt's own output is computed with the *new* $b'_{KV}$ | with the old $b_{KV}$ and $b_D$; as printed, the conversion has an error of 16 to 60 % |
| eq. 23 | $R_{a+b} = R_a + R_b$ | the product, $R_{a+b} = R_a R_b$ |
| eq. 18 against algorithm 2, step (c) | $b_D$ is rotated in only one of them, and RoPE is applied outside $\phi$ | for softmax features, RoPE is applied inside $\phi$, in both the numerator and the normalizer |
| algorithm 2, step (d) | the similarity is rotated in the numerator only | the same similarity in both: softmax attention with RoPE |
| KV shift | not treated | the shift state (the prompt's last raw keys and values) is part of the bias: without it the conversion has an error of 4 to 16 % |
| decay, padding, absolute positions, prompts after prompts | not treated | see `kvlens.convert_prompt`: $b_{KV}$ decays by $\gamma^M$; without RoPE after the map, $R$ drops out and ``position_offset`` grows by $M$ |
"""  # noqa: E501

from kvlens.papers.paper_claims import claims_table, read_claims

CLAIMS = read_claims(r"""
sec. 1 | "The converted extra bias term only amounts to about 1% of the total number of parameters"
    conversion-error --scale paper | holds | between 0.5 and 2 % at three of table 1's sizes: 1.4 % with six heads a layer, 0.7 and 0.5 % with 12 and 16. The share is one in 12 times the number of heads, at any size | the bias is about 1 %
    conversion-error --scale paper | does not hold | 2.1 % at 205,000 and at 2 million parameters, with four heads a layer (the paper names no heads) | the bias is about 1 %
sec. 1 | "such extra weights can be combined freely to incorporate more in-context prompts or thrown away to recover the original model"
    tests/model/test_laws.py::test_prompts_one_after_another_equal_their_concatenation | holds | prompts one after another, at 1e-11 in float64; that a bias without a prompt is the model without it: tests/conversion/test_convert.py |
sec. 4.1, app. A, slides | "ICL conversion cannot be achieved through modifying existing weights"
    direct-conversion | holds | what the best W_K and W_V leave of the prompt's term (of its norm, mean square over random texts): all of it at X = 0; 83 % on texts of 1 token, 36 % of 16, 19 % of 64, 53 % of 1 to 64. No linear map of X^T X, of which they are a special case, leaves less than 33, 8.8, 4.4 and 50 % | other weights W_K and W_V cannot
th. 4.1, eq. 10-11 | the conversion of plain linear attention
    tests/model/test_laws.py::test_a_converted_prompt_replaces_the_prompt_in_one_pass_and_in_pieces | holds | identity features without a normalizer among the models there, at 1e-11 in float64 |
assumption 4.2 | without the causal mask "a conversion satisfying one input prompt may not satisfy another"
    tests/ops/test_unmasked_attention.py::test_a_bias_replaces_the_prompt_in_one_layer_or_if_the_prompt_does_not_see_the_text | holds | without the mask a bias replaces the prompt for every text in one layer, at 1e-11 in float64; in two it is right for the text that it was made with, and off by more than 1 % for another. Where the prompt's tokens do not see the text, one bias serves all texts in two layers too |
assumption 4.3 | relative positions are "not an absolute necessity"
    tests/model/test_laws.py::test_a_converted_prompt_replaces_the_prompt_in_one_pass_and_in_pieces | holds | learned, sinusoidal and no positions are among the models there: ``position_offset`` of the bias takes the place of the transformation |
th. 4.5, eq. 14-16 | the conversion with RoPE and a normalizer
    tests/model/test_laws.py::test_a_converted_prompt_replaces_the_prompt_in_one_pass_and_in_pieces | holds | in one pass and in pieces, at 1e-11 in float64 |
sec. 6.1, table 1 | "the conversions are indeed exact to the numerical rounding errors"
    conversion-error --scale paper | holds | 5.1e-7 to 1.0e-6 at five sizes, where the float32 forward pass itself errs by 5.0e-7 to 9.1e-7 (table under "How exact"); exact to the last bit with sums in float64 | the conversion is exact, up to the rounding of float32; the conversion is exact up to rounding: the ratio; the conversion is exact: the error is only rounding
sec. 8 | "As the model size increases a factor of 10, the rounding errors increase by approximately a factor 2"
    conversion-error --scale paper | does not hold | by a factor of 1.2 for each factor of 10 (5.1e-7 to 1.0e-6 over four decades: two in all); the paper's own table has 1.5, 1.9, 2.1 and 2.5. At scale small, over three sizes: by 1.35, 1.34 to 1.36 over 100 pairs, tested against 2 | ten times the size doubles the rounding error
sec. 6.2, table 2 | in-context accuracy 99.95 % with the prompt and converted, 2.23 % without
    conversion-accuracy | holds | 36,560 of 36,583 correct with the prompt and converted, no prediction differs; 2 % without the prompt, which is chance | the model has learned to use its context; the converted model is as accurate; the conversion is exact: none; without the prompt accuracy falls to chance; the conversion is exact up to rounding: at most twice
    conversion-accuracy | holds | on the paper's sequences, after training further on them (600 steps of 16): 4,866 of 4,873 correct with the prompt and converted (99.86 %, significantly above 99.45 %), no prediction differs; 85 of 3,776 (2.25 %) without the prompt, where chance is 2.13 % | the model has learned to use its context; the converted model is as accurate
sec. 6.3, fig. 1 | "adding these bias terms makes training slightly faster"
    trainable-bias | inconclusive | loss averaged over training, without minus with: -0.001 nats, -0.015 to 0.013; 0.025 would have been found in 80 % | the model with bias terms trains slightly faster
sec. 6.3, fig. 1 | the architecture "accomplishes the induction head task better by itself"
    trainable-bias | inconclusive | accuracy at the end, with minus without: -0.001, -0.006 to 0.003 (99.7 % without); 0.008 would have been found in 80 % | the model with bias terms reaches a higher in-context accuracy
sec. 6.4 | "The relative error of the logits is improved from 16.56% to 9.17%"
    gpt2-text | holds | `docs-gpt2`, twelve prompts, each with its own features: 24.4 % without the prompt, 11.7 % with 256 random features (0.116 to 0.140 less); logits less their mean 27.7 and 13.1 %. The weights of GPT-2 were not at hand | without the prompt the logits are off; converted they are nearer to those with the prompt; the part that changes predictions
    softmax-conversion --scale paper | holds | stories260K, 128-token prompts, eight contexts: 9.5 % without, 8.9 and 7.8 % with 64 and 4,096 random features, a weak method (table under "What fewer keys cost") | random features recover part
sec. 6.4, tables 3 to 5 | "the conversion method can capture the information in the ICL prompt"
    gpt2-text | holds | `docs-gpt2`: share of next tokens as with the prompt 0.821 with random features, 0.996 with half of the keys fitted, 0.728 without (0.02 to 0.16, and 0.24 to 0.30 more) | converted the model predicts more of them than without
sec. 6.4 | fitted keys come nearer than random features (ours)
    gpt2-text | holds | `docs-gpt2`: 0.42 % with half of the keys, against 11.7 %; every key kept leaves 2.5e-7 | fitted keys come nearer; rounding, at most
sec. 7, eq. 19 | the bias is the initial state of the recurrence
    tests/ops/test_linear_attention.py | holds | the recurrent form, started from the bias, equals the parallel form with it |
sec. 7 | "we could extend our ICL conversion method to those autoregressive RNN architectures", H3 and Mamba
    tests/bridge/test_hybrid.py::test_states_alone_replace_the_prompt | holds | Mamba and Falcon-Mamba, tiny random models: logits 5e-16 from the prompted ones in float64, the state and the convolution's inputs being the bias; Jamba 7e-16 (tests/bridge/test_exactness.py) |
    tests/ops/test_h3.py::test_a_prompt_is_its_initial_states | holds | H3, at 1e-11 in float64, as an op: no public checkpoint class has it |
sec. 8 | "the precision of our method should always be better than approximating the full softmax with all the tokens"
    gpt2-text | holds | `docs-gpt2`, with the same features: 22.4 % with every token approximated, 11.7 % with the prompt alone (0.084 to 0.130 less, less for each of twelve prompts) | approximating only the prompt errs less
sec. 8 | the conversion is "a potential initialization for existing fine-tuning methods to reduce the number of training steps required"
    softmax-conversion --set distil_steps=60 --set 'distil_rates=[1e-3]' --set distil_texts=48 --set 'random=[64]' --set 'keys=[4]' --set n_texts=4 | holds | `facts-gpt2`, eight contexts: the loss at which a fine-tuning of 60 steps without a bias ends is reached after 0.69 of the steps (0.57 to 0.81) from 64 random features, and after 0.41 (0.28 to 0.55) from four fitted keys; the bias stays attached | it takes fewer steps than without a bias
app. C | starting tokens in the key-value matrix "would just give the same result as the bias term but with more computational cost"
    tests/ops/test_linear_attention.py::test_cut_anywhere_and_resume | holds | the state after tokens stands for them, at 1e-11 in float64. M tokens are M (d_phi + d_head) numbers, the bias d_phi (d_head + 1): more from about M = d_head / 2 on |
app. C | a scaling term, or a change of the input or of the FFN, cannot convert exactly
    - | not tested | considerations, without a number; X = 0 excludes a scaling term as it excludes other weights (sec. 4.1) |
app. D | the term can stand in the FFN of a GPT-J block: FFN(q) + q sum R phi(k) v
    tests/model/test_linear_model.py::test_side_by_side_it_is_the_prompt_and_one_after_the_other_it_is_not | holds | at 1e-11 in float64, with a normalizer of 1 and attention beside the FFN, as the paper says; one after the other it is off |
app. D.1, algorithm 2 | the conversion of softmax attention by random features
    tests/conversion/test_fits.py | holds | features come near where scores are small, and every key kept is exact; of the sum of scores, algorithm 2 is ``method="random"`` |
slides, naive conversion | fine-tuning on generated answers "cannot achieve exact conversion"
    softmax-conversion --scale paper | holds | a copy with its weights fine-tuned on 96 continuations ends at a divergence of 0.034 nats, eight keys per head at 0.0020 | a few fitted keys come closer
slides | "Prompt tuning may have universal approximation capability": virtual keys as a change of the weights
    weights-to-prompt | inconclusive | that keys reproduce part of a change is significant, that enough of them reproduce all of it is neither shown nor excluded by at most 64. Share of the change of `facts-gpt2`'s logits that is not reproduced on unseen text, mean of six changes, with 1 / 4 / 16 / 64 keys per head: attention, given keys 0.71 / 0.55 / 0.45 / 0.40, free keys 0.57 / 0.44 / 0.38 / 0.36; MLPs, given keys 0.86 / 0.70 / 0.60 / 0.57, free keys 0.69 / 0.55 / 0.48 / 0.47. `stories260K`: attention 0.63 / 0.57 / 0.54 / 0.54 and 0.50 / 0.47 / 0.46 / 0.46, MLPs 0.72 / 0.69 / 0.68 / 0.68 and 0.59 / 0.55 / 0.55 / 0.55. All are significantly below 1; with random signs, 1.03 to 1.04 are not. All with 96 texts; with 384, an outside measurement gave 0.36 instead of 0.39 at 64 keys. The prompt that the weights were trained on leaves 1.12 and 1.39, 0.89 and 1.02 | virtual keys reproduce part; if there is nothing to learn; the weights that learned a prompt
sec. 5 | answers about a prompt stay right when few keys are kept (ours)
    facts-recall | inconclusive | with a quarter as many polished keys as a story has tokens 494 of 500 stay right (97.4 to 99.4 %); with the closed form 476, fewer than 99 % | the model answers from the story; the exact conversion keeps all; 99; choosing budgets and fitting keeps more; fewer than any value of the kind
sec. 5 | kvlens' fitted keys against methods that keep keys (ours)
    compaction --scale paper | holds | 0.42 / 0.39 / 0.40 times the error of Attention Matching's pursuit at 8 / 16 / 32 keys (table under "The field's methods") | the ratio is below 1; answers about the story stay right
    softmax-conversion --scale paper | holds | fitted keys against the most attended ones without a fit, at 8 / 16 / 32 keys: 1.76 / 1.00 / 0.49 % against 5.4 / 4.0 / 2.5 % | the ratio is below 1
""")  # noqa: E501
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{claims_table(CLAIMS)}"
