"""Few tokens on Hopper: the kernel of cuda/decode_sm90.cu, which reads the packed tensors as they are.

`linear` multiplies up to 256 tokens. The positions' row pitch must be a multiple of 16 bytes for the copy
engine, so k must be a multiple of 128. Nothing is repacked and nothing is kept per layer but the two
128-byte descriptions of its tensors ("tensor maps"), which stay right as long as address and shape do.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from twofour.kernels import nvrtc

_SHARED_BYTES = 227 << 10  # of a multiprocessor
_ELEMENT = {torch.float16: 6, torch.bfloat16: 9, torch.uint8: 0}  # CUtensorMapDataType
_SWIZZLE_128 = 3
_KEPT_LAUNCHES = 4096  # of one shape: more than any model has layers, few enough to forget a lost model's


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled.

    Tokens it has room for, warpgroups of 64 rows a block, blocks that share a row block's columns, columns a
    tile, tiles in flight, row blocks that are worked on together when there are several tiles of tokens.
    """

    tokens: int
    warpgroups: int
    split: int
    step: int
    stages: int
    grouped: int = 16

    @property
    def shared_bytes(self) -> int:
        sums = 64 * self.warpgroups * self.tokens * 4 if self.split > 1 else 0
        return self.stages * self.stage_bytes + sums + 1024  # alignment

    @property
    def stage_bytes(self) -> int:
        return 64 * self.warpgroups * (self.step + self.step // 8) + 2 * self.step * self.tokens

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + 32


def why_not(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """The reason why this backend cannot run a layer, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it is written for compute capability 9.0 (Hopper)"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16, not {dtype}"
    if k % 128:
        return f"it needs a multiple of 128 columns, not {k}"
    return None


def configs(tokens: int) -> list[Config]:
    """Candidates for a number of tokens: in one tile while they are few, in one or several after that."""
    room = _room(tokens)
    tiles = [room] if tokens <= 64 else [t for t in (64, 96, 128, 192, 256) if t <= room]
    found = []
    for tile, resident, warpgroups, split, step in itertools.product(
        tiles, (2, 1), (1, 2, 4), (1, 2, 4), (128, 256)
    ):
        config = _fit(tile, warpgroups, split, step, resident)
        # With thousands of tokens there are blocks enough without splitting, and small ones read x too often.
        if config is not None and not (tokens > 1024 and (split > 1 or tile * warpgroups < 256)):
            found.append(config)
    return list(dict.fromkeys(found))


def guess(n: int, k: int, tokens: int, processors: int = 132) -> Config:
    """A good configuration for a shape that was not measured, after those that were (benchmarks/LOG.md)."""
    room = _room(tokens)
    if tokens > room:
        first = _fit(128, 2, 1, 128, 1) if tokens <= 512 else _fit(128, 4, 1, 128, 1)
    else:
        blocks = -(-n // 64)
        many = blocks > 3 * processors
        warpgroups = 1 if room <= 32 or not many else 2 if room <= 64 else 4
        split = 2 if 2 * blocks <= processors else 1
        resident = 2 if many and warpgroups == 1 else 1
        first = _fit(room, warpgroups, split, 256 if room <= 64 else 128, resident)
    return first or _fit(room, 1, 1, 128, 1) or configs(tokens)[0]


def _room(tokens: int) -> int:
    """Tokens that one tile holds: rounded up to a size there is, at most 256."""
    return next((t for t in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if t >= tokens), 256)


def _fit(room: int, warpgroups: int, split: int, step: int, resident: int) -> Config | None:
    """The configuration with as many stages as `resident` blocks have memory for, None if they do not fit."""
    registers = 65536 // resident // (128 * warpgroups + 32)
    one = Config(room, warpgroups, split, step, 1)
    stages = (_SHARED_BYTES // resident - one.shared_bytes) // one.stage_bytes + 1
    if stages < 2 or room // 2 + 48 > min(registers, 255) or (room // 2) % split:
        return None
    return Config(room, warpgroups, split, step, min(stages, 16))


def linear(
    x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, config: Config, out: Tensor | None = None
) -> Tensor:
    """x [tokens, k] · Wᵀ + bias, all contiguous and on one GPU."""
    if out is None:
        out = x.new_empty((x.shape[0], values.shape[0]))
    launches = _launches(values.shape[0], x.shape[1], x.dtype, config, x.device.index)
    launches.run(x, values, meta, bias, out)
    return out


def source(config: Config, dtype: torch.dtype) -> str:
    """The CUDA source with its constants, and the one instruction whose operands depend on them."""
    kind = "f16" if dtype == torch.float16 else "bf16"
    count = config.tokens // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"((d)[{i}])' for i in range(count))
    instruction = (
        f"wgmma.mma_async.sp.sync.aligned.m64n{config.tokens}k32.f32.{kind}.{kind} "
        f"{{{sums}}}, %{count}, %{count + 1}, %{count + 2}, %{count + 3}, 1, 1, 1, 0, 0;"
    )
    return (
        f"#define TOKENS {config.tokens}\n#define WARPGROUPS {config.warpgroups}\n"
        f"#define SPLIT {config.split}\n#define STEP {config.step}\n#define STAGES {config.stages}\n"
        f"#define FP16 {int(dtype == torch.float16)}\n"
        f'#define WGMMA(d, a, b, e, selector) asm volatile("{instruction}" '
        f': {outputs} : "l"(a), "l"(b), "r"(e), "n"(selector))\n' + _text()
    )


def compile_all(configs: list[Config], dtype: torch.dtype, device: torch.device) -> None:
    """Compile what is not in the cache yet, on all cores at once: one after another takes minutes."""
    if why_not(device, dtype, 128, 128) is None:
        sources = list(dict.fromkeys(source(c, dtype) for c in configs))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda text: nvrtc.compile_source(text, "sm_90a"), sources))


@cache
def _text() -> str:
    return files("twofour.kernels").joinpath("cuda/decode_sm90.cu").read_text()


class Launches:
    """The launches of one shape under one configuration, by the addresses of the weight's tensors."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, config: Config, device: int) -> None:
        self.n, self.k, self.dtype, self.config, self.device = n, k, dtype, config, device
        self.function = nvrtc.load(source(config, dtype), "sm_90a", "decode", config.shared_bytes, device)
        self.by_address: dict[tuple[int, int], _Launch] = {}

    def run(self, x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The hot path: microseconds of host time count."""
        key = (values.data_ptr(), meta.data_ptr())
        launch = self.by_address.get(key)
        if launch is None:
            if len(self.by_address) >= _KEPT_LAUNCHES:
                self.by_address.clear()
            launch = self.by_address[key] = _Launch(self, *key)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        launch(x.data_ptr(), x.shape[0], out.data_ptr(), 0 if bias is None else bias.data_ptr(), stream)


@cache
def _launches(n: int, k: int, dtype: torch.dtype, config: Config, device: int) -> Launches:
    return Launches(n, k, dtype, config, device)


class _Launch:
    """One weight under one configuration: everything but x, the output and the stream is set once."""

    def __init__(self, of: Launches, values: int, meta: int) -> None:
        n, k, dtype, config = of.n, of.k, of.dtype, of.config
        rows = 64 * config.warpgroups
        self.lock = threading.Lock()
        self.memory = ctypes.create_string_buffer(4 * 128)
        maps = -(-ctypes.addressof(self.memory) // 128) * 128
        _describe(maps, dtype, values, (k // 2, n), k, (64, rows), _SWIZZLE_128)
        _describe(maps + 128, torch.uint8, meta, (k // 8, n), k // 8, (config.step // 8, rows), 0)
        self.pointers = (ctypes.c_uint64 * 2)()  # y, bias
        self.blocks, self.room, self.split = -(-n // rows), config.tokens, config.split
        # n, tokens, steps, row blocks, tiles of tokens, row blocks that share the cache
        self.numbers = (ctypes.c_int * 6)(n, 0, -(-k // config.step), self.blocks, 1, config.grouped)
        at, number = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        where = [maps, maps + 128, maps + 256, at, at + 8, *range(number, number + 24, 4)]
        self.arguments = (ctypes.c_void_p * len(where))(*where)
        self.describe_x = _encoder(maps + 256, dtype, k, config.tokens)
        self.run = nvrtc.launcher(of.function, config.threads, config.shared_bytes, self.arguments)

    def __call__(self, x: int, tokens: int, out: int, bias: int, stream: int) -> None:
        tiles = -(-tokens // self.room)
        with self.lock:  # the driver copies the arguments before it returns
            self.describe_x(x, tokens)
            pointers, numbers = self.pointers, self.numbers
            pointers[0], pointers[1] = out, bias
            numbers[1], numbers[4] = tokens, tiles
            self.run(self.blocks * tiles * self.split, stream)


def _encoder(at: int, dtype: torch.dtype, k: int, box_tokens: int) -> Any:
    """A call (address, tokens) that describes x at `at`, with all that does not change made once."""
    encode = nvrtc.driver().cuTensorMapEncodeTiled
    sizes, pitch = (ctypes.c_uint64 * 2)(k, 0), (ctypes.c_uint64 * 1)(2 * k)
    box, ones = (ctypes.c_uint32 * 2)(64, box_tokens), (ctypes.c_uint32 * 2)(1, 1)
    target, address_of_x, last = ctypes.c_void_p(at), ctypes.c_void_p(), (0, 0)

    def describe_x(address: int, tokens: int) -> None:
        nonlocal last
        if last == (address, tokens):
            return
        last = (address, tokens)
        sizes[1] = tokens
        address_of_x.value = address
        status = encode(
            target,
            _ELEMENT[dtype],
            2,
            address_of_x,
            sizes,
            pitch,
            box,
            ones,
            0,
            _SWIZZLE_128,
            2,
            0,
        )
        if status:
            nvrtc.check(status, "cuTensorMapEncodeTiled")

    return describe_x


def _describe(
    at: int,
    dtype: torch.dtype,
    address: int,
    sizes: tuple[int, int],
    pitch: int,
    box: tuple[int, int],
    swizzle: int,
) -> None:
    """Write the description of a row-major matrix, [sizes[1], sizes[0]] with `pitch` bytes a row, at `at`."""
    status = nvrtc.driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        _ELEMENT[dtype],
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(*sizes),
        (ctypes.c_uint64 * 1)(pitch),
        (ctypes.c_uint32 * 2)(*box),
        (ctypes.c_uint32 * 2)(1, 1),
        0,
        swizzle,
        2,  # 128-byte promotion in L2
        0,  # zeros beyond the edges
    )
    nvrtc.check(status, "cuTensorMapEncodeTiled")
