"""The layers of a checkpoint, from its config alone: a model on the meta device costs no memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.select import Layer, LeftAlone, Selection, require_layers, select


@dataclass(frozen=True)
class CheckpointLayers:
    """The chosen layers by the name of their weight tensor in the files, and what is left alone."""

    by_tensor: dict[str, Layer]
    left: tuple[LeftAlone, ...]


def skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The model that the config describes, without weights."""
    import transformers

    directory = checkpoint.directory
    try:
        config = transformers.AutoConfig.from_pretrained(directory)
    except (ValueError, KeyError, OSError, TypeError) as error:
        kind = checkpoint.config.get("model_type")
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise InputError(
            f"transformers cannot read {directory / 'config.json'} (model_type {kind!r}): {first}.",
            hint="For a model of your own use twofour.prune_ and twofour.pack_ from Python.",
        ) from error
    for ours in ("quantization_config", "transformers_weights"):
        if hasattr(config, ours):
            delattr(config, ours)
    architecture = getattr(transformers, (config.architectures or [""])[0], None)
    with torch.device("meta"):
        if architecture is not None:
            return architecture(config)
        return transformers.AutoModel.from_config(config)


def checkpoint_layers(
    checkpoint: Checkpoint, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> CheckpointLayers:
    """Select layers as `select` does for a model in memory, and find their tensors in the files."""
    model = skeleton(checkpoint)
    selection = require_layers(select(model, include, exclude))
    by_tensor: dict[str, Layer] = {}
    left = list(selection.left)
    for layer in selection.layers:
        keys = [f"{name}.weight" for name in name_variants(model, layer.name)]
        key = next((k for k in keys if k in checkpoint.tensors), None)
        if key is None:
            left.append(LeftAlone(layer.name, layer.kind, "the checkpoint has no tensor of this name"))
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
    require_layers(Selection(tuple(by_tensor.values()), tuple(left)))
    return CheckpointLayers(by_tensor, tuple(left))


def name_variants(model: nn.Module, name: str) -> list[str]:
    """What files and other classes of the same model may call a module: with or without the body's prefix.

    `transformer.h.0` of a GPT-2 with its head is `h.0` of one without, and files exist of both.
    """
    prefix = getattr(model, "base_model_prefix", "") + "."
    return [name, prefix + name, name.removeprefix(prefix)]
