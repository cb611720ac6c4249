"""The short causal convolution in front of a recurrent layer, with the rows that it carries over."""

from kvlens.checks import doors
from kvlens.ops.short_convolution.convolution import ShortConvolutionOutput, short_convolution
from kvlens.ops.short_convolution.naive import naive_short_convolution

__all__ = ["ShortConvolutionOutput", "naive_short_convolution", "short_convolution"]

doors(__name__)
