"""Quantize a checkpoint on calibration text: block by block, each layer on what the rounded ones before give.

What a block gave is on disk when it is done (`.OUT.blocks/`), for `resume`: the codes and scales of its
layers, and what else of the block was smoothed or tuned with them: norms, biases, and rows of layers that are
not rounded.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from twofour.calibrate.blocks import Block, InModel, Teacher
from twofour.io.checkpoint import Checkpoint
from twofour.io.finished import FinishedBlocks
from twofour.io.prune_calibrated import (
    CalibrationOptions,
    as_stored_,
    checkpoint_dtype,
    open_blocks,
    open_for_calibration,
    parameters_in_files,
)
from twofour.io.record import was_tuned
from twofour.io.structure import CheckpointLayers
from twofour.io.workplace import run_of
from twofour.packed import unpack
from twofour.progress import OnProgress
from twofour.prune.reconstruct import Reconstruct, Reconstructed
from twofour.quantize import Quantized, Rounding, Scheme
from twofour.quantize.blocks import Rounded, quantize_blocks
from twofour.quantize.smooth import Smoothing
from twofour.select import Layer

#: What a quantized layer is in a file.
PARTS = ("weight_values", "weight_meta", "weight_scale")


def quantize_into(
    work: FinishedBlocks,
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    scheme: Scheme,
    rounding: Rounding,
    calibration: CalibrationOptions,
    options: dict[str, Any],
    *,
    teacher: Checkpoint | None,
    smooth: bool,
    tune: Reconstruct | None,
    resume: bool,
    on_progress: OnProgress,
) -> None:
    """Leave the codes of every block in `work`, with notes about each layer. `options` tell runs apart."""
    model, windows, weights = open_for_calibration(checkpoint, layers, calibration, on_progress)
    followed = None
    if teacher is not None:
        dense, _, its_weights = open_blocks(teacher, layers, model.dtype)
        followed = Teacher(dense, its_weights or InModel())
    run = run_of(options, checkpoint, *calibration.files, *([teacher] if teacher else []))
    finished = work.begin(run, resume=resume)
    keys = {layer: key for key, layer in layers.by_tensor.items()}
    beside = parameters_in_files(model, checkpoint)
    smoothing = Smoothing(model, beside.__contains__) if smooth else None

    @torch.no_grad()
    def restore(number: int) -> list[Layer]:
        with safe_open(work.file(number), framework="pt") as opened:
            names = {key: name for name, key in beside.items()}
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                if key in names:
                    model.get_parameter(names[key]).copy_(opened.get_tensor(key))
            found = [layers.by_tensor[key] for key in json.loads(opened.metadata()["notes"])]
            for layer in found:
                base = keys[layer].removesuffix(".weight")
                values, meta, scale = (opened.get_tensor(f"{base}.{part}") for part in PARTS)
                weight = model.get_parameter(f"{layer.name}.weight")
                matrix = unpack(values, meta, layer.columns, scale, weight.dtype)
                weight.copy_(layer.from_matrix(matrix))
        return found

    def keep(block: Block, rounded: dict[Layer, Rounded], tuned: Reconstructed | None) -> None:
        tensors: dict[str, Tensor] = {}
        notes: dict[str, dict[str, Any]] = {}
        for layer, own in rounded.items():
            key = keys[layer]
            new, note = described_layer(key, layer, own.codes, checkpoint.tensors[key].nbytes)
            tensors |= new
            errors = {"relative_error": own.error, "output_error": own.output_error}
            notes[key] = {**note, **errors, "tokens": own.tokens}
        smoothed = smoothing.changed[block.name] if smoothing else ()
        for name in dict.fromkeys((*smoothed, *(tuned.changed if tuned else ()))):
            tensors[beside[name]] = as_stored_(model.get_parameter(name), checkpoint, beside[name])
        work.write(block, tensors, notes, tuned)

    quantize_blocks(
        *(model, list(keys), windows, scheme, rounding, keep),
        device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu",
        prepare=smoothing,
        tune=tune,
        teacher=followed,
        fit=not was_tuned(checkpoint.record),  # what pruning has tuned, a fit layer by layer would undo
        may_change=beside.__contains__,
        dtypes={layer: checkpoint_dtype(checkpoint, key) for layer, key in keys.items()},
        finished=finished,
        restore=restore,
        weights=weights,
        on_progress=on_progress,
    )


def described_layer(
    key: str, layer: Layer, rounded: Quantized, dense_bytes: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a layer in the files, and what there is to say about them.

    Scales are written as bfloat16, which holds them exactly, whatever the dtype of the layer.
    """
    packed = rounded.packed(layer.name)
    assert packed.scale is not None
    base = key.removesuffix(".weight")
    parts = zip(PARTS, (packed.values, packed.meta, packed.scale), strict=True)
    note: dict[str, Any] = {
        "layer": layer.name,
        "shape": list(layer.shape),
        "dense_bytes": dense_bytes,
        "packed_bytes": packed.nbytes,
    }
    return {f"{base}.{part}": tensor for part, tensor in parts}, note
