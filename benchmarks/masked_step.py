"""What holding masks costs: a training step of a 2:4 model with `hold_masks` against the same step without.

Usage: python benchmarks/masked_step.py [--layers 4] [--width 2048] [--batch 16] [--scheme int4] [--out FILE]

A Llama with random weights takes the steps of `twofour recover`: forward in bfloat16 (on a CPU in float32),
the loss (one kernel on a GPU), backward, clipping, fused AdamW on float32 weights.

    dense           none of ours: 2:4 weights at the start, and what becomes of them
    masked          masks held through gradients and optimizer
    distill         masked, with the predictions of a teacher of the same shape
    distill_beside  the same, the teacher's forward in a stream of its own beside the student's; on a GPU only
    teacher         the forward of that teacher alone
    rounded         masked, with rounding to --scheme in the loop; only where one is given

All take turns in one process, so that whatever else the machine does hits all, and a ratio is the median of
the ratios within each round. How far it can be trusted is seen from `again`, a second dense step of each
round, whose ratio should be 1. What should hold: masked at most 1.03 of dense, distill at most masked and the
teacher together, with the teacher beside the student if `recover` has it so. The document is printed as
the last line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import twofour
from twofour.quantize.schemes import SCHEMES
from twofour.recover.beside import RUNS_BESIDE, Beside
from twofour.recover.losses import next_tokens, recovery_loss
from twofour.recover.rounded import RoundedLayers

MOST_MASKED, MOST_DISTILL = 1.03, 1.0


class Student:
    """A model with its optimizer, and a step of it."""

    def __init__(self, model: LlamaForCausalLM, run: Any, masked: bool) -> None:
        self.model, self.run = model, run
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
        self.masks = twofour.hold_masks(model).attach(self.optimizer) if masked else None

    def step(self, tokens: Tensor, teacher: Any = None, beside: Beside | None = None) -> None:
        beside = beside or Beside(tokens.device, wanted=False)
        beliefs = None if teacher is None else beside.begin(lambda: predictions(teacher, tokens))
        with autocast(tokens.device):
            logits = self.run(input_ids=tokens, use_cache=False).logits
        with beside.joined():
            loss = recovery_loss(
                logits, next_tokens(tokens), beliefs, task=1.0 if teacher is None else 0.1, kl=1.0
            )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@torch.no_grad()
def predictions(teacher: Any, tokens: Tensor) -> Tensor:
    with autocast(tokens.device):
        logits: Tensor = teacher(input_ids=tokens, use_cache=False).logits
    return logits


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def make(arguments: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.width // arguments.head,
        num_key_value_heads=max(1, arguments.width // arguments.head // 4),
        vocab_size=arguments.vocabulary,
        max_position_embeddings=arguments.seqlen,
        tie_word_embeddings=True,
    )
    with device:
        return twofour.prune_(LlamaForCausalLM(config))


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(
    work: dict[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Times of each, taking turns: forwards and backwards, so that none always follows the same one."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(-2, rounds):
        for name in list(work)[:: 1 if number % 2 else -1]:
            taken = milliseconds(work[name], device)
            if number >= 0:  # the first two warm up
                times[name].append(taken)
    return times


def ratio(times: dict[str, list[float]], name: str, to: tuple[str, ...] = ("dense",)) -> float:
    rounds = zip(times[name], *(times[other] for other in to), strict=True)
    return round(statistics.median(mine / sum(others) for mine, *others in rounds), 4)


def row_of(mode: str, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    def run(model: nn.Module) -> Any:
        return torch.compile(model) if mode == "compiled" else model

    models = {name: make(arguments, device) for name in ("dense", "masked", "teacher")}
    dense, masked = (Student(models[n].train(), run(models[n]), n == "masked") for n in ("dense", "masked"))
    teacher = run(models["teacher"].eval().to(torch.bfloat16 if device.type == "cuda" else torch.float32))
    tokens = torch.randint(0, arguments.vocabulary, (arguments.batch, arguments.seqlen), device=device)
    work: dict[str, Callable[[], object]] = {
        "dense": lambda: dense.step(tokens),
        "masked": lambda: masked.step(tokens),
        "teacher": lambda: predictions(teacher, tokens),
        "distill": lambda: masked.step(tokens, teacher),
        "again": lambda: dense.step(tokens),
    }
    if device.type == "cuda":
        beside = Beside(device)
        work["distill_beside"] = lambda: masked.step(tokens, teacher, beside)
    times = measure(work, arguments.rounds, device)
    ratios = {
        "masked": ratio(times, "masked"),
        "again": ratio(times, "again"),
    }
    for name in ("distill", "distill_beside"):
        for other in ("dense", "masked"):
            if name in times:
                ratios[f"{name}_to_{other}_and_teacher"] = ratio(times, name, (other, "teacher"))
    judged = f"distill{'_beside' * (RUNS_BESIDE and device.type == 'cuda')}_to_masked_and_teacher"
    if arguments.scheme:
        assert masked.masks is not None
        rounded = RoundedLayers(masked.model, masked.masks.layers, SCHEMES[arguments.scheme])

        def rounded_step() -> None:
            masked.step(tokens)
            rounded.refresh()

        more = measure({"dense": work["dense"], "rounded": rounded_step}, arguments.rounds, device)
        times["rounded"], ratios["rounded"] = more["rounded"], ratio(more, "rounded")
    return {
        "mode": mode,
        "ms": {name: round(statistics.median(found), 3) for name, found in times.items()},
        "least_ms": {name: round(min(found), 3) for name, found in times.items()},
        "ratios": ratios,
        "holds": ratios["masked"] <= MOST_MASKED and ratios[judged] <= MOST_DISTILL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=None, help="of the MLP; default: 3.5 × width")
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--scheme", choices=list(SCHEMES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="a file for the document too")
    arguments = parser.parse_args()
    arguments.inner = arguments.inner or 7 * arguments.width // 2
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as recover does
    begin = time.perf_counter()
    rows = []
    for mode in arguments.modes:
        rows.append(row_of(mode, arguments, device))
        ms, ratios = rows[-1]["ms"], rows[-1]["ratios"]
        print(
            f"{mode:8}  "
            + ", ".join(f"{name} {value:.2f} ms" for name, value in ms.items())
            + f"; masked {ratios['masked']:.3f} of dense (again: {ratios['again']:.3f})"
            + "".join(
                f", {name} {ratios[f'{name}_to_masked_and_teacher']:.3f} of masked and teacher"
                for name in ("distill", "distill_beside")
                if name in ms
            )
            + (f", rounded {ratios['rounded']:.3f} of dense" if "rounded" in ratios else "")
        )
    about = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "tokens": arguments.batch * arguments.seqlen,
        **{k: v for k, v in vars(arguments).items() if k not in ("out", "device", "modes")},
        "seconds": round(time.perf_counter() - begin, 1),
    }
    document = json.dumps({"what": "masked_step", **about, "rows": rows})
    if arguments.out:
        arguments.out.write_text(document + "\n")
    print(document)


if __name__ == "__main__":
    main()
