"""Zero-shot and few-shot tasks by EleutherAI's lm-eval, for those who have it installed.

Perplexity says how well a pruned model still predicts text; tasks (arc_easy, hellaswag, gsm8k) say what it
can still do. lm-eval is the harness in which published figures are made. It is no dependency of twofour: this
loads a model, packed or dense, as every other verb does, and hands it over.

lm-eval gets the model as it is here: its own `device` and `dtype` arguments are not used, ours are. Tasks,
prompts, metrics and seeds are lm-eval's own, so figures can be compared with those of others.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from twofour.errors import InputError, TwoFourError
from twofour.io.load import load_causal_lm

INSTALL = 'pip install "lm_eval[hf]"'


def evaluate(
    model_dir: str | Path,
    tasks: str | Sequence[str | dict[str, Any]],
    limit: float | None = None,
    batch_size: int | str = 8,
    *,
    num_fewshot: int | None = None,
    max_length: int | None = None,
    device: str | None = None,
    dtype: Any = None,
    task_directory: str | Path | None = None,
    model_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The results of a model on lm-eval's tasks.

    >>> evaluate("Llama-3-8B-24-packed", ["arc_easy", "hellaswag"], limit=100)    # doctest: +SKIP
    {'tasks': {'arc_easy': {'acc,none': 0.71, 'acc_stderr,none': 0.045, ...}, ...}, ...}

    `tasks` are names or patterns with a *, or one string of them with commas. `limit` is a number of examples
    a task, or below 1 a share of them: for a first look, not for a figure to report. `batch_size` may be
    "auto". `task_directory` holds task files of one's own; a task may also be given as the dict that such a
    file contains. `model_options` go to lm-eval's `HFLM` (add_bos_token), `options` to its `simple_evaluate`
    (apply_chat_template, gen_kwargs, fewshot_random_seed).
    """
    harness = _harness()
    if isinstance(tasks, str):
        tasks = [task.strip() for task in tasks.split(",") if task.strip()]
    if not tasks:
        raise InputError(
            "no task was named.", hint="For example arc_easy; `lm-eval ls tasks` lists them all."
        )
    if limit is not None and limit <= 0:
        raise InputError(f"limit must be above 0, got {limit}.")
    manager = harness.task_manager(include_path=None if task_directory is None else str(task_directory))
    chosen: list[Any] = []
    for task in tasks:  # before a large model is loaded, so that a misspelt name costs nothing
        names = [task] if isinstance(task, dict) else manager.match_tasks([task])
        if not names:
            raise InputError(
                f"lm-eval {harness.version} has no task {task!r}.",
                hint="`lm-eval ls tasks` lists them; tasks of your own need task_directory.",
            )
        chosen += [name for name in names if name not in chosen]
    model, tokenizer = load_causal_lm(model_dir, device=device, dtype=dtype, open_experts=False)
    start = time.perf_counter()
    try:
        wrapped = harness.wrapper(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            max_length=max_length,
            **(model_options or {}),
        )
        found = harness.simple_evaluate(
            model=wrapped,
            tasks=chosen,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            **{"log_samples": False, **options},
        )
    except OSError as error:  # what its data sets raise without a network, too
        raise TwoFourError(
            f"lm-eval could not read the data of its tasks: {error}",
            hint="They are downloaded from the Hugging Face hub when a task is run for the first time.",
        ) from error
    if found is None:  # one process of several, and not the one that collects
        return {}
    return {
        "model": str(model_dir),
        "tasks": found["results"],
        "groups": found.get("groups", {}),
        "shots": found.get("n-shot", {}),
        "examples": {name: n["effective"] for name, n in found.get("n-samples", {}).items()},
        "task_versions": found.get("versions", {}),
        "limit": limit,
        "lm_eval": harness.version,
        "seconds": time.perf_counter() - start,
        **({"samples": found["samples"]} if "samples" in found else {}),
    }


@dataclass(frozen=True)
class _Harness:
    """The parts of lm-eval that are used."""

    version: str
    simple_evaluate: Any
    wrapper: Any
    task_manager: Any


def _harness() -> _Harness:
    try:
        package = import_module("lm_eval")
        wrapper = import_module("lm_eval.models.huggingface").HFLM
        manager = import_module("lm_eval.tasks").TaskManager
        return _Harness(package.__version__, package.simple_evaluate, wrapper, manager)
    except ImportError as error:
        missing = error.name or str(error)
        what = "is not installed" if missing == "lm_eval" else f"cannot be used: {missing} is missing"
        raise InputError(f"lm-eval {what}.", hint=f"Install it with: {INSTALL}") from error
