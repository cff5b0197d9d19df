"""Implementations of the operators in ops.py, each registered when its module is imported.

`reference` is plain torch and always there; `dispatch` chooses among the others on a GPU.
"""

from twofour.kernels import dispatch, reference

__all__ = ["dispatch", "reference"]
