"""The same prompt continued by each model, on the spot: what `report --generate` shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twofour.errors import InputError
from twofour.progress import OnProgress, silent
from twofour.report.documents import Document
from twofour.report.subject import Subject

NEW_TOKENS = 48


def generate_for(subjects: Sequence[Subject], prompt: str, on_progress: OnProgress = silent) -> None:
    """Add what each model, and the dense one it came from if that is still there, makes of the prompt."""
    if not prompt.strip():
        raise InputError("the prompt of --generate is empty.")
    wanted: dict[Path, tuple[str, list[Subject]]] = {}
    for subject in subjects:
        if subject.dense_name and (Path(subject.dense_name) / "config.json").exists():
            dense = Path(subject.dense_name).resolve()
            wanted.setdefault(dense, (subject.dense_name, []))[1].append(subject)
    for subject in subjects:
        wanted.setdefault(subject.directory.resolve(), (str(subject.directory), []))[1].append(subject)
    for done, (directory, (named, own)) in enumerate(wanted.items()):
        on_progress(done, len(wanted), f"{named} writes")
        content = {"verb": "generate", "model": named, "prompt": prompt, "text": _continue(directory, prompt)}
        source = f"greedy, at most {NEW_TOKENS} tokens, when this page was made"
        for subject in own:
            subject.documents.append(Document("generate", content, source))
    on_progress(len(wanted), len(wanted), "")


def _continue(directory: Path, prompt: str) -> str:
    from twofour.bench.generations import write_on
    from twofour.io.load import load_causal_lm

    model, tokenizer = load_causal_lm(directory)
    text: str = tokenizer.decode(write_on(model, tokenizer, prompt, NEW_TOKENS), skip_special_tokens=True)
    return text
