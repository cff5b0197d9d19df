"""From dense to pruned to recovered: perplexity and seconds of each stage, and how much of the gap closes.

Usage: python benchmarks/recover.py MODEL TEXT EVALUATION WORK [options, also those of `twofour recover`]

MODEL is pruned by `--method` over windows of TEXT, once: WORK keeps the result, and what the teacher wrote.
From there each of `--recipes` starts, with MODEL as the teacher, on TEXT and on `--written` tokens that the
teacher writes. Perplexity as in benchmarks/oneshot.py, of weights rounded to the dtype of MODEL. Rows are
printed as they come, and added to the file `--out`.

`--minutes M` is a limit for each recipe, loading, compiling and evaluating included: a few steps are timed
and given up, and the run is planned with as many as fit, so that its schedule comes to its end. A deep model
takes minutes to `--compile` as a whole; `--compile-blocks` compiles one block, which serves for all of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from oneshot import add_row, perplexity, windows_of
from torch import Tensor

from twofour.calibrate.blocks import find_blocks
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import token_stream
from twofour.io.load import load_causal_lm
from twofour.pattern import check_pattern
from twofour.progress import OnProgress
from twofour.recover.data import Windows, write_in_units
from twofour.recover.losses import perplexity as of_loss
from twofour.recover.options import Recover
from twofour.recover.state import Position, Store
from twofour.recover.train import settle, train_
from twofour.select import select
from twofour.version import __version__

#: Settings of `Recover` that are not given by an option of the same name.
OWN = ("recipe", "seqlen")

#: Tokens of a step, unless `--batch` is given.
STEP_TOKENS = {"cuda": 16384, "cpu": 1024}

#: A run is timed for so many steps, or until this many seconds have passed between two looks at it.
TIMED_STEPS, TIMED_SECONDS = 40, 10.0

#: Evaluations in a run, each of which may write the weights, and bytes a second of that writing.
EVALUATIONS, WRITES = 5, 1e9

Train = Callable[[Any, Recover, OnProgress], Position]


class _Enough(Exception):
    """Ends a run that was only timed."""


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting of `Recover` as an option."""
    kinds = {"int": int, "float": float}
    for field in dataclasses.fields(Recover):
        if field.name in OWN:
            continue
        kind, flag = str(field.type).split(" ")[0], f"--{field.name.replace('_', '-')}"
        if kind == "bool":
            parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, type=kinds.get(kind, str), default=argparse.SUPPRESS)


