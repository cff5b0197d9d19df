"""twofour: 2:4 structured sparsity for PyTorch, from a dense checkpoint to a packed model.

    import twofour
    from transformers import AutoModelForCausalLM

    twofour.prune_(model)                 # at most two of every four neighbouring weights stay
    twofour.pack_(model)                  # stored in 9/16 of the bytes
    twofour.save(model, "out")
    AutoModelForCausalLM.from_pretrained("out")

The names are loaded when they are first used: importing the package is cheap and touches no GPU. It also
tells transformers, now or whenever that is imported, how to load packed checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from twofour._import_hook import register_when_imported
from twofour.errors import InputError, TwoFourError
from twofour.version import __version__

if TYPE_CHECKING:
    from twofour.advise.advice import advise as advise
    from twofour.io.check import check as check
    from twofour.io.load import load as load
    from twofour.io.pack import pack_ as pack_
    from twofour.io.quantize import quantize_ as quantize_
    from twofour.io.save import save as save
    from twofour.nn.fuse import fuse_ as fuse_
    from twofour.nn.fuse import unfuse_ as unfuse_
    from twofour.prune.model import prune_ as prune_
    from twofour.recover.masks import hold_masks as hold_masks
    from twofour.recover.train import recover_ as recover_
    from twofour.report.page import report as report

_HOME = {
    "advise": "twofour.advise.advice",
    "check": "twofour.io.check",
    "fuse_": "twofour.nn.fuse",
    "hold_masks": "twofour.recover.masks",
    "load": "twofour.io.load",
    "pack_": "twofour.io.pack",
    "prune_": "twofour.prune.model",
    "quantize_": "twofour.io.quantize",
    "recover_": "twofour.recover.train",
    "report": "twofour.report.page",
    "save": "twofour.io.save",
    "unfuse_": "twofour.nn.fuse",
}

__all__ = [
    "InputError",
    "TwoFourError",
    "__version__",
    "advise",
    "check",
    "fuse_",
    "hold_masks",
    "load",
    "pack_",
    "prune_",
    "quantize_",
    "recover_",
    "report",
    "save",
    "unfuse_",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'twofour' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


register_when_imported()
