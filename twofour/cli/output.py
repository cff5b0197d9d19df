"""What the verbs print: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twofour.progress import OnProgress
from twofour.report.figures import to_json
from twofour.words import alike as alike
from twofour.words import size as size  # verbs import all they print with from here

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Include = Annotated[
    list[str] | None,
    typer.Option(
        help="Only layers whose name matches this pattern, e.g. 'model.layers.*.mlp.*'. Repeatable."
    ),
]
Exclude = Annotated[list[str] | None, typer.Option(help="Leave these layers alone. Repeatable.")]
Save = Annotated[
    bool, typer.Option("--save", help="Keep the JSON document in reports/ of the model, for the report.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a run that was cut short stopped.")]

# What every verb that calibrates asks for.
Calib = Annotated[
    Path | None, typer.Option(help="Calibration text: plain or .jsonl; self: the model writes it.")
]
Samples = Annotated[int, typer.Option(help="Windows of calibration text.")]
Seqlen = Annotated[int | None, typer.Option(help="Tokens a window. Default: the model's, at most 2048.")]
Seed = Annotated[int, typer.Option(help="Which windows are taken.")]

#: What is printed: plain text, or text and its style. No markup: rich would take brackets in a path for it.
Part = str | tuple[str, str]

#: Without a terminal: when a plain line first tells that there is work, and then how often how far it is.
SECONDS_BEFORE_FIRST_LINE, SECONDS_BETWEEN_LINES = 2.0, 5.0


def print_json(document: dict[str, Any]) -> None:
    sys.stdout.write(to_json(document))


def keep(document: dict[str, Any], directory: Path) -> None:
    """Put the document beside the model, where `twofour report` finds it."""
    from twofour.report.documents import save_document

    note(f"Kept: {save_document(directory, document)}")


def print_error(message: str, *, as_json: bool, layer: str | None = None) -> None:
    note(("error:", "bold red"), f" {message}")
    if as_json:
        print_json({"error": {"message": message, "layer": layer}})


def say(*parts: Part) -> None:
    """A line of the result for people."""
    Console(soft_wrap=True).print(Text.assemble(*parts))


def note(*parts: Part) -> None:
    """A line that is not the result."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(*parts))


def bold(text: str) -> Part:
    return text, "bold"


def shell(*words: object) -> Part:
    """A command of ours to copy into a shell, whatever its paths are called."""
    return bold(shlex.join(["twofour", *map(str, words)]))


def table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table of the result; columns after the first are figures and stand to the right."""
    shown = Table(title=Text(title, "bold"), title_justify="left")
    for number, column in enumerate(columns):
        shown.add_column(Text(column), justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    # A pipe has no width; a table cut to a guess of 80 columns would be useless there.
    Console(width=None if sys.stdout.isatty() else 120).print(shown)


@contextlib.contextmanager
def progress(what: str) -> Iterator[OnProgress]:
    """Progress on standard error: a bar on a terminal, a line now and then elsewhere."""
    if sys.stderr.isatty():
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        labels = TextColumn("{task.fields[label]}", style="dim", markup=False)
        with Progress(*columns, labels, console=Console(stderr=True)) as bar:
            task = bar.add_task(what, total=None, label="")
            yield lambda done, total, label: bar.update(task, completed=done, total=total, label=label)
        return
    due = time.monotonic() + SECONDS_BEFORE_FIRST_LINE
    # When the work, or a part of it with another total, first told of itself, and what was done by then.
    begun: tuple[float, int, int] | None = None

    def on_progress(done: int, total: int, label: str) -> None:
        nonlocal due, begun
        now = time.monotonic()
        if begun is None or done < begun[1] or total != begun[2]:
            begun = (now, done, total)
        if now >= due:
            due = now + SECONDS_BETWEEN_LINES
            # A resumed run starts far along: what it found done tells nothing of its speed.
            start, before, _ = begun
            left = f"{(now - start) * (total - done) / (done - before):.0f} s left, " if done > before else ""
            note(f"{what}: {100 * done // max(total, 1)} %, {left}{label}")

    # Until the work can tell how far it is: loading a model, or tokenizing one long text, takes a while.
    first = threading.Timer(SECONDS_BEFORE_FIRST_LINE, note, [f"{what} …"])
    first.daemon = True
    if os.environ.get("RANK", "0") == "0":  # one process of torchrun speaks for all
        first.start()
    try:
        yield on_progress
    finally:
        first.cancel()


def quiet_libraries() -> None:
    """transformers' own bars and notices would run through ours."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.ERROR)
