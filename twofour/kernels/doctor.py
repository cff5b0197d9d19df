"""What this machine has and which backends can run on it."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

from twofour.kernels import ampere, cusparselt, dispatch_codes, hopper
from twofour.packed import FOUR_BIT

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
            _backend("hopper", _for_a_layer(hopper), "own kernels for Hopper, read the packed form as it is"),
            _backend("ampere", _for_a_layer(ampere), "own kernel for few tokens on any GPU from sm_80 on"),
            _backend(
                "cusparselt", _for_a_layer(cusparselt), "NVIDIA's library with kept plans, for many tokens"
            ),
            _backend(
                "reference",
                None,
                "plain PyTorch on any device: unpacks, then multiplies. Saves memory, not time",
            ),
            *(_backend(f"{way} ({bits})", _for_codes(way), what) for way, (bits, what) in _OF_CODES.items()),
        ],
    }


#: The ways of dispatch_codes.py, for which weights each is, and what it is.
_OF_CODES = {
    "codes": ("8 bits", "own kernels for Hopper, 8-bit weights times 8-bit tokens"),
    "decode4": ("4 bits", "own kernel for Hopper, few tokens in 16 bits, a scale for 128 columns"),
    "decode": ("8 and 4 bits", "own kernel for few tokens in 16 bits on any GPU from sm_80 on"),
    "widen": ("8 and 4 bits", "weights become 16 bits for the kernels above, for many tokens"),
}


def _for_codes(way: str) -> str | None:
    """Why a way cannot run an ordinary layer of the weights that it is for on the first GPU."""
    if not torch.cuda.is_available():
        return "it needs a CUDA device"
    four_bit = way == "decode4"
    held = (FOUR_BIT, 4096 // 128, False) if four_bit else (torch.int8, 1, True)
    product = dispatch_codes.Product(4096, 4096, 16, torch.bfloat16, 0, *held, streamed=four_bit)
    return dispatch_codes.why_not(way, product)


def _for_a_layer(backend: Any) -> str | None:
    """Why a backend cannot run an ordinary layer on the first GPU."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return backend.why_not(device, torch.bfloat16, 4096, 4096)


def _backend(name: str, reason: str | None, what: str) -> dict[str, Any]:
    return {"name": name, "runs": reason is None, "why": what if reason is None else reason}


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this PyTorch was built without CUDA"
    return "PyTorch was built with CUDA but finds no device; is the driver installed"
