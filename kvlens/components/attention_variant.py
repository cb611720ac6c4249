"""The attention variants of DUAL sec. 4 and app. D, as settings of a model.

    cfg = HookedKVTransformerConfig(..., attention_variant=AttentionVariantConfig(regularised=Regularised(alpha=-0.5)))
    cfg = HookedKVTransformerConfig(..., attention_variant={"negative": {"k": 3, "beta": 0.2}, "augmented": {"values": True}})

They can be combined, except that ridge replaces the gradient step that regularised and negative modify.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from kvlens.checks import Count, Finite, Within, checked, from_fields
from kvlens.errors import KVLensError


@checked
@dataclass(frozen=True)
class Regularised:
    """Subtract a share of each token's own value.

    Args:
        alpha: strength, of either sign; 0 is plain attention.
        form: ``self_attention`` z_i - alpha v_i (app. D.1), ``normalised`` the same over 1 - alpha, or ``one_step``
            z_i - alpha p_ii v_i (eq. 13: W_0 scaled by 1 - alpha, where the query alone is H_T).
    """

    alpha: Finite
    form: Literal["self_attention", "normalised", "one_step"] = "self_attention"

    def __post_init__(self):
        if self.form == "normalised" and self.alpha == 1:
            raise KVLensError("Regularised: form='normalised' divides by 1 - alpha, so alpha must not be 1")


@checked
@dataclass(frozen=True)
class Augmented:
    """Pass keys and values through one MLP per key-value head, after projection, norm and shift, before RoPE (eq. 14).

    With ``parallel``, add c MLP(x) there instead, where x is what the projection reads: the parallel adapter of app. E.5.

    Args:
        keys, values: whether keys and values are augmented.
        depth: number of layers; one layer is act(W x), two are W_2 act(W_1 x).
        width: width of the hidden layers; None means 2 d_head, and beside a projection twice its width, as in app. E.5.
        activation: ``gelu``, ``relu``, ``silu`` or ``tanh``.
        parallel: c in W x + c MLP(x); the last layer starts at 0, so that a trained model is unchanged at first. None for
            MLP(W x).
    """

    keys: bool = False
    values: bool = False
    depth: Annotated[int, Within(1, 64)] = 1
    width: Annotated[int, Within(1, 2**20)] | None = None
    activation: Literal["gelu", "relu", "silu", "tanh"] = "gelu"
    parallel: Finite | None = None


@checked
@dataclass(frozen=True)
class Negative:
    """Push away from the lowest-scored tokens (eq. 15, 34; the remark in sec. 5).

    Args:
        k: number of visible tokens to use (all of them if there are fewer), or a fraction of them in (0, 1].
        beta: their total weight.
        per: ``query``: p_ij - (beta / k) [j in N_i]; ``label``: v_j - beta mean_{N_j} v.
    """

    k: Count | Annotated[float, Within(above=0, most=1)]
    beta: Finite
    per: Literal["query", "label"] = "query"


@checked
@dataclass(frozen=True)
class Ridge:
    """The regularized least-squares fit instead of one gradient step (eq. 33).

    Args:
        strength: lambda, positive: at 0 the system may have no solution.
    """

    strength: Annotated[float, Within(above=0)]


@dataclass(frozen=True)
class _GivenVariants:
    """The variants as passed by the user: dicts are converted to the settings classes."""

    regularised: Regularised | Mapping[str, object] | None = None
    augmented: Augmented | Mapping[str, object] | None = None
    negative: Negative | Mapping[str, object] | None = None
    ridge: Ridge | Mapping[str, object] | None = None

    def __post_init__(self):
        kinds: dict[str, type] = dict(regularised=Regularised, augmented=Augmented, negative=Negative, ridge=Ridge)
        for name, kind in kinds.items():
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, from_fields(kind, value))
        if self.ridge is not None and (self.regularised is not None or self.negative is not None):
            raise KVLensError(
                "attention_variant: ridge replaces the gradient step that regularised and negative change; it combines with "
                "augmented alone"
            )


class AttentionVariantConfig(_GivenVariants):
    """The variants of a model's attention; each may be given as a dict of its fields."""

    regularised: Regularised | None
    augmented: Augmented | None
    negative: Negative | None
    ridge: Ridge | None

    @property
    def needs_pattern(self) -> bool:
        """Whether all scores must be computed, because negatives are chosen among them."""
        return self.negative is not None

    @property
    def wants_own_share(self) -> bool:
        """Whether p_ii is needed."""
        return self.regularised is not None and self.regularised.form == "one_step"

    @property
    def why_no_kv_bias(self) -> str | None:
        """Why a prompt of a model with this variant has no KV bias; None if it has one."""
        if self.negative is not None:
            return "negative samples are chosen among all tokens' scores, but a bias has no scores for the prompt's tokens"
        if self.ridge is not None:
            return "ridge attention also needs sum phi(k) phi(k)^T of the prompt, which b_KV and b_D do not hold"
        return None

    def to_json(self) -> dict[str, object]:
        """The variants that are set, as dicts of their fields."""
        return {name: value for name, value in asdict(self).items() if value is not None}
