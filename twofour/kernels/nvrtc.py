"""CUDA source to a running kernel, with what a CUDA build of PyTorch brings: NVRTC and the driver.

Sources live in `twofour/kernels/cuda/`. They are compiled at first use for this GPU and kept in the user's
cache (`TWOFOUR_CACHE`, else `~/.cache/twofour`), named by the hash of everything that went in, so a second
process loads in milliseconds. No nvcc, no build step. Everything goes through ctypes: a launch must cost
microseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from twofour.errors import TwoFourError

_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_SHARED_MEMORY_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def cache_directory() -> Path:
    base = os.environ.get("TWOFOUR_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "twofour"
    return Path(base).expanduser()


@cache
def cuda_text(*names: str) -> str:
    """Files of `cuda/`, one after the other: NVRTC is given one source, so nothing is included."""
    return "\n".join(files("twofour.kernels").joinpath(f"cuda/{name}").read_text() for name in names)


@cache
def driver() -> ctypes.CDLL:
    """The CUDA driver, with the argument types of the calls that are made often."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TwoFourError(f"the CUDA driver cannot be loaded: {error}.") from error
    library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


@cache
def _nvrtc() -> ctypes.CDLL:
    """NVRTC as PyTorch ships it."""
    version = (torch.version.cuda or "").split(".")[0]
    folders = [Path(torch.__file__).parent / "lib", *_nvidia_folders(version)]
    tried = [str(folder / f"libnvrtc.so.{version}") for folder in folders] + [
        f"libnvrtc.so.{version}",
        "libnvrtc.so",
    ]
    for name in tried:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise TwoFourError(
        "NVRTC was not found.", hint=f"Looked for {', '.join(tried)}; a CUDA build of torch brings it."
    )


def _nvidia_folders(version: str) -> list[Path]:
    packages = Path(torch.__file__).parents[1] / "nvidia"
    return [packages / f"cu{version}" / "lib", packages / "cuda_nvrtc" / "lib"]


def check(status: int, call: str) -> None:
    """Turn a driver error into an exception with the driver's own words."""
    if status:
        words = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(words))
        raise TwoFourError(f"{call} failed: {(words.value or b'unknown error').decode()} ({status}).")


def try_again(status: int, name: str, call: Callable[..., int], *arguments: Any) -> None:
    """After a call of the driver that did not succeed: once more, if the thread had not used CUDA yet."""
    if status == _NO_CONTEXT:
        require_context()
        status = call(*arguments)
    check(status, name)


def require_context() -> None:
    """Give a thread that has not used CUDA yet the context of torch's current device.

    The runtime does so by itself, the driver does not.
    """
    context, device = ctypes.c_void_p(), ctypes.c_int()
    check(driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if context.value:
        return
    check(driver().cuDeviceGet(ctypes.byref(device), torch.cuda.current_device()), "cuDeviceGet")
    # Retained once for each such thread, and never released: the process has it until it ends.
    check(driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")


def compile_source(source: str, architecture: str) -> bytes:
    """The cubin for a source, compiled now or in an earlier process."""
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device", "--use_fast_math"]
    known = "\n".join([source, *options, f"nvrtc {major.value}.{minor.value}"])
    path = cache_directory() / "kernels" / f"{hashlib.sha256(known.encode()).hexdigest()}.cubin"
    if path.exists():
        return path.read_bytes()
    program = ctypes.c_void_p()
    _nvrtc_check(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"twofour.cu", 0, None, None)
    )
    arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    status = library.nvrtcCompileProgram(program, len(options), arguments)
    if status:
        raise TwoFourError(f"a kernel did not compile for {architecture}:\n{_log(library, program)}")
    size = ctypes.c_size_t()
    _nvrtc_check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    cubin = ctypes.create_string_buffer(size.value)
    _nvrtc_check(library.nvrtcGetCUBIN(program, cubin))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    _keep(path, cubin.raw)
    return cubin.raw


def compile_sources(sources: Iterable[str], architecture: str) -> None:
    """Compile what is not in the cache yet, on all cores at once: one after another takes minutes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda text: compile_source(text, architecture), dict.fromkeys(sources)))


def _log(library: ctypes.CDLL, program: Any) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _nvrtc_check(status: int) -> None:
    if status:
        raise TwoFourError(f"NVRTC failed with status {status}.")


def _keep(path: Path, content: bytes) -> None:
    """Not being able to is no error."""
    with contextlib.suppress(OSError):
        write_whole(path, content)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file of the cache beside its place and rename it: processes and threads may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


@cache
def load(source: str, architecture: str, name: str, shared_bytes: int, device_index: int) -> ctypes.c_void_p:
    """The function of a source on a device, with its shared memory allowed."""
    cubin = compile_source(source, architecture)
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # makes sure that torch has set the device up
        require_context()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        check(driver().cuModuleLoadData(ctypes.byref(module), cubin), "cuModuleLoadData")
        check(
            driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction"
        )
        if (
            shared_bytes
        ):  # what the kernel declares itself counts too, so the limit may be less than 48 KB away
            status = driver().cuFuncSetAttribute(function, _SHARED_MEMORY_LIMIT, shared_bytes)
            check(status, "cuFuncSetAttribute")
    return function


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id and a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


_CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_MAY_START_EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


def resident_clusters(
    function: ctypes.c_void_p, threads: int, shared_bytes: int, cluster: int, device_index: int
) -> int:
    """How many clusters of a kernel the GPU runs at once. Not all of it: they do not cross its parts."""
    with torch.cuda.device(device_index):
        require_context()
        size = LaunchAttribute(id=_CLUSTER_DIMENSION)
        size.value[:3] = cluster, 1, 1
        config = LaunchConfig((cluster, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(size), 1)
        count = ctypes.c_int()
        status = driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), function, ctypes.byref(config))
        check(status, "cuOccupancyMaxActiveClusters")
    return count.value


def launcher(
    function: ctypes.c_void_p, threads: int, shared_bytes: int, arguments: Any, early: bool = True
) -> Callable[[int, int], None]:
    """A call (blocks, stream) that launches a kernel with arguments which are read at each launch.

    With `early` the kernel may start while the one before it in the stream still runs: it must wait for that
    one itself (griddepcontrol.wait, from compute capability 9.0 on) before it touches what it made.
    """
    attribute = LaunchAttribute(id=_MAY_START_EARLY)
    attribute.value[0] = 1
    config = LaunchConfig(
        (1, 1, 1), (threads, 1, 1), shared_bytes, None, ctypes.pointer(attribute), int(early)
    )
    at = ctypes.addressof(config)
    run = driver().cuLaunchKernelEx

    def launch(blocks: int, stream: int) -> None:
        config.grid[0] = blocks
        config.stream = stream
        status = run(at, function, arguments, None)
        if status:
            try_again(status, "cuLaunchKernelEx", run, at, function, arguments, None)

    return launch
