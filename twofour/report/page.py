"""From directories to a page, and from a page to a file."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from twofour.errors import InputError
from twofour.progress import OnProgress, silent
from twofour.report import accuracy, making, speed
from twofour.report.content import Page
from twofour.report.documents import Refused
from twofour.report.generate import generate_for
from twofour.report.html import render_html
from twofour.report.markdown import render_markdown
from twofour.report.subject import Subject, read_subjects
from twofour.report.verdict import verdict
from twofour.version import __version__

#: The formats, and the names of files that tell them.
SUFFIXES = {"html": (".html", ".htm"), "md": (".md", ".markdown")}

#: What tells an earlier report of ours from any other file: near the begin of HTML, at the end of markdown.
MARK_OF_HTML = b'<meta name="generator" content="twofour report">'
MARK_OF_MARKDOWN = b"\n---\n\nMade by twofour "


def make_page(subjects: Sequence[Subject], refused: Sequence[Refused]) -> Page:
    sections = [
        speed.roofline(subjects),
        speed.layer_times(subjects),
        speed.end_to_end(subjects),
        making.advice(subjects),
        accuracy.perplexity(subjects),
        accuracy.tasks(subjects),
        accuracy.layer_errors(subjects),
        accuracy.rounding_errors(subjects),
        accuracy.sensitivity(subjects),
        accuracy.recovery(subjects),
        making.sizes(subjects),
        making.generations(subjects),
        making.how_made(subjects),
    ]
    shown = [section for section in sections if section.items]
    gaps = [gap for section in shown for gap in section.missing]
    shown.append(making.not_known(subjects, gaps, refused))
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Page(
        title=", ".join(subject.name for subject in subjects),
        verdicts=[(subject.name, verdict(subject)) for subject in subjects],
        facts=making.facts(subjects),
        sections=shown,
        made=f"Made by twofour {__version__} on {now}.",
    )


def report(
    directories: Sequence[str | Path],
    out: str | Path = "report.html",
    *,
    documents: Sequence[str | Path] = (),
    format: Literal["html", "md"] | None = None,
    generate: str | None = None,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write one page about these models and return what is on it.

        twofour.report(["./model-24-packed"], "report.html")

    `documents` are files that verbs printed with --json, besides those in each model's `reports/`. With
    `generate`, a prompt, every model continues it. `format` is known from the name of `out` if not given.
    """
    out = Path(out)
    _require_ours(out)
    form: str | None = format or next(
        (name for name, ends in SUFFIXES.items() if out.suffix.lower() in ends), None
    )
    if form is None:
        raise InputError(
            f"{out}: its name does not tell whether to write HTML or markdown.",
            hint="End it in .html or .md, or add --format.",
        )
    if form not in SUFFIXES:
        raise InputError(f"there is no format {form!r}.", hint=f"Choose one of: {', '.join(SUFFIXES)}.")
    if not directories:
        raise InputError("a report needs a model directory.")
    subjects, refused = read_subjects(directories, documents)
    if generate is not None:
        generate_for(subjects, generate, on_progress)
    page = make_page(subjects, refused)
    text = render_markdown(page) if form == "md" else render_html(page)
    written = _write(out, text)
    return {
        "out": str(out),
        "format": form,
        "bytes": written,
        **page.to_dict(),
        "refused": [vars(refusal) for refusal in refused],
    }


def _require_ours(out: Path) -> None:
    """Refuse to write over anything but a report: a slip of the finger must not cost a text or a model."""
    if out.is_dir():
        raise InputError(f"{out} is a directory.", hint="Give the file to write with -o.")
    if not out.exists():
        return
    try:
        with out.open("rb") as file:
            begin = file.read(2000)
            file.seek(max(0, out.stat().st_size - 500))
            end = file.read()
    except OSError as error:
        raise InputError(f"cannot read {out}, which is there: {error.strerror or error}.") from error
    if MARK_OF_HTML not in begin and MARK_OF_MARKDOWN not in end:
        raise InputError(
            f"{out} is there, and it is no report of twofour, so it is not written over.",
            hint="Give another name with -o, or move the file away.",
        )


def _write(out: Path, text: str) -> int:
    """Beside its place first, then renamed: a report is there whole or not at all."""
    # Lone surrogates, which JSON can carry, have no bytes in UTF-8.
    content = text.encode("utf-8", errors="replace")
    partial = out.with_name(f".{out.name}.partial")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(out)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror or error}.") from error
    return len(content)
