"""What this machine has and which backends can run on it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

_PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "numpy", "triton", "gguf")


def examine() -> dict[str, Any]:
    """Versions, GPUs and backends, each backend with the reason for its state."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        name = torch.cuda.get_device_name(index)
        gpus.append({"name": name, "capability": f"{major}.{minor}", "sparse_tensor_cores": major >= 8})
    return {
        "versions": versions,
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "no_gpu": None if gpus else _why_no_gpu(),
        "backends": [
            {
                "name": "reference",
                "runs": True,
                "why": "plain PyTorch on any device: unpacks, then multiplies. Saves memory, not time.",
            }
        ],
    }


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    return "PyTorch was built with CUDA but finds no device; is the driver installed"
