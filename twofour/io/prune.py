"""Prune a checkpoint on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.calibrate import parallel
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.finished import FinishedBlocks
from twofour.io.format import is_packed
from twofour.io.prune_calibrated import CalibrationOptions, prune_blocks
from twofour.io.record import add_step
from twofour.io.stream import require_sound, rewrite
from twofour.io.structure import CheckpointLayers, checkpoint_layers, require_floating
from twofour.io.writer import CheckpointWriter, require_new
from twofour.progress import OnProgress, silent
from twofour.prune import Method, chosen_method, options_of, prune_weight
from twofour.select import LeftAlone, Selection, require_layers


def prune_checkpoint(
    source: str | Path,
    out: str | Path,
    method: str | Method | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    calibration: CalibrationOptions | None = None,
    kept: Mapping[str, str] | None = None,
    budget: Mapping[str, Any] | None = None,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a pruned copy of a dense checkpoint, still in dense form, and return the record of the step.

    A method that looks only at the weights streams tensor by tensor. One that looks at the inputs of the
    layers runs the model block by block over the text of `calibration`.
    Without `method` it is `best` where there is text and `magnitude` where there is none.
    `kept` are layers that stay dense, with the reason for each; `budget` is how they were chosen, for the
    record (`twofour.advise.budget` makes both).
    """
    chosen = chosen_method(method, has_text=calibration is not None)
    checkpoint = Checkpoint(source)
    require_new(Path(out))
    if is_packed(checkpoint.config):
        raise InputError(
            f"{source} is packed already.", hint="Prune the dense checkpoint that it was made from."
        )
    layers = _without(checkpoint_layers(checkpoint, include, exclude), kept or {})
    require_floating(checkpoint, layers)
    options: dict[str, Any] = options_of(chosen)
    if chosen.needs_inputs:
        if calibration is None:
            raise InputError(
                f"{chosen.name} looks at the inputs of the layers.", hint="Give text with --calib FILE."
            )
        options |= calibration.as_recorded()
    elif calibration is not None and calibration.lowrank:
        raise InputError(f"low-rank compensation needs inputs, and {chosen.name} does not look at any.")
    elif calibration is not None and calibration.permute:
        raise InputError(f"permutation goes by the inputs, and {chosen.name} does not look at any.")
    if budget:
        options["budget"] = budget["budget"]
    described = {**options, "layers": sorted(layers.by_tensor)}
    step: dict[str, Any] = {}

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        step.update(
            verb="prune",
            source=str(source),  # as it was given: `recover` looks there for the teacher
            options=options,
            layers={note.pop("layer"): {"tensor": key, **note} for key, note in notes.items()},
            left={x.name: f"{x.type}: {x.reason}" for x in layers.left},
            **({"budget": dict(budget)} if budget else {}),
        )
        writer.finish(checkpoint.config, add_step(checkpoint.record, step), copy_from=checkpoint.directory)

    if calibration is None or not chosen.needs_inputs:

        def convert(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            layer = layers.by_tensor.get(name)
            if layer is None:
                return {name: tensor}, {}
            pruned, loss = prune_weight(layer, tensor, chosen)
            return {name: pruned}, {"layer": layer.name, "shape": list(layer.shape), **loss}

        if parallel.is_first():
            rewrite(checkpoint, out, convert, described, finish, resume=resume, on_progress=on_progress)
        parallel.wait()
        return step

    if parallel.is_first():
        require_sound(checkpoint, on_progress)
    with FinishedBlocks(out) as work:
        prune_blocks(
            *(checkpoint, layers, chosen, work, described, calibration),
            resume=resume,
            on_progress=on_progress,
        )
        if parallel.is_first():
            found = work.contents()
            if found.blocks:
                step["blocks"] = found.blocks

            def place(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
                if name not in layers.by_tensor and name not in found.files:
                    return {name: tensor}, {}
                base = name.removesuffix("weight")
                extra = [key for side in ("left", "right") if (key := f"{base}lowrank_{side}") in found.files]
                return {key: found.read(key) for key in (name, *extra)}, dict(found.notes.get(name, {}))

            rewrite(checkpoint, out, place, described, finish)
            work.remove()
    parallel.wait()
    return step


def _without(layers: CheckpointLayers, kept: Mapping[str, str]) -> CheckpointLayers:
    """The layers but for those that stay dense."""
    staying = [layer for layer in layers.by_tensor.values() if layer.name in kept]
    left = [LeftAlone(layer.name, layer.kind, kept[layer.name]) for layer in staying]
    by_tensor = {key: layer for key, layer in layers.by_tensor.items() if layer.name not in kept}
    require_layers(Selection(tuple(by_tensor.values()), (*layers.left, *left)))
    return CheckpointLayers(by_tensor, (*layers.left, *left))
