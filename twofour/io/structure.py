"""The layers of a checkpoint, from its config alone: a model on the meta device costs no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from twofour.calibrate.experts import open_experts_, weight_conversions
from twofour.errors import InputError
from twofour.io.checkpoint import CONFIG, Checkpoint
from twofour.select import Layer, LeftAlone, Selection, require_layers, select

#: Why experts are left alone whose files hold the stacked tensor itself, as few do.
IN_ONE_TENSOR = "the files hold all experts in one tensor: prune and pack the model in memory, from Python"

#: What a weight may be stored as, in safetensors' words.
FLOATING = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class CheckpointLayers:
    """The chosen layers by the name of their weight tensor in the files, and what is left alone."""

    by_tensor: dict[str, Layer]
    left: tuple[LeftAlone, ...]


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The model that the config describes, without weights."""
    import transformers

    path = checkpoint.directory / CONFIG
    architecture = architecture_of(checkpoint)
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
        for ours in ("quantization_config", "transformers_weights"):
            if hasattr(config, ours):
                delattr(config, ours)
        with torch.device("meta"):
            if architecture is not None:
                return architecture(config)
            return transformers.AutoModel.from_config(config)
    except Exception as error:  # a value that fits nothing can fail as anything, anywhere in a model's code
        kind = checkpoint.config.get("model_type")
        raise InputError(
            f"transformers cannot make a model of {path} (model_type {kind!r}): {said(error)}.",
            hint="Repair it, or for a model of your own use twofour.prune_ and twofour.pack_ from Python.",
        ) from error


def architecture_name(checkpoint: Checkpoint) -> str | None:
    """What config.json calls the class of the model that was saved; None if it does not say."""
    names = checkpoint.config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise InputError(f"{checkpoint.directory / CONFIG}: architectures is {names!r}, not a list of names.")
    return names[0] if names else None


def architecture_of(checkpoint: Checkpoint) -> Any:
    """The class of the model that was saved; None if the config does not say, or transformers has no such."""
    import transformers

    return getattr(transformers, architecture_name(checkpoint) or "", None)


def said(error: Exception) -> str:
    """An error of transformers in a line. Of some the first line only says who speaks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")


def checkpoint_layers(
    checkpoint: Checkpoint, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> CheckpointLayers:
    """Select layers as `select` does for a model in memory, and find their tensors in the files.

    Experts are layers of their own here, as they are in most files, whatever the model makes of them.
    """
    model = skeleton(checkpoint)
    opened = open_experts_(model)
    try:
        selection = require_layers(select(model, include, exclude))
    except InputError as error:
        name = architecture_name(checkpoint)
        if name is None or architecture_of(checkpoint) is not None:
            raise
        raise InputError(
            f"{checkpoint.directory / CONFIG} names the architecture {name!r}, which transformers does not "
            "know, and the model of its model_type lacks the layers asked for.",
            hint="Correct the name, or install the version of transformers that has it.",
        ) from error
    by_tensor: dict[str, Layer] = {}
    left = list(selection.left)
    together: dict[str, LeftAlone] = {}
    key_of = keys_in_files(model, checkpoint.tensors)
    for layer in selection.layers:
        key = key_of(f"{layer.name}.weight")
        if key is None:
            experts = next((name for name in opened if layer.name.startswith(f"{name}.")), None)
            if experts is None:
                left.append(LeftAlone(layer.name, layer.kind, "the checkpoint has no tensor of this name"))
            else:
                together[experts] = LeftAlone(experts, "experts", IN_ONE_TENSOR)
            continue
        found = checkpoint.tensors[key].shape
        expected = layer.shape[::-1] if layer.kind == "conv1d" else layer.shape
        if found != expected:
            raise InputError(
                f"the config says {list(expected)} but the file holds {list(found)}.",
                layer=layer.name,
                hint="Its config.json belongs to another model.",
            )
        by_tensor[key] = layer
    left += together.values()
    require_layers(Selection(tuple(by_tensor.values()), tuple(left)))
    return CheckpointLayers(by_tensor, tuple(left))


def require_floating(checkpoint: Checkpoint, layers: CheckpointLayers) -> None:
    """Refuse weights that are codes of another library's: nothing could be made of them."""
    for key, layer in layers.by_tensor.items():
        if (dtype := checkpoint.tensors[key].dtype) not in FLOATING:
            raise InputError(
                f"its weight is stored as {dtype}, not as floating-point numbers of 16 bits or more.",
                layer=layer.name,
                hint="Take the model as it was before it was quantized.",
            )


def keys_in_files(model: nn.Module, keys: Iterable[str]) -> Callable[[str], str | None]:
    """From the name of a model's tensor to its key in files that hold these; None if they do not have it."""
    renamed = renaming(model)
    by_name = {renamed(key): key for key in keys}
    by_name |= {key: key for key in keys}
    return lambda name: next((by_name[n] for n in name_variants(model, name) if n in by_name), None)


def renaming(model: nn.Module) -> Callable[[str], str]:
    """What transformers calls a tensor of a file in this model: some models were renamed since."""
    rules = [rule for rule in weight_conversions(model) if not hasattr(rule, "operations")]

    def rename(key: str) -> str:
        for rule in rules:
            key, _ = rule.rename_source_key(key)
        return key

    return rename


def name_variants(model: nn.Module, name: str) -> list[str]:
    """What files and other classes of the same model may call a module: with or without the body's prefix.

    `transformer.h.0` of a GPT-2 with its head is `h.0` of one without, and files exist of both.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    return [name, prefix + name, name.removeprefix(prefix)]
