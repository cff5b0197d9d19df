"""Where the time model's figures come from: shipped ones, or a user's own measurement on top of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofour.advise.gpus import Gpu, find_gpu
from twofour.advise.products import Curve
from twofour.advise.schemes import DENSE, SPARSE, Scheme
from twofour.advise.steps import Rest, TimeModel
from twofour.errors import InputError

if TYPE_CHECKING:
    from twofour.advise.fit import Measured

DEFAULTS = Path(__file__).parent / "defaults" / "nvidia-h200.json"

#: Cells of one contender below which a fit would say more about noise than about the GPU.
FEWEST_ROWS = 6

#: Where no data sheet is known: what share of it a copy and a large product usually reach.
COPY_SHARE, PRODUCT_SHARE = 0.88, 0.72


@dataclass(frozen=True)
class MeasuredRows:
    """What `twofour bench --json` or `twofour tune --json` of one GPU gave."""

    gpu: str
    dense: list[Measured]
    sparse: list[Measured]
    ceilings: dict[str, float]


def shipped() -> TimeModel:
    """The figures of the H200."""
    return from_dict(json.loads(DEFAULTS.read_text(encoding="utf-8")))


def from_dict(content: dict[str, Any]) -> TimeModel:
    dense, sparse = (Curve(**content[kind]) for kind in ("dense", "sparse"))
    return TimeModel(dense, sparse, Rest(**content["rest"]), content["fitted_to"])


def to_dict(model: TimeModel) -> dict[str, Any]:
    parts = {"dense": model.dense.to_dict(), "sparse": model.sparse.to_dict(), "rest": model.rest.to_dict()}
    rounded = {part: {k: float(f"{v:.4g}") for k, v in values.items()} for part, values in parts.items()}
    return {"fitted_to": model.fitted_to, **rounded}


def read_rows(path: str | Path) -> MeasuredRows:
    """Products of a document of `bench` (contenders dense and twofour) or of `tune` (our best kernel)."""
    from twofour.advise.fit import Measured

    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        gpu = content["about"]["gpu"]
        dense: list[Measured] = []
        sparse: list[Measured] = []
        for row in content.get("products", ()):
            if row.get("graph_ms") is None or row["contender"] not in ("dense", "twofour"):
                continue
            timed = Measured(row["rows"], row["columns"], row["tokens"], 1e3 * row["graph_ms"]["p50"])
            (dense if row["contender"] == "dense" else sparse).append(timed)
        for row in content.get("rows", ()):
            shape = row["n"], row["k"], row["tokens"]
            dense.append(Measured(*shape, 1e3 * row["dense_ms"]))
            if "hopper" in row["best"]:
                sparse.append(Measured(*shape, 1e3 * row["best"]["hopper"]["ms"]))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} does not hold rows of products ({type(error).__name__}: {error}).",
            hint="Make it with: twofour bench --shapes 8B --json > rows.json",
        ) from error
    if gpu is None or min(len(dense), len(sparse)) < FEWEST_ROWS:
        raise InputError(
            f"{path} has {len(dense)} dense and {len(sparse)} 2:4 products timed on a GPU, "
            f"and the fit needs {FEWEST_ROWS} of each.",
            hint="Make it on a machine with a GPU: twofour bench --shapes 8B --json > rows.json",
        )
    return MeasuredRows(gpu, dense, sparse, content.get("ceilings") or {})


def refine(rows: MeasuredRows, start: TimeModel) -> tuple[Gpu, TimeModel]:
    """The GPU of the rows and a time model that follows them, starting from another GPU's."""
    from twofour.advise.fit import fit_curve

    gpu = _gpu_of(rows)

    def fitted(scheme: Scheme, curve: Curve) -> Curve:
        return fit_curve(rows.sparse if scheme.sparse else rows.dense, gpu, scheme, curve)

    count = len(rows.dense) + len(rows.sparse)
    said = f"{count} products measured on {rows.gpu}; the rest of a layer as on the H200"
    made = replace(start, dense=fitted(DENSE, start.dense), sparse=fitted(SPARSE, start.sparse))
    return gpu, replace(made, fitted_to=said)


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
