"""`twofour check`"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from twofour.cli.output import Json, alike, note, print_json, progress, quiet_libraries, say, size, table

EXAMPLE = "Example: [bold]twofour check ./Llama-3-8B-24-packed[/]"

#: Faults shown to people; all of them are in the JSON.
MOST_FAULTS = 20


def command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A checkpoint.", show_default=False)],
    json: Json = False,
) -> int:
    """Check a checkpoint: is it whole, is every layer 2:4, what does it weigh. Exit status 1 if not."""
    from twofour.io.check import check

    quiet_libraries()
    with progress("checking") as on_progress:
        report = check(directory, on_progress)
    if json:
        print_json({"verb": "check", "ok": report.ok, **asdict(report)})
        return 0 if report.ok else 1
    kinds: dict[str, list] = {}
    for layer in report.layers:
        kinds.setdefault(f"{alike(layer.name)}  {'×'.join(map(str, layer.shape))}", []).append(layer)
    rows = []
    for kind, layers in kinds.items():
        groups = sum(x.groups for x in layers)
        dense, stored = (sum(getattr(x, what) for x in layers) for what in ("dense_bytes", "stored_bytes"))
        broken = sum(x.over for x in layers)
        part = f"{sum(x.under for x in layers) / max(groups, 1):.2%}"
        rows.append((kind, len(layers), broken or "yes", part, size(dense), size(stored)))
    if rows:
        columns = ("layers", "number", "2:4", "groups under 2", "dense", "stored")
        table(
            str(directory),
            columns,
            [(*r[:2], f"{r[2]} broken" if r[2] != "yes" else "yes", *r[3:]) for r in rows],
        )
    for fault in report.faults[:MOST_FAULTS]:
        note(("fault:", "bold red"), f" {fault}")
    if len(report.faults) > MOST_FAULTS:
        note(f"… and {len(report.faults) - MOST_FAULTS} more faults (all with --json).")
    form = "packed" if report.packed else "dense"
    if report.scheme:
        group = report.scheme.get("group")
        form += f" {report.scheme['name']}{f' in groups of {group}' if group else ''}"
    sums = f"{report.checksums} of {report.tensors} tensors compared with their checksums"
    found = f"{len(report.faults)} fault{'s' * (len(report.faults) > 1)}"
    verdict = ("sound", "green") if report.ok else (found, "red")
    say(f"{directory}: {form}, {size(report.bytes)}, {sums}: ", verdict)
    return 0 if report.ok else 1
