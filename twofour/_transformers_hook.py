"""Register our quantizer with transformers, without importing transformers.

transformers has no entry points for quantizers and takes seconds to import, so `import twofour` must not
do it. Its registry is the module `transformers.quantizers.auto`: if that is loaded already we register
at once, otherwise a finder on `sys.meta_path` lets the import run as usual and registers right after it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY = "transformers.quantizers.auto"


def register_when_imported() -> None:
    if _REGISTRY in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    importlib.import_module("twofour.io.huggingface")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)  # once; and the search below must not find us again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            _register_after(spec.loader)
        return spec


def _register_after(loader: Any) -> None:
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        run(module)
        _register()

    loader.exec_module = exec_module
