"""Rotary embedding of queries and keys: what it is, in plain torch, and as the one kernel of cuda/rope.cu.

    twofour::rope(q, k, cos, sin, heads_dim, round_steps)

q and k are [batch, heads, tokens, head] (heads_dim 1) or [batch, tokens, heads, head] (heads_dim 2),
cos and sin [batch or 1, tokens, rotated]. The first `rotated` numbers of a head are turned, a number
together with the one half of that further on; the others stay. cos and sin have q's type or float32.

With `round_steps` the two products are rounded to q's type before they are added, as a model does that
computes in 16 bit; without, or where cos and sin are float32, all is float32 and is rounded once. Both are
bit for bit what such a model computes, so nothing changes but the time. The results lie in memory as q and k
do, without their gaps.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twofour.kernels import nvrtc
from twofour.kernels.nvrtc import cuda_text
from twofour.ops import library

#: Numbers of 16 bit that one access of the kernel takes.
_VECTOR = 8

#: Of a block.
THREADS = 128

#: Heads that one thread goes through at most, so that it reads cos and sin once for all of them.
_MOST_HEADS = 8


def reference(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, round_steps: bool
) -> tuple[Tensor, Tensor]:
    """Right on every device and for every floating type."""
    if not round_steps:
        cos, sin = cos.float(), sin.float()
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out, rotated = torch.empty_like(x), cos.shape[-1]
    first, second = x[..., :rotated].chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    out[..., :rotated] = x[..., :rotated] * cos + turned * sin
    out[..., rotated:] = x[..., rotated:]
    return out


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled: the constants of cuda/rope.cu."""

    head: int
    rotated: int
    dtype: torch.dtype
    wide: bool  # cos and sin are float32
    round_steps: bool
    vector: int = _VECTOR

    @property
    def pieces(self) -> int:
        """Threads for one head of one token."""
        return (self.rotated // 2 + self.head - self.rotated) // self.vector


def why_not(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """The reason why the kernel cannot be used, None if it can."""
    if q.device.type != "cuda" or not q.device == k.device == cos.device == sin.device:
        return "it needs all tensors on one CUDA device"
    if _capability(q.device.index) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if q.dtype not in (torch.float16, torch.bfloat16) or k.dtype != q.dtype:
        return f"it turns float16 and bfloat16, not {q.dtype}"
    if cos.dtype != sin.dtype or cos.dtype not in (q.dtype, torch.float32):
        return "cos and sin must have the type of q, or float32"
    if any(t.stride(-1) != 1 for t in (q, k, cos, sin)):
        return "the numbers of a head must be neighbours in memory"
    if q.numel() + k.numel() >= 1 << 31:
        return "it counts in 32 bit"
    return None


def launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, round_steps: bool
) -> tuple[Tensor, Tensor]:
    """In one kernel; only where `why_not` says nothing."""
    if torch._C._cuda_getDevice() != q.device.index:  # launches go to the current one
        with torch.cuda.device(q.device):
            return launch(q, k, cos, sin, heads_dim, round_steps)
    new_q, new_k = torch.empty_like(q), torch.empty_like(k)
    if new_q.numel() or new_k.numel():
        places = places_of((q, k, cos, sin, new_q, new_k), heads_dim)
        config = config_of(q, cos, places, round_steps)
        _launches(config, q.device.index).run(places, sizes_of(q, k, heads_dim))
    return new_q, new_k


def _on_cuda(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_dim: int, round_steps: bool
) -> tuple[Tensor, Tensor]:
    run = launch if why_not(q, k, cos, sin) is None else reference
    return run(q, k, cos, sin, heads_dim, round_steps)


def places_of(tensors: tuple[Tensor, ...], heads_dim: int) -> list[int]:
    """For q, k, cos, sin and the two results: address, and strides of batch, heads and tokens."""
    places: list[int] = []
    batch = tensors[0].shape[0]
    for tensor in tensors:
        strides = tensor.stride()
        if len(strides) == 4:
            places += (tensor.data_ptr(), strides[0], strides[heads_dim], strides[3 - heads_dim])
        else:
            places += (tensor.data_ptr(), strides[0] if tensor.shape[0] == batch else 0, 0, strides[1])
    return places


def sizes_of(q: Tensor, k: Tensor, heads_dim: int) -> tuple[int, int, int, int]:
    """Sequences, tokens, heads of the queries, heads of the keys."""
    return q.shape[0], q.shape[3 - heads_dim], q.shape[heads_dim], k.shape[heads_dim]


def config_of(q: Tensor, cos: Tensor, places: list[int], round_steps: bool) -> Config:
    """By words of 16 bytes where every row of every tensor begins at one, else number by number."""
    head, rotated = q.shape[-1], cos.shape[-1]
    bits = rotated // 2 | head
    for number in places:  # strides count numbers; addresses count bytes, and are looked at again below
        bits |= number
    for address in places[::4]:
        bits |= address // 2
    wide = cos.dtype != q.dtype
    return Config(head, rotated, q.dtype, wide, round_steps and not wide, 1 if bits % _VECTOR else _VECTOR)


def work(places: list[int], sizes: tuple[int, int, int, int], config: Config, processors: int) -> list[int]:
    """The struct Work of cuda/rope.cu in 64-bit numbers, the last of them how many threads it takes."""
    batch, tokens, query_heads, key_heads = sizes
    heads = query_heads + key_heads
    single = batch * tokens * heads * config.pieces  # threads, if each had one head
    groups = -(-heads // min(max(single // (processors * 1024), 1), _MOST_HEADS))
    return [*places, tokens, query_heads, heads, groups, batch * tokens * groups * config.pieces]


def source(config: Config) -> str:
    """The CUDA source with its constants."""
    return constants(config) + cuda_text("common.cuh", "rope.cu")


def constants(config: Config) -> str:
    return (
        f"#define FP16 {int(config.dtype == torch.float16)}\n#define WIDE {int(config.wide)}\n"
        f"#define STEPS {int(config.round_steps)}\n#define VECTOR {config.vector}\n"
        f"#define HEAD {config.head}\n#define ROTATED {config.rotated}\n#define THREADS {THREADS}\n"
    )


class Launches:
    """The launches of one configuration on one device: what is turned is set at each."""

    def __init__(self, config: Config, device: int) -> None:
        self.config, self.device = config, device
        capability = _capability(device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        function = nvrtc.load(source(config), "sm_{}{}".format(*capability), "rope", 0, device)
        self.lock = threading.Lock()
        self.work = (ctypes.c_int64 * 29)()
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(self.work))
        # The kernel waits for the one before it itself only where the hardware has a word for that.
        self.launch = nvrtc.launcher(function, THREADS, 0, arguments, early=capability >= (9, 0))

    def run(self, places: list[int], sizes: tuple[int, int, int, int]) -> None:
        """The hot path: microseconds of host time count."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        numbers = work(places, sizes, self.config, self.processors)
        with self.lock:  # the driver copies the arguments before it returns
            self.work[:] = numbers  # type: ignore[assignment]
            self.launch(-(-numbers[-1] // THREADS), stream)


@cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@cache
def _launches(config: Config, device: int) -> Launches:
    return Launches(config, device)


library.impl("rope", reference, "CompositeExplicitAutograd")
library.impl("rope", _on_cuda, "CUDA")
