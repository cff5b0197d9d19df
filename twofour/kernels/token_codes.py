"""Tokens rounded to 8 bits on a GPU, as one kernel: what stands before a product of codes.

`round_tokens` gives what `quantize.activations.round_tokens` does, but for the last bit of a quotient: the
kernel multiplies by the reciprocal of the scale.
"""

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

#: Codes as the kernels number them.
CODES = {torch.float8_e4m3fn: 1, torch.int8: 2}

_TILE = 256  # tokens, at most, of a tile of the product
_MOST_HELD = 16  # pieces of 8 numbers that a thread keeps in registers


def why_not(device: torch.device, dtype: torch.dtype, codes: torch.dtype, k: int) -> str | None:
    """The reason why the kernel cannot round such tokens, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < ((8, 9) if codes == torch.float8_e4m3fn else (8, 0)):
        return "this GPU has no instruction for it"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it rounds float16 and bfloat16, not {dtype}"
    if k % 8 or not 0 < k <= 8 * 1024 * _MOST_HELD:
        return f"it needs a multiple of 8 columns, at most {8 * 1024 * _MOST_HELD}, not {k}"
    return None


def round_tokens(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [tokens, k], contiguous, on a GPU: codes [tokens, k] and their scales in float32.

    There are more scales than tokens: a kernel that takes whole tiles of tokens reads them unasked.
    """
    rounded = torch.empty(x.shape, dtype=codes, device=x.device)
    scale = torch.empty(x.shape[0] + _TILE, dtype=torch.float32, device=x.device)
    if x.shape[0]:
        _kernel(x.shape[1], x.dtype, codes, x.device.index)(x, rounded, scale)
    return rounded, scale


def source(k: int, dtype: torch.dtype, codes: torch.dtype) -> str:
    return (
        f"#define K {k}\n#define THREADS {_threads(k)}\n#define CODES {CODES[codes]}\n"
        f"#define FP16 {int(dtype == torch.float16)}\n" + cuda_text("common.cuh", "round_tokens.cu")
    )


def _threads(k: int) -> int:
    """Two pieces a thread for usual widths, so that a token is many requests at once."""
    return next((t for t in (128, 256, 512) if k <= 8 * 8 * t), 1024)


@cache
def _kernel(
    k: int, dtype: torch.dtype, codes: torch.dtype, device: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    where = torch.device("cuda", device)
    function = nvrtc.load(source(k, dtype, codes), architecture(where), "round_tokens", 0, device)
    lock = threading.Lock()
    pointers = (ctypes.c_uint64 * 3)()
    at = ctypes.addressof(pointers)
    arguments: Any = (ctypes.c_void_p * 3)(at, at + 8, at + 16)
    early = torch.cuda.get_device_capability(where) >= (9, 0)
    launch = nvrtc.launcher(function, _threads(k), 0, arguments, early=early)

    def run(x: Tensor, rounded: Tensor, scale: Tensor) -> None:
        stream = torch._C._cuda_getCurrentRawStream(device)
        with lock:  # the driver copies the arguments before it returns
            pointers[0], pointers[1], pointers[2] = x.data_ptr(), rounded.data_ptr(), scale.data_ptr()
            launch(x.shape[0], stream)

    return run
