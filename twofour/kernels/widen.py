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
from twofour.streamed import is_streamed

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
    by_rows = torch.empty(n, k // 8, dtype=torch.uint8, device=meta.device) if streamed else meta
    run = _kernel(k, scale.shape[1], scale.dtype, values.dtype, streamed, values.device.index)
    run(values, meta, scale, out, by_rows)
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
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    where = torch.device("cuda", device)
    text = source(k, scales, dtype, codes, streamed)
    function = nvrtc.load(text, architecture(where), "widen", 0, device)
    lock = threading.Lock()
    pointers, chunks = (ctypes.c_uint64 * 5)(), ctypes.c_int64()
    at = ctypes.addressof(pointers)
    given = (at, at + 8, at + 16, ctypes.addressof(chunks), at + 24, at + 32)
    arguments: Any = (ctypes.c_void_p * 6)(*given)
    early = torch.cuda.get_device_capability(where) >= (9, 0)
    launch = nvrtc.launcher(function, _THREADS, 0, arguments, early=early)

    def run(values: Tensor, meta: Tensor, scale: Tensor, out: Tensor, by_rows: Tensor) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        with lock:  # the driver copies the arguments before it returns
            pointers[0], pointers[1], pointers[2] = values.data_ptr(), scale.data_ptr(), out.data_ptr()
            pointers[3], pointers[4] = meta.data_ptr(), by_rows.data_ptr()
            chunks.value = out.numel() // 8
            launch(-(-chunks.value // _THREADS), stream)

    return run
