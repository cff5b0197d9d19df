"""Model directories as the verbs leave them, small, with every document a page can show."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

KINDS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (256, 64),
    "mlp.up_proj": (256, 64),
    "mlp.down_proj": (64, 256),
}
STAMP = {"twofour": "0.1.0", "torch": "2.13.0", "date": "2026-01-02T03:04:05+00:00"}
GPU = {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-02-03T04:05:06+00:00", "machine": "x86_64"}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def layer_names(blocks: int = 2) -> dict[str, tuple[int, int]]:
    return {f"model.layers.{b}.{kind}": shape for b in range(blocks) for kind, shape in KINDS.items()}


def recorded_model(directory: Path, layers: dict[str, tuple[int, int]], *, error: float = 0.4) -> Path:
    """A packed model's config and record, without its weights."""
    pruned = {
        name: {"tensor": f"{name}.weight", "shape": list(shape), "relative_error": error + 0.001 * number}
        | {"output_error": 0.02 + 0.0001 * number}
        for number, (name, shape) in enumerate(layers.items())
    }
    packed = {
        name: {"shape": [n, k], "dense_bytes": 2 * n * k, "packed_bytes": 9 * n * k // 8}
        for name, (n, k) in layers.items()
    }
    dense_bytes = sum(note["dense_bytes"] for note in packed.values())
    options = {
        "method": "sparsegpt",
        "damping": 0.01,
        "calib": "c4.jsonl",
        "samples": 16,
        "seqlen": 64,
        "seed": 3,
    }
    steps = [
        {"verb": "prune", "options": options, "layers": pruned, "left": {}, "source": "./dense", **STAMP},
        {
            "verb": "recover",
            "options": {
                "recipe": "distill",
                "data": ["c4.jsonl"],
                "lr": 1e-4,
                "fsdp": True,
                "source": "./pruned",
            },
            "tokens": 12800,
            "held_out_perplexity": {"before": 9.5, "after": 7.25},
            "seconds": 77.0,
            **STAMP,
        },
        {"verb": "pack", "options": {}, "layers": packed, "dense_bytes": dense_bytes}
        | {"packed_bytes": dense_bytes * 9 // 16, **STAMP},
    ]
    write(directory / "twofour.json", {"steps": steps})
    modules = {name: list(shape) for name, shape in layers.items()}
    ours = {
        "quant_method": "twofour",
        "format_version": 1,
        "pattern": "2:4",
        "scheme": None,
        "modules": modules,
    }
    write(directory / "config.json", {"model_type": "llama", "quantization_config": ours})
    return directory


def quantized_model(
    directory: Path, layers: dict[str, tuple[int, int]], scheme: str, group: int | None = None, **options: Any
) -> Path:
    """The same in 8 or 4 bits. Without `calib` it was rounded without text."""
    recorded_model(directory, layers)
    record = json.loads((directory / "twofour.json").read_text())
    notes = {
        name: {"shape": [n, k], "dense_bytes": 2 * n * k, "packed_bytes": 5 * n * k // 8}
        | {"relative_error": 0.03 + 0.001 * number}
        | ({"output_error": 0.0007 + 0.0001 * number} if "calib" in options else {})
        for number, (name, (n, k)) in enumerate(layers.items())
    }
    sizes = {key: sum(note[key] for note in notes.values()) for key in ("dense_bytes", "packed_bytes")}
    options = {"scheme": scheme, "group": group, **options}
    record["steps"][-1] = {"verb": "quantize", "options": options, "layers": notes, **sizes, **STAMP}
    write(directory / "twofour.json", record)
    config = json.loads((directory / "config.json").read_text())
    named = {"name": scheme} | ({"group": group} if group else {})
    config["quantization_config"] |= {"format_version": 3, "scheme": named}
    write(directory / "config.json", config)
    return directory


def recovery_log(directory: Path, steps: int = 40) -> None:
    lines = []
    for step in range(0, steps + 1, 2):
        if step:
            lines.append({"step": step, "what": "train", "loss": 1.5 * math.exp(-step / 20) + 0.25})
        if step % 10 == 0:
            lines.append({"step": step, "what": "evaluation", "held_out_perplexity": 7.0 + 2.5 / (1 + step)})
    (directory / "recover.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def score(model: str, perplexity: float, **more: Any) -> dict[str, Any]:
    protocol = {"data": "/somewhere/text.txt", "tokens": 4096, "context": 64, "stride": 32}
    return {
        "verb": "eval",
        "model": model,
        "perplexity": perplexity,
        **protocol,
        "agreement": None,
        "kl": None,
    } | more


def products(tokens: tuple[int, ...] = (1, 2048)) -> dict[str, Any]:
    """A document of bench: q and o alone, k and v only fused with q, gate and up only fused."""
    shapes = {"q": (64, 64), "qkv": (128, 64), "gate_up": (512, 64), "down": (64, 256)}
    rows = []
    for name, (n, k) in shapes.items():
        for m in tokens:
            for contender, ms in (("dense", 0.02 * n * k / 4096), ("twofour", 0.01 * n * k / 4096)):
                rows.append(
                    {"shape": name, "rows": n, "columns": k, "tokens": m, "dtype": "bfloat16"}
                    | {"contender": contender, "graph_ms": {"p20": ms, "p50": ms, "p80": ms}}
                )
    ceilings = {"copy_gb_s": 2750.0, "matmul_tflops": 730.0}
    return {"verb": "bench", "about": GPU, "ceilings": ceilings, "products": rows}


def end_to_end() -> dict[str, Any]:
    rows = [
        {"contender": who, "layers": 32, "what": "decode", "batch": 16, "tokens": 1024, "mode": "graph"}
        | {"attention": "sdpa", "ms": {"p50": ms}, "times_dense": 8.0 / ms, "tokens_per_s": 16e3 / ms}
        | {"peak_bytes": 13_370_000_000, "model_bytes": 11_000_000_000, "resident_share": 0.5625}
        for who, ms in (("dense", 8.0), ("twofour", 6.4), ("fused", 5.0))
    ]
    rows.append(rows[0] | {"contender": "torch24", "ms": None, "error": "refused <by> cuSPARSELt"})
    return {"verb": "bench", "about": GPU, "end_to_end": rows}


def advised(model: str) -> dict[str, Any]:
    form = {"name": "2:4", "measured": True, "prefill_ms": 40.0, "decode_ms": 5.5, "weight_bytes": 9.1e9}
    form |= {"prefill_x": 1.31, "decode_x": 1.44}
    return {"verb": "advise", "model": model, "verdict": "Worth it for decode: 1.44×.", "forms": [form]} | {
        "gpu": {"name": "H200"},
        "batch": 1,
        "prompt": 2048,
    }


def whole_model(directory: Path, blocks: int = 2) -> Path:
    """With everything that a page can show."""
    layers = layer_names(blocks)
    recorded_model(directory, layers)
    recovery_log(directory)
    reports = directory / "reports"
    name = directory.name
    write(reports / "eval.json", score(name, 7.5, agreement=0.91, kl=0.125))
    write(reports / "eval-dense.json", score("./dense", 7.0))
    write(reports / "bench.json", products())
    write(reports / "end-to-end.json", end_to_end())
    write(reports / "advise.json", advised("./dense"))
    sensitivity = {layer: {"loss_increase": 0.001 + 0.0005 * number} for number, layer in enumerate(layers)}
    write(reports / "sensitivity.json", {"verb": "sensitivity", "model": name, "layers": sensitivity})
    for model, text in ((name, " a small town."), ("./dense", " Paris.")):
        told = {"verb": "generate", "model": model, "prompt": "The capital of France is", "text": text}
        write(reports / f"generate-{Path(model).name}.json", told)
    return directory


def measured(model: str) -> dict[str, Any]:
    """A document of `bench DIR` on a GPU."""
    rows = [
        {"contender": who, "layers": 2, "what": what, "batch": batch, "tokens": 512, "mode": "graph"}
        | {"attention": "sdpa", "ms": {"p50": ms}, "times_dense": 9.0 / ms, "tokens_per_s": 1e3 / ms}
        | {"peak_bytes": 2_220_000_000, "model_bytes": 1_110_000_000}
        for what, batch in (("prefill", 1), ("prefill", 16), ("decode", 1), ("decode", 16))
        for who, ms in (("dense", 9.0), ("dense_fused", 4.0), ("twofour", 8.0), ("fused", 6.0))
        if (what, who) != ("prefill", "fused")
    ]
    protocol = {"data": "/somewhere/wiki.txt", "tokens": 2048, "context": 64, "stride": 32}
    written = {"prompt": "Once upon a time", "dense": "a king", "sparse": "a queen", "same_tokens": 1}
    return {
        "verb": "bench",
        "about": GPU,
        "model": model,
        "form": "packed",
        "dense": {"model": "./dense", "found": "record"},
        "end_to_end": rows,
        "perplexity": protocol | {"dense": 6.0, "sparse": 6.06, "agreement": 0.875, "kl": 0.25},
        "generations": [written],
    }


def measured_model(directory: Path, blocks: int = 2) -> Path:
    """A whole model that `bench` has measured as well."""
    whole_model(directory, blocks)
    write(directory / "reports" / "zbench-1.json", measured(directory.name))
    return directory
