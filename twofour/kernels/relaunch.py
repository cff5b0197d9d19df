"""A library's kernel, launched without the library.

A library may take ten microseconds of host time in every call to work out what is the same in all of them.
`learn` captures such a call in CUDA graphs, which runs nothing, with different addresses, and reads from the
graphs what the kernel is given: where that differs, there the addresses are. The `Relaunch` that it returns
puts new ones in their places. There is one only if it foretells to the byte what the library gives its kernel
with other addresses; else the library has to be called. All of these are multiples of `ALIGNED`: what a
library does with others is not learnt.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Sequence
from ctypes import byref, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from typing import Any

from twofour.errors import TwoFourError
from twofour.kernels.nvrtc import LaunchAttribute, LaunchConfig, check, driver, require_context, try_again

#: A call of the library with these addresses in this stream.
Call = Callable[[Sequence[int], int], None]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may go on as they like
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_COOPERATIVE, _CLUSTER, _CLUSTER_PLACES = 2, 4, 5  # CU_LAUNCH_ATTRIBUTE_…
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE: there are no more parameters
_ALIGNMENT = 128  # of each argument in our memory; a tensor map asks for 64

#: What the addresses that a launch is learnt with, and may be used with, are multiples of.
ALIGNED = 256

#: How far the first address, the second and so on are moved: all different in both rows, so that it shows
#: which one it was.
_STEPS = ((256 * 3, 256 * 5, 256 * 7, 256 * 11), (256 * 13, 256 * 17, 256 * 19, 256 * 23))


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


@dataclass
class _Node:
    """A launch as a graph has it: all but `arguments` must be the same whatever the addresses."""

    function: int
    shape: tuple[int, ...]  # grid, block, bytes of shared memory
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    arguments: list[bytes]


class Relaunch:
    """The launch: call it with the addresses and a stream."""

    def __init__(self, node: _Node, places: Sequence[tuple[int, int, int]]) -> None:
        """`places`: which word of the arguments is which address, plus how many bytes."""
        starts, size = _starts(node.arguments)
        self._memory = ctypes.create_string_buffer(size + _ALIGNMENT)
        base = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        ctypes.memmove(base, _joined(node.arguments), size)
        self._words = (ctypes.c_uint64 * (size // 8)).from_address(base)
        self._places, self._lock = tuple(places), threading.Lock()
        self.needs = {which for _, which, _ in places}
        self._arguments = (c_void_p * len(starts))(*(base + start for start in starts))
        self._attributes = (LaunchAttribute * max(1, len(node.attributes)))()
        for attribute, (number, values) in zip(self._attributes, node.attributes, strict=False):
            attribute.id = number
            attribute.value[:] = values
        first = ctypes.cast(self._attributes, ctypes.POINTER(LaunchAttribute))
        grid, block, shared = node.shape[:3], node.shape[3:6], node.shape[6]
        self._config = LaunchConfig(grid, block, shared, None, first, len(node.attributes))
        self._function, self._at = c_void_p(node.function), ctypes.addressof(self._config)
        self._run = driver().cuLaunchKernelEx

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        words = self._words
        with self._lock:  # the driver copies the arguments before it returns
            for word, which, offset in self._places:
                words[word] = addresses[which] + offset
            self._config.stream = stream
            status = self._run(self._at, self._function, self._arguments, None)
            if status:
                given = (self._at, self._function, self._arguments, None)
                try_again(status, "cuLaunchKernelEx", self._run, *given)


def learn(call: Call, addresses: Sequence[int], wanted: Collection[int]) -> Relaunch | None:
    """The launch behind a call, None if that is not one kernel which only the addresses tell from others.

    The addresses in the places `wanted` must be among its arguments: else it has them from somewhere else.
    """
    if any(address % ALIGNED for address in addresses):
        return None
    moved = [[a + step for a, step in zip(addresses, steps, strict=False)] for steps in _STEPS]
    try:
        if not hasattr(driver(), "cuFuncGetParamInfo"):
            return None  # a driver from before CUDA 12.4
        require_context()
        first, second, third = (_captured(call, given) for given in (addresses, *moved))
    except TwoFourError:
        return None
    if first is None or second is None or third is None:
        return None
    places = _places(_joined(first.arguments), _joined(second.arguments), addresses)
    if places is None or not {which for _, which, _ in places}.issuperset(wanted):
        return None
    if not _same_launch(first, second) or not _same_launch(first, third):
        return None
    words = bytearray(_joined(first.arguments))
    for word, which, offset in places:
        words[8 * word : 8 * word + 8] = (moved[1][which] + offset).to_bytes(8, "little")
    return Relaunch(first, places) if bytes(words) == _joined(third.arguments) else None


def _places(first: bytes, second: bytes, addresses: Sequence[int]) -> list[tuple[int, int, int]] | None:
    """Which words are which address, from the arguments before and after all were moved."""
    if len(first) != len(second):
        return None
    found = []
    for word in range(len(first) // 8):
        here = slice(8 * word, 8 * word + 8)
        before, after = (int.from_bytes(words[here], "little") for words in (first, second))
        if before == after:
            continue
        which = [i for i in range(len(addresses)) if _STEPS[0][i] == after - before]
        if not which:
            return None
        offset = before - addresses[which[0]]
        if abs(offset) >= 1 << 31:
            return None  # the lower half of an address, beside something else
        found.append((word, which[0], offset))
    return found


def _same_launch(a: _Node, b: _Node) -> bool:
    return (a.function, a.shape, a.attributes) == (b.function, b.shape, b.attributes)


def _captured(call: Call, addresses: Sequence[int]) -> _Node | None:
    """What a call launches, if that is one kernel."""
    cuda, stream, graph = driver(), c_void_p(), c_void_p()
    # A stream of its own: in one from a pool somebody else's work might be captured.
    check(cuda.cuStreamCreate(byref(stream), _NON_BLOCKING), "cuStreamCreate")
    try:
        check(cuda.cuStreamBeginCapture_v2(stream, _RELAXED), "cuStreamBeginCapture")
        try:
            call(addresses, stream.value or 0)
        except TwoFourError:
            if cuda.cuStreamEndCapture(stream, byref(graph)) == 0:
                cuda.cuGraphDestroy(graph)
            raise
        check(cuda.cuStreamEndCapture(stream, byref(graph)), "cuStreamEndCapture")
    finally:
        cuda.cuStreamDestroy_v2(stream)
    try:
        nodes, count, kind = (c_void_p * 2)(), c_size_t(2), ctypes.c_int(-1)
        check(cuda.cuGraphGetNodes(graph, None, byref(count)), "cuGraphGetNodes")
        if count.value != 1:
            return None
        check(cuda.cuGraphGetNodes(graph, nodes, byref(count)), "cuGraphGetNodes")
        node = c_void_p(nodes[0])
        check(cuda.cuGraphNodeGetType(node, byref(kind)), "cuGraphNodeGetType")
        return _read(cuda, node) if kind.value == _KERNEL else None
    finally:
        cuda.cuGraphDestroy(graph)


def _read(cuda: Any, node: c_void_p) -> _Node | None:
    found = _NodeParams()
    check(cuda.cuGraphKernelNodeGetParams_v2(node, byref(found)), "cuGraphKernelNodeGetParams")
    function = c_void_p(found.function)
    if not function.value:  # as the runtime launches
        check(cuda.cuKernelGetFunction(byref(function), c_void_p(found.kernel)), "cuKernelGetFunction")
    if not function.value or not found.arguments:
        return None
    arguments: list[bytes] = []
    offset, size = c_size_t(), c_size_t()
    while True:
        index = len(arguments)
        status = cuda.cuFuncGetParamInfo(function, c_size_t(index), byref(offset), byref(size))
        if status:
            break
        arguments.append(ctypes.string_at(found.arguments[index], size.value))
    if status != _INVALID_VALUE:
        check(status, "cuFuncGetParamInfo")
    attributes = []
    for number in (_COOPERATIVE, _CLUSTER, _CLUSTER_PLACES):
        value = (ctypes.c_int * 16)()
        if cuda.cuGraphKernelNodeGetAttribute(node, number, byref(value)) == 0 and any(value):
            attributes.append((number, tuple(value)))
    shape = (*found.grid, *found.block, found.shared_bytes)
    return _Node(function.value, shape, tuple(attributes), arguments)


def _starts(arguments: Sequence[bytes]) -> tuple[list[int], int]:
    """Where each argument starts when they are joined, and how long they are then."""
    starts, size = [], 0
    for argument in arguments:
        starts.append(size)
        size += -(-len(argument) // _ALIGNMENT) * _ALIGNMENT
    return starts, size


def _joined(arguments: Sequence[bytes]) -> bytes:
    return b"".join(a.ljust(-(-len(a) // _ALIGNMENT) * _ALIGNMENT, b"\0") for a in arguments)
