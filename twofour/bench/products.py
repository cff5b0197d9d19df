"""Products y = x·Wᵀ, one row per shape, number of tokens and contender.

W is n×k and 2:4, x is tokens×k. A contender gets the same dense 2:4 matrices as all others (several, so that
they do not stay in the L2) and makes a callable of each. The dense contender multiplies with the zeros in
place, which draws less power than a full matrix would: its time errs in favour of dense.

What a row's figures mean:

    graph_ms, eager_ms, host_us   see timing.py; graph_ms and host_us are None on a CPU
    times_dense_graph, _eager     median of dense over median of this contender, same run: above 1 is faster
    weight_gb_s                   bytes of the weight in this contender's own form, over time
    tflops                        logical: 2·tokens·n·k, zeros counted, over time
    roofline_share                the time it cannot beat over the time it takes: the larger of its bytes
                                  (weight, x and y once each) at the speed of a copy, and the multiplications
                                  it must do (half of them for 2:4) at the speed of a large dense product
    relative_error                ‖y − reference‖ / ‖reference‖, float64, over a sample of output features;
                                  dense_relative_error is that of F.linear on the same data

Time is that of the graph where there is one, else of the plain call. A contender that raises gives a row
with "error". To see how far two runs of the same thing differ, add dense once more under another name.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.bench.timing import copies_past_l2, host_microseconds, time_cpu, time_eager, time_graph
from twofour.errors import InputError
from twofour.packed import packed_shapes
from twofour.pattern import keep_best
from twofour.progress import OnProgress, silent

Product = Callable[[Tensor], Tensor]

#: The weights, each 2:4 and dense, and a bias or None; gives one product for each weight.
Factory = Callable[[list[Tensor], Tensor | None], Sequence[Product]]

#: Projections of Llama-3, by model: rows (output features) and columns (input features) of the weight.
SHAPES: dict[str, dict[str, tuple[int, int]]] = {
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    "70B": {"qkv": (10240, 8192), "o": (8192, 8192), "gate_up": (57344, 8192), "down": (8192, 28672)},
    "tiny": {"square": (128, 128), "wide": (256, 128), "tall": (128, 256)},
}

#: Output features that the reference is computed for.
SAMPLED_FEATURES = 64


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches: of a large copy (read and write counted) and of a large dense product."""

    copy_gb_s: float
    matmul_tflops: float


def dense_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    return rows * columns * dtype.itemsize


def packed_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    (_, kept), (_, meta) = packed_shapes(rows, columns)
    return rows * (kept * dtype.itemsize + meta)


@dataclass(frozen=True)
class Contender:
    """A way to compute the product. A plain factory is taken for one that holds W as 2:4 in x's dtype."""

    make: Factory
    weight_bytes: Callable[[int, int, torch.dtype], float] = packed_bytes  # of rows, columns, x's dtype
    work: float = 0.5  # multiplications for each one of a dense product in x's dtype; fp8 counts half


