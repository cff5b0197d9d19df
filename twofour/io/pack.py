"""Pack a model in memory, or a checkpoint on disk without ever building the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from twofour.calibrate.experts import opened_experts
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed, packed_config, stub
from twofour.io.record import add_step, last_step, summary
from twofour.io.stream import rewrite
from twofour.io.structure import CheckpointLayers, checkpoint_layers, require_floating
from twofour.io.writer import CheckpointWriter
from twofour.nn import Memory, convert_, packed_layers
from twofour.nn.lowrank import lowrank_aside
from twofour.packed import pack
from twofour.progress import OnProgress, silent
from twofour.select import require_layers, select


def pack_(
    model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = (), memory: Memory = "auto"
) -> nn.Module:
    """Replace every eligible layer, which must be 2:4, by one that holds it packed. In place.

    >>> from twofour import prune_
    >>> pack_(prune_(nn.Sequential(nn.Linear(64, 32))))
    Sequential(
      (0): SparseLinear(in_features=64, out_features=32, bias=True, memory=auto)
    )

    Either all of the layers are packed or, when one of them is not 2:4, none. Low-rank corrections go along.
    Experts that are stored as one tensor are taken apart, and each is packed by itself.
    """
    with lowrank_aside(model) as corrected, opened_experts(model) as experts:
        layers = require_layers(select(model, include, exclude)).layers
        _require_packed(corrected, {layer.name for layer in layers})
        convert_(model, layers, memory)
        if any(packed_layers(module) for module in experts.values()):
            experts.clear()  # all stay apart, or none: a checkpoint is loaded by one rule for all blocks
    if hasattr(model, "save_pretrained"):
        from twofour.io.huggingface import mark_packed  # imports transformers

        mark_packed(model)
    return model


def pack_checkpoint(
    source: str | Path,
    out: str | Path,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a packed copy of a 2:4 checkpoint and return the record of the step.

    Packed are the layers that `twofour prune` noted in the record or, for a model from elsewhere, all
    eligible ones. One that is not 2:4 is an error that names it: nothing is silently left dense.
    """
    checkpoint = Checkpoint(source)
    if is_packed(checkpoint.config):
        raise InputError(f"{source} is packed already.")
    layers = layers_to_write(checkpoint, include, exclude)
    modules = {key.removesuffix(".weight"): layer.shape for key, layer in layers.by_tensor.items()}
    lowrank = lowrank_of(checkpoint)
    _require_packed(lowrank, modules.keys())
    stubs = stub(modules)
    step: dict[str, Any] = {}

    def convert(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        layer = layers.by_tensor.get(name)
        if layer is None:
            return {name: tensor}, {}
        packed = pack(layer.to_matrix(tensor), layer.name)
        base = name.removesuffix(".weight")
        new = {f"{base}.weight_values": packed.values, f"{base}.weight_meta": packed.meta}
        if name in stubs:
            new[name] = stubs[name]
        return new, {
            "layer": layer.name,
            "shape": list(layer.shape),
            "dense_bytes": tensor.nbytes,
            "packed_bytes": packed.nbytes,
        }

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        done = {note.pop("layer"): note for note in notes.values()}
        for base in lowrank:  # copied beside the packed weight, so part of what the layer takes
            beside = lowrank_bytes(checkpoint, base)
            note = done[layers.by_tensor[f"{base}.weight"].name]
            note["lowrank_bytes"] = beside
            note["packed_bytes"] += beside
        step.update(
            verb="pack",
            options={},
            layers=done,
            left={x.name: f"{x.type}: {x.reason}" for x in layers.left},
            dense_bytes=sum(n["dense_bytes"] for n in done.values()),
            packed_bytes=sum(n["packed_bytes"] for n in done.values()),
        )
        record = add_step(checkpoint.record, step)
        config = packed_config(checkpoint.config, modules, summary(record), lowrank)
        writer.finish(config, record, copy_from=checkpoint.directory)

    options = {"layers": sorted(layers.by_tensor)}
    rewrite(checkpoint, out, convert, options, finish, resume=resume, on_progress=on_progress)
    return step


def _require_packed(corrected: Iterable[str], packed: Set[str]) -> None:
    """A packed checkpoint has no place for the correction of a layer that is not packed."""
    if dropped := sorted(set(corrected) - packed):
        raise InputError(
            "it has a low-rank correction, which only a packed layer can carry.",
            layer=dropped[0],
            hint="Pack it too, or prune again without --lowrank.",
        )


def lowrank_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The ranks of the compensations that `prune --lowrank` left in the files; packing carries them along."""
    end = ".lowrank_right"
    found = {name: info.shape[0] for name, info in checkpoint.tensors.items() if name.endswith(end)}
    return {name.removesuffix(end): rank for name, rank in found.items()}


def lowrank_bytes(checkpoint: Checkpoint, base: str) -> int:
    """What a layer's compensation takes in the files; 0 if it has none."""
    names = (f"{base}.lowrank_left", f"{base}.lowrank_right")
    return sum(checkpoint.tensors[name].nbytes for name in names if name in checkpoint.tensors)


def layers_to_write(
    checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]
) -> CheckpointLayers:
    """Those of `layers_to_pack`, after a look at whether all of them can be."""
    layers = layers_to_pack(checkpoint, include, exclude)
    require_floating(checkpoint, layers)
    if not (include or exclude) and (lost := lost_layers(checkpoint)):
        raise InputError(
            "the record says that it was pruned, and the files lack it.",
            layer=lost[0],
            hint="Copy or make the checkpoint again.",
        )
    return layers


def lost_layers(checkpoint: Checkpoint) -> list[str]:
    """The layers that were pruned, by the record, and have no weight in the files, dense or packed."""
    pruned = (last_step(checkpoint.record, "prune") or {"layers": {}})["layers"]
    in_files = {name: str(note.get("tensor", f"{name}.weight")) for name, note in pruned.items()}
    return sorted(
        name
        for name, weight in in_files.items()
        if not {weight, f"{weight}_values"} & checkpoint.tensors.keys()
    )


def layers_to_pack(
    checkpoint: Checkpoint, include: Sequence[str], exclude: Sequence[str]
) -> CheckpointLayers:
    pruned = last_step(checkpoint.record, "prune")
    if include or exclude or pruned is None:
        return checkpoint_layers(checkpoint, include, exclude)
    # Names, not patterns: brackets would otherwise be read as a pattern.
    exact = [name.replace("[", "[[]") for name in pruned["layers"]]
    return checkpoint_layers(checkpoint, exact)
