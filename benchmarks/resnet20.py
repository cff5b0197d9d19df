"""ResNet-20 on CIFAR-10, pruned in one shot and trained on: the published workflow for CNNs.

    python benchmarks/resnet20.py MODEL.safetensors --data DIRECTORY [--recover EPOCHS] [--distill 0,0.9]

DIRECTORY is what benchmarks/cifar10.py reads. Each of `--methods` prunes the dense model over `--images`
training images, with the BatchNorms measured anew, and the groups of four along the input channels.

With --recover each is then trained on all 50,000 images as such models are: SGD with momentum 0.9, weight
decay 1e-4, batches of 128, crops and flips, a rate of 0.1 that falls to a tenth after a half and again after
three quarters of the epochs. Two lines of it are about sparsity (`hold_masks`, `attach`). `--distill W`:
beside the classes, with weight 1 - W, it learns what the dense model predicts, with weight W; several with
commas are run one after another, each from the same pruned model.

Rows are printed, and added to the file `--out`, that of a recovery anew each time it is tested: if it is
stopped, what it had reached is there. It is tested to be watched; the weights are those of the last step.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cifar10 import Pictures, normalised, read, shifted
from oneshot import add_row
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import twofour
from twofour.pattern import check_pattern
from twofour.select import select
from twofour.version import __version__

BATCH = 128

#: Steps from Python before the rest is replayed: cuDNN chooses its algorithms, the optimizer has its moments.
WARM = 12

#: A row in the file takes the place of an older one that says the same of these.
SAME = ("model", "stage", "method", "planned", "rate", "schedule", "distill", "seed", "device")


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


@dataclass(frozen=True)
class Recovery:
    """How a pruned model is trained. `minutes` is for one run, 0: as long as it takes."""

    epochs: int
    rate: float
    schedule: str
    distill: float
    temperature: float
    seed: int
    minutes: float
    look: int

    def rate_at(self, done: float) -> float:
        """`done` is the share of the training before this step."""
        if self.schedule == "cosine":
            return self.rate * (1 + math.cos(math.pi * done)) / 2
        return self.rate * (1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01)


class Step:
    """One step of the training, on a batch that is put into `images` and `classes`.

    It is some hundred small kernels, and calling them takes longer than they do. So on a GPU they are
    recorded once, the masking included, and from then on replayed by one call.
    """

    def __init__(self, model: nn.Module, teacher: nn.Module, how: Recovery, device: torch.device) -> None:
        self.model, self.teacher, self.how = model, teacher, how
        self.rate = torch.tensor(
            how.rate, device=device
        )  # a tensor, so that a recorded step can see it change
        self.optimizer = torch.optim.SGD(
            model.parameters(), self.rate, momentum=0.9, weight_decay=1e-4, fused=True
        )
        twofour.hold_masks(model).attach(self.optimizer)
        self.images = torch.zeros(BATCH, 3, 32, 32, dtype=torch.uint8, device=device)
        self.classes = torch.zeros(BATCH, dtype=torch.long, device=device)
        self.summed = torch.zeros((), device=device)
        self.done = 0
        self._replay: Callable[[], None] | None = None

    def __call__(self, images: Tensor, classes: Tensor, rate: float) -> None:
        self.images.copy_(images)
        self.classes.copy_(classes)
        self.rate.fill_(rate)
        if self.done == WARM and images.is_cuda:
            self._replay = self._recorded()
        (self._replay or self._work)()
        self.done += 1

    def _recorded(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self._work()
        except RuntimeError as error:
            print(f"the step cannot be recorded, so it goes on from Python: {error}", flush=True)
            self.optimizer.zero_grad()
            return self._work
        return graph.replay

    def _work(self) -> None:
        self.optimizer.zero_grad()
        x = normalised(self.images)
        logits = self.model(x)
        loss = F.cross_entropy(logits, self.classes)
        if self.how.distill:
            with torch.no_grad():
                beliefs = self.teacher(x)
            heat = self.how.temperature
            apart = F.kl_div(
                (logits / heat).log_softmax(1),
                (beliefs / heat).log_softmax(1),
                log_target=True,
                reduction="batchmean",
            )
            loss = (1 - self.how.distill) * loss + self.how.distill * heat**2 * apart
        loss.backward()
        self.optimizer.step()
        self.summed += loss.detach()


def recover(
    model: nn.Module, teacher: nn.Module, train: Pictures, how: Recovery
) -> Iterator[tuple[int, int, float]]:
    """Train a pruned model as a dense one is trained; its zeros stay.

    Whenever it is to be looked at it is in evaluation mode, and the epochs, how many there will be and the
    last one's loss are given.
    """
    device = train.images.device
    random = torch.Generator(device).manual_seed(how.seed)
    step = Step(model, teacher, how, device)
    steps, epochs, epoch = len(train.images) // BATCH, how.epochs, 0
    start = time.perf_counter()
    while epoch < epochs:
        model.train()
        order = torch.randperm(len(train.images), generator=random, device=device)[: steps * BATCH]
        images, classes = shifted(train.images[order], random), train.classes[order]
        step.summed.zero_()
        began = time.perf_counter()
        for number, batch in enumerate(zip(images.split(BATCH), classes.split(BATCH), strict=True)):
            step(*batch, how.rate_at((epoch + number / steps) / epochs))
        loss = float(step.summed) / steps  # waits for the GPU
        epoch += 1
        if epoch == 2 and how.minutes:  # the first one had to warm up
            left = 60 * how.minutes - (time.perf_counter() - start)
            epochs = min(epochs, epoch + max(1, int(left / (time.perf_counter() - began))))
        if epoch % how.look == 0 or epoch in (1, 2, epochs):
            model.eval()
            yield epoch, epochs, loss


@torch.no_grad()
def top1(model: nn.Module, test: Pictures) -> float:
    """In percent."""
    parts = zip(test.images.split(500), test.classes.split(500), strict=True)
    right = [(model(normalised(x)).argmax(1) == classes).sum() for x, classes in parts]
    return round(100 * float(torch.stack(right).sum()) / len(test.images), 2)


def is_2_of_4(model: nn.Module) -> bool:
    weights = {layer: model.get_parameter(f"{layer.name}.weight").detach() for layer in select(model).layers}
    return all(check_pattern(layer.to_matrix(weight)).legal for layer, weight in weights.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--methods", default="magnitude,wanda,sparsegpt,admm", help="with commas")
    parser.add_argument("--images", type=int, default=2000, help="to calibrate on")
    parser.add_argument("--recover", type=int, default=0, metavar="EPOCHS")
    parser.add_argument("--minutes", type=float, default=0, help="fewer epochs, if a run would take longer")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--schedule", choices=["steps", "cosine"], default="steps")
    parser.add_argument("--distill", default="0", help="weights with commas")
    parser.add_argument("--temperature", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look", type=int, default=5, help="test after so many epochs")
    parser.add_argument("--few", type=int, help="only so many images of both kinds, to try it out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    torch.backends.cudnn.benchmark = True
    # All on one stream that is not the default one: gradients of a recorded step must be made on its own.
    with torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext():
        run(given, device)


def run(given: argparse.Namespace, device: torch.device) -> None:
    train, test = (Pictures(p.images[: given.few], p.classes[: given.few]) for p in read(given.data, device))

    def tell(model: nn.Module, start: float, **facts: Any) -> None:
        row = {
            "model": "ResNet-20",
            **dict.fromkeys(SAME[2:-1]),
            **facts,
            "top1": top1(model, test),
            "seconds": round(time.perf_counter() - start, 1),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
            "twofour": __version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(row), flush=True)
        if given.out:
            add_row(given.out, row, SAME)

    dense = ResNet20()
    dense.load_state_dict(load_file(given.model))
    dense.eval().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    tell(dense, time.perf_counter(), stage="dense")
    calibration = normalised(train.images[: given.images]).split(100)
    for method in given.methods.split(","):
        pruned, start = copy.deepcopy(dense), time.perf_counter()
        twofour.prune_(pruned, method, data=calibration)
        tell(pruned, start, stage="pruned", method=method, images=given.images)
        for distill in map(float, given.distill.split(",")) if given.recover else ():
            how = Recovery(
                *(given.recover, given.rate, given.schedule, distill, given.temperature),
                *(given.seed, given.minutes, given.look),
            )
            asked = {"planned": how.epochs, "rate": how.rate, "schedule": how.schedule}
            asked |= {"distill": how.distill, "seed": how.seed}
            model, start = copy.deepcopy(pruned), time.perf_counter()
            for epoch, epochs, loss in recover(model, dense, train, how):
                facts = {"epochs": epoch, "of": epochs, "loss": round(loss, 4), "legal": is_2_of_4(model)}
                tell(model, start, stage="recovered", method=method, **asked, **facts)


if __name__ == "__main__":
    main()
