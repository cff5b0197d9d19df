"""8 and 4 bits on top of 2:4: what a weight is stored as, how it is rounded, how activations are helped."""

from twofour.quantize.rounding import Quantized, Rounding, quantize_matrix
from twofour.quantize.schemes import SCHEMES, Scheme, scheme_named
from twofour.quantize.smooth import smooth_

__all__ = ["SCHEMES", "Quantized", "Rounding", "Scheme", "quantize_matrix", "scheme_named", "smooth_"]
