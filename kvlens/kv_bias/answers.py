"""How far a model's answers with a bias are from those with the prompt: errors of logits and of the next-token distribution.

On texts not used for fitting, with logits p (with the prompt), c (converted) and w (without the prompt) at each position:

    logits_error = mean over positions of ||c - p|| / ||p||
    lost_share   = sqrt(sum over positions of ||c - p||^2  /  sum over positions of ||p - w||^2)
    KL           = sum over tokens of softmax(p) (log softmax(p) - log softmax(c)), in nats

``lost_share`` is the fraction of the prompt's effect that is lost: 0 if nothing is lost, 1 if the converted model is as far
from the prompted one as a model that has not read the prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AnswerErrors:
    """The errors of a conversion, for one prompt or each prompt of a batch.

    Attributes:
        logits_error: relative error of the logits, mean over positions.
        lost_share: error of the logits relative to the prompt's effect on them.
        kl_median, kl_95, kl_worst: KL divergence of the next-token distribution, in nats: median, 95th percentile and maximum
            over positions.
        n_texts: number of held-out texts per prompt.
        text_length: number of tokens in each.
        without: what comes before the text "without the prompt": "the prompt's BOS", "what was converted before", or
            "nothing".
    """

    logits_error: Float[Tensor, "*batch"]
    lost_share: Float[Tensor, "*batch"]
    kl_median: Float[Tensor, "*batch"]
    kl_95: Float[Tensor, "*batch"]
    kl_worst: Float[Tensor, "*batch"]
    n_texts: int
    text_length: int
    without: str

    @classmethod
    def of_positions(
        cls,
        error: Float[Tensor, "batch text pos"],
        size: Float[Tensor, "batch text pos"],
        effect: Float[Tensor, "batch text pos"],
        kl: Float[Tensor, "batch text pos"],
        without: str,
    ) -> "AnswerErrors":
        """From ||c - p||, ||p||, ||p - w|| and KL at each position."""
        error, size, effect, kl = (x.double() for x in (error, size, effect, kl))
        tiny = torch.finfo(torch.float64).tiny
        sizes = torch.tensor([0.5, 0.95, 1.0], dtype=torch.float64, device=kl.device)
        median, most, worst = kl.flatten(1).quantile(sizes, dim=1)
        return cls(
            logits_error=(error / size.clamp(min=tiny)).mean(dim=(1, 2)),
            lost_share=(error.square().sum(dim=(1, 2)) / effect.square().sum(dim=(1, 2)).clamp(min=tiny)).sqrt(),
            kl_median=median,
            kl_95=most,
            kl_worst=worst,
            n_texts=kl.shape[1],
            text_length=kl.shape[2],
            without=without,
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "AnswerErrors":
        """The same with ``change`` applied to every measured value."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.to_tensors().items()}
        return replace(self, **changed)

    def to_tensors(self) -> dict[str, Tensor]:
        """The measured values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}

    def to_json(self) -> dict[str, Any]:
        """The fields that describe the texts."""
        return {name: getattr(self, name) for name in ("n_texts", "text_length", "without")}

    def to_dict(self) -> dict[str, Any]:
        """All fields; measured values as numbers for one prompt, as lists for a batch."""
        return {**{name: tensor.tolist() for name, tensor in self.to_tensors().items()}, **self.to_json()}

    @classmethod
    def read(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "AnswerErrors":
        """Rebuild from the results of :meth:`to_json` and :meth:`to_tensors`."""
        known = {**plain, **tensors}
        return cls(**{f.name: known[f.name] for f in fields(cls)})

    def summary(self) -> str:
        """A short description of the error of the logits and the share lost; means for a batch."""
        error, lost = float(self.logits_error.mean()), float(self.lost_share.mean())
        prompts = f", mean of {self.logits_error.numel()} prompts" if self.logits_error.dim() else ""
        return f"logits off by {error:.2%}, {lost:.3g} of the prompt's effect lost{prompts}, held out"
