"""The induction head as a function, and the loss landscape of the one-layer shifted head (KVSA th. 1-3)."""

from kvlens.checks import doors
from kvlens.ops.induction.induction_head import induction_head
from kvlens.ops.induction.landscape import landscape_loss
from kvlens.ops.induction.naive import naive_induction_head, naive_landscape_loss

__all__ = ["induction_head", "landscape_loss", "naive_induction_head", "naive_landscape_loss"]

doors(__name__)
