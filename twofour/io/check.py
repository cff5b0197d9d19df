"""`check`: is this checkpoint whole, is every layer 2:4, and what does it weigh?

Reads everything tensor by tensor: stored checksums, NaN, every position nibble, every group. A packed
checkpoint is checked by what its config lists; one that is only pruned, by what its record lists; any other,
by all layers that could be 2:4. Whether all tensors of the model are there, and in shape, is for transformers
to say (`twofour.io.rehearse`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.errors import InputError
from twofour.io.checkpoint import CONFIG, INDEX, Checkpoint
from twofour.io.format import is_packed, packed_modules, scheme_of, stub
from twofour.io.pack import layers_to_pack, lost_layers, lowrank_bytes
from twofour.io.rehearse import rehearse
from twofour.io.structure import FLOATING
from twofour.io.writer import sha256
from twofour.packed import unpack, validate
from twofour.pattern import check_pattern
from twofour.progress import OnProgress, silent
from twofour.quantize.schemes import Scheme
from twofour.select import Layer

#: Tensors that are checked with their layer.
PACKED = (".weight_values", ".weight_scale")

#: Of a dense weight, where the packed one is quantized and does not tell: 16 bit.
DENSE_BYTES = 2


@dataclass
class LayerCheck:
    """One 2:4 layer: how its groups are filled and how many bytes it takes."""

    name: str
    shape: tuple[int, ...]
    groups: int
    under: int  # groups with fewer than two nonzeros, which is allowed
    over: int  # groups with more, which is not
    dense_bytes: int
    stored_bytes: int  # with a low-rank correction, if it has one


@dataclass
class CheckReport:
    directory: str
    packed: bool
    scheme: dict[str, Any] | None = None  # of all packed layers, as config.json names it
    bytes: int = 0
    checksums: int = 0  # tensors whose stored checksum was compared
    tensors: int = 0
    layers: list[LayerCheck] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.faults


def check(directory: str | Path, on_progress: OnProgress = silent) -> CheckReport:
    """Look at every byte of a checkpoint and report what is wrong with it, if anything."""
    directory = Path(directory)
    try:
        checkpoint = Checkpoint(directory)
        _ = checkpoint.record  # read when it is first asked for
    except InputError as error:
        if not (directory / CONFIG).exists():
            raise  # not a checkpoint at all
        return CheckReport(str(directory), packed=False, faults=[str(error)])
    packed = is_packed(checkpoint.config)
    report = CheckReport(str(directory), packed, bytes=checkpoint.nbytes, tensors=len(checkpoint.tensors))
    report.faults += [f"{name}: {INDEX} leaves it out, and a file holds it." for name in checkpoint.unlisted]
    total = 2 * checkpoint.nbytes
    misfits = _misfits(checkpoint, packed)
    done = _check_bytes(checkpoint, report, on_progress, total)
    try:
        layers = _packed_layers(checkpoint, report) if packed else _dense_layers(checkpoint)
    except InputError:
        if packed or not misfits:
            raise
        layers = {}  # the model does not fit its files, and that will be said
    for base, layer in layers.items():
        try:
            entry = (
                _check_packed(checkpoint, base, layer) if packed else _check_dense(checkpoint, base, layer)
            )
        except InputError as error:
            report.faults.append(str(error))
            continue
        report.layers.append(entry)
        done += entry.stored_bytes
        on_progress(done, total, base)
        if entry.over:
            report.faults.append(f"{base}: {entry.over} of {entry.groups} groups keep more than two weights.")
    told = {fault.partition(":")[0] for fault in report.faults}
    report.faults += [why for name, why in misfits if not told & {name, name.rpartition(".")[0]}]
    on_progress(total, total, "")
    return report


def _misfits(checkpoint: Checkpoint, packed: bool) -> list[tuple[str, str]]:
    """What is missing, left over or of another shape, by the name that the model has for it."""
    try:
        found = rehearse(checkpoint)
    except InputError as error:
        if not packed:
            raise  # there is no telling which layers to look at
        return [("", str(error))]
    if found is not None:
        return sorted(found)
    return [
        (name, f"{name}: the record says that it was pruned, and the files lack it.")
        for name in lost_layers(checkpoint)
    ]


def _check_bytes(checkpoint: Checkpoint, report: CheckReport, on_progress: OnProgress, total: int) -> int:
    done = 0
    for file in checkpoint.files:
        try:
            sums = checkpoint.checksums(file)
        except InputError as error:
            report.faults.append(str(error))
            sums = {}
        for info in (t for t in checkpoint.tensors.values() if t.file == file):
            tensor = checkpoint.read(info.name)
            if info.name in sums:
                report.checksums += 1
                if sha256(tensor) != sums[info.name]:
                    report.faults.append(f"{info.name}: its bytes in {file} do not match their checksum.")
            if info.dtype in FLOATING and not info.name.endswith(PACKED) and (wrong := _not_finite(tensor)):
                report.faults.append(f"{info.name}: {wrong} of {tensor.numel()} numbers are NaN or infinite.")
            done += info.nbytes
            on_progress(done, total, info.name)
    return done


def _not_finite(tensor: Tensor) -> int:
    """How many numbers are NaN or infinite, but for a mask, which some models have in their files."""
    finite = tensor.isfinite()
    if bool(finite.all()) or bool(((tensor == 0) | tensor.isneginf()).all()):
        return 0
    return int((~finite).sum())


def _packed_layers(checkpoint: Checkpoint, report: CheckReport) -> dict[str, Layer]:
    config = checkpoint.config["quantization_config"]
    modules, scheme = packed_modules(config), scheme_of(config)
    report.scheme = None if scheme is None else scheme.as_config()
    for name in checkpoint.tensors:
        base, _, what = name.rpartition(".")
        if what in ("weight_values", "weight_meta", "weight_scale") and base not in modules:
            report.faults.append(f"{base}: the file holds its {what}, but the config does not list it.")
    if missing := [key for key in stub(modules) if key not in checkpoint.tensors]:
        report.faults.append(f"{missing[0]}: the empty tensor that stops loaders without twofour is missing.")
    return {
        name: Layer(name, "linear" if len(shape) == 2 else "conv2d", shape) for name, shape in modules.items()
    }


def _check_packed(checkpoint: Checkpoint, base: str, layer: Layer) -> LayerCheck:
    scheme = scheme_of(checkpoint.config["quantization_config"])
    for what in ("weight_values", "weight_meta", *(() if scheme is None else ("weight_scale",))):
        if f"{base}.{what}" not in checkpoint.tensors:
            raise InputError(f"the config lists it, but the files hold no {what}.", layer=base)
    values, meta = checkpoint.read(f"{base}.weight_values"), checkpoint.read(f"{base}.weight_meta")
    stored_as = checkpoint.tensors[f"{base}.weight_values"].dtype
    if scheme is None and (stored_as not in FLOATING or f"{base}.weight_scale" in checkpoint.tensors):
        raise InputError("the files hold codes or scales of it, but the config names no scheme.", layer=base)
    if values.dim() == 2 and values.shape[0] != layer.rows:
        raise InputError(f"weight_values has {values.shape[0]} rows, the config {layer.rows}.", layer=base)
    scale = None
    if scheme is not None:
        scale = checkpoint.read(f"{base}.weight_scale")
        _require_scheme(values, scale, scheme, layer)
    validate(values, meta, layer.columns, scale, layer=base)
    groups = check_pattern(unpack(values, meta, layer.columns))  # of the codes, where there are such
    dense = values.element_size() if scheme is None else DENSE_BYTES
    for side in layer.shape:
        dense *= side
    stored = values.nbytes + meta.nbytes + lowrank_bytes(checkpoint, base)
    stored += scale.nbytes if scale is not None else 0
    return LayerCheck(base, layer.shape, groups.groups, groups.under, groups.over, dense, stored)


def _require_scheme(values: Tensor, scale: Tensor, scheme: Scheme, layer: Layer) -> None:
    """Refuse codes or scales of another kind than the config names."""
    if values.dtype != scheme.stored:
        raise InputError(
            f"weight_values is {values.dtype}, and {scheme.name} needs {scheme.stored}.", layer=layer.name
        )
    width = scheme.scale_width(layer.columns)
    if scale.shape[-1:] != (width,):
        raise InputError(
            f"weight_scale has shape {list(scale.shape)}, and {scheme.name} needs {width} a row.",
            layer=layer.name,
        )
    signed = len(scheme.signs) > 1
    if not bool((scale.isfinite() & ((scale != 0) if signed else (scale > 0))).all()):
        wrong = "zero, infinity or NaN" if signed else "a number that is not positive and finite"
        raise InputError(f"weight_scale holds {wrong}.", layer=layer.name)


def _dense_layers(checkpoint: Checkpoint) -> dict[str, Layer]:
    return {key.removesuffix(".weight"): x for key, x in layers_to_pack(checkpoint, (), ()).by_tensor.items()}


def _check_dense(checkpoint: Checkpoint, base: str, layer: Layer) -> LayerCheck:
    weight = checkpoint.read(f"{base}.weight")
    if not weight.is_floating_point():
        raise InputError(f"its weight is {weight.dtype}, which is no type of weights.", layer=base)
    groups = check_pattern(layer.to_matrix(weight))
    stored = weight.nbytes + lowrank_bytes(checkpoint, base)
    return LayerCheck(base, layer.shape, groups.groups, groups.under, groups.over, weight.nbytes, stored)
