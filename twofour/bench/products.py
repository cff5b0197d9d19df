"""Products y = x·Wᵀ, one row per shape, number of tokens and contender.

W is n×k and 2:4, x is tokens×k. A contender (contenders.py) gets the same matrices as all others, several, so
that they do not stay in the L2, and makes a callable of each. A dense contender gets them as they were before
they were pruned: with the zeros in place a product draws less power, and is up to 4 % faster than what
people have.

With a scheme the matrices are random codes of 8 or 4 bits, and the contenders those of
quantized_contenders.py.

What a row's figures mean:

    graph_ms, eager_ms, host_us   see timing.py; graph_ms and host_us are None on a CPU
    turns                         that the contenders of a shape and a number of tokens took with each other
                                  (timing.in_turns), so that heat and power limits meet all of them alike
    sustained                     whether a turn was long enough for a contender to have a clock of its own.
                                  In short turns at the power limit all share one, which is the lower the more
                                  power the others draw: that tells who needs fewer cycles. Who runs one for
                                  longer, as everyone does who reads long prompts, gets the sustained time
    times_dense_graph, _eager     median of dense over median of this contender, same run: above 1 is faster
    times_dense_same_graph, …     the same over dense of the scheme's precision; only with a scheme
    weight_gb_s                   bytes of the weight in this contender's own form, over time
    tflops                        logical: 2·tokens·n·k, zeros counted, over time
    roofline_share                the time it cannot beat over the time it takes: the larger of its bytes
                                  (weight, x and y once each) at the speed of a copy, and the multiplications
                                  it must do (half of them for 2:4) at the speed of a large dense product
    relative_error                ‖y − reference‖ / ‖reference‖, float64, over a sample of output features;
                                  dense_relative_error is that of F.linear with the 2:4 weight. With a scheme
                                  the reference has the dequantized W and x as it came: where a contender
                                  rounds x, that is in the figure

Time is that of the graph where there is one, else of the plain call. A contender that raises gives a row
with "error". To see how far two runs of the same thing differ, add dense once more under another name.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from twofour.bench.contenders import (
    CONTENDERS,
    GPU_CONTENDERS,
    Contender,
    Factory,
    Product,
    packed_bytes,
)
from twofour.bench.quantized_contenders import SAME_PRECISION, quantized_bytes, quantized_contenders
from twofour.bench.random_codes import Halves, exact_rows, in_other_order, random_codes
from twofour.bench.timing import (
    ROUNDS,
    SETTLE_MS,
    WARM_MS,
    Call,
    Timer,
    Times,
    copies_past_l2,
    cpu_timer,
    eager_timer,
    graph_timer,
    host_microseconds,
    in_turns,
    time_cpu,
    time_graph,
)
from twofour.errors import InputError
from twofour.packed import Packed24
from twofour.pattern import keep_best
from twofour.progress import OnProgress, silent
from twofour.quantize.schemes import Scheme

#: Projections of Llama-3, by model: rows (output features) and columns (input features) of the weight.
SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "tiny": {"square": (128, 128), "wide": (256, 128), "tall": (128, 256)},
}

#: Output features that the reference is computed for.
SAMPLED_FEATURES = 64

#: Calls of each contender that are timed, and the seconds that plain ones may take together.
GRAPH_REPEATS, EAGER_REPEATS, CPU_REPEATS, SECONDS = 30, 50, 20, 1.0

#: Turns of each with CUDA graphs: all of the balanced orders of five contenders.
GRAPH_ROUNDS = 10


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: of a large copy (read and write counted) and of a large dense product."""

    copy_gb_s: float
    matmul_tflops: float


def named_shapes(name: str) -> dict[str, tuple[int, int]]:
    """
    >>> named_shapes("8B")["8B.o"]
    (4096, 4096)
    """
    if name not in SHAPES:
        raise InputError(f"there are no shapes {name!r}.", hint=f"Choose one of: {', '.join(SHAPES)}.")
    return {f"{name}.{which}": shape for which, shape in SHAPES[name].items()}


@torch.no_grad()
def measure_ceilings(device: torch.device | str, dtype: torch.dtype) -> Ceilings:
    """Measured, as datasheets are not: a copy far larger than the L2, a product that fills the chip."""
    device = torch.device(device)
    gpu = device.type == "cuda"
    source = torch.randn(1 << 29 if gpu else 1 << 23, device=device, dtype=dtype)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    copy_ms = (time_graph([copy]) if gpu else time_cpu(copy))["p50"]
    copied = 2 * source.nbytes
    del copy, source, target
    side = 8192 if gpu else 256
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = partial(torch.matmul, a, b)
    product_ms = (time_graph([product]) if gpu else time_cpu(product))["p50"]
    del product, a, b
    free(device)
    return Ceilings(copied / copy_ms / 1e6, 2 * side**3 / product_ms / 1e9)


