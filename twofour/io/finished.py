"""The finished blocks of a run that goes block by block, each in a file of its own in `.OUT.blocks/`.

A run that was cut short goes on after them with `resume`: they are only run again, not made again. They stay
after an error as well, be it a full disk or a text that is not there: it is hours of work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twofour.calibrate.blocks import Block
from twofour.errors import TwoFourError
from twofour.io.workplace import beside, describe_run, empty, held, readable_os_errors, require_same_run
from twofour.prune.reconstruct import Reconstructed


class FinishedBlocks:
    """Use as a context manager around all of the work, from before the first block until OUT is there."""

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out)
        self.directory = beside(self.out, "blocks")
        self._held = contextlib.ExitStack()
        # A block's file is written while the next block is worked on.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="finished block")
        self._last: Future[None] | None = None

    def begin(self, run: dict[str, Any], *, resume: bool) -> int:
        """Take the directory for this run; how many blocks one of the same has finished."""
        self._held.enter_context(held(self.directory, self.out))
        self._held.callback(self._remove_if_empty)
        number = 0
        if resume:
            while _is_whole(self.file(number)):
                number += 1
        if number:
            require_same_run(self.directory, run)
        else:
            with readable_os_errors(self.out):
                empty(self.directory)
            describe_run(self.directory, run, self.out)
        return number

    def file(self, number: int) -> Path:
        return self.directory / f"block-{number:04d}.safetensors"

    def write(
        self,
        block: Block,
        tensors: dict[str, Tensor],
        notes: dict[str, Any],
        tuned: Reconstructed | None,
    ) -> None:
        """Leave a block: its tensors as they will be in the files, notes by their names, how it was tuned."""
        self.wait()
        of_block = {"block": block.name, **dataclasses.asdict(tuned)} if tuned else {}
        metadata = {"notes": json.dumps(notes), "block": json.dumps(of_block)}
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        self._last = self._writer.submit(self._write, self.file(block.number), stored, metadata)

    def _write(self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        partial = path.with_name("block.partial")
        with readable_os_errors(self.out):
            save_file(tensors, partial, metadata=metadata)
            partial.replace(path)

    def wait(self) -> None:
        """Until all is on disk; what went wrong there is raised here."""
        if self._last is not None:
            self._last.result()

    def contents(self) -> Contents:
        self.wait()
        found = Contents({}, {}, {})
        for file in sorted(self.directory.glob("block-*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata()
                found.files |= dict.fromkeys(opened.keys(), file)
            found.notes |= json.loads(metadata["notes"])
            if block := json.loads(metadata["block"]):
                found.blocks[block.pop("block")] = block
        return found

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def __enter__(self) -> FinishedBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown()  # also when cut short: what is finished is there for --resume
        self._held.close()

    def _remove_if_empty(self) -> None:
        """Take the directory away if no block was finished."""
        if not self.file(0).exists():
            shutil.rmtree(self.directory, ignore_errors=True)


@dataclasses.dataclass
class Contents:
    """Where each tensor is, the notes by the names of the weights, and those about tuned blocks by theirs."""

    files: dict[str, Path]
    notes: dict[str, dict[str, Any]]
    blocks: dict[str, dict[str, Any]]

    def read(self, key: str) -> Tensor:
        if key not in self.files:
            raise TwoFourError(f"{key} is in no finished block: the files of the run were changed.")
        with safe_open(self.files[key], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
            return tensor


def _is_whole(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
