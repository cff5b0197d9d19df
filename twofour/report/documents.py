"""The JSON that verbs leave: found, read, recognised by its "verb".

    DIR/reports/*.json     what `twofour VERB … --save` kept, or `--json > DIR/reports/NAME.json` wrote
    --with FILE.json       the same, from anywhere
    DIR/recover.jsonl      the log of `twofour recover`

A file that is not JSON is an error that names it. One that is JSON and not understood, because its verb is
unknown or a figure is not where it should be, is *refused*: the page names it and says why. Nothing is
guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofour.errors import InputError
from twofour.io.checkpoint import read_json
from twofour.report.figures import is_number, to_json

#: Where documents lie beside a model. A directory: the stages copy a model's files along, but not these.
REPORTS = "reports"
LOG = "recover.jsonl"

#: What a value must be. `float` is any number, also NaN; `int` one that can be divided by; `tuple` a shape.
_WORDS = {
    str: "a text",
    dict: "an object",
    list: "a list",
    bool: "true or false",
    float: "a number",
    int: "a number above 0",
    tuple: "a shape",
}

#: For every verb that is understood, what its document must have. Everything else in it may be missing.
REQUIRED: dict[str, dict[str, type]] = {
    "advise": {"verdict": str, "forms": list},
    "bench": {"about": dict},
    "check": {"directory": str, "layers": list, "faults": list, "ok": bool},
    "demo": {"dense": str, "packed": str, "prompt": str, "dense_text": str, "packed_text": str},
    "doctor": {},
    "eval": {"model": str, "perplexity": float, "tokens": int, "context": int, "stride": int},
    "generate": {"model": str, "prompt": str, "text": str},
    "pack": {"out": str, "layers": dict, "dense_bytes": int, "packed_bytes": int},
    "prune": {"out": str, "layers": dict, "options": dict},
    "quantize": {"out": str, "layers": dict, "options": dict, "dense_bytes": int, "packed_bytes": int},
    "recover": {"out": str, "options": dict},
    "sensitivity": {"model": str, "layers": dict},
    "tune": {"rows": list},
}

#: What each row must have, for the lists of rows that a document may hold.
ROWS: dict[tuple[str, str], dict[str, type]] = {
    ("advise", "forms"): {"name": str, "prefill_ms": float, "decode_ms": float, "weight_bytes": float},
    ("bench", "products"): {"rows": int, "columns": int, "tokens": int, "contender": str},
    ("bench", "end_to_end"): {"what": str, "batch": int, "tokens": int, "contender": str, "mode": str},
    ("bench", "generations"): {"prompt": str},
    ("check", "layers"): {"name": str, "shape": tuple, "dense_bytes": int, "stored_bytes": int},
    ("tune", "rows"): {"n": int, "k": int, "tokens": int, "dense_ms": int, "times_dense": int},
}

#: Tables by name: of layers, and of lm-eval's tasks.
BY_LAYER: dict[tuple[str, str], dict[str, type]] = {
    ("prune", "layers"): {"shape": tuple, "relative_error": float},
    ("pack", "layers"): {"shape": tuple},
    ("quantize", "layers"): {"shape": tuple},
    ("sensitivity", "layers"): {"loss_increase": float},
    ("eval", "tasks"): {},
}

#: What each line of the recovery's log must have.
LOG_LINE: dict[str, type] = {"step": float}


@dataclass(frozen=True)
class Document:
    verb: str
    content: dict[str, Any]
    source: str  # the file, as the page names it
    sha256: str = ""

    @property
    def model(self) -> str | None:
        """The model it is about, as the command named it; None: it is about a machine."""
        for key in ("model", "out", "directory", "packed"):
            if isinstance(named := self.content.get(key), str):
                return named
        return None

    @property
    def machine(self) -> dict[str, Any]:
        about = self.content.get("about")
        return about if isinstance(about, dict) else {}


@dataclass(frozen=True)
class Refused:
    source: str
    why: str


def read_document(path: Path, source: str | None = None) -> Document | Refused:
    """A file of JSON as what it is. InputError if it is no JSON object at all."""
    source = source or str(path)
    if not path.exists():
        raise InputError(f"{path} does not exist.", hint="Give a file that a verb wrote with --json.")
    content = read_json(path)
    verb = content.get("verb")
    if not isinstance(verb, str):
        return Refused(source, 'has no "verb", so it is not what a verb printed with --json')
    if "error" in content:
        return Refused(source, f"is the error of a failed {verb}")
    if verb not in REQUIRED:
        return Refused(source, f'has the verb "{verb}", which this version does not know')
    if why := _wrong(verb, content):
        return Refused(source, f'says it is of "{verb}", but {why}')
    return Document(verb, content, source, hashlib.sha256(path.read_bytes()).hexdigest())


def documents_beside(directory: Path) -> list[Document | Refused]:
    """All documents in the model's `reports/`."""
    files = sorted((directory / REPORTS).glob("*.json"), key=_in_order)
    return [read_document(file, f"{directory.name}/{REPORTS}/{file.name}") for file in files]


