"""Prune a checkpoint on disk, tensor by tensor: for methods that look at nothing but the weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed
from twofour.io.record import add_step
from twofour.io.stream import rewrite
from twofour.io.structure import checkpoint_layers
from twofour.io.writer import CheckpointWriter
from twofour.progress import OnProgress, silent
from twofour.prune import method_named, prune_weight


def prune_checkpoint(
    source: str | Path,
    out: str | Path,
    method: str = "magnitude",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a pruned copy of a dense checkpoint, still in dense form, and return the record of the step."""
    chosen = method_named(method)
    checkpoint = Checkpoint(source)
    if is_packed(checkpoint.config):
        raise InputError(
            f"{source} is packed already.", hint="Prune the dense checkpoint that it was made from."
        )
    layers = checkpoint_layers(checkpoint, include, exclude)
    options = {"method": chosen.name, **dataclasses.asdict(chosen), "layers": sorted(layers.by_tensor)}
    step: dict[str, Any] = {}

    def convert(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        layer = layers.by_tensor.get(name)
        if layer is None:
            return {name: tensor}, {}
        pruned, loss = prune_weight(layer, tensor, chosen)
        return {name: pruned}, {"layer": layer.name, "shape": list(layer.shape), **loss}

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        step.update(
            verb="prune",
            options={"method": chosen.name, **dataclasses.asdict(chosen)},
            layers={note.pop("layer"): {"tensor": key, **note} for key, note in notes.items()},
            left={x.name: f"{x.type}: {x.reason}" for x in layers.left},
        )
        writer.finish(checkpoint.config, add_step(checkpoint.record, step), copy_from=checkpoint.directory)

    rewrite(checkpoint, out, convert, options, finish, resume=resume, on_progress=on_progress)
    return step
