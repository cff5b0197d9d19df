"""What holding masks costs: a training step of a 2:4 model with `hold_masks` against the same step without.

Usage: python benchmarks/masked_step.py [--device cpu|cuda] [--tokens 512 2048 8192]; --help has the rest.

A stack of MLP blocks, fused AdamW, forward + backward + step. Dense and masked steps alternate in one
process, so that whatever else the machine does hits both; the cost is the median of the ratios of neighbours.
How far that can be trusted is seen from a second dense model, whose cost should be 0. What the masks alone
take is measured as well: masking all gradients and all weights once, as a share of the dense step. On a CPU
with one thread the clock is that of the processor time, which does not count what others had of the core.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import twofour
from twofour.recover.mask_tensor import zero_pruned_


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def seconds(work: Callable[[], object], device: str) -> float:
    clock = time.perf_counter
    if device == "cpu" and torch.get_num_threads() == 1:
        clock = time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device, dtype = arguments.device, getattr(torch, arguments.dtype)

    def make(held: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(arguments.width) for _ in range(arguments.layers)))
        model = twofour.prune_(model).to(device, dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if held:
            twofour.hold_masks(model).attach(optimizer)
        return model, optimizer

    pairs = {"dense": make(False), "again": make(False), "masked": make(True)}
    held = pairs["masked"][0]
    masked = [module for module in held.modules() if isinstance(module, nn.Linear)]

    def masks_alone() -> None:
        for module in masked:
            zero_pruned_(module.weight, module.weight_mask)
        for module in masked:
            zero_pruned_(module.weight.grad, module.weight_mask)

    rows = []
    for tokens in arguments.tokens:
        x = torch.randn(tokens, arguments.width, device=device, dtype=dtype)

        def step(which: str, x: torch.Tensor = x) -> None:
            model, optimizer = pairs[which]
            optimizer.zero_grad()
            (model(x) - x).square().mean().backward()
            optimizer.step()

        times: dict[str, list[float]] = {which: [] for which in (*pairs, "masks")}
        for round_ in range(-2, arguments.rounds):
            order = list(pairs)[:: 1 if round_ % 2 else -1]
            taken = {which: seconds(lambda which=which: step(which), device) for which in order}
            taken["masks"] = seconds(masks_alone, device)
            if round_ >= 0:  # the first two warm up
                for which, value in taken.items():
                    times[which].append(value)
        best = {which: min(values) for which, values in times.items()}

        def cost(which: str, times: dict[str, list[float]] = times) -> float:
            ratios = [mine / dense for mine, dense in zip(times[which], times["dense"], strict=True)]
            return round(100 * (statistics.median(ratios) - 1), 2)

        row = {
            "tokens": tokens,
            "dense_ms": round(best["dense"] * 1e3, 3),
            "masked_ms": round(best["masked"] * 1e3, 3),
            "masks_ms": round(best["masks"] * 1e3, 3),
            "cost_percent": cost("masked"),
            "control_percent": cost("again"),
            "masks_alone_percent": round(100 * best["masks"] / best["dense"], 2),
        }
        rows.append(row)
        print(
            f"{tokens:6} tokens: dense {row['dense_ms']:9.2f} ms, masked {row['masked_ms']:9.2f} ms "
            f"({row['cost_percent']:+.2f} %, control {row['control_percent']:+.2f} %), "
            f"masks alone {row['masks_ms']:.2f} ms ({row['masks_alone_percent']:.2f} %)"
        )
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "dtype": arguments.dtype,
        "width": arguments.width,
        "layers": arguments.layers,
        "parameters": sum(p.numel() for p in held.parameters()),
    }
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
