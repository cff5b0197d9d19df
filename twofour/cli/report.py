"""`twofour report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import Json, bold, note, print_json, progress, quiet_libraries, say, size

EXAMPLE = "Example: [bold]twofour report ./Llama-3-8B-24-packed -o report.html[/]"


def command(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="Models; several are compared.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Default: report.html or report.md.")
    ] = None,
    documents: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="FILE", help="What a verb printed with --json. Repeatable."),
    ] = None,
    format: Annotated[str | None, typer.Option(help="html or md. Default: by the name of the file.")] = None,
    generate: Annotated[
        str | None, typer.Option(metavar="PROMPT", help="Let every model continue this, here and now.")
    ] = None,
    json: Json = False,
) -> None:
    """One self-contained page about models: what was measured, how they were made, what is not known."""
    from twofour.report.page import report

    if generate is not None:
        quiet_libraries()
    target = out or Path("report.md" if format == "md" else "report.html")
    with progress("reporting") as on_progress:
        found = report(
            directories,
            target,
            documents=documents or (),
            format=format,  # type: ignore[arg-type]
            generate=generate,
            on_progress=on_progress,
        )
    if json:
        print_json({"verb": "report", **found})
        return
    for sentence in found["verdicts"].values():
        say(sentence)
    for refusal in found["refused"]:
        note(("not understood:", "yellow"), f" {refusal['source']} {refusal['why']}")
    commands = dict.fromkeys(gap["command"] for gap in found["missing"])
    if commands:
        gaps = len(found["missing"])
        say(f"Not measured: {gaps} thing{'s' * (gaps > 1)}; the page names the commands, such as")
        say("  ", bold(next(iter(commands))))
    say(f"Written: {target}, {size(found['bytes'])}")
