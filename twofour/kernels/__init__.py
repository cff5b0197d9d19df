"""Implementations of the operators in ops.py, each registered when its module is imported.

`reference` is plain torch and always there.
"""

from twofour.kernels import reference

__all__ = ["reference"]
