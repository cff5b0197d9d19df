"""Read text: a `.jsonl` file is one document a line, anything else is one long document."""

from __future__ import annotations

import json
from pathlib import Path

from twofour.errors import InputError


def read_documents(path: str | Path) -> list[str]:
    """The documents of a text file, without empty ones.

    A line of `.jsonl` is an object with a "text" or a plain string.
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.", hint="Give a plain-text or .jsonl file.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    if path.suffix != ".jsonl":
        documents = [content]
    else:
        documents = [
            _document(path, n, line) for n, line in enumerate(content.splitlines(), 1) if line.strip()
        ]
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise InputError(f"{path} holds no text.")
    return documents


def _document(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}).") from error
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise InputError(f'{path}, line {number}: expected {{"text": "…"}} or a string.')
    return text
