"""What `config.json` says about a packed checkpoint, and how a reader without twofour is stopped.

`quantization_config` carries `quant_method: "twofour"`, the format version, the pattern, the scheme, the
packed modules with the shapes of their dense weights, and the steps that made the model.

transformers only *warns* about a quant_method it does not know and then runs on random weights. Two things
stop it, whichever version it is:

* `transformers_weights`, where a config may name its weight file, holds a sentence instead. transformers
  refuses it and prints it. Our quantizer removes it before the files are looked up.
* A *stub*: one packed module also has an empty tensor under its old name, `{module}.weight`. Whatever loads
  tensors by name stops at its shape. (`save_pretrained` drops the first, so this one must stand alone too.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from twofour.errors import InputError
from twofour.quantize.schemes import Scheme, scheme_from_config
from twofour.version import __version__

METHOD = "twofour"
#: 2 came with low-rank compensation, 3 with 8 and 4 bits. A checkpoint is written as the oldest version that
#: has what it needs, for older readers.
FORMAT_VERSION = 3
SENTENCE = "this is a packed 2:4 checkpoint; `pip install twofour`, and `import twofour` before loading it"


def packed_config(
    config: dict[str, Any],
    modules: dict[str, tuple[int, ...]],
    made: list[str],
    lowrank: dict[str, int] | None = None,
    scheme: Scheme | None = None,
) -> dict[str, Any]:
    """A model's config.json with our part added. Modules are named as their tensors are in the files."""
    return {
        **config,
        "transformers_weights": SENTENCE,
        "quantization_config": {
            "quant_method": METHOD,
            "format_version": format_version(lowrank, scheme),
            "pattern": "2:4",
            "scheme": None if scheme is None else scheme.as_config(),
            "modules": {name: list(shape) for name, shape in modules.items()},
            **({"lowrank": lowrank} if lowrank else {}),
            "made": made,
            "twofour_version": __version__,
        },
    }


def made_by(config: dict[str, Any], made: list[str]) -> dict[str, Any]:
    """A packed model's config with the steps that made it told anew."""
    ours = {**config["quantization_config"], "made": made, "twofour_version": __version__}
    return {**config, "quantization_config": ours}


def format_version(lowrank: dict[str, int] | None, scheme: Scheme | None = None) -> int:
    """The oldest version whose readers understand it: one that ignored the compensation would load a worse
    model without a word."""
    if scheme is not None:
        return 3
    return 2 if lowrank else 1


def is_packed(config: dict[str, Any]) -> bool:
    ours = config.get("quantization_config")
    return isinstance(ours, dict) and ours.get("quant_method") == METHOD


def packed_modules(quantization_config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The packed modules and their dense shapes, after refusing what this version cannot read."""
    version = quantization_config.get("format_version")
    if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise InputError(
            f"the checkpoint has format version {version!r}, and twofour {__version__} reads up to "
            f"{FORMAT_VERSION}.",
            hint="Upgrade twofour.",
        )
    if quantization_config.get("pattern") != "2:4":
        raise InputError(f"the pattern {quantization_config.get('pattern')!r} is not 2:4.")
    scheme_of(quantization_config)
    modules = quantization_config.get("modules")
    if not isinstance(modules, dict) or not all(_is_shape(shape) for shape in modules.values()):
        raise InputError("quantization_config.modules must map module names to [out, in] or [O, C, R, S].")
    return {name: tuple(shape) for name, shape in modules.items()}


def scheme_of(quantization_config: dict[str, Any]) -> Scheme | None:
    """How the packed modules, all of them, are quantized; None if they are not."""
    return scheme_from_config(quantization_config.get("scheme"))


def lowrank_ranks(quantization_config: dict[str, Any]) -> dict[str, int]:
    """The rank of each packed module's compensation, for those that have one."""
    ranks = quantization_config.get("lowrank") or {}
    modules = quantization_config.get("modules") or {}
    if not isinstance(ranks, dict) or not all(isinstance(r, int) and r > 0 for r in ranks.values()):
        raise InputError("quantization_config.lowrank must map module names to ranks.")
    if unknown := [name for name in ranks if name not in modules]:
        raise InputError(
            "the config gives it a low-rank compensation but does not pack it.", layer=unknown[0]
        )
    return ranks


def stub(modules: Iterable[str]) -> dict[str, Tensor]:
    """The empty tensor that stops a loader which does not know the format."""
    return {f"{name}.weight": torch.empty(0) for name in sorted(modules)[:1]}


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list | tuple) and len(shape) in (2, 4) and all(isinstance(s, int) for s in shape)
