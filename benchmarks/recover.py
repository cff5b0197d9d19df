"""From dense to pruned to recovered, by the command line, with the perplexity and seconds of each stage.

Usage: python benchmarks/recover.py MODEL CALIBRATION EVALUATION WORK [options] [-- options of `recover`]

The model is pruned by `best` (or `--method`) over windows of CALIBRATION, then recovered with each of
`--recipes` from the same pruned model, with MODEL as the teacher, on CALIBRATION and on what the teacher
writes. Perplexity as in benchmarks/oneshot.py. WORK gets the models. Rows are printed as they come, and added
to the file `--out`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from oneshot import add_row, perplexity, windows_of

from twofour.io.load import load_causal_lm
from twofour.version import __version__


def command(*arguments: str) -> dict[str, Any]:
    """Run a verb as a user would; what it prints, and its seconds."""
    start = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "twofour.cli.main", *arguments, "--json"], stdout=subprocess.PIPE, check=True
    )
    return {**json.loads(ran.stdout), "wall_seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "calibration", "evaluation", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--samples", default="128")
    parser.add_argument("--seqlen", default="256", help="of the calibration windows and of training")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=None, help="score only the first so many")
    parser.add_argument("--method", default="best")
    parser.add_argument("--recipes", default="distill", help="with commas")
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument("--out", type=Path)
    given, of_recover = parser.parse_known_args()
    of_recover = [option for option in of_recover if option != "--"]
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    scored = windows_of(tokenizer, given.evaluation, given.context, given.windows)

    def row(stage: str, directory: Path, seconds: float, **facts: Any) -> float:
        model, _ = load_causal_lm(directory, device, torch.float32)
        value, count = perplexity(model.eval(), scored)
        found = {
            "model": given.name or given.model.resolve().name,
            "stage": stage,
            "perplexity": round(value, 4),
            "seconds": seconds,
            **facts,
            "evaluation": f"{len(scored)} windows of at most {given.context}, {count} tokens "
            f"of {given.evaluation.name}",
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "twofour": __version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(found), flush=True)
        if given.out:
            add_row(given.out, found, ("model", "stage", "evaluation", "device"))
        return value

    dense = row("dense", given.model, 0.0)
    pruned = given.work / "pruned"
    if not pruned.exists():
        options = ["--method", given.method, "--calib", str(given.calibration)]
        options += ["--samples", given.samples, "--seqlen", given.seqlen]
        took = command("prune", str(given.model), str(pruned), *options)["wall_seconds"]
    else:
        took = 0.0
    before = row(f"pruned by {given.method}", pruned, took)
    for recipe in given.recipes.split(","):
        out = given.work / recipe
        options = ["--teacher", str(given.model), "--recipe", recipe, "--seqlen", given.seqlen]
        options += ["--data", str(given.calibration), "--data", "self", *of_recover]
        step = command("recover", str(pruned), str(out), *options)
        told = {key: step[key] for key in ("tokens", "steps", "best_step", "held_out_perplexity")}
        told["options"] = {key: step["options"][key] for key in ("lr", "batch", "seqlen", "dtype", "compile")}
        after = row(f"recovered by {recipe}", out, step["wall_seconds"], **told)
        print(f"gap closed: {(before - after) / (before - dense):.1%}, over dense {after / dense - 1:.1%}")


if __name__ == "__main__":
    main()
