"""What `twofour bench DIR` shows to people."""

from __future__ import annotations

from typing import Any

from twofour.cli.output import bold, note, say, size, table

UNKNOWN = "–"

HOW_DENSE = {
    "given": "{model}",
    "record": "{model}, which its record names",
    "unpacked": "its own weights with their zeros",
    "itself": "the model itself",
}


def show_model(document: dict[str, Any]) -> None:
    for text in document["notes"]:
        note(text)
    machine, dense = document["about"], document["dense"]
    where = f"{machine['gpu'] or 'CPU'}, torch {machine['torch']}, {document['dtype']}, {machine['date']}"
    say(f"{document['model']} ({document['form']}{_scheme(document)}) on {where}")
    say(f"Dense is {HOW_DENSE[dense['found']].format(model=dense['model'])}.")
    _show_times(document)
    _show_sizes(document)
    _show_accuracy(document)
    for written in document["generations"]:
        say(bold(f"“{written['prompt']}”"), " …")
        for who, shown in (("dense", "dense"), ("sparse", "2:4")):
            if written[who] is not None:
                say("  ", (f"{shown:5}", "dim"), f" {' '.join(written[who].split())}")


def _show_times(document: dict[str, Any]) -> None:
    rows = document["end_to_end"]
    shown = [
        (
            f"{row['what']} {row['batch']}×{row['tokens']}, {row['mode']}",
            row["contender"],
            "failed" if "error" in row else f"{row['ms']['p50']:.3f}",
            _figure(row["times_dense"], "{:.2f}"),
            _figure(row["tokens_per_s"], "{:.0f}"),
            _bytes(row["peak_bytes"]),
        )
        for row in sorted(rows, key=lambda row: (row["batch"], row["what"] == "decode", row["mode"]))
    ]
    table("Times", ("what", "contender", "ms", "× dense", "tokens/s", "peak memory"), shown)
    for error in dict.fromkeys(f"{row['contender']}: {row['error']}" for row in rows if "error" in row):
        say(("failed", "yellow"), f" {error}")
    best: dict[int, dict[str, Any]] = {}
    for request in document["requests"]:
        sparse = not request["contender"].startswith("dense") and request["times_dense"] is not None
        if sparse and request["times_dense"] > best.get(request["batch"], {"times_dense": 0})["times_dense"]:
            best[request["batch"]] = request
    if best:
        told = ", ".join(
            f"{r['times_dense']:.2f}× dense at batch {b} ({r['contender']})" for b, r in best.items()
        )
        say(f"A request of {document['prompt']} tokens and {document['generate']} more: {told}.")


def _show_sizes(document: dict[str, Any]) -> None:
    sizes = document["sizes"]
    rows = [
        (what, *(_bytes(sizes[who][key]) for who in ("dense", "sparse")))
        for what, key in (("on disk", "disk_bytes"), ("in memory", "memory_bytes"))
    ]
    table("Size", ("all tensors", "dense", f"2:4{_scheme(document)}"), rows)


def _show_accuracy(document: dict[str, Any]) -> None:
    perplexity, agreement = document["perplexity"], document["agreement"]
    if perplexity is not None:
        dense, sparse = (_figure(perplexity[who], "{:.3f}") or "not known" for who in ("dense", "sparse"))
        say(
            f"Perplexity on {perplexity['tokens']} tokens of {perplexity['data']}: dense ",
            bold(dense),
            ", 2:4 ",
            bold(sparse),
        )
    if agreement is not None:
        say(
            f"The same most likely token as dense at {agreement['share']:.1%} of {agreement['tokens']} "
            f"positions ({agreement['over']}), KL {agreement['kl']:.4f} nats"
        )


def _scheme(document: dict[str, Any]) -> str:
    """What is stored besides 2:4, if it is quantized."""
    scheme = document["scheme"]
    return f" {scheme['name']}" if scheme else ""


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _bytes(count: int | None) -> str:
    return UNKNOWN if count is None else size(count)