@torch.no_grad()
def run_products(
    shapes: Mapping[str, tuple[int, int]],
    tokens: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
    contenders: Mapping[str, Contender | Factory] | None = None,
    *,
    scheme: Scheme | None = None,
    bias: bool = False,
    ceilings: Ceilings | None = None,
    copies: int | None = None,
    sustained: bool = False,
    seed: int = 0,
    on_progress: OnProgress = silent,
    into: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Measure every contender on every shape and number of tokens.

    Rows are added to the list `into` as they come, so that they are not lost if the run is stopped.

    >>> rows = run_products(named_shapes("tiny"), [16], torch.float32, "cpu")
    >>> [row["contender"] for row in rows[:2]]
    ['dense', 'twofour']
    """
    device = torch.device(device)
    ceilings = ceilings or measure_ceilings(device, dtype)
    given = contenders
    if given is None and scheme is not None:
        given = quantized_contenders(scheme, device)
    elif given is None:
        given = {**CONTENDERS, **(GPU_CONTENDERS if device.type == "cuda" else {})}
    # Dense first: the ratios of the others need it.
    known = {n: c if isinstance(c, Contender) else Contender(c) for n, c in given.items()}
    known = {n: known[n] for n in sorted(known, key=lambda n: n != "dense")}
    at = {m: [n for n, c in known.items() if c.most_tokens is None or m <= c.most_tokens] for m in tokens}
    baselines = {"times_dense": "dense"}
    about: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    if scheme is not None:
        baselines["times_dense_same"] = SAME_PRECISION[scheme.codes]
        about |= {"scheme": scheme.name, "group": scheme.group}
    random = torch.Generator(device).manual_seed(seed)
    total = len(shapes) * sum(len(names) for names in at.values())
    rows: list[dict[str, Any]] = [] if into is None else into
    first = len(rows)
    for name, (n, k) in shapes.items():
        small = packed_bytes(n, k, dtype) if scheme is None else quantized_bytes(scheme)(n, k, dtype)
        count = copies or copies_past_l2(int(small), device)
        weights, unpruned = _random_weights(n, k, count, dtype, random, scheme)
        given_bias = torch.randn(n, device=device, dtype=dtype, generator=random) if bias else None
        of = {which: unpruned if contender.unpruned else weights for which, contender in known.items()}
        made = {which: _make(contender, of[which], given_bias) for which, contender in known.items()}
        for m, present in at.items():
            x = torch.randn(m, k, device=device, dtype=dtype, generator=random)
            check = _Check(x, weights, unpruned, given_bias, random)
            cell: dict[str, dict[str, Any]] = {}
            for which in present:
                cell[which] = {"shape": name, "rows": n, "columns": k, "tokens": m, **about}
                cell[which] |= {"contender": which, "copies": count}
            tell = partial(on_progress, len(rows) - first, total)
            _Cell(cell, made, known, x, check).measure(tell, sustained)
            for which in present:
                _derive(cell[which], known[which], cell, baselines, ceilings, dtype)
            rows += cell.values()
            del x, check, cell
        del weights, unpruned, of, made, given_bias
        free(device)
    on_progress(total, total, "done")
    return rows[first:]


def _random_weights(
    rows: int, columns: int, count: int, dtype: torch.dtype, random: Any, scheme: Scheme | None
) -> tuple[list[Any], list[Any]]:
    """Matrices that keep two of four, with outputs of about 1, and what they were before they were pruned:

    dense matrices, or with a scheme packed codes and `Halves`.
    """
    if scheme is not None:
        codes = random_codes(rows, columns, scheme, dtype, random)
        kept = [codes, *(in_other_order(codes, random) for _ in range(count - 1))]
        return kept, [Halves.around(one, scheme, random) for one in kept]
    options = {"device": random.device, "generator": random}
    first = torch.randn(rows, columns, dtype=dtype, **options) * (2 / columns) ** 0.5
    # The same rows in another order are as good as new ones, and cheaper.
    unpruned = [first, *(first[torch.randperm(rows, **options)] for _ in range(count - 1))]
    return [one * keep_best(one.abs()) for one in unpruned], unpruned


def _make(contender: Contender, weights: list[Any], bias: Tensor | None) -> Sequence[Product] | str:
    """The products, or what went wrong."""
    try:
        return contender.make(weights, bias)
    except Exception as error:
        return one_line(error)


class _Check:
    """The relative error of an output over sampled features, against float64."""

    def __init__(
        self,
        x: Tensor,
        weights: list[Any],
        unpruned: list[Any],
        bias: Tensor | None,
        random: torch.Generator,
    ) -> None:
        rows = weights[0].shape[0]
        self.chosen = torch.randperm(rows, device=x.device, generator=random)[:SAMPLED_FEATURES]
        wide, add = x.double(), 0.0 if bias is None else bias[self.chosen].double()
        # The first and the last copy: a contender that mixes its copies up would be found.
        self.ends = sorted({0, len(weights) - 1})
        self.references = {
            before: [wide @ _exact(of[i], self.chosen).T + add for i in self.ends]
            for before, of in ((False, weights), (True, unpruned))
        }
        ends = {i: partial(F.linear, weight=_dense(weights[i]), bias=bias) for i in self.ends}
        self.dense = self(ends, x)

    def __call__(
        self, products: Sequence[Product] | Mapping[int, Product], x: Tensor, unpruned: bool = False
    ) -> float:
        errors = []
        for which, reference in zip(self.ends, self.references[unpruned], strict=True):
            y = products[which](x)[:, self.chosen].double()
            errors.append(float((y - reference).norm() / reference.norm()))
        return max(errors, key=lambda e: (e != e, e))  # NaN is the worst


def _exact(weight: Tensor | Packed24 | Halves, rows: Tensor) -> Tensor:
    if isinstance(weight, Halves):
        return weight.exact_rows(rows)
    return exact_rows(weight, rows) if isinstance(weight, Packed24) else weight[rows].double()


def _dense(weight: Tensor | Packed24) -> Tensor:
    return weight.unpack() if isinstance(weight, Packed24) else weight


class _Cell:
    """The rows of one shape and number of tokens while they are measured, all contenders in turns.

    What was measured of a contender before it raised stays beside the error.
    """

    def __init__(
        self,
        rows: dict[str, dict[str, Any]],
        made: Mapping[str, Sequence[Product] | str],
        known: Mapping[str, Contender],
        x: Tensor,
        check: _Check,
    ) -> None:
        self.rows, self.gpu = rows, x.device.type == "cuda"
        self.title = "{shape}, {tokens} tokens".format(**next(iter(rows.values())))
        self.calls: dict[str, list[Call]] = {}  # of those that have not failed
        for which, row in rows.items():
            products = made[which]
            row |= {"graph_ms": None, "eager_ms": None, "host_us": None}
            row |= {"relative_error": None, "dense_relative_error": check.dense}
            if isinstance(products, str):
                row["error"] = products
                continue
            try:
                if known[which].scaled:
                    row["relative_error"] = check(products, x, known[which].unpruned)
                self.calls[which] = [partial(product, x) for product in products]
            except Exception as error:
                row["error"] = one_line(error)

    def measure(self, tell: Callable[[str], None], sustained: bool) -> None:
        turns, warm_ms = (ROUNDS, SETTLE_MS) if sustained else (GRAPH_ROUNDS, WARM_MS)
        for row in self.rows.values():
            row |= {"turns": turns if self.gpu else ROUNDS, "sustained": sustained}
        tell(f"{self.title}, plain calls")
        timer, repeats = (eager_timer, EAGER_REPEATS) if self.gpu else (cpu_timer, CPU_REPEATS)
        self._times("eager_ms", lambda calls: timer(calls[0], SECONDS / ROUNDS), repeats)
        if not self.gpu:
            return
        for which, calls in list(self.calls.items()):
            try:
                self.rows[which]["host_us"] = host_microseconds(calls[0])
            except Exception as error:
                self._failed(which, error)
        tell(f"{self.title}, CUDA graphs")
        self._times("graph_ms", partial(graph_timer, warm_ms=warm_ms), GRAPH_REPEATS, turns)

    def _times(
        self, field: str, make: Callable[[list[Call]], Timer], repeats: int, rounds: int = ROUNDS
    ) -> None:
        timers = {which: partial(make, calls) for which, calls in self.calls.items()}
        results: dict[str, Times | Exception] = in_turns(timers, repeats, rounds)
        for which, times in results.items():
            if isinstance(times, Exception):
                self._failed(which, times)
            else:
                self.rows[which][field] = times

    def _failed(self, which: str, error: Exception) -> None:
        self.rows[which]["error"] = one_line(error)
        del self.calls[which]


def _derive(
    row: dict[str, Any],
    contender: Contender,
    cell: Mapping[str, dict[str, Any]],
    baselines: Mapping[str, str],
    ceilings: Ceilings,
    dtype: torch.dtype,
) -> None:
    """What follows from what was measured. `baselines`: names of ratios, and whose time is in them."""
    for ratio, baseline in baselines.items():
        for how in ("graph", "eager"):
            own, other = row[f"{how}_ms"], cell.get(baseline, {}).get(f"{how}_ms")
            row[f"{ratio}_{how}"] = other["p50"] / own["p50"] if own and other else None
    row |= {"weight_gb_s": None, "tflops": None, "roofline_share": None}
    # Without a graph a GPU's time has the host in it, and says nothing about bytes and multiplications.
    times = row["graph_ms"] or (row["eager_ms"] if row["host_us"] is None else None)
    if times is None or "error" in row:
        return
    seconds = times["p50"] / 1e3
    m, n, k = row["tokens"], row["rows"], row["columns"]
    weight = contender.weight_bytes(n, k, dtype)
    by_bytes = (weight + m * (n + k) * dtype.itemsize) / (ceilings.copy_gb_s * 1e9)
    by_work = 2 * m * n * k * contender.work / (ceilings.matmul_tflops * 1e12)
    row["weight_gb_s"] = weight / seconds / 1e9
    row["tflops"] = 2 * m * n * k / seconds / 1e12
    row["roofline_share"] = max(by_bytes, by_work) / seconds


def one_line(error: BaseException) -> str:
    """One line. A call that breaks a capture is reported by what it raised, not by the capture's own end."""
    while error.__context__ is not None and "captur" in str(error).lower():
        error = error.__context__
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
