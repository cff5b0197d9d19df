"""Where the time model's figures come from: shipped ones, or a user's own measurement on top of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from twofour.advise.gpus import MEASURED, Gpu, find_gpu
from twofour.advise.products import Curve
from twofour.advise.schemes import DENSE, SCHEMES, SPARSE
from twofour.advise.steps import Rest, TimeModel
from twofour.errors import InputError

if TYPE_CHECKING:
    from twofour.advise.fit import Measured

DEFAULTS = Path(__file__).parent / "defaults" / "nvidia-h200.json"

#: Cells of one scheme below which a fit would say more about noise than about the GPU.
FEWEST_ROWS = 6

#: Where no data sheet is known: what share of it a copy and a large product usually reach.
COPY_SHARE, PRODUCT_SHARE = 0.88, 0.72


@dataclass(frozen=True)
class MeasuredRows:
    """What `twofour bench --json` or `twofour tune --json` of one GPU gave."""

    gpu: str
    by_scheme: dict[str, list[Measured]]
    ceilings: dict[str, float]


def shipped() -> TimeModel:
    """The figures of the H200, and as measured there."""
    return from_dict(json.loads(DEFAULTS.read_text(encoding="utf-8")))


def from_dict(content: dict[str, Any]) -> TimeModel:
    curves = {name: Curve(**figures) for name, figures in content["curves"].items()}
    return TimeModel(curves, Rest(**content["rest"]), content["fitted_to"], frozenset(curves))


def to_dict(model: TimeModel) -> dict[str, Any]:
    def rounded(figures: dict[str, float]) -> dict[str, float]:
        return {name: float(f"{value:.4g}") for name, value in figures.items()}

    curves = {name: rounded(curve.to_dict()) for name, curve in model.curves.items()}
    return {"fitted_to": model.fitted_to, "curves": curves, "rest": rounded(model.rest.to_dict())}


def read_rows(path: str | Path) -> MeasuredRows:
    """Products of a document of `bench`, in 16 bit or of some schemes, or of `tune` in 16 bit."""
    from twofour.advise.fit import Measured

    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gpu = content["about"]["gpu"]
        # A document of several schemes has dense once for each of them: a cell is the median of its times.
        cells: dict[tuple[str, int, int, int], list[float]] = {}
        for row in content.get("products", ()):
            name = _scheme_of(row["contender"], row.get("scheme"))
            if row.get("graph_ms") is not None and name is not None:
                key = name, row["rows"], row["columns"], row["tokens"]
                cells.setdefault(key, []).append(row["graph_ms"]["p50"])
        for row in content.get("rows", ()):
            shape = row["n"], row["k"], row["tokens"]
            cells.setdefault((DENSE.name, *shape), []).append(row["dense_ms"])
            if row["best"] and row.get("scheme") is None:
                fastest = min(kept["ms"] for kept in row["best"].values())
                cells.setdefault((SPARSE.name, *shape), []).append(fastest)
        by_scheme: dict[str, list[Measured]] = {}
        for (name, n, k, tokens), times in cells.items():
            by_scheme.setdefault(name, []).append(Measured(n, k, tokens, 1e3 * median(times)))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} does not hold rows of products ({type(error).__name__}: {error}).",
            hint="Make it with: twofour bench --shapes 8B --json > rows.json",
        ) from error
    count = {scheme: len(by_scheme.get(scheme.name, ())) for scheme in SCHEMES}
    dense, sparse = count[DENSE], max(count[scheme] for scheme in SCHEMES if scheme.sparse)
    if gpu is None or min(dense, sparse) < FEWEST_ROWS:
        raise InputError(
            f"{path} has {dense} dense and {sparse} 2:4 products timed on a GPU, "
            f"and the fit needs {FEWEST_ROWS} of each.",
            hint="Make it on a machine with a GPU: twofour bench --shapes 8B --json > rows.json",
        )
    return MeasuredRows(gpu, by_scheme, content.get("ceilings") or {})


def _scheme_of(contender: str, quantized: str | None) -> str | None:
    """Which of our schemes a row of `bench` is of, None if of none (another library, one kernel alone)."""
    ours = "2:4" if quantized is None else f"2:4 {quantized}"
    # "twofour fp8" stands beside int8: the same layer in fp8.
    name = {"twofour": ours, "twofour fp8": "2:4 fp8"}.get(contender, contender)
    return name if any(scheme.name == name for scheme in SCHEMES) else None


def refine(rows: MeasuredRows, start: TimeModel) -> tuple[Gpu, TimeModel]:
    """The GPU of the rows and a time model that follows them, starting from the H200's.

    Schemes without rows keep the H200's curve, on the data sheet of this GPU: its kernels are the same, and
    what rounding and launching cost them does not follow from 16 bit.
    """
    from twofour.advise.fit import fit_curve, of_its_kernel

    gpu = _gpu_of(rows)
    timed = {scheme: of_its_kernel(rows.by_scheme.get(scheme.name, ()), scheme) for scheme in SCHEMES}
    chosen = [scheme for scheme in SCHEMES if len(timed[scheme]) >= FEWEST_ROWS]
    fitted = {scheme.name: fit_curve(timed[scheme], gpu, scheme, start.curve(scheme)) for scheme in chosen}
    count = sum(len(timed[scheme]) for scheme in chosen)
    said = f"{count} products measured on {rows.gpu} ({', '.join(fitted)}); the rest as on the {MEASURED}"
    kept = start.measured if gpu.name == MEASURED else frozenset()
    curves = {**start.curves, **fitted}
    return gpu, replace(start, curves=curves, fitted_to=said, measured=kept | fitted.keys())


def _gpu_of(rows: MeasuredRows) -> Gpu:
    try:
        return find_gpu(rows.gpu)
    except InputError:
        if not {"copy_gb_s", "matmul_tflops"} <= rows.ceilings.keys():
            raise
    # No data sheet: ceilings are what bench measured, over the share that is usual. The fit sees to the rest.
    bandwidth = rows.ceilings["copy_gb_s"] / COPY_SHARE
    rate = rows.ceilings["matmul_tflops"] / PRODUCT_SHARE
    return Gpu(rows.gpu, bandwidth, None, 132, None, rate, None, None, from_measurement=True)
