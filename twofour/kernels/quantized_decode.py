"""Few tokens times weights of 8 or 4 bits, on any GPU from Ampere on: cuda/quantized_decode_sm80.cu.

Activations stay in 16 bits; codes become 16-bit numbers on the way to the tensor cores, exactly, and scales
multiply sums in float32. So the result is that of the dequantized weights, rounded once at the end, while the
weights cost 5 or 3 bits each to read. `linear` takes any number of tokens, up to 64 in one tile; k must be a
multiple of 32. As in ampere.py nothing is repacked and one launch object serves every weight of a shape.

From compute capability 9.0 on a configuration may have a `split`: so many blocks (a cluster) share the
columns of some rows. Then few rows can come in large blocks and still keep every multiprocessor busy.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from twofour.kernels import nvrtc
from twofour.kernels.ampere import architecture
from twofour.kernels.nvrtc import cuda_text
from twofour.quantize.schemes import GROUPS, Codes

_MOST_STAGES = 6
_DEFINED: dict[Codes, int] = {"int4": 4, "int8": 8, "fp8": 88}  # what the source calls them

# A row of a wide tile is more bytes in one place, a narrow one leaves room for more teams or more blocks.
# (row_tiles, row_warps, k_warps, step) and the kilobytes that a block may take; each with every split of
# _SPLITS. With 54 a multiprocessor of Hopper has room for four blocks, with 74 for three, with 96 for two.
_Shape = tuple[int, int, int, int]
_SHAPES: dict[int, list[tuple[_Shape, tuple[int, ...]]]] = {
    8: [
        ((1, 1, 8, 128), (54,)),
        ((2, 1, 4, 128), (54, 74)),
        ((2, 1, 4, 256), (74, 96)),
        ((4, 1, 4, 128), (54, 74, 96)),
        ((4, 1, 2, 256), (54, 74)),
        ((4, 2, 2, 128), (54, 74)),
        ((4, 2, 2, 256), (74,)),
        ((2, 2, 4, 256), (96,)),
        ((2, 4, 1, 512), (74,)),
        ((4, 2, 1, 512), (74,)),
    ],
    16: [
        ((1, 1, 8, 128), (96,)),
        ((2, 1, 4, 128), (54, 74)),
        ((2, 2, 4, 128), (74, 96)),
        ((4, 1, 4, 128), (74,)),
        ((2, 2, 2, 256), (74,)),
        ((4, 2, 2, 128), (54, 74)),
        ((4, 2, 2, 256), (96,)),
        ((4, 4, 1, 128), (74,)),
        ((2, 4, 1, 512), (96,)),
    ],
    32: [
        ((1, 1, 4, 128), (96,)),
        ((2, 1, 4, 128), (96,)),
        ((2, 2, 2, 128), (54, 74)),
        ((2, 4, 2, 128), (74, 96)),
        ((4, 2, 2, 128), (74, 96)),
        ((4, 4, 1, 128), (54, 74)),
        ((2, 8, 1, 128), (74, 96)),
    ],
    64: [
        ((1, 2, 2, 128), (96,)),
        ((1, 4, 2, 128), (96,)),
        ((1, 8, 1, 128), (74,)),
        ((2, 4, 1, 128), (54, 74)),
        ((2, 4, 2, 128), (96,)),
        ((2, 8, 1, 128), (74, 96)),
    ],
}
_SPLITS = (1, 2, 4)


@dataclass(frozen=True)
class Config:
    """How the kernel is compiled.

    Tokens a tile has room for, 16-row tiles a warp, warps that share the rows of a block, teams of such warps
    that share its columns, columns a tile of the weight, tiles in flight per team, blocks that share columns.
    """

    tokens: int
    row_tiles: int
    row_warps: int
    k_warps: int
    step: int
    stages: int
    split: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.row_warps

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.k_warps

    def stage_bytes(self, codes: Codes, group: int | None) -> int:
        """Of all teams: codes, positions and scales of the rows, and the tokens."""
        row = self.step // (4 if codes == "int4" else 2) + self.step // 8
        row += 4 * (self.step // group) if group else 0
        return self.k_warps * (self.rows * row + (2 * self.step + 16) * self.tokens)

    def shared_bytes(self, codes: Codes, group: int | None) -> int:
        sums = 4 * self.k_warps * self.tokens * (self.rows + 4)  # in the place of the tiles, after the last
        return max(self.stages * self.stage_bytes(codes, group), sums)


def why_not(
    device: torch.device, dtype: torch.dtype, codes: Codes, n: int, k: int, group: int | None
) -> str | None:
    """The reason why this backend cannot run a layer, None if it can."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0 (Ampere) or later"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it multiplies float16 and bfloat16, not {dtype}"
    if k % 32:
        return f"it needs a multiple of 32 columns, not {k}"
    if codes != "int4" and group is not None:
        return f"it has one scale a row for {codes}, not one for {group} columns"
    if codes == "int4" and group not in GROUPS:
        return f"it has a scale for 32, 64 or 128 columns of int4, not for {group or 'a row'}"
    return None


