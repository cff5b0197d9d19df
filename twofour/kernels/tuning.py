"""What was measured to be fastest: tables of choices on disk, and the measuring.

A table maps a product ("4096x14336 bfloat16 16": n×k, dtype, bucket of tokens) to choices, best first. This
machine's own is kept in the user's cache under the GPU's name and the versions that matter, so that a new
driver, library or kernel starts a new one: what was measured with another kernel may not even run with this.
Several processes may write it at once. The tables in `defaults/` ship with the package.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from twofour.errors import TwoFourError
from twofour.kernels import cusparselt
from twofour.kernels.nvrtc import cache_directory, write_whole
from twofour.version import __version__

Table = dict[str, list[dict[str, Any]]]


def known(product: str, device: int) -> list[dict[str, Any]]:
    """Choices for a product, best first: this machine's, then the shipped ones."""
    return [*_own(device).get(product, []), *_shipped(device).get(product, [])]


def remember(product: str, device: int, choices: list[dict[str, Any]]) -> None:
    """Keep what was measured, for this process and later ones."""
    path = own_path(device)
    _own(device)[product] = _written(path)[product] = choices
    # Read again: another process may have added to it. Two that rename at the same moment lose the rows of
    # one, until that one writes again.
    table = {**_read(path), **_written(path)}
    write_whole(path, json.dumps(table, indent=1).encode())


def own_path(device: int) -> Path:
    """Where this machine's table is."""
    return cache_directory() / "tuned" / f"{_gpu(device)}-{_versions()}.json"


def _gpu(device: int) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device)).strip("-").lower()


@cache
def _versions() -> str:
    """What a measurement depends on besides the GPU."""
    try:
        library = str(cusparselt.version())
    except TwoFourError:  # not there: our own kernels need nothing of it
        library = "-none"
    parts = [f"twofour{__version__}-{_kernels()}", f"torch{torch.__version__}", f"cslt{library}", _driver()]
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts))


def _kernels() -> str:
    """A digest of the kernels' sources."""
    folder = files("twofour.kernels").joinpath("cuda")
    texts = [file.read_bytes() for file in sorted(folder.iterdir(), key=lambda file: file.name)]
    return hashlib.sha256(b"\n".join(texts)).hexdigest()[:8]


def _driver() -> str:
    try:
        said = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        said = ""
    version = re.search(r"\d+(\.\d+)+", said)  # the first number with a point in it
    return f"driver{version[0]}" if version else "driver-unknown"


@cache
def _written(path: Path) -> Table:
    """What this process has put there."""
    return {}


@cache
def _own(device: int) -> Table:
    return _read(own_path(device))


@cache
def _shipped(device: int) -> Table:
    folder = files("twofour.kernels").joinpath("defaults")
    file = folder.joinpath(f"{_gpu(device)}.json")
    table: Table = json.loads(file.read_text()) if file.is_file() else {}
    if cusparselt.ids_are_known():
        return table
    return {product: [c for c in kept if c["backend"] != "cusparselt"] for product, kept in table.items()}


def _read(path: Path) -> Table:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return {}  # none yet, or damaged: it is only a cache
