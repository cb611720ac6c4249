"""The mathematics of kvlens as pure tensor functions: no module, no hook, no TransformerLens.

A concept of the papers is a file. It has the equations at its top, then the naive form (the slow, obvious reference, one line
per equation), then the fast ones: parallel, chunked, recurrent. Its forms share a signature and the layout
``batch pos head d``; ``initial_state`` is what came before, ``output_final_state`` asks for what comes after, and ``scale``
divides scores.

- ``kv_shift``: keys and values mixed with their predecessors (KVSA);
- ``feature_maps``: phi, with phi(q).phi(k) instead of exp(q.k) (ICLCA);
- ``rotary``: R_m, the rotation by position (RoPE), whose group law makes the conversion exact;
- ``linear_attention``: the recurrence whose initial state is the KV bias (ICLCA eq. 12-13, 19);
- ``lightning``: the same with one decay per head (MiniMax, RetNet), with flash-linear-attention's argument names;
- ``delta_rule``: the gated delta rule and Kimi delta attention, and the state that a prompt leaves behind in them;
- ``ssd``, ``selective_scan``, ``h3``: the recurrences of Mamba-2, Mamba-1 and H3;
- ``short_convolution``: the convolution in front of such layers, and the rows that it carries over;
- ``softmax_attention``: with its normalizer, and a KV bias joined to it in log space (ICLCA sec. 5);
- ``softmax_features``: phi of such a bias: virtual keys, random, Taylor and learned features (ICLCA sec. 5 and 6.4);
- ``landmarks``: which of a prompt's keys to keep, and with which weights and values; ``key_scores``: how others choose them;
- ``attention_variants``: the variants of attention that follow from the dual model (DUAL sec. 4, app. D);
- ``dual``, ``dual_layers``: attention as one step of gradient descent (DUAL th. 3.1, 3.2, B.1, B.2);
- ``induction``: the induction head as a function, and its training loss landscape (KVSA th. 1-3).

Each function is checked against the shapes in its signature where it is called from outside kvlens.
"""
