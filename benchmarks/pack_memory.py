"""Peak memory and time of `twofour prune` and `twofour pack` on a generated checkpoint of several GB.

Usage: python benchmarks/pack_memory.py [GIGABYTES] [DIRECTORY]
Makes a Llama-shaped bf16 checkpoint in one file (the hard case: it cannot be read shard by shard), runs the
commands as processes of their own and prints the peak resident memory that the kernel counted for each.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INNER, VOCABULARY = 4096, 14336, 8192


def layer(number: int) -> dict[str, torch.Tensor]:
    shapes = {f"self_attn.{x}_proj": (HIDDEN, HIDDEN) for x in "qkvo"}
    shapes |= {
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    prefix = f"model.layers.{number}."
    weights = {f"{prefix}{n}.weight": torch.randn(s).bfloat16() for n, s in shapes.items()}
    norms = {
        f"{prefix}{n}_layernorm.weight": torch.ones(HIDDEN).bfloat16() for n in ("input", "post_attention")
    }
    return {**weights, **norms}


def make(directory: Path, gigabytes: float) -> None:
    bytes_per_layer = sum(t.nbytes for t in layer(0).values())
    layers = max(1, round(gigabytes * 1e9 / bytes_per_layer))
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "lm_head.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    for number in range(layers):
        tensors |= layer(number)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(config))


def measure(*arguments: object) -> dict[str, float]:
    start = time.perf_counter()
    command = [sys.executable, "-m", "twofour", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} failed")
    return {"peak_gb": round(usage.ru_maxrss / 1e6, 3), "seconds": round(time.perf_counter() - start, 1)}


def main() -> None:
    gigabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as name:
        base = Path(name)
        # In a process of its own: a child's peak counts what its parent had resident when it was forked.
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(base / "dense", gigabytes))
        maker.start()
        maker.join()
        size = (base / "dense" / "model.safetensors").stat().st_size
        row = {"checkpoint_gb": round(size / 1e9, 2), "torch": torch.__version__, "cores": os.cpu_count()}
        row["prune"] = measure("prune", base / "dense", base / "pruned")
        row["pack"] = measure("pack", base / "pruned", base / "packed")
        row["check"] = measure("check", base / "packed")
        print(json.dumps(row))


if __name__ == "__main__":
    main()
