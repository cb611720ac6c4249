"""Features that are not keys: method="random", "taylor", "elu_plus_one" and "learned" (ICLAA in ICLCA sec. 5 and 6.4).

    b_KV = sum_j phi(k_j) v_j^T        b_D = sum_j phi(k_j)

as for linear attention, on one log-scale per head. Softmax scores of real models reach 100. An affordable number of random
features cannot represent them (they are measured to be little better than leaving the prompt out), and a second-order
polynomial is worse than leaving it out: it is accurate only for scores well below 1, which few heads of trained models have.
Features trained on the prompt can represent them, at the cost of the training.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.learned import Kernel, train_features
from kvlens.conversion.softmax.method import Approximation, needs_plain_scores
from kvlens.conversion.softmax.prompt_pass import ConvertedExactly
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError
from kvlens.kv_bias import EluFeatures, KVBias, LearnedFeatures, RandomFeatures, SoftmaxFeatures, TaylorFeatures
from kvlens.model.protocol import ReadsPrompts
from kvlens.ops.feature_maps import draw_projections
from kvlens.ops.softmax_features import elu_log_features, random_log_features, taylor_features


class FreeFeatures(Approximation):
    """A method whose features are not keys: for models that use plain scores exp(q.k)."""

    def check_model(self, model: ReadsPrompts) -> None:
        needs_plain_scores(model, self.name)


@checked
@dataclass(frozen=True, kw_only=True)
class RandomProjections(FreeFeatures):
    """Positive random features (FAVOR+, Choromanski et al. 2021); one draw per layer and key-value head. For comparison.

    Attributes:
        n_features: number of features per key-value head.
        random_feature_kind: "orthogonal" (in blocks of d_head), or "iid".
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: ICLAA, algorithm 2.
    """

    name: ClassVar[str] = "random"

    n_features: Annotated[int, Within(1, MOST_ASKED)]
    random_feature_kind: Literal["orthogonal", "iid"] = "orthogonal"

    def fit(self, teacher: Teacher) -> KVBias:
        keys, generator = teacher.keys(0).keys, torch.Generator().manual_seed(self.seed)
        sizes = keys.shape[1], self.n_features, keys.shape[-1], self.random_feature_kind
        projection = torch.stack([draw_projections(*sizes, generator) for _ in range(teacher.n_layers)]).to(keys)
        logs = [random_log_features(_keys(teacher, i), w, _scale(teacher, i)) for i, w in enumerate(projection)]
        return _summed(teacher.exact, logs, RandomFeatures(projection))


@checked
@dataclass(frozen=True, kw_only=True)
class Learned(FreeFeatures):
    """Features trained on the reference queries and the prompt's keys (:mod:`kvlens.conversion.softmax.learned`).

    Attributes:
        n_features: number of features per key-value head.
        kernel: "split", kvlens' own, with one map for queries and one for keys; "phi_mlp", that of ICLCA's slides, with one map
            for both; "hedgehog", whose features come in pairs of opposite signs.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the features are trained on the reference text.

    Source: ICLCA's slides ("various linearization methods"); Hedgehog, Zhang et al. 2024.
    """

    name: ClassVar[str] = "learned"
    fits_on_text: ClassVar[bool] = True

    n_features: Annotated[int, Within(1, MOST_ASKED)]
    kernel: Kernel = "split"

    def __post_init__(self) -> None:
        if self.kernel == "hedgehog" and self.n_features % 2:
            raise KVLensError(
                f"learned: kernel='hedgehog' has features in pairs, so n_features must be even, got {self.n_features}"
            )

    def fit(self, teacher: Teacher) -> KVBias:
        trained = train_features(teacher, self.n_features, self.kernel)
        queries = trained.queries
        return _summed(teacher.exact, list(trained.log_keys), LearnedFeatures(queries.weight, queries.offset))


@checked
@dataclass(frozen=True, kw_only=True)
class EluPlusOne(FreeFeatures):
    """phi(x) = elu(x / sqrt(scale)) + 1, the kernel of linear attention, which grows linearly, not as exp(q.k). For comparison.

    Attributes:
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Katharopoulos et al. 2020, which ICLCA sec. 8 names among "more sophisticated kernels".
    """

    name: ClassVar[str] = "elu_plus_one"

    def fit(self, teacher: Teacher) -> KVBias:
        logs = [elu_log_features(_keys(teacher, layer), _scale(teacher, layer)) for layer in range(teacher.n_layers)]
        return _summed(teacher.exact, logs, EluFeatures(teacher.keys(0).keys.shape[-1]))


@checked
@dataclass(frozen=True, kw_only=True)
class Taylor(FreeFeatures):
    """The second-order Taylor polynomial, with error |q.k / scale|^3 / 6, for scores below 1. For comparison.

    It approximates exp(10) = 22,026 by 61; the normalizer is then equally wrong, and the output worse than without the prompt.

    Attributes:
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.
    """

    name: ClassVar[str] = "taylor"

    def fit(self, teacher: Teacher) -> KVBias:
        exact, b_kv, b_d, log_scale = teacher.exact, [], [], []
        for layer in range(teacher.n_layers):
            phi = taylor_features(_keys(teacher, layer), _scale(teacher, layer))
            logs = _masked(exact, phi.log_scale[..., None]).squeeze(-1)
            top = logs.amax(dim=1)
            features = phi.features * (logs - top[:, None]).exp()[..., None]
            b_kv.append(torch.einsum("bjgr,bgjd->bgrd", features, exact.bias.b_KV[layer]))
            b_d.append(features.sum(dim=1))
            log_scale.append(top)
        new = dict(b_KV=torch.stack(b_kv), b_D=torch.stack(b_d), log_scale=torch.stack(log_scale))
        return replace(exact.bias, **new, features=TaylorFeatures(teacher.keys(0).keys.shape[-1]))  # type: ignore[arg-type]


def _summed(exact: ConvertedExactly, logs: list[Float[Tensor, "batch key kv_head r"]], features: SoftmaxFeatures) -> KVBias:
    """b_KV and b_D for positive features that are given as logarithms."""
    b_kv, b_d, log_scale = [], [], []
    for layer, log_phi in enumerate(logs):
        log_phi = _masked(exact, log_phi)
        top = log_phi.amax(dim=(1, 3))
        phi = (log_phi - top[:, None, :, None]).exp()
        b_kv.append(torch.einsum("bjgr,bgjd->bgrd", phi, exact.bias.b_KV[layer]))
        b_d.append(phi.sum(dim=1))
        log_scale.append(top)
    stacked = dict(b_KV=torch.stack(b_kv), b_D=torch.stack(b_d), log_scale=torch.stack(log_scale))
    return replace(exact.bias, **stacked, features=features)  # type: ignore[arg-type]


def _masked(exact: ConvertedExactly, log_phi: Tensor) -> Tensor:
    return log_phi if exact.real is None else log_phi.masked_fill(~exact.real[:, :, None, None], -torch.inf)


def _keys(teacher: Teacher, layer: int) -> Float[Tensor, "batch key kv_head d_key"]:
    return teacher.keys(layer).keys.transpose(1, 2)


def _scale(teacher: Teacher, layer: int) -> float:
    return teacher.keys(layer).rule.scale
