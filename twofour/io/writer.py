"""Write a checkpoint so that it is there whole or not at all.

Everything goes into a hidden directory beside the target (`.NAME.partial`), shard by shard, each written
under another name and renamed. The config comes last, and then the whole directory is renamed to its
name: a run that is killed, or a disk that fills up, leaves no checkpoint that could be loaded. What the
finished shards hold is noted in `progress.jsonl`, so that a later run can go on after them.

Each shard's safetensors header carries the SHA-256 of its tensors under `twofour_sha256`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twofour.errors import InputError
from twofour.io.checkpoint import CHECKSUMS, CONFIG, INDEX, RECORD, WEIGHTS
from twofour.io.workplace import RUN, beside, describe_run, empty, held, readable_os_errors, require_same_run

_PROGRESS = "progress.jsonl"


def sha256(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, as they lie in a safetensors file."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def shard_metadata(tensors: dict[str, Tensor]) -> dict[str, str]:
    """The header of a shard: `format` is for transformers, the checksums for `twofour check`."""
    return {"format": "pt", CHECKSUMS: json.dumps({name: sha256(t) for name, t in tensors.items()})}


class CheckpointWriter:
    """Use as a context manager; nothing appears at `out` before `finish`."""

    def __init__(self, out: str | Path, shards: int, run: dict[str, Any], *, resume: bool = False) -> None:
        self.out = Path(out)
        self.shards = shards
        self.staging = beside(self.out, "partial")
        #: What earlier shards gave, by number: from this run or, resumed, from the one before.
        self.done: dict[int, dict[str, Any]] = {}
        require_new(self.out)
        with contextlib.ExitStack() as stack:
            stack.enter_context(held(self.staging, self.out))
            with readable_os_errors(self.out):
                if not (resume and self._take_over(run)):
                    empty(self.staging)
                    describe_run(self.staging, run, self.out)
            self._held = stack.pop_all()

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # What is finished is kept for --resume when the work was merely cut short (Ctrl-C, a kill);
        # after an error it would only fill the disk.
        if kind is not None and issubclass(kind, Exception):
            shutil.rmtree(self.staging, ignore_errors=True)
        self._held.close()

    def write_shard(self, number: int, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Write shard `number` of `shards`, counted from 1. `notes` come back in `done`."""
        name = self._name(number)
        tensors = _apart({key: tensor.contiguous() for key, tensor in tensors.items()})
        with readable_os_errors(self.out):
            partial = self.staging / f"{name}.partial"
            save_file(tensors, partial, metadata=shard_metadata(tensors))
            partial.rename(self.staging / name)
            size = sum(t.nbytes for t in tensors.values())
            note = {"shard": number, "tensors": list(tensors), "bytes": size, "notes": notes}
            self._note(note)
            self.done[number] = note

    def finish(self, config: dict[str, Any], record: dict[str, Any], copy_from: Path | None = None) -> None:
        """Add the config and the small files of the source, then put the directory in its place."""
        with readable_os_errors(self.out):
            for file in _small_files(copy_from) if copy_from else ():
                shutil.copyfile(file, self.staging / file.name)
            if self.shards > 1:
                weight_map = {
                    t: self._name(n) for n, note in sorted(self.done.items()) for t in note["tensors"]
                }
                size = sum(note["bytes"] for note in self.done.values())
                write_json(self.staging / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
            write_json(self.staging / RECORD, record)
            for ours in (_PROGRESS, RUN):
                (self.staging / ours).unlink()
            write_json(self.staging / CONFIG, config)
            publish(self.staging, self.out)

    def _name(self, number: int) -> str:
        return WEIGHTS if self.shards == 1 else f"model-{number:05d}-of-{self.shards:05d}.safetensors"

    def _take_over(self, run: dict[str, Any]) -> bool:
        """Read what a run of the same that was cut short has finished; False if there is nothing."""
        notes = []
        with contextlib.suppress(OSError, json.JSONDecodeError):  # up to a line that was cut off
            for line in (self.staging / _PROGRESS).read_text().splitlines():
                notes.append(json.loads(line))
        if not notes:
            return False
        require_same_run(self.staging, run)
        partial = self.staging / f"{_PROGRESS}.partial"
        partial.write_text("".join(json.dumps(note) + "\n" for note in notes))
        partial.replace(self.staging / _PROGRESS)
        self.done = {n["shard"]: n for n in notes if (self.staging / self._name(n["shard"])).exists()}
        return True

    def _note(self, note: dict[str, Any]) -> None:
        with (self.staging / _PROGRESS).open("a") as file:
            file.write(json.dumps(note) + "\n")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tied tensors each with memory of its own: a file holds no tensor twice by reference."""
    seen: set[tuple[torch.device, int]] = set()
    found = {}
    for key, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr())
        found[key] = tensor.clone() if tensor.numel() and place in seen else tensor
        seen.add(place)
    return found


def require_new(out: Path) -> None:
    """Refuse a target that is there already: nothing is ever overwritten."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} already exists.", hint="Choose another name or remove it first.")


def publish(staging: Path, out: Path) -> None:
    """Rename a finished directory to its name."""
    if out.exists():
        out.rmdir()  # empty, or the writer would have refused; rename onto a directory fails on some systems
    staging.rename(out)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _small_files(directory: Path) -> Iterator[Path]:
    """Tokenizer, generation config, licence and the like: all that is not weights, config or hidden."""
    for file in sorted(directory.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
        ours = file.name in (CONFIG, RECORD) or file.name.endswith(".index.json")
        if file.is_file() and not weights and not ours and not file.name.startswith("."):
            yield file


def free_bytes(path: Path) -> int:
    """Free space where `path` will be made."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    stat = os.statvfs(existing)
    return stat.f_bavail * stat.f_frsize
