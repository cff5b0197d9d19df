"""A function by torch.compile, for what is many small passes over memory and should be one.

It is compiled when it is first called. Where nothing can be compiled (no Triton, no compiler), it is called
as it is, after a warning: slower, and the same numbers up to the order of sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch


class Fused:
    """`what` is the subject of the warning."""

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        self._function, self._what = function, what
        self._run: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # slow to import, and needed by no one else

        if self._run is None:
            self._run = torch.compile(self._function)
        try:
            return self._run(*arguments)
        except TorchDynamoException as error:
            warnings.warn(f"{self._what} is computed unfused, which is slower: {error}", stacklevel=2)
            self._run = self._function
            return self._function(*arguments)
