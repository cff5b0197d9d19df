"""`twofour eval`"""

from __future__ import annotations

import contextlib
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twofour.cli.output import (
    Json,
    Save,
    bold,
    keep,
    print_error,
    print_json,
    progress,
    quiet_libraries,
    say,
    table,
)
from twofour.errors import InputError

if TYPE_CHECKING:
    from twofour.bench.perplexity import Perplexity

EXAMPLE = "Example: [bold]twofour eval ./Llama-3-8B-24-packed --data wiki.test.txt --against ./Llama-3-8B[/]"


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A causal language model.", show_default=False)
    ],
    data: Annotated[
        Path | None, typer.Option(help="Text to score: plain, or .jsonl with a document a line.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="A model to compare the predictions with.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens a window. Default: the model's, at most 2048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from window to window. Default: half a window.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many tokens.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,…", help="Tasks of lm-eval, which must be installed, e.g. hellaswag,arc_easy."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Tasks: only the first so many examples of each.")
    ] = None,
    task_directory: Annotated[
        Path | None, typer.Option("--task-dir", help="Tasks: a directory with task files of your own.")
    ] = None,
    save: Save = False,
    json: Json = False,
) -> int:
    """Perplexity of a model on a text, with its tokens and seconds, or its results on tasks, or both."""
    if data is None and tasks is None:
        raise InputError("there is nothing to evaluate on.", hint="Give --data TEXT, --tasks NAMES, or both.")
    if tasks is None and (limit is not None or task_directory is not None):
        raise InputError("--limit and --task-dir are about --tasks, and there are none.")
    if data is None and (against, context, stride, max_tokens) != (None, None, None, None):
        raise InputError(
            "--against, --context, --stride and --max-tokens are about --data, which is not there."
        )
    if save and data is None:
        raise InputError(
            "the report shows perplexities.", hint="Add --data TEXT, or keep what --json prints."
        )
    quiet_libraries()
    found = _on_tasks(directory, tasks, limit, task_directory) if tasks is not None else {}
    result = _on_text(directory, data, against, context, stride, max_tokens) if data is not None else None
    document: dict[str, Any] = {"verb": "eval", "model": str(directory)}
    if result is not None:
        document |= {"against": against and str(against), "data": str(data), **asdict(result)}
    document |= found
    broken = None if result is None else _gives_nan(directory, against, result)
    if save and broken is None:  # the report has no use for a perplexity that is none
        keep(document, directory)
    if json:
        print_json(document)
    else:
        if result is not None and broken != directory:
            _say_perplexity(directory, against, result)
        if found:
            _say_tasks(directory, found)
    if broken is None:
        return 0
    see = shlex.join(["twofour", "check", str(broken)])
    print_error(f"{broken} gives NaN on this text: it has no perplexity. See: {see}", as_json=False)
    return 1


def _gives_nan(directory: Path, against: Path | None, result: Perplexity) -> Path | None:
    """The model that does, if one of them does."""
    if math.isnan(result.perplexity):
        return directory
    return against if math.isnan(result.against_perplexity or 0) else None


def _on_text(
    directory: Path,
    data: Path,
    against: Path | None,
    context: int | None,
    stride: int | None,
    max_tokens: int | None,
) -> Perplexity:
    from twofour.bench.perplexity import evaluate, require_same_words
    from twofour.calibrate.text import read_documents
    from twofour.io.load import load_causal_lm

    documents = read_documents(data)
    model, tokenizer = load_causal_lm(directory, open_experts=False)
    other = None
    if against:
        other, its = load_causal_lm(against, open_experts=False)
        require_same_words(tokenizer, its, directory, against)
    with progress("evaluating") as on_progress:
        return evaluate(
            model,
            tokenizer,
            documents,
            context=context,
            stride=stride,
            max_tokens=max_tokens,
            against=other,
            on_progress=on_progress,
        )


def _on_tasks(directory: Path, tasks: str, limit: int | None, task_directory: Path | None) -> dict[str, Any]:
    """What the document says of tasks: their metrics, and beside them how lm-eval was run."""
    from twofour.bench.lm_eval import evaluate

    # lm-eval prints here and there; standard output is the document's.
    with contextlib.redirect_stdout(sys.stderr):
        found = evaluate(directory, tasks, limit, task_directory=task_directory)
    return {
        "tasks": found["tasks"],
        "harness": {key: value for key, value in found.items() if key not in ("model", "tasks")},
    }


def _say_perplexity(directory: Path, against: Path | None, result: Perplexity) -> None:
    say(
        f"{directory}: perplexity ",
        bold(f"{result.perplexity:.3f}"),
        f" over {result.tokens} tokens of {result.documents} documents in {result.seconds:.1f} s",
    )
    say(
        f"Windows of {result.context} tokens, {result.stride} apart, every token scored once; "
        f"documents start {'with' if result.bos else 'without'} BOS."
    )
    if result.agreement is not None and not math.isnan(result.agreement):
        say(
            f"Against {against}, whose perplexity is {result.against_perplexity:.3f}: the same most likely "
            f"token at {result.agreement:.1%} of the positions, KL {result.kl:.4f} nats."
        )


def _say_tasks(directory: Path, found: dict[str, Any]) -> None:
    harness = found["harness"]
    rows = []
    for task, metrics in found["tasks"].items():
        for key, value in metrics.items():
            metric, _, way = key.partition(",")  # lm-eval's keys are a metric and how the answer was read
            if isinstance(value, float) and not metric.endswith("_stderr"):
                error = metrics.get(f"{metric}_stderr,{way}")
                spread = f"± {error:.4f}" if isinstance(error, float) else ""
                shots, examples = harness["shots"].get(task, ""), harness["examples"].get(task, "")
                rows.append((task, metric, f"{value:.4f}", spread, shots, examples))
    table(f"{directory}: tasks", ("task", "metric", "value", "error", "shots", "examples"), rows)
    limited = " Only the first of each task: not a figure to report." if harness["limit"] else ""
    say(f"By lm-eval {harness['lm_eval']} in {harness['seconds']:.1f} s.{limited}")
