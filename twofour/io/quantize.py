"""Quantize a 2:4 model in memory, or a pruned checkpoint on disk into a packed one of 8 or 4 bits.

Without text every weight is rounded for itself, and a checkpoint streams as it does for `pack`. With text the
model runs block by block as in pruning: each layer is rounded on the inputs that the rounded layers before it
really give, and what a block gave is on disk (`.OUT.blocks/`) when it is done, for `resume`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn

from twofour.calibrate.blocks import Block
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed, packed_config, stub
from twofour.io.pack import layers_to_pack, lowrank_of
from twofour.io.prune_calibrated import (
    CalibrationOptions,
    FilesBehind,
    block_file,
    checkpoint_dtype,
    finished_blocks,
    open_for_calibration,
    read_pruned,
    vectors_in_files,
)
from twofour.io.record import add_step, summary
from twofour.io.stream import rewrite
from twofour.io.structure import CheckpointLayers
from twofour.io.writer import CheckpointWriter, require_new
from twofour.nn.lowrank import lowrank_layers
from twofour.nn.modules import Memory
from twofour.nn.quantized import put_quantized_
from twofour.packed import Packed24, unpack
from twofour.progress import OnProgress, silent
from twofour.prune.hessian import relative_output_error
from twofour.quantize import Quantized, Rounding, Scheme, quantize_matrix, scheme_named, smooth_
from twofour.quantize.blocks import quantize_blocks
from twofour.quantize.rounding import require_two_four
from twofour.select import Layer, require_layers, select

Model = TypeVar("Model", bound=nn.Module)

#: The least share of a 16-bit checkpoint that can come out, all of it in 4 bits: 3 of 16 bits.
LEAST = 3 / 16

_PARTS = ("weight_values", "weight_meta", "weight_scale")


@dataclass(frozen=True)
class QuantizeOptions:
    """`scheme` as in quantize/schemes.py; without `rounding` compensated if there is text, else nearest."""

    scheme: str | Scheme
    group: int | None = None
    rounding: Rounding | None = None
    smooth: bool = False

    def settled(self, has_text: bool) -> tuple[Scheme, Rounding]:
        """What it comes to, after refusing what cannot be."""
        scheme = scheme_named(self.scheme, self.group)
        rounding = self.rounding or ("compensated" if has_text else "nearest")
        if not has_text and (rounding != "nearest" or self.smooth):
            what = "smoothing" if self.smooth else f"{rounding} rounding"
            raise InputError(f"{what} looks at the inputs of the layers.", hint="Give calibration text.")
        if self.smooth and not scheme.rounds_activations:
            raise InputError(
                f"{scheme.name} leaves activations as they are, so there is nothing to smooth.",
                hint="Leave smoothing out.",
            )
        return scheme, rounding


def quantize_(
    model: Model,
    scheme: str | Scheme = "int8",
    windows: Tensor | None = None,
    *,
    group: int | None = None,
    rounding: Rounding | None = None,
    smooth: bool = False,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    memory: Memory = "auto",
    on_progress: OnProgress = silent,
) -> Model:
    """Replace every eligible layer, which must be 2:4, by a packed one of 8 or 4 bits. In place.

    >>> from twofour import prune_
    >>> quantize_(prune_(nn.Sequential(nn.Linear(64, 32))), "int8")
    Sequential(
      (0): QuantizedLinear(in_features=64, out_features=32, bias=True, memory=auto, scheme=int8)
    )

    `windows` [samples, length] are tokens of calibration text: with them errors are compensated, as 4 bits
    need it. `rounding="joint"` takes a dense model and prunes it on the way.
    """
    chosen, how = QuantizeOptions(scheme, group, rounding, smooth).settled(windows is not None)
    _refuse_corrections(lowrank_layers(model))
    layers = require_layers(select(model, include, exclude)).layers
    if any(not layer.name for layer in layers):
        raise InputError("a layer on its own cannot be replaced in place.", hint="Wrap it in a module.")
    weights = {layer: model.get_parameter(f"{layer.name}.weight") for layer in layers}
    packed: dict[Layer, Packed24] = {}

    def put(layer: Layer, rounded: Quantized) -> Packed24:
        packed[layer] = rounded.packed(layer.name, weights[layer].dtype)
        return packed[layer]

    if windows is None:
        for number, (layer, weight) in enumerate(weights.items(), 1):
            put(layer, quantize_matrix(layer.to_matrix(weight.detach()), chosen, how, layer=layer.name))
            on_progress(number, len(weights), layer.name)
    else:
        if how != "joint":  # all are looked at before the first is changed
            for layer, weight in weights.items():
                require_two_four(layer.to_matrix(weight.detach()), layer.name)
        if smooth:
            smooth_(model, windows, include, exclude)
        quantize_blocks(
            *(model, layers, windows, chosen, how),
            lambda block, layer, rounded, _: put(layer, rounded),
            device=next(iter(weights.values())).device,
            on_progress=on_progress,
        )
    put_quantized_(model, packed, chosen, memory)
    if hasattr(model, "save_pretrained"):
        from twofour.io.huggingface import mark_packed  # imports transformers

        mark_packed(model, "quantize")
    return model


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    *,
    calibration: CalibrationOptions | None = None,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a packed, quantized copy of a pruned checkpoint and return the record of the step.

    Quantized are the layers that `pack` would pack. One that is not 2:4 is an error that names it, unless the
    rounding is joint, which prunes.
    """
    scheme, rounding = options.settled(calibration is not None)
    checkpoint = Checkpoint(source)
    require_new(Path(out))
    if is_packed(checkpoint.config):
        raise InputError(
            f"{source} is packed already.", hint="Quantize the pruned checkpoint that it was made from."
        )
    _refuse_corrections(lowrank_of(checkpoint))
    layers = layers_to_pack(checkpoint, include, exclude)
    modules = {key.removesuffix(".weight"): layer.shape for key, layer in layers.by_tensor.items()}
    recorded: dict[str, Any] = {"scheme": scheme.name, "group": scheme.group, "rounding": rounding}
    recorded |= {"smooth": True} if options.smooth else {}
    recorded |= calibration.as_recorded() if calibration else {}
    described = {**recorded, "layers": sorted(layers.by_tensor)}
    stubs = stub(modules)
    step: dict[str, Any] = {}

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        done = {note.pop("layer"): note for note in notes.values() if "layer" in note}
        step.update(
            verb="quantize",
            source=str(source),
            options=recorded,
            layers=done,
            left={x.name: f"{x.type}: {x.reason}" for x in layers.left},
            dense_bytes=sum(note["dense_bytes"] for note in done.values()),
            packed_bytes=sum(note["packed_bytes"] for note in done.values()),
        )
        record = add_step(checkpoint.record, step)
        config = packed_config(checkpoint.config, modules, summary(record), scheme=scheme)
        writer.finish(config, record, copy_from=checkpoint.directory)

    if calibration is None:

        def convert(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            layer = layers.by_tensor.get(name)
            if layer is None:
                return {name: tensor}, {}
            matrix = layer.to_matrix(tensor)
            rounded = quantize_matrix(matrix, scheme, rounding, layer=layer.name)
            new, note = _stored(name, layer, matrix, rounded, None, tensor.nbytes)
            return {**new, **{key: stubs[key] for key in stubs if key == name}}, note

        rewrite(
            *(checkpoint, out, convert, described, finish),
            resume=resume,
            least=LEAST / 2 if _is_wide(checkpoint) else LEAST,
            on_progress=on_progress,
        )
        return step
    work = Path(out).absolute().parent / f".{Path(out).absolute().name}.blocks"
    try:
        _quantize_blocks(
            *(checkpoint, layers, scheme, rounding, options.smooth, work, described, calibration),
            resume=resume,
            on_progress=on_progress,
        )
    except Exception:
        shutil.rmtree(work, ignore_errors=True)  # an error would come again; a run cut short may go on
        raise
    files, all_notes = _finished_work(work)

    def place(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        base = name.removesuffix(".weight")
        keys = [f"{base}.{part}" for part in _PARTS] if name in layers.by_tensor else [name]
        if keys[0] not in files:
            return {name: tensor}, {}
        new = {key: read_pruned(files[key], key) for key in keys}
        new |= {key: stubs[key] for key in stubs if key == name}
        return new, dict(all_notes.get(name, {}))

    rewrite(checkpoint, out, place, described, finish, least=LEAST / 2 if _is_wide(checkpoint) else LEAST)
    shutil.rmtree(work)
    return step


def _quantize_blocks(
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    scheme: Scheme,
    rounding: Rounding,
    smooth: bool,
    work: Path,
    options: dict[str, Any],
    calibration: CalibrationOptions,
    *,
    resume: bool,
    on_progress: OnProgress,
) -> None:
    """Leave the codes of every block in `work`, with notes about each layer."""
    model, windows, weights = open_for_calibration(checkpoint, layers, calibration, on_progress, whole=smooth)
    finished = finished_blocks(work, options) if resume else 0
    if not finished:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / "options.json").write_text(json.dumps(options))
    keys = {layer: key for key, layer in layers.by_tensor.items()}
    with FilesBehind() as files:
        if smooth and (norms := _smoothed(model, windows, checkpoint, layers)):
            files.write(work / "norms.safetensors", norms, {"notes": "{}"})

        @torch.no_grad()
        def restore(number: int) -> list[Layer]:
            with safe_open(work / block_file(number), framework="pt") as opened:
                found = list(json.loads(opened.metadata()["notes"]))
                for key in found:
                    layer, base = layers.by_tensor[key], key.removesuffix(".weight")
                    values, meta, scale = (opened.get_tensor(f"{base}.{part}") for part in _PARTS)
                    weight = model.get_parameter(f"{layer.name}.weight")
                    matrix = unpack(values, meta, layer.columns, scale, weight.dtype)
                    weight.copy_(layer.from_matrix(matrix))
            return [layers.by_tensor[key] for key in found]

        tensors: dict[str, Tensor] = {}
        notes: dict[str, dict[str, Any]] = {}

        def keep(block: Block, layer: Layer, rounded: Quantized, gram: Gram) -> Packed24:
            key = keys[layer]
            weight = model.get_parameter(f"{layer.name}.weight").detach()
            nbytes = checkpoint.tensors[key].nbytes
            new, note = _stored(key, layer, layer.to_matrix(weight), rounded, gram, nbytes)
            tensors.update({name: tensor.cpu() for name, tensor in new.items()})
            notes[key] = note
            if len(notes) == len(block.layers):
                metadata = {"notes": json.dumps(notes)}
                files.write(work / block_file(block.number), dict(tensors), metadata)
                tensors.clear()
                notes.clear()
            values, meta, scale = (new[f"{key.removesuffix('.weight')}.{part}"] for part in _PARTS)
            return Packed24(values, meta, layer.columns, scale)

        quantize_blocks(
            *(model, list(keys), windows, scheme, rounding, keep),
            device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu",
            dtypes={layer: checkpoint_dtype(checkpoint, key) for layer, key in keys.items()},
            finished=finished,
            restore=restore,
            weights=weights,
            on_progress=on_progress,
        )


def _stored(
    key: str, layer: Layer, matrix: Tensor, rounded: Quantized, gram: Gram | None, dense_bytes: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a layer in the files, and what there is to say about it.

    Scales are written as bfloat16, which holds them exactly, whatever the dtype of the layer.
    """
    packed = rounded.packed(layer.name)
    assert packed.scale is not None
    base = key.removesuffix(".weight")
    tensors = zip(_PARTS, (packed.values, packed.meta, packed.scale), strict=True)
    new = rounded.weight()
    norm = float(torch.linalg.vector_norm(matrix, dtype=torch.float32))
    error = float(torch.linalg.vector_norm(matrix.float() - new))
    note: dict[str, Any] = {
        "layer": layer.name,
        "shape": list(layer.shape),
        "dense_bytes": dense_bytes,
        "packed_bytes": packed.nbytes,
        "relative_error": error / norm if norm else 0.0,
    }
    if gram is not None:
        note |= {"output_error": relative_output_error(matrix, new, gram), "tokens": gram.tokens}
    return {f"{base}.{part}": tensor for part, tensor in tensors}, note


def _smoothed(
    model: nn.Module, windows: Tensor, checkpoint: Checkpoint, layers: CheckpointLayers
) -> dict[str, Tensor]:
    """Smooth the model in memory; its changed norms as they are to be in the files."""
    exact = [layer.name.replace("[", "[[]") for layer in layers.by_tensor.values()]
    keys = vectors_in_files(model, checkpoint)
    new: dict[str, Tensor] = {}
    for norm in smooth_(model, windows, exact):
        for own, parameter in model.get_submodule(norm).named_parameters(recurse=False):
            key = keys.get(f"{norm}.{own}")
            if key is None:
                raise InputError("the files hold no tensor of this norm.", layer=norm, hint="Do not smooth.")
            new[key] = parameter.detach().to(checkpoint_dtype(checkpoint, key)).cpu().contiguous()
    return new


def _finished_work(work: Path) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Where each tensor is, and the notes by the names of the weights."""
    files: dict[str, Path] = {}
    notes: dict[str, dict[str, Any]] = {}
    for file in sorted(work.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
            notes |= json.loads(opened.metadata()["notes"])
    return files, notes


def _is_wide(checkpoint: Checkpoint) -> bool:
    return any(info.dtype == "F32" for info in checkpoint.tensors.values())


def _refuse_corrections(corrected: Any) -> None:
    if name := next(iter(corrected), None):
        raise InputError(
            "it has a low-rank correction, which a quantized layer cannot carry yet.",
            layer=name,
            hint="Prune again without --lowrank.",
        )
