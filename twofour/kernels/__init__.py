"""Implementations of the operators in ops.py, each registered when its module is imported.

`reference` is plain torch and always there; `dispatch` chooses among the others on a GPU, `dispatch_codes`
where weights are quantized.
"""

from twofour.kernels import dispatch, dispatch_codes, reference

__all__ = ["dispatch", "dispatch_codes", "reference"]
