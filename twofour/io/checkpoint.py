"""Read a Hugging Face style directory tensor by tensor, without ever holding more than one.

A checkpoint is `config.json` and either `model.safetensors` or `model.safetensors.index.json` with its
shards. Each tensor is read through a mapping of its own that ends with it: the resident memory of a long
pass over a large file would otherwise grow to the size of the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from twofour.errors import InputError
from twofour.io.record import wrong_record

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: In the header of a file: the SHA-256 of its tensors as they were written.
CHECKSUMS = "twofour_sha256"
#: What the stages leave beside a model: how it was made.
RECORD = "twofour.json"

_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class TensorInfo:
    name: str
    file: str
    dtype: str  # safetensors' name: F32, BF16, U8, F8_E4M3
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count * _BYTES.get(self.dtype, 1)


class Checkpoint:
    """A directory that has been found whole: all shards are there, all tensors where the index says."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            what = "is a file, not a directory" if self.directory.exists() else "does not exist"
            raise InputError(f"{self.directory} {what}.", hint="Give a Hugging Face style model directory.")
        self.config = read_json(self.directory / CONFIG)
        #: Tensors in the files that the index leaves out. transformers loads them all the same.
        self.unlisted: list[str] = []
        self.tensors = self._find_tensors()

    @cached_property
    def record(self) -> dict[str, Any]:
        """How the model was made so far, empty if nobody wrote it down."""
        return read_record(self.directory)

    @property
    def files(self) -> list[str]:
        return sorted({t.file for t in self.tensors.values()})

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

    def read(self, name: str) -> Tensor:
        with self._open(self.tensors[name].file) as file:
            return file.get_tensor(name)

    def metadata(self, file: str) -> dict[str, str]:
        with self._open(file) as opened:
            return opened.metadata() or {}

    def checksums(self, file: str) -> dict[str, str]:
        """The SHA-256 of a file's tensors as they were written; empty where another tool wrote it."""
        try:
            found = json.loads(self.metadata(file).get(CHECKSUMS, "{}"))
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict):
            raise InputError(f"{file}: the stored checksums cannot be read.")
        return found

    def _find_tensors(self) -> dict[str, TensorInfo]:
        index = self.directory / INDEX
        if (self.directory / WEIGHTS).exists():
            return dict(self._tensors_in(WEIGHTS))
        if not index.exists():
            if any(self.directory.glob("*.bin")) or any(self.directory.glob("*.pt*")):
                raise InputError(
                    f"{self.directory} holds pickled weights, which twofour never reads.",
                    hint="Load the model with transformers and save_pretrained it as safetensors first.",
                )
            raise InputError(f"{self.directory} has neither {WEIGHTS} nor {INDEX}.")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index} has no weight_map: it is not a safetensors index.")
        for name, file in weight_map.items():
            if not isinstance(file, str):
                raise InputError(f"{index} says that {name} is in {file!r}, which is not the name of a file.")
        found: dict[str, TensorInfo] = {}
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file:
                raise InputError(f"{index} names {file!r}, which is not a file beside it.")
            found.update(self._tensors_in(file))
        for name, file in weight_map.items():
            if name not in found or found[name].file != file:
                raise InputError(f"{index} says that {file} holds {name}, but it does not.")
        self.unlisted = sorted(found.keys() - weight_map.keys())
        return found

    def _tensors_in(self, file: str) -> Iterator[tuple[str, TensorInfo]]:
        with self._open(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                yield name, TensorInfo(name, file, part.get_dtype(), tuple(part.get_shape()))

    @contextmanager
    def _open(self, file: str) -> Iterator[Any]:
        path = self.directory / file
        if not path.exists():
            raise InputError(f"{path} is missing.", hint="Copy the whole checkpoint again.")
        try:
            with safe_open(path, framework="pt") as opened:
                yield opened
        except SafetensorError as error:
            raise InputError(
                f"{path} is not a whole safetensors file ({error}).", hint="Copy or download it again."
            ) from error
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}.") from error


def stamps(*of: Checkpoint | str | Path) -> dict[str, list[int]]:
    """What tells these files from others that take their place under the same name."""
    paths = [
        path
        for one in of
        for path in ([one.directory / f for f in one.files] if isinstance(one, Checkpoint) else [Path(one)])
    ]
    return {str(p): [p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.exists()}


def read_record(directory: Path) -> dict[str, Any]:
    """The record beside a model, empty if there is none."""
    path = directory / RECORD
    record = read_json(path) if path.exists() else {}
    if why := wrong_record(record):
        raise InputError(f"{path}: {why}.", hint="Restore it, or remove it to go on without a record.")
    return record


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a sentence about what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing.",
            hint="Give a Hugging Face style model directory (config.json and safetensors).",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, not a JSON object.")
    return content