def configs(tokens: int, codes: Codes, group: int | None, clusters: bool = False) -> list[Config]:
    """Candidates for a number of tokens; beyond 64 they come in several tiles of 64.

    `clusters` (compute capability 9.0 and later) adds those whose columns are split over blocks.
    """
    room = _room(tokens)
    splits = _SPLITS if clusters else _SPLITS[:1]
    found = [
        _fit(room, shape, size, codes, group, split)
        for shape, sizes in _SHAPES[room]
        for size in sizes
        for split in splits
    ]
    return list(dict.fromkeys(c for c in found if c is not None))


def guess(
    n: int,
    k: int,
    tokens: int,
    codes: Codes,
    group: int | None,
    processors: int = 108,
    clusters: bool = False,
) -> Config:
    """A configuration for a shape that was not measured, after those that were (benchmarks/LOG.md).

    Teams that share the columns of a few rows where tokens are few; more rows a block, which read x less
    often, where they are many. Where rows are too few for all multiprocessors, a cluster shares columns.
    """
    room, candidates = _room(tokens), configs(tokens, codes, group, clusters)
    many = n * -(-tokens // room) >= 96 * processors
    narrow = group in (32, 64)  # more scales at a time: with as many rows they do not fit the registers
    shape, split = {
        8: ((2, 1, 4, 256), 1 if n >= 40 * processors else 2),
        16: ((2, 4, 1, 512) if codes == "int4" else (2, 2, 2, 256), 1 if many else 4),
        32: ((2, 4, 2, 128) if narrow else (4, 2, 2, 128), 1) if many else ((2, 1, 4, 128), 2),
        64: ((1, 8, 1, 128) if narrow else (2, 4, 1, 128), 1 if many else 4),
    }[room]

    def likeness(config: Config) -> tuple[bool, bool, int]:
        own = (config.row_tiles, config.row_warps, config.k_warps, config.step)
        return own == shape, config.split == (split if clusters else 1), config.stages

    return max(candidates, key=likeness)


def _room(tokens: int) -> int:
    """Tokens that one tile holds."""
    return next((t for t in (8, 16, 32, 64) if t >= tokens), 64)


def _fit(
    room: int, shape: _Shape, kilobytes: int, codes: Codes, group: int | None, split: int
) -> Config | None:
    """The configuration with as many stages as there is memory for, None if it is not enough for two."""
    stages = (kilobytes << 10) // Config(room, *shape, 1).stage_bytes(codes, group)
    config = Config(room, *shape, min(stages, _MOST_STAGES), split)
    return config if stages >= 2 and config.shared_bytes(codes, group) <= kilobytes << 10 else None


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    codes: Codes,
    group: int | None,
    config: Config,
    out: Tensor | None = None,
) -> Tensor:
    """x [tokens, k] · Wᵀ + bias, all contiguous and on one GPU; scale and bias of x's type."""
    n = values.shape[0]
    if out is None:
        out = x.new_empty((x.shape[0], n))
    launches = _launches(n, x.shape[1], x.dtype, codes, group, config, x.device.index)
    launches.run(x, values, meta, scale, bias, out)
    return out


