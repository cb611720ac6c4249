"""Converting a softmax model's prompt: exactly with all its keys, or approximately with a known error (ICLCA sec. 5, ICLAA).

**A conversion method.** A conversion method for softmax models is a frozen dataclass: its fields are its options, its docstring
documents them, and `fit` returns the bias. `fit` gets a `Teacher` with the exact conversion (`teacher.exact.bias`: every key
and value of the prompt) and, for methods that need it, reference text. The base class `Approximation` has the options for that
text, and records the fit and its measured errors in `bias.fit`.

```python
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from kvlens.checks import Within, checked
from kvlens.conversion import Approximation, Teacher
from kvlens.kv_bias import KVBias


@checked
@dataclass(frozen=True, kw_only=True)
class LastKeys(Approximation):
    '''Keep only the prompt's last keys.

    Attributes:
        n_keys: number of keys per head.
    '''

    name: ClassVar[str] = "last"

    n_keys: Annotated[int, Within(1, 4096)] = 8

    def fit(self, teacher: Teacher) -> KVBias:
        exact = teacher.exact.bias
        near = exact.features.distance <= self.n_keys  # the last token of each prompt is at distance 1
        return replace(exact, b_D=exact.b_D * near, b_KV=exact.b_KV * near[..., None])
```

`convert_prompt(model, prompt, method=LastKeys(n_keys=4))` works as it is. A method that keeps a number of keys derives from
`FewKeys` (`n_features`, `ratio` and their refusals), or from `KeptKeys` if it chooses them by a score, with weights of 1
(`kvlens/conversion/softmax`); `without=` and padding leave tokens out, whose `b_D` is 0. To add it to kvlens itself, give it a
file there and a line in `kvlens/conversion_methods.py`, which adds the shorthand `method="last", n_keys=4` and `kvlens report
--method last` (whose `--features` needs the class attribute `shorthand = {"n_features": "n_keys"}`, as in `FewKeys`); export it
beside the others in `kvlens/conversion/softmax/__init__.py` and `kvlens/conversion/__init__.py`, and name it in
`convert_prompt`'s docstring. Lists of all methods: `tests/conversion/test_methods.py`, `test_long_prompts.py`,
`tests/bridge/test_approximations.py`, and `METHODS` of `kvlens/papers/iclca/compaction.py` for the table in
`tests/benchmarks/results/fewer_keys.md`. Unused keys are zeroed here, not removed, so the tensors keep their size. Its test
compares it with a known result: here, keeping all 12 keys is exact.

```python
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, convert_prompt

sizes = dict(n_layers=2, d_model=16, d_head=8, n_ctx=64, d_vocab=20, act_fn="gelu", seed=0, device="cpu", dtype=torch.float64)
model = HookedKVTransformer(HookedKVTransformerConfig(**sizes))
prompt = torch.arange(12)
exact = convert_prompt(model, prompt)
texts = dict(n_continuations=4, continuation_length=8)
errors = []
for n in (2, 6, 12):
    bias = convert_prompt(model, prompt, method=LastKeys(n_keys=n, **texts))
    assert (bias.b_D != 0).sum(dim=-1).unique().tolist() == [n]
    assert bias.fit.method == "last" and bias.fit.settings["n_keys"] == n
    errors.append(float(bias.fit.answers.logits_error))
assert torch.equal(bias.b_KV, exact.b_KV) and errors[2] < 1e-11 < min(errors[:2])
```
"""

from kvlens.checks import doors
from kvlens.conversion.softmax.attention_matching import AttentionMatching
from kvlens.conversion.softmax.convert import convert_softmax_prompt
from kvlens.conversion.softmax.expected_attention import ExpectedAttention
from kvlens.conversion.softmax.free_features import EluPlusOne, Learned, RandomProjections, Taylor
from kvlens.conversion.softmax.kept_keys import H2O, KeptKeys, SnapKV, StreamingLLM
from kvlens.conversion.softmax.kvzip import KVzip
from kvlens.conversion.softmax.landmark import Landmark
from kvlens.conversion.softmax.method import Approximation, ConversionMethod, Exact
from kvlens.conversion.softmax.methods import METHODS, method_of, option_names
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.conversion.softmax.teacher import Teacher

__all__ = [
    "H2O",
    "METHODS",
    "Approximation",
    "AttentionMatching",
    "ConversionMethod",
    "EluPlusOne",
    "Exact",
    "ExpectedAttention",
    "KVzip",
    "KeptKeys",
    "Landmark",
    "Learned",
    "RandomProjections",
    "SnapKV",
    "StreamingLLM",
    "Taylor",
    "Teacher",
    "TextOptions",
    "convert_softmax_prompt",
    "method_of",
    "option_names",
]

doors(__name__)
