"""`twofour.json`: what each stage did to a model, in order, so that it can be explained and repeated."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from twofour.version import __version__


def add_step(record: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    """The record with one more step, stamped with the versions and the time."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    stamp = {"twofour": __version__, "torch": torch.__version__, "date": now}
    return {**record, "steps": [*record.get("steps", []), {**step, **stamp}]}


def wrong_record(record: dict[str, Any]) -> str | None:
    """What is wrong with a record that somebody may have edited, if anything: verbs rely on the rest."""
    steps = record.get("steps", [])
    if not isinstance(steps, list):
        return "its steps are not a list"
    return next(filter(None, map(_wrong_step, steps)), None)


def _wrong_step(step: Any) -> str | None:
    if not isinstance(step, dict) or not isinstance(step.get("verb"), str):
        return "a step is not an object with a verb"
    for part in ("options", "layers"):
        if not isinstance(step.get(part, {}), dict):
            return f"the {part} of {step['verb']} are not an object"
    if step["verb"] == "prune" and not ("layers" in step and "options" in step):
        return "its step prune lacks the options or the layers"
    if wrong := [name for name, note in step.get("layers", {}).items() if not isinstance(note, dict)]:
        return f"what {step['verb']} says about {wrong[0]} is not an object"
    return None


def last_step(record: dict[str, Any], verb: str) -> dict[str, Any] | None:
    return next((s for s in reversed(record.get("steps", [])) if s.get("verb") == verb), None)


def was_permuted(record: dict[str, Any]) -> bool:
    """Whether pruning put channels into another order than they have in the dense model."""
    return bool((last_step(record, "prune") or {}).get("options", {}).get("permute"))


def was_tuned(record: dict[str, Any]) -> bool:
    """Whether pruning has tuned blocks towards the dense model."""
    return (last_step(record, "prune") or {}).get("options", {}).get("method") == "best"


def summary(record: dict[str, Any]) -> list[str]:
    """The steps in a few words each, for config.json."""
    return [
        " ".join([s["verb"], *(f"{k}={v}" for k, v in s.get("options", {}).items())]) for s in record["steps"]
    ]
