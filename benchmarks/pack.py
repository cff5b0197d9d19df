"""Pack and unpack a 4096×14336 matrix, as a multiple of `w.clone()`. Usage: python benchmarks/pack.py"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable

import torch

from twofour.packed import pack
from twofour.pattern import keep_best

ROWS, COLUMNS, REPEATS = 4096, 14336, 9


def milliseconds(work: Callable[[], object]) -> dict[str, float]:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    cuts = statistics.quantiles(times, n=5)
    return {"p20": round(cuts[0], 1), "p50": round(statistics.median(times), 1), "p80": round(cuts[3], 1)}


def main() -> None:
    rows = []
    for dtype in (torch.bfloat16, torch.float32, torch.int8):
        weight = torch.randn(ROWS, COLUMNS)
        weight = weight * keep_best(weight.abs())
        weight = (weight * 30).to(dtype) if dtype == torch.int8 else weight.to(dtype)
        packed = pack(weight)
        timed = {
            "clone": milliseconds(weight.clone),
            "keep_best": milliseconds(lambda w=weight: keep_best(w)),
            "pack": milliseconds(lambda w=weight: pack(w)),
            "unpack": milliseconds(lambda p=packed: p.unpack()),
        }
        clone = timed["clone"]["p50"]
        for what, ms in timed.items():
            rows.append(
                {"what": what, "dtype": str(dtype)[6:], "ms": ms, "times_clone": round(ms["p50"] / clone, 1)}
            )
            print(f"{what:10} {str(dtype)[6:]:9} {ms['p50']:8.1f} ms  {ms['p50'] / clone:5.1f} × clone")
    about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    print(json.dumps({"shape": [ROWS, COLUMNS], **about, "rows": rows}))


if __name__ == "__main__":
    main()
