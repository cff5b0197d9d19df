"""What 2:4 would bring to a model on a GPU, told before anything is pruned.

gpus.py holds ceilings, products.py the time of one product, layers.py the layers of a model without its
weights, steps.py a whole prefill or decode step, advice.py puts them together and sentences.py into words.
The room and its verb have the same name, so the module itself can be called: `twofour.advise(…)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verb(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from twofour.advise.advice import advise

        return advise(*arguments, **options)


sys.modules[__name__].__class__ = _Verb
