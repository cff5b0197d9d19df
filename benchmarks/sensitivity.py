"""Is the estimate of each layer's sensitivity right, what does it cost, what is a budget made of it worth?

    python benchmarks/sensitivity.py MODEL CALIBRATION EVALUATION [options]
    python benchmarks/sensitivity.py --random Llama-3-8B [options]

MODEL: the estimate of `twofour.advise.sensitivity` for every layer, beside the truth (the layer pruned alone,
loss and divergence from the dense model measured on EVALUATION); rank correlations with it of the estimate,
its parts, and the errors of the layer's outputs and weights; and what each took. `--layers N` measures the
truth of N random layers only.

MODEL with `--budget`: half of the damage of pruning everything (a `ppl=` budget), against leaving as many
layers dense by the error of their outputs or at random, and against the same at the budget's speed: units
dense in that order only as long as the told speed stays at least the budget's. The sets are then pruned as
`twofour prune` does it, and the perplexity is measured on EVALUATION.

`--random`: time and memory for a model of this shape with random weights, made on the device.

Seconds are wall time, with the GPU idle at both ends. Rows are printed as they come and added to `--out`, in
place of older ones of the same model, method, kind, text and device.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.advise import sensitivity as room
from twofour.advise.budget import Budget, Times, Work, choose
from twofour.advise.loss_parts import PROBES
from twofour.advise.sensitivity import Measured, Pruned, in_place, loss_with, measure
from twofour.bench.timing import about
from twofour.calibrate.blocks import find_blocks
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows, token_stream
from twofour.errors import InputError
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.prune import method_named, prune_
from twofour.select import Layer, select
from twofour.version import __version__

#: Tokens of a forward pass of the truth: bounds its logits and their like.
AT_ONCE = {"cuda": 16384, "cpu": 1024}

#: For --random; the small one is to try the script with.
SHAPES: dict[str, dict[str, int]] = {
    "Llama-3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("calibration", type=Path, nargs="?")
    parser.add_argument("evaluation", type=Path, nargs="?")
    parser.add_argument("--random", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--method", default="sparsegpt")
    parser.add_argument("--samples", type=int, default=128, help="windows that the method sees")
    parser.add_argument("--scored", type=int, default=room.SCORED, help="windows of the estimate")
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--windows", type=int, default=256, help="of EVALUATION")
    parser.add_argument("--layers", type=int, help="truth of so many random layers; default: all")
    parser.add_argument("--budget", action="store_true")
    parser.add_argument("--draws", type=int, default=5, help="random sets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if (given.evaluation is None) == (given.random is None):
        parser.error("give MODEL CALIBRATION EVALUATION, or --random SHAPE")
    if given.threads:
        torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    room.SCORED = given.scored
    if given.random:
        rows = [by_time(given)]
        texts = {
            "model": f"random weights, {given.random}",
            "calibration": "random tokens",
            "evaluation": "–",
        }
    else:
        start = time.perf_counter()
        calibration = CalibrationOptions(given.calibration, given.samples, given.seqlen)
        measured = measure(given.model, calibration, given.method, device=given.device)
        loading = time.perf_counter() - start - sum(measured.took.values())
        text = evaluation_windows(given)
        rows = (
            by_budget(given, measured, text) if given.budget else [by_layer(given, measured, text, loading)]
        )
        texts = {
            "model": given.name or given.model.resolve().name,
            "calibration": f"{given.samples}x{given.seqlen} of {given.calibration.name}, seed 0; "
            f"scored {measured.sensitivity.scored} others with {PROBES} probes",
            "evaluation": f"{len(text)}x{given.seqlen} of {given.evaluation.name}",
        }
    for row in rows:
        print(json.dumps(row), flush=True)
    if given.out:
        versions = {"twofour": __version__, "transformers": transformers.__version__}
        machine = {"device": torch.device(given.device).type, **about(given.device), **versions}
        add(given.out, [{**row, **texts, "method": given.method, **machine} for row in rows])


def evaluation_windows(given: argparse.Namespace) -> Tensor:
    """Windows from all over the text that do not overlap: every token counts once."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    tokens = token_stream(tokenizer, read_documents(given.evaluation))
    every = len(tokens) // given.seqlen
    if every < given.windows:
        raise InputError(f"{given.evaluation} has only {every} windows of {given.seqlen} tokens.")
    whole = tokens[: every * given.seqlen].view(every, given.seqlen)
    return whole[torch.linspace(0, every - 1, given.windows).long()]


