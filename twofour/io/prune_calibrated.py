"""Prune a checkpoint with a method that looks at the layers' inputs: block by block over calibration text.

What a block gave is on disk when the block is done (`.OUT.blocks/`), so a run that was cut short goes on
there with `resume`: the finished blocks are only run again, not pruned again, and the result is the same.
Beside the weights of the layers a block's file holds the norms and biases that were tuned with them, and what
else moved where channels were reordered. At the end the source is copied with the new weights in place of the
old, as any other stage does it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.blocks import Block
from twofour.calibrate.statistics import Gram
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import require_text, sample_windows
from twofour.calibrate.written import write_windows
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.finished import FinishedBlocks
from twofour.io.load import load_causal_lm
from twofour.io.streamed import DTYPES, StreamedBlocks, open_streamed
from twofour.io.structure import CheckpointLayers, keys_in_files
from twofour.io.workplace import run_of
from twofour.nn.lowrank import LowRank, add_lowrank_, lowrank_cost
from twofour.progress import OnProgress, silent
from twofour.prune import Method, prune_block, reorder_block, run_calibrated
from twofour.prune.hessian import relative_output_error
from twofour.prune.lowrank import compensate
from twofour.prune.permute_block import Reordered
from twofour.select import Layer

#: Above this a model is calibrated in the dtype of its checkpoint rather than in float32.
FLOAT32_UP_TO = 8 << 30

#: In place of a file: the model writes its calibration text itself.
SELF = "self"


@dataclasses.dataclass(frozen=True)
class CalibrationOptions:
    """What a checkpoint is calibrated on: `samples` windows of `seqlen` tokens of the text `calib`.

    `seqlen` None is what the model takes, at most 2048. `lowrank` is the rank of the correction that is
    fitted to the same inputs and kept beside each weight; 0 is none. `permute`: the channels inside each
    block are reordered before it is pruned.
    """

    calib: str | Path
    samples: int = 128
    seqlen: int | None = None
    seed: int = 0
    lowrank: int = 0
    permute: bool = False

    def __post_init__(self) -> None:
        require_text(self.samples, 2 if self.seqlen is None else self.seqlen)
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise InputError(f"the seed {self.seed} has more than 64 bits.", hint="Give a smaller one.")
        if self.lowrank < 0:
            raise InputError(
                f"a correction of rank {self.lowrank} is none.", hint="Give --lowrank 1 or more."
            )

    @property
    def files(self) -> list[str | Path]:
        return [] if str(self.calib) == SELF else [self.calib]

    def length_for(self, model: Any) -> int:
        """The tokens of a window; more than the model takes are refused."""
        longest: int = model.config.get_text_config().max_position_embeddings
        if self.seqlen is not None and self.seqlen > longest:
            raise InputError(
                f"windows of {self.seqlen} tokens are longer than the {longest} that the model takes.",
                hint=f"Give --seqlen {longest} or less, or leave it out.",
            )
        return min(2048, longest) if self.seqlen is None else self.seqlen

    def as_recorded(self) -> dict[str, Any]:
        """As it stands in the record of the step. What is off, of what is an extra, is not named."""
        recorded = {**dataclasses.asdict(self), "calib": str(self.calib)}
        return {key: value for key, value in recorded.items() if value or key not in ("lowrank", "permute")}


def prune_blocks(
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    method: Method,
    work: FinishedBlocks,
    options: dict[str, Any],
    calibration: CalibrationOptions,
    *,
    resume: bool,
    on_progress: OnProgress = silent,
) -> None:
    """Leave the pruned weights of every block in `work`, with notes about each."""
    model, windows, weights = open_for_calibration(checkpoint, layers, calibration, on_progress)
    run = run_of(options, checkpoint, *calibration.files)
    finished = parallel.of_first(work.begin(run, resume=resume) if parallel.is_first() else 0)
    keys = {f"{layer.name}.weight": key for key, layer in layers.by_tensor.items()}
    keys = parameters_in_files(model, checkpoint) | keys

    @torch.no_grad()
    def restore(number: int) -> None:
        names = {key: name for name, key in keys.items()}
        with safe_open(work.file(number), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                if key in names:
                    model.get_parameter(names[key]).copy_(opened.get_tensor(key))
                elif key.endswith(".lowrank_left"):
                    name = names[f"{key.removesuffix('lowrank_left')}weight"].removesuffix(".weight")
                    right = opened.get_tensor(f"{key.removesuffix('left')}right")
                    add_lowrank_(model.get_submodule(name), opened.get_tensor(key), right, name)

    def compensation(layer: Layer, before: Tensor, after: Tensor, gram: Gram) -> dict[str, float]:
        if not calibration.lowrank or layer.kind == "conv2d":
            return {}
        dtype = checkpoint_dtype(checkpoint, keys[f"{layer.name}.weight"])
        dense, pruned = layer.to_matrix(before), layer.to_matrix(after)
        # Rounded as it will be on disk: the next block, and a resumed run, see the same.
        left, right = (x.to(dtype) for x in compensate(dense, pruned, gram, calibration.lowrank, layer.name))
        add_lowrank_(model.get_submodule(layer.name), left, right, layer.name)
        whole = pruned.float() + left.float() @ right.float()
        return {
            "lowrank": left.shape[1],
            "lowrank_bytes": lowrank_cost(layer, left.shape[1], dtype).bytes,
            "lowrank_output_error": relative_output_error(dense, whole, gram),
        }

    def change(block: Block) -> None:
        moved = Reordered({}, ())
        if calibration.permute:
            moved = reorder_block(block, method, model.config, keys.__contains__)
        notes, tuned = prune_block(block, method, keys.__contains__, compensation)
        stored = {}
        changed = (f"{layer.name}.weight" for layer in notes)
        for name in dict.fromkeys((*changed, *(tuned.changed if tuned else ()), *moved.changed)):
            stored[keys[name]] = as_stored_(model.get_parameter(name), checkpoint, keys[name])
        for layer in notes:
            module, key = model.get_submodule(layer.name), keys[f"{layer.name}.weight"]
            if isinstance(module, LowRank):
                for side in ("lowrank_left", "lowrank_right"):
                    beside = f"{key.removesuffix('weight')}{side}"
                    stored[beside] = as_stored_(getattr(module, side), checkpoint, key)
        if not parallel.is_first():
            return
        reordered = {layer: {"permutation": note} for layer, note in moved.notes.items()}
        of_layers = {
            keys[f"{layer.name}.weight"]: {
                "layer": layer.name,
                "shape": list(layer.shape),
                **note,
                **reordered.get(layer, {}),
            }
            for layer, note in notes.items()
        }
        work.write(block, stored, of_layers, tuned)

    run_calibrated(
        *(model, list(layers.by_tensor.values()), windows, method, change),
        device=f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu",
        finished=finished,
        restore=restore,
        weights=weights,
        on_progress=on_progress,
    )


def open_for_calibration(
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    calibration: CalibrationOptions,
    on_progress: OnProgress = silent,
) -> tuple[Any, Tensor, StreamedBlocks | None]:
    """The model, the windows of text, and who brings the blocks, unless the whole model is in memory."""
    documents = read_documents(calibration.calib) if calibration.files else None
    wide = 2 * checkpoint.nbytes <= FLOAT32_UP_TO
    dtype = torch.float32 if wide else None
    # To write text the whole model has to run; otherwise a block at a time is enough.
    model, tokenizer, weights = open_blocks(checkpoint, layers, dtype, whole=documents is None)
    samples, seed, length = calibration.samples, calibration.seed, calibration.length_for(model)
    if documents is None:
        windows = write_windows(model, tokenizer, samples, length, seed, on_progress)
    else:
        windows = sample_windows(tokenizer, documents, samples, length, seed, on_progress)
    return model, windows, weights


def open_blocks(
    checkpoint: Checkpoint, layers: CheckpointLayers, dtype: torch.dtype | None, whole: bool = False
) -> tuple[Any, Any, StreamedBlocks | None]:
    """The model, its tokenizer, and who brings the blocks, unless the whole model is in memory."""
    streamed = None if whole else open_streamed(checkpoint, list(layers.by_tensor.values()), dtype)
    if streamed is not None:
        return streamed
    return *load_causal_lm(checkpoint.directory, device="cpu", dtype=dtype or "auto"), None


def as_stored_(parameter: Tensor, checkpoint: Checkpoint, key: str) -> Tensor:
    """Round a parameter to how it is stored: what the next block sees is what will be on disk, and what a
    resumed run sees."""
    stored = parameter.detach().to(checkpoint_dtype(checkpoint, key))
    parameter.copy_(stored)
    return stored


def checkpoint_dtype(checkpoint: Checkpoint, key: str) -> torch.dtype:
    dtype = DTYPES.get(checkpoint.tensors[key].dtype)
    if dtype is None:
        raise InputError(
            f"a weight stored as {checkpoint.tensors[key].dtype} cannot be calibrated.", layer=key
        )
    return dtype


def parameters_in_files(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's parameters and their tensors in the files, where they are there as such.

    One that transformers made out of something else cannot be written back: a vector (a norm, a bias) is then
    not tuned, and channels that it would have to follow are not reordered.
    """
    found: dict[str, str] = {}
    key_of = keys_in_files(model, checkpoint.tensors)
    for name, parameter in model.named_parameters():
        key = key_of(name)
        info = checkpoint.tensors.get(key or "")
        if key and info and info.shape == tuple(parameter.shape) and info.dtype in DTYPES:
            found[name] = key
    return found
