"""Times of products, dense in 16 bits against 2:4 in 16, 8 or 4, from the rows of `bench` and `tune`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from twofour.bench.contenders import dense_bytes, packed_bytes
from twofour.bench.quantized_contenders import quantized_bytes
from twofour.quantize.schemes import Scheme
from twofour.report.documents import Document
from twofour.report.figures import is_number
from twofour.report.layers import Kind, fused_kinds

#: The contender of `bench` that a user gets without asking for more.
OURS = "twofour"

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

#: For documents of `tune` from before it named its GPU.
UNNAMED = "a GPU that the document does not name"

#: Numbers of tokens that stand for: one sequence in decode, some, many, a prompt.
TELLING_TOKENS = (1, 16, 256, 2048)


@dataclass(frozen=True)
class Product:
    """y = x·Wᵀ with `tokens` rows of x, once with W dense in 16 bits and once 2:4."""

    rows: int
    columns: int
    tokens: int
    dense_ms: float
    sparse_ms: float
    width: int  # bytes of a number
    gpu: str
    source: str  # file and rows
    scheme: Scheme | None = None  # of the 2:4 weight; None: it has the width of all others
    same_bits_ms: float | None = None  # dense in as many bits as the scheme has

    @property
    def ratio(self) -> float:
        return self.dense_ms / self.sparse_ms

    @property
    def flops(self) -> float:
        """Zeros counted: both forms give the same result."""
        return 2.0 * self.rows * self.columns * self.tokens

    def moved(self, *, packed: bool) -> float:
        """Bytes that must move at least: the weight, x and y once each."""
        shape = self.rows, self.columns, self.tokens, self.width
        return moved_bytes(*shape, packed=packed, scheme=self.scheme)


@dataclass(frozen=True)
class Ceilings:
    gpu: str
    gb_s: float
    tflops: float
    source: str


def moved_bytes(
    rows: int, columns: int, tokens: int, width: int, *, packed: bool, scheme: Scheme | None = None
) -> float:
    dtype = torch.float32 if width == 4 else torch.bfloat16
    weight_bytes = dense_bytes if not packed else quantized_bytes(scheme) if scheme else packed_bytes
    return weight_bytes(rows, columns, dtype) + tokens * (rows + columns) * width


def products_of(documents: Iterable[Document], scheme: Scheme | None = None) -> list[Product]:
    """Those whose 2:4 weight has this scheme: a shape has other times in other bits."""
    found: list[Product] = []
    for document in documents:
        if document.verb == "bench":
            found += _of_bench(document, scheme)
        elif document.verb == "tune":
            found += _of_tune(document, scheme)
    return found


def _is_of(row: dict[str, Any], scheme: Scheme | None) -> bool:
    return (row.get("scheme"), row.get("group")) == (
        (None, None) if scheme is None else (scheme.name, scheme.group)
    )


def ceilings_of(documents: Iterable[Document]) -> Ceilings | None:
    """What the machine reaches, where a document of `bench` has measured it."""
    for document in documents:
        given = document.content.get("ceilings")
        if document.verb != "bench" or not isinstance(given, dict):
            continue
        copy, matmul = given.get("copy_gb_s"), given.get("matmul_tflops")
        if is_number(copy) and is_number(matmul) and min(copy, matmul) > 0:
            return Ceilings(_gpu(document), copy, matmul, f"{document.source}, ceilings")
    return None


def matched(kinds: Sequence[Kind], products: Sequence[Product]) -> dict[Kind, list[Product]]:
    """The products that were measured for the model's own layers, alone or fused, by tokens."""
    found: dict[Kind, list[Product]] = {}
    for kind in [*kinds, *fused_kinds(kinds)]:
        own = {p.tokens: p for p in products if (p.rows, p.columns) == (kind.rows, kind.columns)}
        if own:
            found[kind] = [own[tokens] for tokens in sorted(own)]
    return found


def by_machine(products: Iterable[Product]) -> dict[str, list[Product]]:
    """Times of different machines are never mixed. GPUs come first: on a CPU 2:4 saves no time."""
    found: dict[str, list[Product]] = {}
    for product in products:
        found.setdefault(product.gpu, []).append(product)
    return {gpu: found[gpu] for gpu in sorted(found, key=lambda gpu: gpu.startswith("CPU"))}


