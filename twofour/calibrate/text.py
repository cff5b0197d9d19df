"""Read text: a `.jsonl` file is one document a line, anything else is one long document."""

from __future__ import annotations

import json
from pathlib import Path

from twofour.errors import InputError

WHAT_A_LINE_IS = 'A line of .jsonl is {"text": "…"} or a string; plain text goes into a file of another name.'


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
        raise InputError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).",
            hint="Convert it, such as with: iconv -f latin1 -t utf-8.",
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
    if path.suffix != ".jsonl":
        documents = [content]
    else:
        # Not splitlines: a JSON string may hold U+2028 and its like as they are.
        lines = enumerate(content.split("\n"), 1)
        documents = [_document(path, n, line) for n, line in lines if line.strip()]
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise InputError(f"{path} holds no text.", hint="Give a plain-text or .jsonl file with some.")
    return documents


def _document(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {number}: not JSON ({error}).", hint=WHAT_A_LINE_IS) from error
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str):
        raise InputError(f"{path}, line {number}: there is no text.", hint=WHAT_A_LINE_IS)
    return text
