"""Prune a checkpoint with a method that looks at the layers' inputs: block by block over calibration text.

What a block gave is on disk when the block is done (`.OUT.blocks/`), so a run that was cut short goes on
there with `resume`: the finished blocks are only run again, not pruned again, and the result is the same.
At the end the source is copied with the new weights in place of the old, as any other stage does it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.statistics import Gram
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.structure import CheckpointLayers
from twofour.progress import OnProgress, silent
from twofour.prune import Method, prune_weight
from twofour.select import Layer

#: Above this a model is calibrated in the dtype of its checkpoint rather than in float32.
FLOAT32_UP_TO = 8 << 30


def prune_blocks(
    checkpoint: Checkpoint,
    layers: CheckpointLayers,
    method: Method,
    work: Path,
    options: dict[str, Any],
    *,
    calib: str | Path,
    samples: int,
    seqlen: int | None,
    seed: int,
    resume: bool,
    on_progress: OnProgress = silent,
) -> None:
    """Leave the pruned weights of every block in `work`, with notes about each."""
    documents = read_documents(calib)
    finished = _finished(work, options) if resume else 0
    if not finished:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        (work / "options.json").write_text(json.dumps(options))
    wide = 2 * checkpoint.nbytes <= FLOAT32_UP_TO
    model, tokenizer = load_causal_lm(
        checkpoint.directory, device="cpu", dtype=torch.float32 if wide else "auto"
    )
    longest = model.config.get_text_config().max_position_embeddings
    windows = sample_windows(tokenizer, documents, samples, min(seqlen or 2048, longest), seed)
    keys = {layer.name: key for key, layer in layers.by_tensor.items()}
    for number in range(finished):
        _put_back(model, work / _file(number), keys)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def change(number: int, grams: dict[Layer, Gram]) -> None:
        weights, notes = {}, {}
        for layer, gram in grams.items():
            parameter = model.get_parameter(f"{layer.name}.weight")
            new, note = prune_weight(layer, parameter.detach(), method, gram)
            stored = new.to(checkpoint_dtype(checkpoint, keys[layer.name]))
            # What the next block sees is what will be on disk: a resumed run sees the same.
            parameter.copy_(stored)
            weights[keys[layer.name]] = stored.cpu().contiguous()
            notes[keys[layer.name]] = {"layer": layer.name, "shape": list(layer.shape), **note}
        partial = work / "block.partial"
        save_file(weights, partial, metadata={"notes": json.dumps(notes)})
        partial.rename(work / _file(number))

    run_blocks(
        model,
        list(layers.by_tensor.values()),
        windows,
        change,
        device=device,
        finished=finished,
        on_progress=on_progress,
    )


@contextmanager
def pruned_weights(work: Path) -> Iterator[dict[str, tuple[Path, dict[str, Any]]]]:
    """Where each pruned tensor is and what was noted about it; the work is removed when all went well."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for file in sorted(work.glob("block-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            notes = json.loads(opened.metadata()["notes"])
        found |= {key: (file, note) for key, note in notes.items()}
    yield found
    shutil.rmtree(work)


def read_pruned(file: Path, key: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(key)


def checkpoint_dtype(checkpoint: Checkpoint, key: str) -> torch.dtype:
    names = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    dtype = names.get(checkpoint.tensors[key].dtype)
    if dtype is None:
        raise InputError(
            f"a weight stored as {checkpoint.tensors[key].dtype} cannot be calibrated.", layer=key
        )
    return dtype


def _file(number: int) -> str:
    return f"block-{number:04d}.safetensors"


def _finished(work: Path, options: dict[str, Any]) -> int:
    """How many blocks from the first on an earlier run with the same options has finished."""
    try:
        if json.loads((work / "options.json").read_text()) != options:
            return 0
    except (OSError, json.JSONDecodeError):
        return 0
    number = 0
    while (work / _file(number)).exists():
        number += 1
    return number


@torch.no_grad()
def _put_back(model: nn.Module, file: Path, keys: dict[str, str]) -> None:
    names = {key: name for name, key in keys.items()}
    with safe_open(file, framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 (not a dict)
            model.get_parameter(f"{names[key]}.weight").copy_(opened.get_tensor(key))
