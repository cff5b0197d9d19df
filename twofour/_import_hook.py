"""Tell transformers and PEFT of our layers, without importing either.

transformers learns how to load packed checkpoints, PEFT how to put adapters on packed layers. Neither has
entry points for that and both take seconds to import, so `import twofour` must not do it. If the module that
must know us is loaded already we register at once, otherwise a finder on `sys.meta_path` lets its
import run as usual and registers right after it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

#: Whose import we wait for, and our module that registers with it when it is imported in turn.
_REGISTRATIONS = {"transformers.quantizers.auto": "twofour.io.huggingface", "peft": "twofour.nn.peft"}


def register_when_imported() -> None:
    for theirs, ours in _REGISTRATIONS.items():
        if theirs in sys.modules:
            importlib.import_module(ours)
        elif not any(isinstance(finder, _Finder) and finder.theirs == theirs for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(theirs, ours))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs = theirs
        self.ours = ours

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.theirs:
            return None
        # Every time until it is really imported: transformers only asks first whether peft could be.
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                if spec.loader is not None:
                    self._register_after(spec.loader)
                return spec
        return None

    def _register_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(self.ours)

        loader.exec_module = exec_module