def source(config: Config, dtype: torch.dtype, codes: Codes, group: int | None) -> str:
    """The CUDA source with its constants."""
    return (
        f"#define TOKENS {config.tokens}\n#define ROW_TILES {config.row_tiles}\n"
        f"#define ROW_WARPS {config.row_warps}\n#define K_WARPS {config.k_warps}\n"
        f"#define STEP {config.step}\n#define STAGES {config.stages}\n#define SPLIT {config.split}\n"
        f"#define CODES {_DEFINED[codes]}\n#define GROUP {group or 0}\n"
        f"#define FP16 {int(dtype == torch.float16)}\n"
        + cuda_text("common.cuh", "sm80.cuh", "numbers.cuh", "quantized_decode_sm80.cu")
    )


def compile_all(
    configs: list[Config], dtype: torch.dtype, codes: Codes, group: int | None, device: torch.device
) -> None:
    """Compile what is not in the cache yet."""
    if why_not(device, dtype, codes, 32, 32, group) is None:
        nvrtc.compile_sources((source(c, dtype, codes, group) for c in configs), architecture(device))


class Launches:
    """The launches of one shape under one configuration: the addresses and the tokens are set at each."""

    def __init__(
        self,
        n: int,
        k: int,
        dtype: torch.dtype,
        codes: Codes,
        group: int | None,
        config: Config,
        device: int,
        early: bool = True,
    ) -> None:
        """`early`: the kernel asks for the weight before the kernel before it has ended."""
        self.n, self.k, self.dtype, self.config, self.device = n, k, dtype, config, device
        where = torch.device("cuda", device)
        text, shared = source(config, dtype, codes, group), config.shared_bytes(codes, group)
        function = nvrtc.load(text, architecture(where), "product", shared, device)
        self.lock = threading.Lock()
        self.pointers = (ctypes.c_uint64 * 6)()  # x, codes, positions, scale, bias, y
        self.blocks, self.room = -(-n // config.rows), config.tokens
        self.numbers = (ctypes.c_int * 5)(n, k, 0, self.blocks, 1)  # and tokens, row blocks, tiles of tokens
        at, number = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        arguments = [*range(at, at + 48, 8), *range(number, number + 20, 4)]
        self.arguments = (ctypes.c_void_p * len(arguments))(*arguments)
        # The kernel waits for the one before it itself only where the hardware has a word for that.
        early = early and torch.cuda.get_device_capability(where) >= (9, 0)
        self.launch = nvrtc.launcher(function, config.threads, shared, self.arguments, early=early)

    def run(
        self, x: Tensor, values: Tensor, meta: Tensor, scale: Tensor, bias: Tensor | None, out: Tensor
    ) -> None:
        """The hot path: microseconds of host time count."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        tokens = x.shape[0]
        tiles = -(-tokens // self.room)
        pointers, numbers = self.pointers, self.numbers
        with self.lock:  # the driver copies the arguments before it returns
            pointers[0], pointers[1], pointers[2] = x.data_ptr(), values.data_ptr(), meta.data_ptr()
            pointers[3], pointers[4] = scale.data_ptr(), 0 if bias is None else bias.data_ptr()
            pointers[5] = out.data_ptr()
            numbers[2], numbers[4] = tokens, tiles
            self.launch(self.blocks * tiles * self.config.split, stream)


@cache
def _launches(
    n: int, k: int, dtype: torch.dtype, codes: Codes, group: int | None, config: Config, device: int
) -> Launches:
    return Launches(n, k, dtype, codes, group, config, device)
