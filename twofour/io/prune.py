"""Prune a checkpoint on disk."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed
from twofour.io.prune_calibrated import prune_blocks, pruned_weights, read_pruned
from twofour.io.record import add_step
from twofour.io.stream import rewrite
from twofour.io.structure import checkpoint_layers
from twofour.io.writer import CheckpointWriter, require_new
from twofour.progress import OnProgress, silent
from twofour.prune import method_named, options_of, prune_weight


def prune_checkpoint(
    source: str | Path,
    out: str | Path,
    method: str = "magnitude",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    calib: str | Path | None = None,
    samples: int = 128,
    seqlen: int | None = None,
    seed: int = 0,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a pruned copy of a dense checkpoint, still in dense form, and return the record of the step.

    A method that looks only at the weights streams tensor by tensor. One that looks at the inputs of the
    layers runs the model block by block over `samples` windows of `seqlen` tokens of the text `calib`.
    """
    chosen = method_named(method)
    checkpoint = Checkpoint(source)
    require_new(Path(out))
    if is_packed(checkpoint.config):
        raise InputError(
            f"{source} is packed already.", hint="Prune the dense checkpoint that it was made from."
        )
    layers = checkpoint_layers(checkpoint, include, exclude)
    options: dict[str, Any] = options_of(chosen)
    if chosen.needs_inputs:
        if calib is None:
            raise InputError(
                f"{method} looks at the inputs of the layers.", hint="Give text with --calib FILE."
            )
        options |= {"calib": str(calib), "samples": samples, "seqlen": seqlen, "seed": seed}
    described = {**options, "layers": sorted(layers.by_tensor)}
    step: dict[str, Any] = {}

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        step.update(
            verb="prune",
            options=options,
            layers={note.pop("layer"): {"tensor": key, **note} for key, note in notes.items()},
            left={x.name: f"{x.type}: {x.reason}" for x in layers.left},
        )
        writer.finish(checkpoint.config, add_step(checkpoint.record, step), copy_from=checkpoint.directory)

    if not chosen.needs_inputs:

        def convert(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            layer = layers.by_tensor.get(name)
            if layer is None:
                return {name: tensor}, {}
            pruned, loss = prune_weight(layer, tensor, chosen)
            return {name: pruned}, {"layer": layer.name, "shape": list(layer.shape), **loss}

        rewrite(checkpoint, out, convert, described, finish, resume=resume, on_progress=on_progress)
        return step

    assert calib is not None
    work = Path(out).absolute().parent / f".{Path(out).absolute().name}.blocks"
    try:
        prune_blocks(
            *(checkpoint, layers, chosen, work, described),
            calib=calib,
            samples=samples,
            seqlen=seqlen,
            seed=seed,
            resume=resume,
            on_progress=on_progress,
        )
    except Exception:
        shutil.rmtree(work, ignore_errors=True)  # an error would come again; a run cut short may go on
        raise
    # If only the writing fails (a full disk), the blocks stay: --resume need not prune again.
    with pruned_weights(work) as pruned_at:

        def place(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            if name not in pruned_at:
                return {name: tensor}, {}
            file, note = pruned_at[name]
            return {name: read_pruned(file, name)}, dict(note)

        rewrite(checkpoint, out, place, described, finish)
    return step