def _dense(weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    return [partial(F.linear, weight=weight, bias=bias) for weight in weights]


def _twofour(weights: list[Tensor], bias: Tensor | None, memory: Any = "auto") -> list[Product]:
    from twofour.nn import SparseLinear

    made: list[Product] = []
    for weight in weights:
        rows, columns = weight.shape
        linear = nn.Linear(columns, rows, bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias, requires_grad=False)
        made.append(SparseLinear.from_dense(linear, memory=memory).eval())
    return made


def _cusparselt(weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    from twofour.kernels import dispatch

    def forced(layer: Product, x: Tensor) -> Tensor:
        with dispatch.force("cusparselt"):
            return layer(x)

    return [partial(forced, layer) for layer in _twofour(weights, bias, memory="fast")]


def _torch24(weights: list[Tensor], bias: Tensor | None) -> list[Product]:
    # What to_sparse_semi_structured calls, with the backend named: the CUTLASS one refuses Hopper.
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Sparse

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in prototype stage"
        return [partial(F.linear, weight=Sparse.from_dense(weight), bias=bias) for weight in weights]


CONTENDERS: dict[str, Contender | Factory] = {
    "dense": Contender(_dense, dense_bytes, work=1.0),
    "twofour": Contender(_twofour),  # what was measured fastest, for each number of tokens
    "torch24": Contender(_torch24),
}


#: Further ones where there is a GPU.
GPU_CONTENDERS: dict[str, Contender | Factory] = {
    "twofour fast": Contender(partial(_twofour, memory="fast")),  # with cuSPARSELt to choose from
    "cusparselt": Contender(_cusparselt),  # its best algorithm, with our kept plans
}


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
    bias: bool = False,
    ceilings: Ceilings | None = None,
    copies: int | None = None,
    seed: int = 0,
    on_progress: OnProgress = silent,
) -> list[dict[str, Any]]:
    """Measure every contender on every shape and number of tokens.

    >>> rows = run_products(named_shapes("tiny"), [16], torch.float32, "cpu")
    >>> [row["contender"] for row in rows[:2]]
    ['dense', 'twofour']
    """
    device = torch.device(device)
    ceilings = ceilings or measure_ceilings(device, dtype)
    everyone = {**CONTENDERS, **(GPU_CONTENDERS if torch.device(device).type == "cuda" else {})}
    given = everyone if contenders is None else contenders
    # Dense first: the ratios of the others need it.
    known = {n: c if isinstance(c, Contender) else Contender(c) for n, c in given.items()}
    known = {n: known[n] for n in sorted(known, key=lambda n: n != "dense")}
    random = torch.Generator(device).manual_seed(seed)
    total = len(shapes) * len(tokens) * len(known)
    rows: list[dict[str, Any]] = []
    for name, (n, k) in shapes.items():
        count = copies or copies_past_l2(packed_bytes(n, k, dtype), device)
        weights = _random_weights(n, k, count, dtype, random)
        given_bias = torch.randn(n, device=device, dtype=dtype, generator=random) if bias else None
        made = {which: _make(contender, weights, given_bias) for which, contender in known.items()}
        for m in tokens:
            x = torch.randn(m, k, device=device, dtype=dtype, generator=random)
            check = _Check(x, weights, given_bias, random)
            dense: dict[str, Any] | None = None
            for which, contender in known.items():
                on_progress(len(rows), total, f"{name}, {m} tokens, {which}")
                row: dict[str, Any] = {"shape": name, "rows": n, "columns": k, "tokens": m}
                row |= {"dtype": str(dtype).removeprefix("torch."), "contender": which, "copies": count}
                _fill(row, made[which], x, check)
                if which == "dense":
                    dense = row
                _derive(row, contender, dense, ceilings, dtype)
                rows.append(row)
            del x, check
        del weights, made, given_bias
        free(device)
    on_progress(total, total, "done")
    return rows


def _random_weights(rows: int, columns: int, count: int, dtype: torch.dtype, random: Any) -> list[Tensor]:
    """Matrices that keep two of four, with nothing else zero and outputs of about 1."""
    options = {"device": random.device, "generator": random}
    first = torch.randn(rows, columns, dtype=dtype, **options) * (2 / columns) ** 0.5
    first *= keep_best(first.abs())
    # The same rows in another order are as good as new ones, and cheaper.
    return [first, *(first[torch.randperm(rows, **options)] for _ in range(count - 1))]


def _make(contender: Contender, weights: list[Tensor], bias: Tensor | None) -> Sequence[Product] | str:
    """The products, or what went wrong."""
    try:
        return contender.make(weights, bias)
    except Exception as error:
        return one_line(error)


class _Check:
    """The relative error of an output over sampled features, against float64."""

    def __init__(
        self, x: Tensor, weights: list[Tensor], bias: Tensor | None, random: torch.Generator
    ) -> None:
        rows = weights[0].shape[0]
        self.chosen = torch.randperm(rows, device=x.device, generator=random)[:SAMPLED_FEATURES]
        wide, add = x.double(), 0.0 if bias is None else bias[self.chosen].double()
        # The first and the last copy: a contender that mixes its copies up would be found.
        self.ends = sorted({0, len(weights) - 1})
        self.references = [wide @ weights[i][self.chosen].double().T + add for i in self.ends]
        self.dense = self([partial(F.linear, weight=weight, bias=bias) for weight in weights], x)

    def __call__(self, products: Sequence[Product], x: Tensor) -> float:
        errors = []
        for which, reference in zip(self.ends, self.references, strict=True):
            y = products[which](x)[:, self.chosen].double()
            errors.append(float((y - reference).norm() / reference.norm()))
        return max(errors, key=lambda e: (e != e, e))  # NaN is the worst


def _fill(row: dict[str, Any], made: Sequence[Product] | str, x: Tensor, check: _Check) -> None:
    """What is measured. What was measured before an error stays beside it."""
    row |= {"graph_ms": None, "eager_ms": None, "host_us": None}
    row |= {"relative_error": None, "dense_relative_error": check.dense}
    if isinstance(made, str):
        row["error"] = made
        return
    calls = [partial(product, x) for product in made]
    try:
        row["relative_error"] = check(made, x)
        if x.device.type != "cuda":
            row["eager_ms"] = time_cpu(calls[0])
            return
        row["eager_ms"] = time_eager(calls[0])
        row["host_us"] = host_microseconds(calls[0])
        row["graph_ms"] = time_graph(calls)
    except Exception as error:
        row["error"] = one_line(error)


def _derive(
    row: dict[str, Any],
    contender: Contender,
    dense: dict[str, Any] | None,
    ceilings: Ceilings,
    dtype: torch.dtype,
) -> None:
    """What follows from what was measured."""
    for how in ("graph", "eager"):
        own, other = row[f"{how}_ms"], dense and dense[f"{how}_ms"]
        row[f"times_dense_{how}"] = other["p50"] / own["p50"] if own and other else None
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
