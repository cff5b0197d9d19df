"""Running the Hopper kernels: what is kept per layer so that a call costs microseconds of host time.

The copy engine reads a matrix through a 128-byte description of it (a "tensor map"). Those of a weight's
values and positions are made once and stay right as long as address and shape do; that of x, and with many
tokens that of y, is made again when it is somewhere else. Weights of 4 bits need none: their pieces lie in
a row (streamed.py).
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twofour.kernels import nvrtc
from twofour.kernels.hopper import Config, Decode4, Prefill, Prefill8
from twofour.kernels.hopper_source import ARCHITECTURE, source
from twofour.packed import is_ordered
from twofour.streamed import ROWS

_ELEMENT = {
    torch.float16: 6,
    torch.bfloat16: 9,
    torch.uint8: 0,
    torch.int8: 0,
    torch.float8_e4m3fn: 0,
}  # CUtensorMapDataType
_WORDS = 2  # CU_TENSOR_MAP_DATA_TYPE_UINT32
_SWIZZLE_64, _SWIZZLE_128 = 2, 3
_MARK = int.from_bytes(os.urandom(8), "little") | 1  # not found in memory by chance, and not zero
_KEPT_LAUNCHES = 4096  # of one shape: more than any model has layers, few enough to forget a lost model's


def linear(
    x: Tensor,
    values: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    config: Config,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [tokens, k] · Wᵀ + bias, perhaps gated; all contiguous and on one GPU."""
    n = values.shape[0] // 2 if activation else values.shape[0]
    launches = _launches(n, x.shape[1], x.dtype, config, x.device.index, activation, is_ordered(meta))
    out = x.new_empty((x.shape[0], n)) if out is None else out
    launches.run(x, values, meta, bias, out)
    return out


class Launches:
    """The launches of one shape under one configuration, by the addresses of the weight's tensors."""

    def __init__(
        self,
        n: int,
        k: int,
        dtype: torch.dtype,
        config: Config,
        device: int,
        activation: str | None = None,
        codes: torch.dtype | None = None,
        early: bool = True,
        ordered: bool = False,
    ) -> None:
        """`early`: the kernel asks for the weight before the kernel before it has ended.
        `ordered`: positions lie as cuSPARSELt wants them (packed.py)."""
        self.n, self.k, self.config, self.device, self.early = n, k, config, device, early
        self.dtype = codes or dtype  # of both operands; with weights of 4 bits that of x
        self.out_dtype = dtype
        self.gated, self.ordered = activation is not None, ordered
        together = ROWS if isinstance(config, Decode4) else 8
        if self.gated and not (config.gates and n % together == 0):
            raise ValueError(f"{config} cannot end in a gated activation of {n} features")
        if isinstance(config, Prefill) and n % 8:
            raise ValueError(f"{config} needs a multiple of 8 rows, not {n}")
        self.function = nvrtc.load(
            source(config, dtype, activation, codes, ordered),
            ARCHITECTURE,
            config.source,
            config.shared_bytes,
            device,
        )
        self.threads = config.threads
        self.resident = nvrtc.resident_clusters(
            self.function, self.threads, config.shared_bytes, config.cluster, device
        )
        self.by_address: dict[tuple[int, int], _Launch] = {}

    def run(
        self,
        x: Tensor,
        values: Tensor,
        meta: Tensor,
        bias: Tensor | None,
        out: Tensor,
        row_scale: Tensor | None = None,
        token_scale: Tensor | None = None,
    ) -> None:
        """The hot path: microseconds of host time count."""
        key = (values.data_ptr(), meta.data_ptr())
        launch = self.by_address.get(key)
        if launch is None:
            if len(self.by_address) >= _KEPT_LAUNCHES:
                self.by_address.clear()
            launch = self.by_address[key] = _Launch(self, *key)
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        launch(
            x.data_ptr(),
            x.shape[0],
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if row_scale is None else row_scale.data_ptr(),
            0 if token_scale is None else token_scale.data_ptr(),
            stream,
        )


@cache
def _launches(
    n: int, k: int, dtype: torch.dtype, config: Config, device: int, activation: str | None, ordered: bool
) -> Launches:
    return Launches(n, k, dtype, config, device, activation, ordered=ordered)


