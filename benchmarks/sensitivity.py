"""Is the estimate of each layer's sensitivity right, and what is a budget made of it worth?

    python benchmarks/sensitivity.py MODEL CALIBRATION EVALUATION [options]

Without `--budget`: the estimate of `twofour.advise.sensitivity` for every layer, beside the truth (the layer
pruned alone, loss and divergence from the dense model measured on EVALUATION) and beside the error of the
layer's outputs and weights; rank correlations, and what each took. `--layers N` measures the truth of N
random layers only.

With `--budget`: half of the damage of pruning everything (a `ppl=` budget), against leaving as many layers
dense by the error of their outputs or at random, and against the same at the budget's speed: units dense in
that order only as long as the told speed stays at least the budget's. The sets are then pruned as `twofour
prune` does it, and the perplexity is measured on EVALUATION.

Seconds are processor time. Rows are printed as they come and added to `--out`, in place of older ones of the
same model, method, kind and text.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from twofour.advise import sensitivity as room
from twofour.advise.budget import Budget, Times, Work, choose
from twofour.advise.sensitivity import Measured, loss_with
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.prune import prune_
from twofour.version import __version__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--method", default="sparsegpt")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--scored", type=int, default=room.SCORED, help="windows of the estimate")
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--windows", type=int, default=48, help="of EVALUATION")
    parser.add_argument("--layers", type=int, help="truth of so many random layers; default: all")
    parser.add_argument("--budget", action="store_true")
    parser.add_argument("--draws", type=int, default=5, help="random sets")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    room.SCORED = given.scored

    cpu = time.process_time()
    calibration = CalibrationOptions(given.calibration, given.samples, given.seqlen)
    measured = Measured(given.model, calibration, given.method)
    about = {
        "model": given.name or given.model.resolve().name,
        "method": given.method,
        "calibration": f"{given.samples}x{given.seqlen} of {given.calibration.name}, seed 0; "
        f"scored {measured.sensitivity.scored} others with {room.PROBES} probes",
        "evaluation": f"{given.windows}x{given.seqlen} of {given.evaluation.name}",
        "device": "cpu",
        "threads": given.threads,
        "twofour": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    measuring = time.process_time() - cpu
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    text = sample_windows(tokenizer, read_documents(given.evaluation), given.windows, given.seqlen, 7)
    rows = by_budget(given, measured, text) if given.budget else by_layer(given, measured, text, measuring)
    for row in rows:
        print(json.dumps(row), flush=True)
    if given.out:
        add(given.out, [{**row, **about} for row in rows])


def by_layer(given: Any, measured: Measured, text: torch.Tensor, measuring: float) -> list[dict[str, Any]]:
    """One row with a figure for every layer, and the rank correlations."""
    layers = list(measured.pruned)
    if given.layers:
        layers = sorted(random.Random(0).sample(layers, given.layers), key=layers.index)
    cpu = time.process_time()
    room.estimate(measured.model, measured.pruned, measured.windows[:4])
    estimating = (time.process_time() - cpu) / min(4, len(measured.windows)) * len(measured.windows)
    before = log_probabilities(measured.model, text)
    dense = loss_of(before, text)
    cpu = time.process_time()
    truth, kl = [], []
    for layer in layers:
        with room._in_place(measured.model, {layer: measured.pruned[layer]}):
            after = log_probabilities(measured.model, text)
        truth.append(loss_of(after, text) - dense)
        kl.append(divergence(before, after))
    each = (time.process_time() - cpu) / len(layers) / text.numel()  # seconds a token and layer
    own = [measured.sensitivity.layers[layer.name] for layer in layers]
    figures = {
        "estimate": [row.loss_increase for row in own],
        "output_error": [row.output_error or 0.0 for row in own],
        "relative_error": [row.relative_error for row in own],
    }
    return [
        {
            "kind": "layers",
            "spearman": {name: round(spearman(values, truth), 3) for name, values in figures.items()},
            "spearman_kl": {name: round(spearman(values, kl), 3) for name, values in figures.items()},
            "spearman_kl_to_loss": round(spearman(kl, truth), 3),  # how much of the truth is chance
            "cpu_seconds": {
                "estimate": round(estimating, 1),
                "with pruning each layer": round(measuring, 1),
                "truth on the same windows": round(each * measured.windows.numel() * len(measured.pruned), 1),
            },
            "sums": {
                "estimate": round(sum(figures["estimate"]), 4),
                "truth": round(sum(truth), 4),
                "kl": round(sum(kl), 4),
            },
            "dense_loss": round(dense, 4),
            "layers": {
                layer.name: {
                    "truth": round(true, 5),
                    "kl": round(divergent, 5),
                    "estimate": round(row.loss_increase, 5),
                    "standard_error": round(row.standard_error, 5),
                    "output_error": round(row.output_error or 0.0, 5),
                    "relative_error": round(row.relative_error, 5),
                }
                for layer, row, true, divergent in zip(layers, own, truth, kl, strict=True)
            },
        }
    ]


def by_budget(given: Any, measured: Measured, text: torch.Tensor) -> list[dict[str, Any]]:
    """A row for each way to choose what stays dense."""
    work = Work("H200")
    times = Times(given.model, list(measured.pruned), work)
    losses = {name: row.loss_increase for name, row in measured.sensitivity.layers.items()}
    errors = {name: row.output_error or 0.0 for name, row in measured.sensitivity.layers.items()}
    everything = list(losses)
    damage = math.exp(measured.loss_increase(everything)) - 1
    chosen = choose(Budget("ppl", 1 + damage / 2), times, measured, losses, work)
    documents = read_documents(given.calibration)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    windows = sample_windows(tokenizer, documents, given.samples, given.seqlen, 0)
    before = math.exp(loss_with(measured.model, {}, text))
    rows: list[dict[str, Any]] = []

    def row(how: str, dense: Sequence[str]) -> None:
        model = copy.deepcopy(measured.model)
        prune_(model, given.method, exclude=list(dense), windows=windows)
        found = math.exp(loss_with(model, {}, text))
        speed = times.speed(set(everything) - set(dense))
        rows.append(
            {
                "kind": "budget",
                "left dense": how,
                "dense_layers": len(dense),
                "speed": round(speed, 3),
                "perplexity": round(found, 3),
                "times_dense": round(found / before, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    rows.append({"kind": "budget", "left dense": "all", "speed": 1.0, "perplexity": round(before, 3)})
    row("none", ())
    row(f"budget {chosen.budget}", chosen.dense)
    rows[-1]["told"] = {"loss": chosen.loss_told, "loss_increase": chosen.loss_increase}
    count = len(chosen.dense)
    worst = sorted(everything, key=lambda name: -errors[name])
    row("by output error, as many layers", worst[:count])
    row("by output error, as fast", as_fast(times, worst, chosen.speed))
    for draw in range(given.draws):
        order = random.Random(draw).sample(everything, len(everything))
        row(f"at random {draw}, as many layers", order[:count])
        row(f"at random {draw}, as fast", as_fast(times, order, chosen.speed))
    return rows


def as_fast(times: Times, order: Sequence[str], speed: float) -> list[str]:
    """Layers dense in this order, with those fused with them, each only if the speed is still reached."""
    dense: set[str] = set()
    everything = {name for unit in times.units for name in unit.names}
    for name in order:
        unit = next(unit for unit in times.units if name in unit.names)
        if times.speed(everything - dense - unit.names) >= speed:
            dense |= unit.names
    return sorted(dense)


@torch.inference_mode()
def log_probabilities(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """[windows, length, vocabulary], window by window: a batch of logits would be there twice."""
    parts = [model(tokens[None], use_cache=False).logits[0].float().log_softmax(-1) for tokens in windows]
    return torch.stack(parts)


def loss_of(log_p: torch.Tensor, windows: torch.Tensor) -> float:
    return -float(log_p[:, :-1].gather(-1, windows[:, 1:, None]).mean(dtype=torch.float64))


def divergence(before: torch.Tensor, after: torch.Tensor) -> float:
    """KL from what the dense model predicts, nats a token: the loss added, but for the luck of the text."""
    each = [float((p.exp() * (p - q)).sum()) for p, q in zip(before, after, strict=True)]
    return sum(each) / before[..., 0].numel()


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = torch.stack([torch.tensor(x, dtype=torch.float64).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def add(path: Path, rows: list[dict[str, Any]]) -> None:
    def same(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(row[key] for key in ("model", "method", "kind", "calibration", "evaluation"))

    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if same(row) not in set(map(same, rows))]
    path.write_text(json.dumps(kept + rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