def save_document(directory: Path, document: dict[str, Any]) -> Path:
    """Keep what a verb found beside the model, as reports/VERB-N.json; nothing is overwritten."""
    folder = directory / REPORTS
    number = 1
    while (path := folder / f"{document['verb']}-{number}.json").exists():
        number += 1
    partial = folder / f".{path.name}.partial"
    try:
        folder.mkdir(exist_ok=True)
        partial.write_text(to_json(document), "utf-8")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def _in_order(path: Path) -> list[tuple[int, str]]:
    """eval-2 before eval-10: later documents count more."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", path.name)]


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a recovery's log, in order; empty if there is none."""
    if not path.exists():
        return []
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}.") from error
    for count, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {count} is not valid JSON ({error}).") from error
        if not isinstance(entry, dict) or (why := _lacks(entry, LOG_LINE)):
            raise InputError(f"{path}, line {count}: {why if isinstance(entry, dict) else 'not an object'}.")
        lines.append(entry)
    return lines


def wrong_figures(step: dict[str, Any]) -> str | None:
    """What a page cannot show of a step of a model's record, if anything."""
    tables = {key: value for key, value in step.items() if key == "layers"}
    return _wrong_tables(step["verb"], tables, BY_LAYER, dict)


def _wrong(verb: str, content: dict[str, Any]) -> str | None:
    if why := _lacks(content, REQUIRED[verb]):
        return why
    return _wrong_tables(verb, content, ROWS, list) or _wrong_tables(verb, content, BY_LAYER, dict)


def _wrong_tables(
    verb: str, content: dict[str, Any], known: dict[tuple[str, str], dict[str, type]], form: type
) -> str | None:
    for (own, key), wanted in known.items():
        if own != verb or key not in content:
            continue
        held = content[key]
        if not isinstance(held, form):
            return f"its {key} is not {_WORDS[form]}"
        rows = [*held.items()] if isinstance(held, dict) else [*enumerate(content[key])]
        if why := _wrong_rows(key, rows, wanted):
            return why
    return None


def _wrong_rows(key: str, rows: Iterable[tuple[Any, Any]], wanted: dict[str, type]) -> str | None:
    for which, row in rows:
        if not isinstance(row, dict):
            return f"{key}[{which}] is not an object"
        if why := _lacks(row, wanted):
            return f"in {key}[{which}] {why}"
    return None


def _lacks(content: dict[str, Any], wanted: dict[str, type]) -> str | None:
    for key, kind in wanted.items():
        if key not in content:
            return f"{key} is missing"
        if not _fits(content[key], kind):
            return f"{key} is not {_WORDS[kind]}"
    return None


def _fits(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return is_number(value) and 0 < value < 1e18
    if kind is tuple:
        whole = isinstance(value, list) and all(type(side) is int and side > 0 for side in value)
        return whole and len(value) >= 2
    return isinstance(value, kind)
