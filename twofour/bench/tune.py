"""Measure which kernel is fastest for the products of a model on this GPU, and remember it.

Every candidate is first run once and compared with float64 on a sample of the outputs: one whose error is
more than 1.2 times that of the dense product does not count, however fast. Then all are timed from CUDA
graphs with the weights rotated past the L2, the best few once more with care. The best of each is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.bench.timing import copies_past_l2, time_graph
from twofour.errors import TwoFourError
from twofour.kernels import ampere, cusparselt, dispatch, hopper, tuning
from twofour.packed import Packed24, pack
from twofour.pattern import keep_best
from twofour.progress import OnProgress, silent

#: Candidates that are timed a second time.
FINALISTS = 4

#: How often each of them is.
ROUNDS = 3

#: What the others must beat. Kept in the table too, for layers whose dense weight may stay in memory.
DENSE = dispatch.Choice("dense")

#: Dense must be so much faster to come first: keeping its weight costs memory.
DENSE_MARGIN = 1.03

#: A candidate may be so much less exact than the dense product.
TOLERANCE = 1.2

SAMPLED_FEATURES = 128


def tune(
    shapes: Iterable[tuple[int, int]],
    buckets: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress = silent,
) -> list[dict[str, Any]]:
    """Tune weights of these [n, k] for these numbers of tokens; one row of figures each."""
    shapes = list(dict.fromkeys(shapes))
    rows = []
    on_progress(0, len(shapes) * len(buckets), "compiling")
    hopper.compile_all([c for b in buckets for c in hopper.configs(b)], dtype, device)
    if hopper.why_not(device, dtype, 128, 128):
        ampere.compile_all([c for b in buckets for c in ampere.configs(b)], dtype, device)
    for number, (n, k) in enumerate(shapes):
        weights = _Weights(n, k, dtype, device)
        for step, bucket in enumerate(buckets):
            on_progress(number * len(buckets) + step, len(shapes) * len(buckets), f"{n}×{k}, {bucket} tokens")
            rows.append(_tune_one(weights, bucket))
        del weights
        torch.cuda.empty_cache()
    on_progress(len(shapes) * len(buckets), len(shapes) * len(buckets), "done")
    dispatch.forget()
    return rows


#: Layers of one parent that `fuse_` is likely to make one product of. Only what is tuned depends on it.
_FUSED_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
)


def shapes_to_tune(layers: Mapping[str, tuple[int, int]]) -> list[tuple[int, int]]:
    """The [n, k] of a model's layers by name, with those that they have when fused.

    >>> shapes_to_tune({"mlp.gate_proj": (64, 32), "mlp.up_proj": (64, 32), "mlp.down_proj": (32, 64)})
    [(64, 32), (32, 64), (128, 32)]
    """
    found = list(dict.fromkeys(layers.values()))
    parents = dict.fromkeys(name.rpartition(".")[0] for name in layers)
    for parent, names in itertools.product(parents, _FUSED_TOGETHER):
        shapes = [layers.get(f"{parent}.{name}") for name in names]
        together = [shape for shape in shapes if shape is not None]
        if len(together) == len(names) and len({k for _, k in together}) == 1:
            found.append((sum(n for n, _ in together), together[0][1]))
    return list(dict.fromkeys(found))


class _Weights:
    """Random 2:4 weights of one shape in all forms, enough copies to be past the L2."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
        self.n, self.k, self.dtype, self.device = n, k, dtype, device
        self.dense: list[Tensor] = []
        self.packed: list[Packed24] = []
        self.compressed: list[Tensor | None] = []
        usable = cusparselt.why_not(device, dtype, n, k) is None
        for _ in range(copies_past_l2(n * k * dtype.itemsize * 9 // 16, device)):
            weight = torch.randn(n, k, device=device, dtype=dtype) / k**0.5
            weight = weight.where(keep_best(weight.abs()), 0)
            self.dense.append(weight)
            self.packed.append(pack(weight))
            self.compressed.append(cusparselt.compress(weight) if usable else None)


def _tune_one(weights: _Weights, bucket: int) -> dict[str, Any]:
    x = torch.randn(bucket, weights.k, device=weights.device, dtype=weights.dtype)
    index = weights.device.index or 0
    compressed = weights.compressed[0] is not None
    product = dispatch.Product(weights.n, weights.k, bucket, weights.dtype, index, compressed)
    features = torch.randperm(weights.n, device=weights.device)[:SAMPLED_FEATURES]
    exact = x.double() @ weights.dense[0][features].double().t()
    allowed = TOLERANCE * _error(F.linear(x, weights.dense[0])[:, features], exact)
    timed: list[tuple[float, dispatch.Choice]] = []
    refused = []
    for choice in dispatch.candidates(product):
        run = dispatch.runner(product, choice)
        try:
            y = run(x, weights.packed[0].values, weights.packed[0].meta, None, weights.compressed[0])
            if not _error(y[:, features], exact) <= allowed:
                refused.append(asdict(choice))
                continue
            timed.append((time_graph(_calls(run, x, weights), 5)["p50"], choice))
        except TwoFourError:
            refused.append(asdict(choice))
    timed.sort(key=lambda entry: entry[0])
    others = [entry for entry in timed[FINALISTS:] if entry[1].backend != timed[0][1].backend]
    finalists = [choice for _, choice in timed[:FINALISTS] + others[:2]]
    runs = [(choice, _calls(dispatch.runner(product, choice), x, weights)) for choice in finalists]
    runs.append((DENSE, [partial(F.linear, x, weight) for weight in weights.dense]))
    # In turns: a chip at its power limit is slower after hard work, and who comes first must not win by it.
    rounds = [[time_graph(calls, 10)["p50"] for _, calls in runs] for _ in range(ROUNDS)]
    best: dict[str, tuple[float, dispatch.Choice]] = {}
    for (choice, _), times in zip(runs, zip(*rounds, strict=True), strict=True):
        ms = median(times)
        if choice.backend not in best or ms < best[choice.backend][0]:
            best[choice.backend] = (ms, choice)
    kept = sorted(best.values(), key=lambda entry: entry[0] * (DENSE_MARGIN if entry[1] == DENSE else 1))
    tuning.remember(product.key, index, [{**asdict(choice), "ms": round(ms, 5)} for ms, choice in kept])
    dense = best["dense"][0]
    sparse = [(ms, choice) for ms, choice in kept if choice != DENSE]
    return {
        "n": weights.n,
        "k": weights.k,
        "tokens": bucket,
        "dense_ms": dense,
        "best": {choice.backend: {"ms": ms, **choice.config} for ms, choice in sparse},
        "times_dense": dense / sparse[0][0],
        "refused": refused,
    }


def _calls(run: dispatch.Run, x: Tensor, weights: _Weights) -> list[Callable[[], Tensor]]:
    forms = zip(weights.packed, weights.compressed, strict=True)
    return [partial(run, x, p.values, p.meta, None, c) for p, c in forms]


def _error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())
