"""One-shot pruning in one harness: perplexity and seconds of each method and of the parts of `best`.

Usage: python benchmarks/oneshot.py MODEL CALIBRATION EVALUATION [options]; --help has them.

The calibration is `--samples` windows of `--seqlen` tokens of CALIBRATION. A .jsonl EVALUATION is scored
document by document, each with BOS and cut at `--context` tokens; plain text as one stream without BOS, in
windows of `--context` tokens that do not overlap, `--windows` of them. All in float32, on `--device`.
MODEL is a directory or a .gguf file. A method with +permute behind it reorders channels before it prunes.
Rows are printed as they come, and added to the file `--out` in place of older ones of the same model, method
and device.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.prune import METHODS, Method, options_of, prune_
from twofour.prune.best import Best
from twofour.prune.reconstruct import Reconstruct
from twofour.version import __version__

#: Behind a method's name: channels inside each block are reordered first.
PERMUTE = "+permute"

#: What the issue of one-shot pruning compares.
ALL = ("dense", "magnitude", "wanda", "sparsegpt", "admm", "best")

#: Tuned for a given time, whatever the text.
LONGER = Reconstruct(rate=0.25, epochs=5, rounds=1)

#: The rows of the ablation: `best` with something changed.
PARTS: dict[str, Callable[[], Method]] = {
    "best, no guard": lambda: Best(reconstruct=Reconstruct(guard=False)),
    "best, one round": lambda: Best(reconstruct=Reconstruct(rounds=1)),
    "best, 5 epochs": lambda: Best(reconstruct=LONGER),
    "best, 5 epochs, norms and biases fixed": lambda: Best(reconstruct=replace(LONGER, norms=False)),
    "best, 5 epochs, following the dense block": lambda: Best(reconstruct=replace(LONGER, follow=0.0)),
    "best, 5 epochs, following the dense model": lambda: Best(reconstruct=replace(LONGER, follow=1.0)),
}


def windows_of(tokenizer: Any, path: Path, context: int, limit: int | None) -> list[list[int]]:
    if path.suffix == ".jsonl":
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        found = [
            (bos + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])[:context]
            for text in read_documents(path)
        ]
    else:
        text = read_documents(path)[0]
        stream = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        found = [stream[i : i + context] for i in range(0, len(stream) - context + 1, context)]
    return found[:limit]


@torch.inference_mode()
def perplexity(model: Any, windows: list[list[int]], batch_tokens: int = 2048) -> tuple[float, int]:
    """exp of the mean loss of every token but the first of each window, and how many tokens that is."""
    loss, count = 0.0, 0
    batches: list[list[list[int]]] = [[]]
    for window in sorted(windows, key=len):  # of like length together: little padding
        if batches[-1] and len(window) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(window)
    for batch in batches:
        tokens = torch.full((len(batch), max(map(len, batch))), -100)
        for row, window in enumerate(batch):
            tokens[row, : len(window)] = torch.tensor(window)
        tokens = tokens.to(model.device)
        # Padding is on the right, where a causal model never looks, and its loss is not counted.
        logits = model(tokens.clamp(min=0), use_cache=False).logits[:, :-1]
        wanted = tokens[:, 1:]
        loss += float(torch.nn.functional.cross_entropy(logits.mT, wanted, reduction="sum"))
        count += int((wanted != -100).sum())
    return math.exp(loss / count), count


def load(path: Path) -> tuple[Callable[[], Any], Any]:
    """How to get the model in float32, anew for every method that changes it, and its tokenizer."""
    source, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()
    return lambda: copy.deepcopy(dense), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=None, help="score only the first so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(ALL),
        metavar="METHOD",
        help="dense, parts, "
        + ", ".join((*METHODS, *(f"'{part}'" for part in PARTS)))
        + f"; {PERMUTE} may follow one. Default: {' '.join(ALL)}",
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    makers: dict[str, Callable[[], Method | None]] = {"dense": lambda: None, **METHODS, **PARTS}
    methods = [one for name in given.methods for one in (PARTS if name == "parts" else [name])]
    if unknown := [name for name in methods if name.removesuffix(PERMUTE) not in makers]:
        parser.error(f"unknown: {', '.join(unknown)}")

    fresh_model, tokenizer = load(given.model)
    documents = read_documents(given.calibration)
    calibration = sample_windows(tokenizer, documents, given.samples, given.seqlen, given.seed)
    scored = windows_of(tokenizer, given.evaluation, given.context, given.windows)
    for name in methods:
        model = fresh_model().to(given.device)
        method = makers[name.removesuffix(PERMUTE)]()
        permute = name.endswith(PERMUTE)
        start, cpu = time.perf_counter(), time.process_time()
        if method is not None:
            prune_(
                model,
                method,
                windows=calibration if method.needs_inputs else None,
                on_progress=show,
                permute=permute,
            )
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        value, count = perplexity(model, scored)
        row = {
            "model": given.name or given.model.resolve().name,
            "method": name,
            "options": (options_of(method) if method is not None else {})
            | ({"permute": True} if permute else {}),
            "perplexity": round(value, 3),
            "seconds": round(seconds, 1),
            "cpu_seconds": round(cpu, 1),  # of all threads; tells what other load did to the seconds
            "threads": torch.get_num_threads(),
            "calibration": f"{given.samples}x{given.seqlen} of {given.calibration.name}, seed {given.seed}",
            "evaluation": f"{len(scored)} windows of at most {given.context}, {count} tokens "
            f"of {given.evaluation.name}",
            "device": torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu",
            "twofour": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(row), flush=True)
        if given.out:
            add_row(given.out, row)


def show(done: int, total: int, label: str) -> None:
    print(f"{label}: {done} of {total}", file=sys.stderr, flush=True)


SAME = ("model", "method", "calibration", "evaluation", "device")


def add_row(path: Path, row: dict[str, Any], same: Sequence[str] = SAME) -> None:
    """Add a row to a file, in place of an older one that says the same of `same`."""
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [old for old in rows if any(old.get(key) != row.get(key) for key in same)]
    path.write_text(json.dumps([*rows, row], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
