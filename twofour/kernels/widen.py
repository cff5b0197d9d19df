"""Codes back to 16-bit values on a GPU, in the packed form: for products of many tokens in 16 bits."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twofour.kernels import nvrtc
from twofour.kernels.ampere import architecture
from twofour.kernels.nvrtc import cuda_text
from twofour.packed import FOUR_BIT, scale_group
from twofour.streamed import ROWS, is_streamed

_CODES = {torch.float8_e4m3fn: 1, torch.int8: 2, FOUR_BIT: 3}
_STREAMED = 4  # FOUR_BIT in threads' order
_THREADS = 256


def why_not(device: torch.device, dtype: torch.dtype, k: int) -> str | None:
    """The reason why the kernel cannot widen codes to such a type, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it gives float16 and bfloat16, not {dtype}"
    return f"it needs a multiple of 32 columns, not {k}" if k % 32 else None


def widen(values: Tensor, meta: Tensor, scale: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The values [n, k/2] of the dequantized matrix, in the type of the scales, and its positions by rows."""
    n, streamed = values.shape[0], is_streamed(meta)
    out = torch.empty(n, k // 2, dtype=scale.dtype, device=values.device)
    run = _kernel(k, scale.shape[1], scale.dtype, values.dtype, streamed, values.device.index)
    if not streamed:
        run(-(-out.numel() // (8 * _THREADS)), values, scale, out, out.numel() // 8)
        return out, meta
    by_rows = torch.empty(n, k // 8, dtype=torch.uint8, device=meta.device)
    run(n // ROWS * scale.shape[1], values, scale, out, meta, by_rows)
    return out, by_rows


def source(k: int, scales: int, dtype: torch.dtype, codes: torch.dtype, streamed: bool = False) -> str:
    shared = k // 2 if scales == 1 else scale_group(k, scales) // 2
    return (
        f"#define KEPT {k // 2}\n#define PER_SCALE {shared}\n#define SCALES {scales}\n"
        f"#define CODES {_STREAMED if streamed else _CODES[codes]}\n"
        f"#define FP16 {int(dtype == torch.float16)}\n" + cuda_text("common.cuh", "widen.cu")
    )


@cache
def _kernel(
    k: int, scales: int, dtype: torch.dtype, codes: torch.dtype, streamed: bool, device: int
) -> Callable[..., None]:
    """A call (blocks, tensors or numbers …)."""
    where = torch.device("cuda", device)
    text = source(k, scales, dtype, codes, streamed)
    function = nvrtc.load(text, architecture(where), "widen", 0, device)
    lock, words = threading.Lock(), (ctypes.c_uint64 * 5)()
    at = ctypes.addressof(words)
    arguments: Any = (ctypes.c_void_p * 5)(*range(at, at + 40, 8))
    early = torch.cuda.get_device_capability(where) >= (9, 0)
    launch = nvrtc.launcher(function, 128 if streamed else _THREADS, 0, arguments, early=early)

    def run(blocks: int, *given: Tensor | int) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        with lock:  # the driver copies the arguments before it returns
            for i, own in enumerate(given):
                words[i] = own if isinstance(own, int) else own.data_ptr()
            launch(blocks, stream)

    return run
