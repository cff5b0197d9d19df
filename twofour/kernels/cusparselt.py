"""cuSPARSELt, NVIDIA's library for Sparse Tensor Cores, called with plans that are kept.

PyTorch's own way to it builds a plan in every call, which costs some 500 µs of host time. Here the shared
library that comes with torch is called through ctypes, and a plan is built once for a shape:

    compressed = compress(weight)                                  # W [n, k], 2:4, fp16 or bf16, on the GPU
    plan = plan_for(n, k, tokens, dtype, device, Algorithm(0), bias.data_ptr())
    plan.run(x, compressed, out)                                   # out[tokens, n] = x[tokens, k]·Wᵀ + bias

A plan has one `Algorithm`; `algorithms` lists those that a GPU has for a shape. Which one is fastest, and
whether its numbers are right, must be measured: that is done elsewhere.

The sparse operand must come first, so the library computes D[n, tokens] = W · xᵀ. Neither x nor the
result is transposed in memory: x [tokens, k] row-major is handed over as such, to be read transposed, and
D column-major is exactly out [tokens, n] row-major. The library takes token counts that are multiples of 8.

Nothing is loaded when this module is imported; the library is opened when a CUDA device first needs it.
Tests put a stand-in for the library in the place of `load`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twofour.errors import InputError, TwoFourError
from twofour.kernels import relaunch
from twofour.kernels.cusparselt_library import call, failure, load, opaque

#: Rows of x that the library works on: pad x with rows up to a multiple of this.
TOKEN_MULTIPLE = 8
#: Plans kept; one is about 100 KiB of host memory.
KEPT_PLANS = 512

_OLDEST = (0, 7)
_MEASURED = (0, 8)  # what the shipped tables were measured with
_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # CUDA_R_16F, CUDA_R_16BF
_COLUMN_MAJOR, _ROW_MAJOR = 1, 2
_AS_IS, _TRANSPOSED = 0, 1
_HALF_SPARSE, _COMPUTE_FLOAT32, _BIAS_POINTER = 0, 2, 8
_CONFIG_ID, _CONFIG_MAX_ID, _SPLIT_K, _SPLIT_K_MODE = 0, 1, 3, 4
_WORKSPACE = 3  # its place among the addresses of a product: the weight, x, the output, the workspace
_ONE_KERNEL, _TWO_KERNELS, _DATA_PARALLEL, _SPLIT, _STREAM_K = 1, 2, 4, 5, 6


@dataclass(frozen=True)
class Algorithm:
    """One way to run a product. The ids mean something else in each version and for each GPU."""

    id: int = 0
    split_k: int = 1
    split_k_mode: int = 0  # 0: the library's own default


def why_not(device: torch.device, dtype: torch.dtype, n: int, k: int) -> str | None:
    """The reason why cuSPARSELt cannot multiply with an [n, k] weight here, or None if it can."""
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, not {device.type}"
    return _why_not(_index(device), dtype, n, k)


@functools.lru_cache(maxsize=4096)
def _why_not(index: int, dtype: torch.dtype, n: int, k: int) -> str | None:
    if dtype not in _TYPES:
        return f"this backend multiplies float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if n % 16 or k % 16 or n <= 0 or k <= 0:
        return f"cuSPARSELt needs rows and columns in multiples of 16, and the weight is [{n}, {k}]"
    if torch.version.cuda is None:
        return "cuSPARSELt needs an NVIDIA GPU and a CUDA build of PyTorch"
    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        return f"Sparse Tensor Cores need compute capability 8.0, and this GPU has {major}.{minor}"
    try:
        found = version()
    except TwoFourError as error:
        return str(error)
    if found < _OLDEST:
        return f"cuSPARSELt {'.'.join(map(str, found))} is too old: install 0.7 or later"
    return None


def _require(device: torch.device, dtype: torch.dtype, n: int, k: int) -> None:
    if (reason := why_not(device, dtype, n, k)) is not None:
        raise InputError(f"{reason.rstrip('.')}.")


def version() -> tuple[int, ...]:
    """The version of the library: part of the key of whatever is measured with it."""
    library, parts = load(), [c_int() for _ in range(3)]
    for which, part in enumerate(parts):
        call(library, "GetProperty", which, byref(part))
    return tuple(part.value for part in parts)


def ids_are_known() -> bool:
    """Whether the ids of algorithms mean what they meant when the shipped tables were measured."""
    try:
        return version()[:2] == _MEASURED
    except TwoFourError:
        return False


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# The states below are per process because those of the library and of CUDA are.
_lock = threading.RLock()
_handles: dict[int, Any] = {}
_workspaces: dict[tuple[int, int], list[Tensor]] = {}
_plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
# A CUDA graph has its own copies of what a kernel needs, so dropping a plan should not hurt it. As no
# one promises that, a dropped plan lives on until as many others have been dropped after it.
_retired: deque[Plan] = deque(maxlen=KEPT_PLANS)


def _handle(library: Any, index: int) -> Any:
    """The library's context on a device: one for all threads, never destroyed (CUDA may be gone by then)."""
    with _lock:
        if index not in _handles:
            handle = opaque()
            with torch.cuda.device(index):
                torch.cuda.current_stream()  # makes sure that torch has set the device up
                call(library, "Init", byref(handle))
            _handles[index] = byref(handle)  # which keeps what it points to alive
        return _handles[index]


