"""The mathematics of kvlens as pure tensor functions: no module, no hook, no TransformerLens.

One folder per term of the papers. Each holds ``naive.py`` (the slow, obvious reference, one line per equation) next to the
fast forms, which share its signature and its layout ``batch pos head d``:

- ``kv_shift``: keys and values mixed with their predecessors (KVSA);
- ``feature_maps``: phi, with phi(q).phi(k) instead of exp(q.k) (ICLCA);
- ``rotary``: R_m, the rotation by position (RoPE), whose group law makes the conversion exact;
- ``linear_attention``: the recurrence whose initial state is the KV bias, in three equal forms (ICLCA eq. 12-13, 19);
- ``delta_rule``: the gated delta rule and Kimi delta attention, and the state that a prompt leaves behind in them;
- ``lightning``: linear attention with one decay per head (MiniMax, RetNet), with the same argument names;
- ``short_convolution``: the convolution in front of such layers, and the rows that it carries over;
- ``softmax_attention``: naive and fused, with its normalizer, and a KV bias joined to it in log space (ICLCA sec. 5);
- ``softmax_features``: phi of such a bias: virtual keys, random, Taylor and learned features (ICLCA sec. 5 and 6.4);
- ``landmarks``: which of a prompt's keys to keep, and with which weights and values;
- ``attention_variants``: the variants of attention that follow from the dual model (DUAL sec. 4, app. D);
- ``dual``: attention as one step of gradient descent (DUAL th. 3.1, 3.2, B.1, B.2);
- ``induction``: the induction head as a function, and its training loss landscape (KVSA th. 1-3).

Each function imported from a package here is checked against the shapes in its signature.
"""
