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
| slides, hypothesized arguments: the share of the bias, an edit of one fact | `kvlens.papers.iclca.stored_bias` |
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

from kvlens.papers.paper_claims import read_claims, table_in

CLAIMS = read_claims(__file__)
"""What the paper claims, in its order, in the form of `kvlens.papers.paper_claims`."""

__doc__ = f"{__doc__}\n# Claims\n\n{table_in(__file__)}"