@contextmanager
def _structured(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Library, handle and descriptor of a sparse matrix, and the bytes it and its making take."""
    _require(device, dtype, n, k)
    library = load()
    about = (_handle(library, _index(device)), byref(opaque()))
    call(library, "StructuredDescriptorInit", *about, n, k, k, 16, _TYPES[dtype], _ROW_MAJOR, _HALF_SPARSE)
    try:
        size, scratch = c_size_t(), c_size_t()
        call(library, "SpMMACompressedSize2", *about, byref(size), byref(scratch))
        yield library, about, size.value, scratch.value
    finally:
        library.cusparseLtMatDescriptorDestroy(about[1])


def compressed_size(n: int, k: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of the compressed form of an [n, k] matrix."""
    with _structured(n, k, dtype, device) as (_, _, size, _):
        return int(size)


def compress(dense: Tensor) -> Tensor:
    """The compressed form, uint8 [bytes], of a matrix [n, k] on a GPU that must already be 2:4.

    The layout belongs to the GPU's architecture and the library's version: never write it to a file.
    """
    if dense.dim() != 2:
        raise InputError(f"cannot compress a tensor of shape {list(dense.shape)}: need a matrix.")
    dense = dense.detach().contiguous()
    n, k = dense.shape
    with (
        _structured(n, k, dense.dtype, dense.device) as (library, about, size, scratch_size),
        torch.cuda.device(dense.device),
    ):
        compressed = torch.zeros(size, dtype=torch.uint8, device=dense.device)
        # Freed when this returns; torch hands it out again only in the order of this stream.
        scratch = torch.empty(max(scratch_size, 1), dtype=torch.uint8, device=dense.device)
        pointers = (dense.data_ptr(), compressed.data_ptr(), scratch.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        call(library, "SpMMACompress2", *about, 1, _AS_IS, *pointers, stream)
    return compressed


class Plan:
    """One product, ready to run: shapes, algorithm and bias are fixed, the tensors are not."""

    def __init__(
        self,
        n: int,
        k: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        algorithm: Algorithm,
        bias_ptr: int | None = None,
    ) -> None:
        _require(device, dtype, n, k)
        self.library = library = load()
        self.index = _index(device)
        handle = _handle(library, self.index)
        made: list[tuple[str, Any]] = []
        # Undone when the last reference goes, but not at exit: CUDA may be gone before us.
        weakref.finalize(self, _destroy, library, made).atexit = False

        def make(name: str, *arguments: Any, undo: str = "", hint: str | None = None) -> Any:
            structure = byref(opaque())
            call(library, name, handle, structure, *arguments, hint=hint)
            made.append((undo or name.replace("Init", "Destroy"), structure))
            return structure

        with torch.cuda.device(self.index):
            kind, matrix = (16, _TYPES[dtype]), "MatDescriptorDestroy"
            pad = f"Pad the {tokens} tokens to a multiple of {TOKEN_MULTIPLE} with rows of zeros."
            hint = pad if tokens % TOKEN_MULTIPLE else None
            a = make("StructuredDescriptorInit", n, k, k, *kind, _ROW_MAJOR, _HALF_SPARSE, undo=matrix)
            # The same bytes could be called [k, tokens] column-major. This spelling is the one that
            # PyTorch uses, and so the one that every version of the library is sure to take.
            b = make("DenseDescriptorInit", tokens, k, k, *kind, _ROW_MAJOR, undo=matrix, hint=hint)
            c = make("DenseDescriptorInit", n, tokens, n, *kind, _COLUMN_MAJOR, undo=matrix, hint=hint)
            product = make("MatmulDescriptorInit", _AS_IS, _TRANSPOSED, a, b, c, c, _COMPUTE_FLOAT32)
            if bias_ptr is not None:
                where = byref(c_void_p(bias_ptr))
                call(library, "MatmulDescSetAttribute", handle, product, _BIAS_POINTER, where, 8)
            choice = make("MatmulAlgSelectionInit", product, 0)
            top, size = c_int(), c_size_t()
            call(library, "MatmulAlgGetAttribute", handle, choice, _CONFIG_MAX_ID, byref(top), 4)
            settings = [(_CONFIG_ID, algorithm.id)]
            settings += [(_SPLIT_K, algorithm.split_k)] if algorithm.split_k != 1 else []
            settings += [(_SPLIT_K_MODE, algorithm.split_k_mode)] if algorithm.split_k_mode else []
            for attribute, value in settings:
                call(library, "MatmulAlgSetAttribute", handle, choice, attribute, byref(c_int(value)), 4)
            plan = make("MatmulPlanInit", product, choice)
            call(library, "MatmulGetWorkspace", handle, plan, byref(size))
        self.algorithm_count = top.value  # ids are 0 … count - 1
        self.workspace_bytes = size.value
        self._parts = (
            library.cusparseLtMatmul,
            handle,
            plan,
            byref(ctypes.c_float(1)),
            byref(ctypes.c_float(0)),
        )
        # How it is run, None for through the library, and whether with a workspace. What can be learnt of
        # that is found out at the first run.
        self._by_library: tuple[relaunch.Call | None, bool] = (None, self.workspace_bytes > 0)
        self._learnt: tuple[relaunch.Call | None, bool] | None = None
        self._workspaces: dict[int, int] = {}
        # What `run` needs of torch, so that it looks up one attribute.
        self._fixed = (
            *(self.index, torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream),
            torch._C._cuda_isCurrentStreamCapturing,
        )

    def run(self, x: Tensor, compressed: Tensor, out: Tensor) -> None:
        """out[tokens, n] = x[tokens, k]·Wᵀ (+ bias) on the current stream.

        All contiguous, 16-byte aligned and of the plan's shape, dtype and device. That is not checked
        here: this is the hot path, a few microseconds of host time.
        """
        index, current_device, raw_stream, capturing = self._fixed
        if current_device() != index:
            with torch.cuda.device(index):
                return self.run(x, compressed, out)
        stream = raw_stream(index)
        w, b, y, workspace = compressed.data_ptr(), x.data_ptr(), out.data_ptr(), 0
        how = self._learnt
        if (w | b | y) % relaunch.ALIGNED or (how is None and capturing()):
            how = self._by_library
        start, uses_workspace = how or self._learn((w, b, y, y))
        if uses_workspace:
            if capturing():  # a graph may be replayed in any stream: it gets one from its own memory
                own = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=out.device)
                workspace = own.data_ptr()
            else:
                workspace = self._workspaces.get(stream) or self._bind(stream)
        (start or self._call)((w, b, y, workspace), stream)
        return None

    def _call(self, addresses: Sequence[int], stream: int) -> None:
        """Through the library."""
        matmul, handle, plan, one, zero = self._parts
        w, x, y, workspace = addresses
        streams = (c_void_p * 1)(stream)
        if status := matmul(handle, plan, one, w, x, zero, y, y, workspace or None, streams, 1):
            raise failure(self.library, "Matmul", status)

    def _learn(self, addresses: Sequence[int]) -> tuple[relaunch.Call | None, bool]:
        """How to run it from now on: without the library, which is twice as quick, if that can be learnt."""
        launch = relaunch.learn(self._call, addresses, wanted=range(_WORKSPACE))
        self._learnt = (launch, _WORKSPACE in launch.needs) if launch else self._by_library
        return self._learnt

    def _bind(self, stream: int) -> int:
        """The workspace of a stream that this plan has not run on yet."""
        self._workspaces[stream] = pointer = _workspace(self.index, stream, self.workspace_bytes)
        return pointer


def _destroy(library: Any, made: list[tuple[str, Any]]) -> None:
    for name, structure in reversed(made):
        if hasattr(library, f"cusparseLt{name}"):  # a product's descriptor has no such function
            getattr(library, f"cusparseLt{name}")(structure)


def _workspace(index: int, stream: int, size: int) -> int:
    """Scratch memory of a stream, shared by its plans: what runs on one stream runs in order.

    Plans hold its address, so none is ever freed, not even one that became too small; each new one is at
    least twice the last, so that all together are less than twice the largest.
    """
    with _lock:
        kept = _workspaces.setdefault((index, stream), [])
        if not kept or kept[-1].numel() < size:
            size = max(size, 2 * kept[-1].numel() if kept else 0)
            kept.append(torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index)))
        return kept[-1].data_ptr()


