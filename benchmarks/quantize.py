"""8 and 4 bits on top of 2:4: perplexity of each scheme and rounding, and of the 16-bit 2:4 model.

Usage: python benchmarks/quantize.py MODEL CALIBRATION EVALUATION [options]; --help has them.

MODEL is pruned once by `--method` and kept as it is stored: in its own 16-bit type. Every row quantizes that,
through files as `twofour quantize` does, loads the result with from_pretrained and scores it; the joint rows
start from MODEL itself, so their masks are their own. Calibration and evaluation are those of
benchmarks/oneshot.py, all in float32. Rows are printed as they come, and added to the file `--out` in place
of older ones of the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from oneshot import add_row, perplexity, windows_of

import twofour
from twofour.io.check import check
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

#: Scheme, group, rounding, smoothing.
ROWS: tuple[tuple[str, int | None, str, bool], ...] = (
    ("int8", None, "nearest", False),
    ("int8", None, "compensated", False),
    ("int8", None, "compensated", True),
    ("int8-weight", None, "compensated", False),
    ("fp8", None, "nearest", False),
    ("fp8", None, "compensated", False),
    ("fp8-weight", None, "compensated", False),
    ("int4", 128, "nearest", False),
    ("int4", 128, "compensated", False),
    ("int4", 64, "compensated", False),
    ("int4", 32, "nearest", False),
    ("int4", 32, "compensated", False),
    ("int8", None, "joint", False),
    ("int4", 128, "joint", False),
)

SAME = ("model", "method", "scheme", "group", "rounding", "smooth", "calibration", "evaluation", "device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--method", default="sparsegpt")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=None, help="score only the first so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", default="", help="rows whose scheme and rounding hold this text")
    parser.add_argument("--work", type=Path, help="keep the checkpoints here; the pruned one is used again")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        run(given, given.work or Path(temporary))


def run(given: argparse.Namespace, work: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    scored = windows_of(tokenizer, given.evaluation, given.context, given.windows)
    calibration = CalibrationOptions(given.calibration, given.samples, given.seqlen, given.seed)

    def measure(directory: Path, **what: Any) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        value, count = perplexity(model, scored)
        row = {
            "model": given.model.resolve().name,
            "method": given.method,
            "scheme": "16 bit",
            "group": None,
            "rounding": None,
            "smooth": False,
            **what,
            "perplexity": round(value, 4),
            "calibration": f"{given.samples}x{given.seqlen} of {given.calibration.name}, seed {given.seed}",
            "evaluation": f"{len(scored)} windows of at most {given.context}, {count} tokens "
            f"of {given.evaluation.name}",
            "device": "cpu",
            "twofour": twofour.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(row), flush=True)
        if given.out:
            add_row(given.out, row, SAME)

    pruned = work / "pruned"
    if not pruned.exists():
        prune_checkpoint(given.model, pruned, given.method, calibration=calibration)
    measure(pruned)
    for scheme, group, rounding, smooth in ROWS:
        name = f"{scheme} {group or ''} {rounding} {'smooth' if smooth else ''}".replace("  ", " ").strip()
        if given.only not in name:
            continue
        out = work / name.replace(" ", "-")
        start = time.perf_counter()
        source = given.model if rounding == "joint" else pruned
        how: Any = rounding
        options = QuantizeOptions(scheme, group, how, smooth)
        # Nearest without text: what there is for those who have none.
        text = None if rounding == "nearest" else calibration
        if not out.exists():
            quantize_checkpoint(source, out, options, calibration=text)
        seconds = time.perf_counter() - start
        report = check(out)
        if not report.ok:
            sys.exit(f"{out}: {report.faults[0]}")
        stored, dense = (
            sum(getattr(layer, what) for layer in report.layers) for what in ("stored_bytes", "dense_bytes")
        )
        measure(
            out,
            **{"scheme": scheme, "group": group, "rounding": rounding, "smooth": smooth},
            **{"bytes": stored, "share_of_dense_16_bit": round(stored / dense, 4)},
            **{"seconds": round(seconds, 1), "threads": torch.get_num_threads()},
        )


if __name__ == "__main__":
    main()
