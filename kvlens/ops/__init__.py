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
- ``ssd``, ``selective_scan``, ``rwkv``, ``h3``: the recurrences of Mamba-2, Mamba-1, RWKV-5 and 6, and H3;
- ``short_convolution``: the convolution in front of such layers, and the rows that it carries over;
- ``softmax_attention``: with its normalizer, and a KV bias joined to it in log space (ICLCA sec. 5);
- ``softmax_features``: phi of such a bias: virtual keys, random, Taylor and learned features (ICLCA sec. 5 and 6.4);
- ``pursuit``: which of a prompt's keys to keep; ``landmarks``: with which weights and values;
- ``attention_matching``: both, after Zweiger et al. 2026;
- ``attention_variants``: the variants of attention that follow from the dual model (DUAL sec. 4, app. D);
- ``dual``, ``dual_layers``: attention as one step of gradient descent (DUAL th. 3.1, 3.2, B.1, B.2);
- ``induction``: the induction head as a function, and its training loss landscape (KVSA th. 1-3).

Each function is checked against the shapes in its signature where it is called from outside kvlens.

**An op.** An op stands in the file of its concept in `kvlens/ops`, named as in the paper, with the equation at its top. First
write the obvious form, one line per equation:

```python
import torch
from jaxtyping import Float
from torch import Tensor


def naive_running_mean(x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
    '''m_i = (x_0 + ... + x_i) / (i + 1), one token at a time.'''
    means = [x[:, : i + 1].mean(dim=1) for i in range(x.shape[1])]
    return torch.stack(means, dim=1)
```

then the fast one, with the same arguments and the same result. `checked` checks each call against the signature, so wrong
shapes raise a readable error:

```python
from kvlens.checks import checked


@checked
def running_mean(x: Float[Tensor, "batch pos d"]) -> Float[Tensor, "batch pos d"]:
    '''m_i = (x_0 + ... + x_i) / (i + 1).

    Args:
        x: one row per token.

    Returns:
        At each position the mean of the rows up to it.
    '''
    counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)
    return x.cumsum(dim=1) / counts[:, None]
```

and a test in `tests/ops`: the two agree, on axes of different lengths, and a property holds that every correct answer has.

```python
from precision import LAW, relative_error


def test_running_mean():
    x = torch.randn(2, 11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert relative_error(running_mean(x), naive_running_mean(x)) < LAW
    later_changed = torch.cat([x[:, :7], torch.zeros_like(x[:, 7:])], dim=1)
    assert torch.equal(running_mean(later_changed)[:, :7], running_mean(x)[:, :7])  # causal
```

The file's last line has its calls checked where they come from outside kvlens. Ops import torch, einops, jaxtyping and a few
modules of the standard library (`tests/test_imports.py`). What a paper defines belongs on its page in `kvlens/papers` too.
"""