def plan_for(
    n: int,
    k: int,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    algorithm: Algorithm,
    bias_ptr: int | None = None,
) -> Plan:
    """The plan for a product, built at its first use and kept among the `KEPT_PLANS` last used."""
    key = (n, k, tokens, dtype, _index(device), algorithm, bias_ptr)
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _plans[key] = Plan(n, k, tokens, dtype, device, algorithm, bias_ptr)
            if len(_plans) > KEPT_PLANS:
                _retired.append(_plans.popitem(last=False)[1])
        else:
            _plans.move_to_end(key)
        return plan


def algorithms(n: int, k: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Algorithm]:
    """The algorithms that the library accepts for a product here, the default one first.

    Splitting k over more blocks pays when tokens are few, so it is offered up to 1024 of them.
    """
    count = Plan(n, k, tokens, dtype, device, Algorithm()).algorithm_count
    major = torch.cuda.get_device_capability(_index(device))[0]
    if major == 9:
        # For float16 version 0.8.0 has 42, and 36 of them ends in an illegal instruction, which takes the
        # whole process with it. The first 21, all there are for bfloat16, ran without fault.
        count = min(count, 21)
    ways = [(1, 0)]
    if tokens <= 1024:
        ways += _splits(major)
    accepted = []
    for algorithm in [Algorithm(number, *way) for way in ways for number in range(max(count, 1))]:
        with suppress(TwoFourError):
            Plan(n, k, tokens, dtype, device, algorithm)
            accepted.append(algorithm)
    return accepted


def _splits(major: int) -> list[tuple[int, int]]:
    """(split_k, mode) worth trying on an architecture.

    Not simply all of them: the library writes a line to standard output for each one it refuses, and up
    to 0.8.1 it is reported to hang when asked for -1 (segment-K) on an architecture that has none.
    """
    if major == 8:
        return [(split_k, mode) for split_k in (2, 4) for mode in (_ONE_KERNEL, _TWO_KERNELS)]
    if major == 9:
        return []  # Hopper takes 1 and -1 only, and -1 (segment-K) was never timed
    return [(1, _DATA_PARALLEL), (1, _STREAM_K), (2, _SPLIT), (4, _SPLIT)]