def settings_of(given: argparse.Namespace, device: str) -> dict[str, Any]:
    found = {f.name: getattr(given, f.name) for f in dataclasses.fields(Recover) if hasattr(given, f.name)}
    found["seqlen"] = given.seqlen
    found.setdefault("batch", max(1, STEP_TOKENS[device] // given.seqlen))
    return found


def prune(given: argparse.Namespace, out: Path) -> float:
    """As a user would; the seconds it took, now or when it was done."""
    took = out.with_suffix(".seconds")
    if not out.exists():
        options = ["--method", given.method, "--calib", str(given.text), "--json"]
        options += ["--samples", str(given.samples), "--seqlen", str(given.seqlen)]
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "twofour", "prune", str(given.model), str(out), *options],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        took.write_text(f"{time.perf_counter() - start:.1f}")
    return float(took.read_text()) if took.exists() else 0.0


def data_of(given: argparse.Namespace, teacher: Any, tokenizer: Any) -> tuple[Windows, Tensor]:
    """The windows to train on, and some from the end of the text to evaluate on."""
    length = given.seqlen
    stream = token_stream(tokenizer, read_documents(given.text))
    count = min(given.held_out, len(stream) // length // 5)
    held_out = stream[-count * length :].reshape(count, length)
    # A ring is cut at another place each time round, so several of the same text are different windows.
    streams = [(stream[: -count * length], True)] * given.text_rounds
    if given.written:
        start = time.perf_counter()
        written = write_in_units(teacher, tokenizer, given.written // length, length, 0, given.work, shown())
        streams.append((written.reshape(-1), False))
        print(f"{written.numel():,} tokens written in {time.perf_counter() - start:.1f} s", flush=True)
    return Windows(streams, length), held_out


def within(
    deadline: float, model: Any, held_out: Tensor, options: Recover, train: Train, compiles: bool
) -> tuple[int, float]:
    """How many tokens can be trained on before the deadline, and the seconds of a step. Trains the model.

    `compiles`: the second half of the run needs another forward than the first, which has to be compiled.
    """
    start = time.perf_counter()
    looks: list[tuple[int, float]] = []

    def look(done: int, total: int, label: str) -> None:
        looks.append((done, time.perf_counter()))
        if len(looks) > 1 and (done >= TIMED_STEPS or looks[-1][1] - looks[-2][1] > TIMED_SECONDS):
            raise _Enough

    with suppress(_Enough):
        train(model, dataclasses.replace(options, tokens=1 << 40), look)
    (before, then), (after, now) = looks[min(1, len(looks) - 2)], looks[-1]
    step = (now - then) / (after - before)
    begun = looks[0][1] - start - step
    assert options.batch is not None
    assert options.seqlen is not None
    began = time.perf_counter()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for tokens in held_out.split(options.batch):
            seen = model(tokens.to(model.device), use_cache=False).logits[:, -1].sum()
    float(seen)
    evaluation = time.perf_counter() - began + sum(p.nbytes for p in model.parameters()) / WRITES
    left = deadline - time.perf_counter() - (EVALUATIONS + 1) * evaluation - (begun if compiles else 0.0)
    steps = max(EVALUATIONS, int(left / step))
    print(f"{1e3 * step:.1f} ms a step, {begun:.0f} s before the first: {steps} steps fit", flush=True)
    return steps * options.batch * options.seqlen, step


def compile_blocks_(model: Any) -> None:
    """Blocks are alike, so what is compiled for the first is used for all."""
    for block in find_blocks(model, select(model).layers)[1]:
        block.compile(dynamic=False)


def shown() -> OnProgress:
    """Progress as a line every ten seconds."""
    last = [0.0]

    def show(done: int, total: int, label: str) -> None:
        if time.monotonic() > last[0] + 10 or done == total:
            last[0] = time.monotonic()
            print(f"{done} of {total}: {label}", file=sys.stderr, flush=True)

    return show


def is_2_of_4(model: Any) -> bool:
    weights = {layer: model.get_parameter(f"{layer.name}.weight").detach() for layer in select(model).layers}
    return all(check_pattern(layer.to_matrix(weight)).legal for layer, weight in weights.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("model", "text", "evaluation", "work"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--method", default="best")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on")
    parser.add_argument(
        "--seqlen", type=int, default=256, help="of the windows, to calibrate and to train on"
    )
    parser.add_argument("--context", type=int, default=256, help="of the windows that are scored")
    parser.add_argument("--windows", type=int, help="score only the first so many")
    parser.add_argument("--recipes", default="distill", help="with commas")
    parser.add_argument("--minutes", type=float, help="for each recipe")
    parser.add_argument("--written", type=int, default=25_000_000, help="tokens that the teacher writes")
    parser.add_argument("--text-rounds", type=int, default=1, help="of TEXT in each round of what is written")
    parser.add_argument("--held-out", type=int, default=64, help="windows from the end of TEXT")
    parser.add_argument("--compile-blocks", action="store_true", help="instead of --compile")
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument("--out", type=Path)
    add_settings(parser)
    given = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given.work.mkdir(parents=True, exist_ok=True)
    settings = settings_of(given, device)
    stored = transformers.AutoConfig.from_pretrained(given.model).dtype or torch.float32
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    scored = windows_of(tokenizer, given.evaluation, given.context, given.windows)

    def tell(stage: str, model: Any, seconds: float, **facts: Any) -> float:
        # As it would be stored, but computed in float32; for windows of so many lengths nothing is compiled.
        with torch.compiler.set_stance("force_eager"):
            value, count = perplexity(model.to(stored).float().eval(), scored)
        row = {
            "model": given.name or given.model.resolve().name,
            "stage": stage,
            "perplexity": round(value, 4),
            "seconds": round(seconds, 1),
            **facts,
            "evaluation": f"{len(scored)} windows of at most {given.context}, {count} tokens "
            f"of {given.evaluation.name}",
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "twofour": __version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
        }
        if stage.startswith("recovered"):
            row |= {
                "gap_closed": round((before - value) / (before - dense), 4),
                "over_dense": round(value / dense - 1, 4),
            }
        print(json.dumps(row), flush=True)
        if given.out:
            add_row(given.out, row, ("model", "stage", "evaluation", "device"))
        return value

    dense = tell("dense", load_causal_lm(given.model, device, torch.float32)[0], 0.0)
    pruned = given.work / "pruned"
    took = prune(given, pruned)
    before = tell(f"pruned by {given.method}", load_causal_lm(pruned, device, torch.float32)[0], took)
    # On a GPU in its own dtype, as `twofour recover` has it.
    teacher, _ = load_causal_lm(given.model, device, "auto" if device == "cuda" else torch.float32)
    windows, held_out = data_of(given, teacher, tokenizer)
    if given.compile_blocks:
        # Each recipe has forwards of its own, to train and to evaluate: more than torch expects of one block.
        torch._dynamo.config.recompile_limit = 64
        compile_blocks_(teacher)

    def train(model: Any, options: Recover, on_progress: OnProgress) -> Position:
        settled = settle(model, teacher, options)
        settled = dataclasses.replace(
            settled, eval_every=options.eval_every or max(1, settled.steps // EVALUATIONS)
        )
        with tempfile.TemporaryDirectory(dir=given.work) as own:
            return train_(
                *(model, windows, held_out, teacher, settled, Store(Path(own))),
                saves=False,
                on_progress=on_progress,
            )

    fixed = False  # whether the forward with fixed masks was compiled already
    for recipe in given.recipes.split(","):
        start = time.perf_counter()
        try:
            model, _ = load_causal_lm(pruned, device, torch.float32)
            if given.compile_blocks:
                compile_blocks_(model)
            options = Recover(recipe=recipe, **settings)
            facts: dict[str, Any] = {}
            if given.minutes:
                kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                compiles = options.compile and recipe == "adaptive" and not fixed
                fit, step = within(start + 60 * given.minutes, model, held_out, options, train, compiles)
                tokens = min(fit, settings.get("tokens", fit))
                options = dataclasses.replace(options, tokens=tokens)
                model.load_state_dict(kept)
                facts["tokens_per_second"] = round(options.batch * options.seqlen / step)  # type: ignore[operator]
            position = train(model, options, shown())
            fixed = True
            settled = settle(model, teacher, options)
            facts |= {
                "tokens": position.step * settled.batch * settled.seqlen,  # type: ignore[operator]
                "written": given.written,
                "text_rounds": given.text_rounds,
                "steps": position.step,
                "best_step": position.best_step,
                "stopped": position.stopped or None,
                "training_seconds": round(position.seconds, 1),
                "held_out_perplexity": {
                    "before": of_loss(position.before),
                    "after": of_loss(position.best),
                },
                "options": {
                    name: getattr(settled, name)
                    for name in ("lr", "batch", "seqlen", "task_weight", "temperature", "dtype", "compile")
                },
                "compile_blocks": given.compile_blocks,
                "legal": is_2_of_4(model),
            }
            tell(f"recovered by {recipe}", model, time.perf_counter() - start, **facts)
        except Exception:  # the other recipes may still work
            traceback.print_exc()
        model = None
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