class _Launch:
    """One weight under one configuration: everything but x, the output and the stream is set once."""

    def __init__(self, of: Launches, values: int, meta: int) -> None:
        n, k, dtype, config = of.n, of.k, of.dtype, of.config
        rows = 64 * config.warpgroups
        self.lock = threading.Lock()
        self.device = torch.device("cuda", of.device)
        self.memory = ctypes.create_string_buffer(5 * 128)
        maps = -(-ctypes.addressof(self.memory) // 128) * 128
        # y, bias, scales of rows and tokens, memory for sums of parts and the mark that they are there, and
        # the weight itself
        self.pointers = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 0, _MARK, values, meta)
        four_bit = isinstance(config, Decode4)  # whose weights are copied as they lie
        if not four_bit:
            swizzle, of_positions = (
                (_SWIZZLE_64, _SWIZZLE_64) if isinstance(config, Prefill8) else (_SWIZZLE_128, 0)
            )
            box, pitch = config.value_bytes // dtype.itemsize, k // 2 * dtype.itemsize
            _describe_rows(maps, dtype, values, n, k // 2, pitch, box, rows, swizzle, of.gated)
            columns = 8 * config.position_bytes
            if of.ordered:
                _describe_ordered(maps + 128, meta, n, k, columns, rows, of.gated)
            else:
                of_rows = (n, k // 8, k // 8, config.position_bytes, rows)
                _describe_rows(maps + 128, torch.uint8, meta, *of_rows, of_positions, of.gated)
        self.config, self.room, self.resident = config, config.tokens, of.resident
        self.row_units, self.steps = config.row_units(2 * n if of.gated else n), -(-k // config.step)
        self.tiles = 0  # of the last call, and how these are shared out
        self.shares = config.share_out(0, self.steps, self.resident)
        # n, tokens, steps, units of rows, tiles of tokens, units of rows that share the cache, units that are
        # not cut, parts of the others, k
        self.numbers = (ctypes.c_int * 9)(n, 0, self.steps, self.row_units, 1, config.grouped, 0, 1, k)
        at, number = ctypes.addressof(self.pointers), ctypes.addressof(self.numbers)
        weight = [at + 48, at + 56] if four_bit else [maps, maps + 128]
        slices = config.step // 64 if four_bit else None
        self.describe_x = _tokens_describer(maps + 256, dtype, k, 128, config.x_box, slices)
        self.describe_y = None
        if isinstance(config, Prefill):  # y leaves by the copy engine; Work and Parts of cuda/tiles_sm90.cuh
            wide = 64 if of.gated else 128
            self.describe_y = _tokens_describer(maps + 384, of.out_dtype, n, wide, config.leaving)
            where = [*weight, maps + 256, maps + 384, at + 8, number, number + 4]
            where += [number + 8, at + 32, at + 16, at + 24]
        else:  # with k in the place of the tokens' scales where weights have 4 bits
            where = [*weight, maps + 256, at, at + 8, number, number + 4]
            where += [*range(number + 8, number + 24, 4), at + 16, number + 32 if four_bit else at + 24]
        self.arguments = (ctypes.c_void_p * len(where))(*where)
        self.run = nvrtc.launcher(
            of.function, of.threads, config.shared_bytes, self.arguments, early=of.early
        )

    def __call__(
        self, x: int, tokens: int, out: int, bias: int, row_scale: int, token_scale: int, stream: int
    ) -> None:
        tiles = -(-tokens // self.room)
        with self.lock:  # the driver copies the arguments before it returns
            self.describe_x(x, tokens)
            if self.describe_y is not None:
                self.describe_y(out, tokens)
            pointers, numbers = self.pointers, self.numbers
            if tiles != self.tiles:
                self.tiles = tiles
                self.shares = self.config.share_out(self.row_units * tiles, self.steps, self.resident)
                numbers[4], numbers[6], numbers[7] = tiles, self.shares.whole, self.shares.parts
            pointers[0], pointers[1], pointers[2], pointers[3] = out, bias, row_scale, token_scale
            numbers[1] = tokens
            if self.shares.part_bytes:
                # From torch, whose allocator knows what else runs, in which stream and in which graph.
                memory = torch.empty(self.shares.part_bytes, dtype=torch.uint8, device=self.device)
                pointers[4] = memory.data_ptr()
            self.run(self.shares.blocks, stream)


def _tokens_describer(
    at: int, dtype: torch.dtype, columns: int, wide: int, box_tokens: int, slices: int | None = None
) -> Any:
    """A call (address, tokens) that describes x or y at `at`, with all that does not change made once.

    A copy takes `wide` bytes (64 or 128) of so many tokens, and with `slices` so many times, one slice after
    the other.
    """
    encode = nvrtc.driver().cuTensorMapEncodeTiled
    count = wide // dtype.itemsize
    first, pitches, boxes = [columns, 0], [dtype.itemsize * columns], [count, box_tokens]
    if slices:
        first, pitches, boxes = [count, 0, columns // count], [*pitches, wide], [*boxes, slices]
    rank = len(first)
    sizes, pitch = (ctypes.c_uint64 * rank)(*first), (ctypes.c_uint64 * (rank - 1))(*pitches)
    box, ones = (ctypes.c_uint32 * rank)(*boxes), (ctypes.c_uint32 * rank)(*[1] * rank)
    target, where, last = ctypes.c_void_p(at), ctypes.c_void_p(), (0, 0)
    element, swizzle = _ELEMENT[dtype], _SWIZZLE_128 if wide == 128 else _SWIZZLE_64

    def describe(address: int, tokens: int) -> None:
        nonlocal last
        if last == (address, tokens):
            return
        sizes[1] = tokens
        where.value = address
        given = (target, element, rank, where, sizes, pitch, box, ones, 0, swizzle, 2, 0)
        status = encode(*given)
        if status:
            nvrtc.try_again(status, "cuTensorMapEncodeTiled", encode, *given)
        last = (address, tokens)

    return describe


def _describe_rows(
    at: int,
    dtype: torch.dtype,
    address: int,
    n: int,
    columns: int,
    pitch: int,
    box_columns: int,
    box_rows: int,
    swizzle: int,
    gated: bool,
) -> None:
    """Describe a row-major matrix of `pitch` bytes a row at `at`, for copies of box_rows × box_columns.

    A gated one has 2n rows, and a copy takes eight of the first n and eight of the others in turns: the
    dimensions, fastest first, are the column, the row within eight, which half, and which eight.
    """
    sizes: tuple[int, ...] = (columns, n)
    strides: tuple[int, ...] = (pitch,)
    box: tuple[int, ...] = (box_columns, box_rows)
    if gated:
        sizes, strides = (columns, 8, 2, n // 8), (pitch, n * pitch, 8 * pitch)
        box = (box_columns, 8, 2, box_rows // 16)
    _describe(at, _ELEMENT[dtype], address, sizes, strides, box, swizzle)


def _describe_ordered(at: int, address: int, n: int, k: int, columns: int, rows: int, gated: bool) -> None:
    """Describe positions in cuSPARSELt's order for copies of rows × columns: see cuda/positions_sm90.cuh.

    The dimensions, fastest first: words of 32 rows × 32 columns, which half of 64 rows, which 32 columns,
    which 64 rows, and which matrix. A gated copy takes half the rows of each of two matrices.
    """
    halves = rows // (64 if gated else 32)
    sizes = (32, 2, k // 32, n // 64, 2 if gated else 1)
    strides = (128, 256, 8 * k, n // 64 * 8 * k)
    box = (32, min(halves, 2), columns // 32, max(halves // 2, 1), sizes[-1])
    _describe(at, _WORDS, address, sizes, strides, box, 0)


def _describe(
    at: int,
    element: int,
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> None:
    rank, encode = len(sizes), nvrtc.driver().cuTensorMapEncodeTiled
    given = (
        ctypes.c_void_p(at),
        element,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        swizzle,
        2,  # 128-byte promotion in L2
        0,  # zeros beyond the edges
    )
    nvrtc.try_again(encode(*given), "cuTensorMapEncodeTiled", encode, *given)