def wait(device: torch.device | str) -> float:
    """Seconds of a clock, the GPU idle."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# Every layer against its true loss


@dataclass(frozen=True)
class Figures:
    """By window, in nats a token."""

    loss: Tensor
    divergence: Tensor

    @property
    def kl(self) -> float:
        return float(self.divergence.mean())


class Truth:
    """The loss on windows with one layer changed.

    Blocks before the layer's give what they gave before, so they are passed over: what every block was given
    by the dense model is kept. So are the dense predictions.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], windows: Tensor) -> None:
        self.model = model
        device = next(model.parameters()).device
        self.batches = windows.to(device).split(max(1, AT_ONCE[device.type] // windows.shape[1]))
        self.name, self.blocks = find_blocks(model, layers)
        self.given: list[list[Tensor]] = [[] for _ in self.blocks]
        hooks = [
            block.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0]))
            for block, own in zip(self.blocks, self.given, strict=True)
        ]
        with torch.no_grad():
            self.dense = [self._log_p(tokens) for tokens in self.batches]
        for hook in hooks:
            hook.remove()
        self.dense_loss = torch.cat(
            [self._loss(*pair) for pair in zip(self.dense, self.batches, strict=True)]
        )

    @torch.no_grad()
    def __call__(self, layer: Layer, new: Pruned) -> Figures:
        number = int(layer.name.removeprefix(f"{self.name}.").split(".")[0])
        losses, divergences = [], []
        with in_place(self.model, {layer: new}):
            for batch, (tokens, dense) in enumerate(zip(self.batches, self.dense, strict=True)):
                with self._starting_at(number, self.given[number][batch]):
                    log_p = self._log_p(tokens)
                losses.append(self._loss(log_p, tokens))
                each = F.kl_div(log_p, dense, reduction="none", log_target=True)
                divergences.append(each.sum(-1).mean(-1).double().cpu())
        return Figures(torch.cat(losses) - self.dense_loss, torch.cat(divergences))

    @contextmanager
    def _starting_at(self, number: int, states: Tensor) -> Iterator[None]:
        """In here the model passes over the blocks before this one, which gets these states."""
        hook = self.blocks[number].register_forward_pre_hook(lambda _, args: (states, *args[1:]))
        for block in self.blocks[:number]:
            block.forward = lambda states, *_, **__: states
        try:
            yield
        finally:
            hook.remove()
            for block in self.blocks[:number]:
                del block.forward

    def _log_p(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits.float().log_softmax(-1)

    def _loss(self, log_p: Tensor, tokens: Tensor) -> Tensor:
        return -log_p[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0].double().mean(-1).cpu()


def by_layer(given: argparse.Namespace, measured: Measured, text: Tensor, loading: float) -> dict[str, Any]:
    """One row with a figure for every layer, and the rank correlations."""
    layers = list(measured.pruned)
    if given.layers:
        layers = sorted(random.Random(0).sample(layers, given.layers), key=layers.index)
    # On a GPU, products of float32 models in TF32: eleven bits are exact enough for a mean of so many tokens.
    torch.set_float32_matmul_precision("high")
    start = wait(given.device)
    truth = Truth(measured.model, list(measured.pruned), text)
    prepared = wait(given.device)
    found = [truth(layer, measured.pruned[layer]) for layer in layers]
    done = wait(given.device)
    torch.set_float32_matmul_precision("highest")
    true, kl = [float(one.loss.mean()) for one in found], [one.kl for one in found]
    halves = [[float(one.loss[half::2].mean()) for one in found] for half in (0, 1)]
    own = [measured.sensitivity.layers[layer.name] for layer in layers]
    parts = [measured.parts[layer] for layer in layers]
    alone = [max(0.0, 1 - (x.first_order.error / (x.first_order.value or 1e-30)) ** 2) for x in parts]
    figures = {
        "estimate": [row.loss_increase for row in own],
        "divergence part alone": [x.divergence.value for x in parts],
        "both parts, not shrunk": [x.first_order.value + x.divergence.value for x in parts],
        "both parts, each layer shrunk by itself": [
            share * x.first_order.value + x.divergence.value for share, x in zip(alone, parts, strict=True)
        ],
        "output error": [row.output_error or 0.0 for row in own],
        "weight error": [row.relative_error for row in own],
    }
    scale = len(measured.pruned) / len(layers)
    return {
        "kind": "layers",
        "spearman": {name: round(spearman(values, true), 3) for name, values in figures.items()},
        "spearman_kl": {name: round(spearman(values, kl), 3) for name, values in figures.items()},
        "spearman_kl_to_loss": round(spearman(kl, true), 3),
        "spearman_of_halves": round(spearman(*halves), 3),  # of the evaluation: how sure the truth itself is
        "first_order_kept": round(measured.sensitivity.first_order_kept, 3),
        "seconds": {
            "loading": round(loading, 1),
            "pruning each layer": round(measured.took["pruning"], 1),
            "estimate": round(measured.took["estimating"], 1),
            "truth": round(done - prepared, 1),
            "before the truth": round(prepared - start, 1),
            "truth of all layers on as many tokens as the estimate": round(
                (done - prepared) * scale * measured.windows.numel() / text.numel(), 1
            ),
        },
        "tokens": {"estimate": measured.windows.numel(), "truth": text.numel()},
        "dtype": str(next(measured.model.parameters()).dtype).removeprefix("torch."),
        "sums": {
            "estimate": round(sum(figures["estimate"]), 4),
            "first_order": round(sum(row.first_order for row in own), 4),
            "divergence": round(sum(row.divergence for row in own), 4),
            "truth": round(sum(true), 4),
            "kl": round(sum(kl), 4),
        },
        "dense_loss": round(float(truth.dense_loss.mean()), 4),
        "layers": {
            layer.name: {
                "truth": round(value, 6),
                "truth_error": round(float(one.loss.std()) / math.sqrt(len(one.loss)), 6),
                "kl": round(one.kl, 6),
                "estimate": round(row.loss_increase, 6),
                "standard_error": round(row.standard_error, 6),
                "first_order_seen": round(x.first_order.value, 6),
                "first_order_error": round(x.first_order.error, 6),
                "divergence": round(row.divergence, 6),
                "output_error": round(row.output_error or 0.0, 5),
                "relative_error": round(row.relative_error, 5),
            }
            for layer, row, x, one, value in zip(layers, own, parts, found, true, strict=True)
        },
    }


# What it takes


def by_time(given: argparse.Namespace) -> dict[str, Any]:
    """A model of random weights: nothing is right or wrong about its layers, but the time is the same."""
    device = torch.device(given.device)
    gpu = device.type == "cuda"
    config = transformers.LlamaConfig(**SHAPES[given.random], max_position_embeddings=8192)
    torch.manual_seed(0)
    start = wait(device)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    built = wait(device)
    count = given.samples + given.scored
    windows = torch.randint(0, config.vocab_size, (count, given.seqlen), device=device)
    seen, scored = windows[: given.samples], windows[given.samples :]
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    layers = select(model).layers
    method = method_named(given.method)
    measured = Measured(model, layers, seen, scored, method, name=given.random, calib="random tokens")
    measuring = wait(device) - built
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if gpu else None
    start_of_truth = wait(device)
    loss_with(model, {layers[0]: measured.pruned[layers[0]]}, scored)
    each = wait(device) - start_of_truth
    return {
        "kind": "time",
        "layers": len(layers),
        "windows": {"seen": [given.samples, given.seqlen], "scored": [given.scored, given.seqlen]},
        "seconds": {
            "all": round(measuring, 1),
            "pruning each layer": round(measured.took["pruning"], 1),
            "estimate": round(measured.took["estimating"], 1),
            "truth of all layers on as many tokens, from one": round(each * len(layers), 1),
            "building": round(built - start, 1),
        },
        "dtype": "bfloat16",
        "peak_gpu_gb": None if peak is None else round(peak, 1),
    }


# What a budget is worth


def by_budget(given: argparse.Namespace, measured: Measured, text: Tensor) -> list[dict[str, Any]]:
    """A row for each way to choose what stays dense."""
    work = Work("H200")
    times = Times(given.model, list(measured.pruned), work)
    losses = {name: max(0.0, row.loss_increase) for name, row in measured.sensitivity.layers.items()}
    errors = {name: row.output_error or 0.0 for name, row in measured.sensitivity.layers.items()}
    everything = list(losses)
    damage = math.exp(measured.loss_increase(everything)) - 1
    chosen = choose(Budget("ppl", 1 + damage / 2), times, measured, losses, work)
    documents = read_documents(given.calibration)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    windows = sample_windows(tokenizer, documents, given.samples, given.seqlen, 0).to(given.device)
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


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    ranks = torch.stack([torch.tensor(x, dtype=torch.float64).argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def add(path: Path, rows: list[dict[str, Any]]) -> None:
    def same(row: dict[str, Any]) -> tuple[str, ...]:
        return tuple(row[key] for key in ("model", "method", "kind", "calibration", "evaluation", "device"))

    old = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in old if same(row) not in set(map(same, rows))]
    path.write_text(json.dumps(kept + rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
