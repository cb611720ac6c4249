"""Where kvlens computes in another way than TransformerLens, and how its modules come into a model that is already built."""

from typing import Any

from torch import nn

from kvlens.components.softmax_form import form_of


def runs_lean(cfg: Any) -> bool:
    """Whether kvlens may compute in another way than TransformerLens: in all but softmax models in the eager form."""
    return cfg.attention == "linear" or form_of(cfg) == "fused"


def is_hooked(*modules: nn.Module) -> bool:
    """Whether anything is hooked to one of ``modules`` themselves."""
    return any(bool(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks) for m in modules)


class TakesOver:
    """Mixed in before a class of TransformerLens, to put itself in the place of one that is already built."""

    @classmethod
    def of(cls, module: nn.Module) -> Any:
        """This class with everything that ``module`` holds; ``module`` is to be dropped."""
        new = cls.__new__(cls)
        new.__dict__ = module.__dict__
        return new
