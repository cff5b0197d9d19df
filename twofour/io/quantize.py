"""Quantize a 2:4 model in memory, or a pruned checkpoint on disk into a packed one of 8 or 4 bits.

Without text every weight is rounded for itself, and a checkpoint streams as it does for `pack`. With text the
model runs block by block as in pruning (io/quantize_calibrated.py). From a dense model, `joint` rounding
prunes on the way: that is `twofour prune --scheme`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from twofour.calibrate.blocks import Block, Teacher
from twofour.calibrate.experts import opened_experts
from twofour.calibrate.parallel import require_alone
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.finished import FinishedBlocks
from twofour.io.format import is_packed, packed_config, stub
from twofour.io.pack import layers_to_write, lowrank_of
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.quantize_calibrated import PARTS, described_layer, quantize_into
from twofour.io.record import add_step, summary, was_permuted, was_tuned
from twofour.io.stream import require_sound, rewrite
from twofour.io.structure import CheckpointLayers
from twofour.io.writer import CheckpointWriter, require_new
from twofour.nn.convert import packed_layers
from twofour.nn.lowrank import lowrank_layers
from twofour.nn.modules import Memory
from twofour.nn.quantized import put_quantized_
from twofour.packed import Packed24
from twofour.progress import OnProgress, silent
from twofour.prune.reconstruct import Reconstruct, Reconstructed
from twofour.quantize import Rounding, Scheme, quantize_matrix, scheme_named
from twofour.quantize.blocks import Rounded, quantize_blocks, relative_error
from twofour.quantize.rounding import require_two_four
from twofour.quantize.smooth import Smoothing
from twofour.quantize.tune import TUNING, TUNING_TO_DENSE
from twofour.select import Layer, require_layers, select

Model = TypeVar("Model", bound=nn.Module)

#: The least share of a 16-bit checkpoint that can come out, all of it in 4 bits: 3 of 16 bits.
LEAST = 3 / 16


@dataclass(frozen=True)
class QuantizeOptions:
    """`scheme` as in quantize/schemes.py; without `rounding` compensated if there is text, else nearest.

    `joint` rounding takes a dense model and prunes it. `smooth`: scale moves from activations into weights;
    None is yes for int8 with text, where large channels leave the others few codes, and otherwise no: in fp8
    every number has an exponent of its own. `tune`: each block is tuned as a whole after its layers are
    rounded (quantize/tune.py). `teacher`: the dense model, a directory, or in `quantize_` a module. The codes
    should come near to what it does (quantize/target.py), and not to what the pruned model does.
    """

    scheme: str | Scheme
    group: int | None = None
    rounding: Rounding | None = None
    smooth: bool | None = None
    tune: bool = False
    teacher: str | Path | nn.Module | None = None

    @property
    def tuning(self) -> Reconstruct | None:
        to_dense = self.teacher is not None or self.rounding == "joint"
        return (TUNING_TO_DENSE if to_dense else TUNING) if self.tune else None

    def settled(self, has_text: bool) -> tuple[Scheme, Rounding, bool]:
        """What it comes to, after refusing what cannot be."""
        scheme = scheme_named(self.scheme, self.group)
        rounding = self.rounding or ("compensated" if has_text else "nearest")
        if self.teacher is not None and rounding == "joint":
            raise InputError(
                "joint rounding starts from the dense model, which is its teacher.", hint="Leave it out."
            )
        if self.teacher is not None and has_text and rounding == "nearest" and not self.tune:
            raise InputError(
                "rounding to the nearest does not look at a teacher.", hint="Round compensated, or tune."
            )
        if not has_text and (rounding != "nearest" or self.smooth or self.tune or self.teacher is not None):
            what = "smoothing" if self.smooth else "tuning" if self.tune else f"{rounding} rounding"
            what = "following a teacher" if self.teacher is not None else what
            raise InputError(f"{what} looks at the inputs of the layers.", hint="Give calibration text.")
        if self.smooth and not scheme.rounds_activations:
            raise InputError(
                f"{scheme.name} leaves activations as they are, so there is nothing to smooth.",
                hint="Leave smoothing out.",
            )
        by_default = has_text and scheme.rounds_activations and scheme.codes == "int8"
        return scheme, rounding, by_default if self.smooth is None else self.smooth


def quantize_(
    model: Model,
    scheme: str | Scheme = "int8",
    windows: Tensor | None = None,
    *,
    group: int | None = None,
    rounding: Rounding | None = None,
    smooth: bool | None = None,
    tune: bool = False,
    teacher: nn.Module | None = None,
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
    need it, int8 is smoothed (see `QuantizeOptions`), and with `tune` each block is tuned as a whole as well.
    Take others than `prune_` had: what `best` was tuned on, it knows by heart.
    With a `teacher`, the dense model, what is left comes as near to that as it can (not for a model by
    `best`, which is near to it already: layers fitted once more would lose that). `rounding="joint"` takes
    a dense model and prunes it on the way. Experts that are stored as one tensor are
    taken apart, as by `pack_`.
    """
    options = QuantizeOptions(scheme, group, rounding, smooth, tune, teacher)
    chosen, how, smoothed = options.settled(windows is not None)
    _refuse_corrections(lowrank_layers(model))
    with opened_experts(model) as experts, opened_experts(teacher) if teacher else nullcontext():
        layers = require_layers(select(model, include, exclude)).layers
        if any(not layer.name for layer in layers):
            raise InputError("a layer on its own cannot be replaced in place.", hint="Wrap it in a module.")
        weights = {layer: model.get_parameter(f"{layer.name}.weight") for layer in layers}
        packed: dict[Layer, Packed24] = {}

        def keep(block: Block, rounded: dict[Layer, Rounded], tuned: Reconstructed | None) -> None:
            for layer, own in rounded.items():
                packed[layer] = own.codes.packed(layer.name, weights[layer].dtype)

        if windows is None:
            for number, (layer, weight) in enumerate(weights.items(), 1):
                codes = quantize_matrix(layer.to_matrix(weight.detach()), chosen, how, layer=layer.name)
                packed[layer] = codes.packed(layer.name, weight.dtype)
                on_progress(number, len(weights), layer.name)
        else:
            if how != "joint":  # all are looked at before the first is changed
                for layer, weight in weights.items():
                    require_two_four(layer.to_matrix(weight.detach()), layer.name)
            quantize_blocks(
                *(model, layers, windows, chosen, how, keep),
                prepare=Smoothing(model) if smoothed else None,
                device=next(iter(weights.values())).device,
                tune=options.tuning,
                teacher=None if teacher is None else Teacher(teacher),
                on_progress=on_progress,
            )
        put_quantized_(model, packed, chosen, memory)
        if any(packed_layers(module) for module in experts.values()):
            experts.clear()  # all stay apart, or none, as in pack_
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
    rounding is joint, which prunes: then the step is one of `prune`, and the source is the dense model.
    """
    scheme, rounding, smooth = options.settled(calibration is not None)
    require_alone("prune --scheme" if rounding == "joint" else "quantize")
    checkpoint = Checkpoint(source)
    require_new(Path(out))
    if is_packed(checkpoint.config):
        raise InputError(f"{source} is packed already.", hint="Take the checkpoint that it was made from.")
    _refuse_corrections(lowrank_of(checkpoint))
    layers = layers_to_write(checkpoint, include, exclude)
    modules = {key.removesuffix(".weight"): layer.shape for key, layer in layers.by_tensor.items()}
    teacher = None
    if options.teacher is not None:
        teacher = _teacher(options.teacher, checkpoint, layers, tunes=options.tune)
    joint = rounding == "joint"
    recorded: dict[str, Any] = {"scheme": scheme.name, "group": scheme.group}
    recorded |= {"method": "joint"} if joint else {"rounding": rounding}
    # What it would be by default is not the same for all of these, so it is said.
    recorded |= {"smooth": smooth} if calibration and scheme.rounds_activations else {}
    recorded |= {"tune": True} if options.tune else {}
    recorded |= {"teacher": str(options.teacher)} if options.teacher is not None else {}
    recorded |= calibration.as_recorded() if calibration else {}
    described = {**recorded, "layers": sorted(layers.by_tensor)}
    stubs = stub(modules)
    step: dict[str, Any] = {}

    def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
        done = {note.pop("layer"): note for note in notes.values() if "layer" in note}
        step.update(
            verb="prune" if joint else "quantize",
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
            new, note = described_layer(name, layer, rounded, tensor.nbytes)
            note["relative_error"] = relative_error(matrix, rounded.weight())
            return {**new, **{key: stubs[key] for key in stubs if key == name}}, note

        rewrite(
            *(checkpoint, out, convert, described, finish),
            resume=resume,
            least=LEAST / 2 if _is_wide(checkpoint) else LEAST,
            on_progress=on_progress,
        )
        return step
    require_sound(checkpoint, on_progress)
    with FinishedBlocks(out) as work:
        quantize_into(
            *(work, checkpoint, layers, scheme, rounding, calibration, described),
            teacher=teacher,
            smooth=smooth,
            tune=options.tuning,
            resume=resume,
            on_progress=on_progress,
        )
        found = work.contents()
        if found.blocks:
            step["blocks"] = found.blocks

        def place(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            base = name.removesuffix(".weight")
            keys = [f"{base}.{part}" for part in PARTS] if name in layers.by_tensor else [name]
            if name not in layers.by_tensor and name not in found.files:
                return {name: tensor}, {}
            new = {key: found.read(key) for key in keys}
            new |= {key: stubs[key] for key in stubs if key == name}
            return new, dict(found.notes.get(name, {}))

        rewrite(
            *(checkpoint, out, place, described, finish),
            least=LEAST / 2 if _is_wide(checkpoint) else LEAST,
        )
        work.remove()
    return step


def _teacher(path: Any, checkpoint: Checkpoint, layers: CheckpointLayers, tunes: bool) -> Checkpoint:
    """The dense model, after a look at whether it is one, and the one that the other was pruned from."""
    teacher = Checkpoint(path)
    hint = "Give the dense model that this one was pruned from."
    if is_packed(teacher.config):
        raise InputError(f"the teacher {path} is packed.", hint=hint)
    if was_permuted(checkpoint.record):
        raise InputError(
            f"{checkpoint.directory} was pruned with --permute, so its channels have another order than the "
            "teacher's.",
            hint="Leave --teacher out, or prune without --permute.",
        )
    if was_tuned(checkpoint.record) and not tunes:
        raise InputError(
            f"{checkpoint.directory} was pruned by best, which has tuned its blocks towards the dense model: "
            "to fit its layers to that once more, one by one, would undo it.",
            hint="Add --tune, or leave --teacher out.",
        )
    for key, info in checkpoint.tensors.items():
        own = teacher.tensors.get(key)
        if own is None or own.shape != info.shape:
            shape = "none" if own is None else f"one of {list(own.shape)}"
            raise InputError(
                f"{key} is {list(info.shape)}, and the teacher {path} has {shape}: it is another model.",
                layer=layers.by_tensor[key].name if key in layers.by_tensor else None,
                hint=hint,
            )
    return teacher


def _is_wide(checkpoint: Checkpoint) -> bool:
    return any(info.dtype == "F32" for info in checkpoint.tensors.values())


def _refuse_corrections(corrected: Any) -> None:
    if name := next(iter(corrected), None):
        raise InputError(
            "it has a low-rank correction, which a quantized layer cannot carry yet.",
            layer=name,
            hint="Prune again without --lowrank.",
        )