def telling(tokens: Iterable[int]) -> list[int]:
    """A few of the numbers of tokens that were measured.

    >>> telling([1, 4, 16, 64, 256, 2048]), telling([3, 5])
    ([1, 16, 256, 2048], [3, 5])
    """
    there = sorted(set(tokens))
    chosen = [count for count in TELLING_TOKENS if count in there]
    if len(chosen) >= 2 or len(there) <= len(chosen):
        return chosen
    step = max(1, (len(there) - 1) // 3)
    return there[::step][:4]


def whole_model(found: dict[Kind, list[Product]], layers: int, tokens: int) -> tuple[float, float] | None:
    """Milliseconds of all 2:4 layers together, dense and sparse, if every one of them was measured.

    Where a fused product was measured but not all of its parts, the fused one counts.
    """
    measured = {kind: p for kind, ps in found.items() for p in ps if p.tokens == tokens}
    chosen = {kind: p for kind, p in measured.items() if not kind.parts}
    for kind, product in measured.items():
        own = [k for k in chosen if k.pattern in kind.parts]
        if kind.parts and len(own) < len(kind.parts):
            chosen = {k: p for k, p in chosen.items() if k not in own} | {kind: product}
    covered = sum(len(kind.names) * max(len(kind.parts), 1) for kind in chosen)
    if not chosen or covered != layers:
        return None
    dense = sum(len(kind.names) * p.dense_ms for kind, p in chosen.items())
    sparse = sum(len(kind.names) * p.sparse_ms for kind, p in chosen.items())
    return dense, sparse


def _of_bench(document: Document, scheme: Scheme | None) -> list[Product]:
    rows = document.content.get("products") or []
    by_place: dict[tuple[Any, ...], dict[str, int]] = {}
    for index, row in enumerate(rows):
        if not _is_of(row, scheme):
            continue
        place = (row["rows"], row["columns"], row["tokens"], str(row.get("dtype")))
        by_place.setdefault(place, {})[row["contender"]] = index
    found = []
    for (n, k, tokens, dtype), who in by_place.items():
        if "dense" not in who or OURS not in who:
            continue
        dense, ours = rows[who["dense"]], rows[who[OURS]]
        pair = _pair(dense, ours)
        if pair is None:
            continue
        source = f"{document.source}, products[{who['dense']}] and [{who[OURS]}]"
        width = BYTES.get(dtype, 2)
        product = Product(n, k, tokens, *pair, width, _gpu(document), source, scheme)
        same = next((index for name, index in who.items() if name.startswith("dense ")), None)
        if same is not None and (both := _pair(rows[same], ours)):
            product = replace(product, same_bits_ms=both[0])
        found.append(product)
    return found


def _of_tune(document: Document, scheme: Scheme | None) -> list[Product]:
    found = []
    for index, row in enumerate(document.content["rows"]):
        if not _is_of(row, scheme):
            continue
        if not (is_number(row["dense_ms"]) and is_number(row["times_dense"]) and row["times_dense"] > 0):
            continue
        source = f"{document.source}, rows[{index}]"
        both = row["dense_ms"], row["dense_ms"] / row["times_dense"]
        found.append(Product(row["n"], row["k"], row["tokens"], *both, 2, _gpu(document), source, scheme))
    return found


def _pair(dense: dict[str, Any], ours: dict[str, Any]) -> tuple[float, float] | None:
    """Both times of the same mode: from graphs if there are such, else of plain calls."""
    for mode in ("graph_ms", "eager_ms"):
        one, other = _median(dense, mode), _median(ours, mode)
        if one is not None and other is not None:
            return one, other
    return None


def _median(row: dict[str, Any], mode: str) -> float | None:
    times = row.get(mode)
    value = times.get("p50") if isinstance(times, dict) else None
    return value if is_number(value) and value > 0 and "error" not in row else None


def _gpu(document: Document) -> str:
    machine = document.machine
    if not machine:
        return UNNAMED
    return str(machine.get("gpu") or f"CPU ({machine.get('machine', 'unknown')})")
