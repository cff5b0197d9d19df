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

FORMATS = ("html", "md")


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
    form = format or ("md" if out.suffix.lower() in (".md", ".markdown") else "html")
    if form not in FORMATS:
        raise InputError(f"there is no format {form!r}.", hint=f"Choose one of: {', '.join(FORMATS)}.")
    if not directories:
        raise InputError("a report needs a model directory.")
    if out.is_dir():
        raise InputError(f"{out} is a directory.", hint="Give the file to write with -o.")
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
