"""Few tokens on any GPU from Ampere on: the kernel of cuda/mma_sm80.cu, on the packed tensors as they are.

`linear` multiplies any number of tokens, up to 64 in one tile. A row of positions must begin at a multiple of
4 bytes for the copies, so k must be a multiple of 32 (multiples of 64 or 128 are copied in wider pieces).
Nothing is repacked and nothing is kept per layer: the kernel gets plain addresses, so one launch object
serves every weight of a shape.
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

_MOST_STAGES = 8

# (row_tiles, row_warps, k_warps, step) and the kilobytes that a block may take. With 48 a multiprocessor of
# Hopper has room for four blocks, one of an A100 for three, one of Ada for two; with 75 it is three, two and
# one; with 96 two, one and one.
_Shape = tuple[int, int, int, int]
_SHAPES: dict[int, list[tuple[_Shape, tuple[int, ...]]]] = {
    8: [
        ((1, 1, 8, 64), (75,)),
        ((1, 1, 4, 128), (75,)),
        ((2, 1, 8, 64), (96,)),
        ((2, 1, 4, 64), (48, 75)),
        ((2, 1, 4, 128), (75, 96)),
        ((4, 1, 4, 64), (48, 75, 96)),
        ((4, 1, 2, 128), (75,)),
        ((2, 2, 4, 64), (75,)),
        ((4, 2, 2, 64), (48, 75, 96)),
        ((4, 2, 4, 64), (96,)),
    ],
    32: [
        ((1, 1, 4, 64), (75,)),
        ((2, 1, 4, 64), (75, 96)),
        ((2, 1, 2, 64), (48, 75)),
        ((4, 1, 2, 64), (48, 75)),
        ((4, 1, 4, 64), (75,)),
        ((2, 2, 4, 64), (75,)),
        ((4, 2, 1, 64), (48, 75)),
        ((4, 2, 2, 64), (75, 96)),
        ((2, 4, 2, 64), (96,)),
        ((4, 4, 1, 64), (48, 75)),
    ],
    64: [
        ((1, 1, 4, 64), (75,)),
        ((2, 1, 2, 64), (48, 75)),
        ((2, 1, 4, 64), (96,)),
        ((4, 1, 2, 64), (75, 96)),
        ((2, 2, 2, 64), (75, 96)),
        ((4, 2, 1, 64), (48, 75)),
        ((2, 4, 1, 64), (75,)),
        ((4, 2, 2, 64), (75,)),
        ((4, 4, 1, 64), (75, 96)),
        ((2, 4, 2, 64), (75,)),
    ],
}
_SHAPES[16] = _SHAPES[8]


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled.

    Tokens a tile has room for, 16-row tiles a warp, warps that share the rows of a block, teams of such warps
    that share its columns, columns a tile of the weight, tiles in flight per team.
    """

    tokens: int
    row_tiles: int
    row_warps: int
    k_warps: int
    step: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.row_warps

    @property
    def stage_bytes(self) -> int:
        return self.k_warps * (self.rows * (self.step + self.step // 8) + 2 * self.step * self.tokens)

    @property
    def shared_bytes(self) -> int:
        sums = 4 * self.k_warps * self.tokens * (self.rows + 4)  # in the place of the tiles, after the last
        return max(self.stages * self.stage_bytes, sums)

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps


def why_not(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """The reason why this backend cannot run a layer, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16, not {dtype}"
    if k % 32:
        return f"it needs a multiple of 32 columns, not {k}"
    return None


def configs(tokens: int) -> list[Config]:
    """Candidates for a number of tokens; beyond 64 they come in several tiles of 64."""
    room = _room(tokens)
    found = [_fit(room, shape, size) for shape, sizes in _SHAPES[room] for size in sizes]
    return list(dict.fromkeys(c for c in found if c is not None))


def guess(n: int, k: int, tokens: int, processors: int = 108) -> Config:
    """A good configuration for a shape that was not measured, after those that were (benchmarks/LOG.md).

    Where there are rows enough, blocks of many rows read x less often; where there are few, small blocks let
    every multiprocessor have some.
    """
    room = _room(tokens)
    many = n * -(-tokens // room) >= 96 * processors
    shape: _Shape
    if room == 8:
        shape, size = (2, 1, 4, 128), 55 if many else 80
    elif many:
        shape, size = (4, 2, 2, 64), 75 if room == 64 else 96
    elif room == 32:
        shape, size = (2, 2, 4, 64), 75
    else:
        shape, size = (1, 1, 8 if room == 16 else 4, 64), 75
    if shape[2] == 8 and k < 2048:  # a team takes 256 columns at least
        shape, size = (2, 1, 4, 64), 75
    return _fit(room, shape, size) or configs(tokens)[0]


def _room(tokens: int) -> int:
    """Tokens that one tile holds."""
    return next((t for t in (8, 16, 32, 64) if t >= tokens), 64)


def _fit(room: int, shape: _Shape, kilobytes: int) -> Config | None:
    """The configuration with as many stages as there is memory for, None if it is not enough for two."""
    stages = (kilobytes << 10) // Config(room, *shape, 1).stage_bytes
    config = Config(room, *shape, min(stages, _MOST_STAGES))
    return config if stages >= 2 and config.shared_bytes <= kilobytes << 10 else None


def linear(
    x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, config: Config, out: Tensor | None = None
) -> Tensor:
    """x [tokens, k] · Wᵀ + bias, all contiguous and on one GPU."""
    if out is None:
        out = x.new_empty((x.shape[0], values.shape[0]))
    _launches(values.shape[0], x.shape[1], x.dtype, config, x.device.index).run(x, values, meta, bias, out)
    return out


def source(config: Config, dtype: torch.dtype) -> str:
    """The CUDA source with its constants."""
    return (
        f"#define TOKENS {config.tokens}\n#define ROW_TILES {config.row_tiles}\n"
        f"#define ROW_WARPS {config.row_warps}\n#define K_WARPS {config.k_warps}\n"
        f"#define STEP {config.step}\n#define STAGES {config.stages}\n"
        f"#define FP16 {int(dtype == torch.float16)}\n" + cuda_text("common.cuh", "sm80.cuh", "mma_sm80.cu")
    )


def architecture(device: torch.device) -> str:
    """What to compile for: the device itself, as mma.sp is in every one from sm_80 on."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def compile_all(configs: list[Config], dtype: torch.dtype, device: torch.device) -> None:
    """Compile what is not in the cache yet."""
    if why_not(device, dtype, 32, 32) is None:
        nvrtc.compile_sources((source(c, dtype) for c in configs), architecture(device))


class Launches:
    """The launches of one shape under one configuration: the addresses and the tokens are set at each."""

    def __init__(
        self, n: int, k: int, dtype: torch.dtype, config: Config, device: int, early: bool = True
    ) -> None:
        """`early`: the kernel may ask for the weight before the kernel before it has ended."""
        self.n, self.k, self.dtype, self.config, self.device = n, k, dtype, config, device
        where = torch.device("cuda", device)
        text, target = source(config, dtype), architecture(where)
        function = nvrtc.load(text, target, "product", config.shared_bytes, device)
        self.lock = threading.Lock()
        self.pointers = (ctypes.c_uint64 * 5)()  # x, values, positions, bias, y
        self.blocks, self.room = -(-n // config.rows), config.tokens
        self.numbers = (ctypes.c_int * 5)(n, k, 0, self.blocks, 1)  # and tokens, row blocks, tiles of tokens
        at, number = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        arguments = [*range(at, at + 40, 8), *range(number, number + 20, 4)]
        self.arguments = (ctypes.c_void_p * len(arguments))(*arguments)
        # The kernel waits for the one before it itself only where the hardware has a word for that.
        early = early and torch.cuda.get_device_capability(where) >= (9, 0)
        self.launch = nvrtc.launcher(
            function, config.threads, config.shared_bytes, self.arguments, early=early
        )

    def run(self, x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The hot path: microseconds of host time count."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        tokens = x.shape[0]
        tiles = -(-tokens // self.room)
        pointers, numbers = self.pointers, self.numbers
        with self.lock:  # the driver copies the arguments before it returns
            pointers[0], pointers[1], pointers[2] = x.data_ptr(), values.data_ptr(), meta.data_ptr()
            pointers[3], pointers[4] = 0 if bias is None else bias.data_ptr(), out.data_ptr()
            numbers[2], numbers[4] = tokens, tiles
            self.launch(self.blocks * tiles, stream)


@cache
def _launches(n: int, k: int, dtype: torch.dtype, config: Config, device: int) -> Launches:
    return Launches(n, k, dtype, config, device)
