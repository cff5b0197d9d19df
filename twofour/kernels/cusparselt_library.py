"""The cuSPARSELt shared library itself: where it is found, how its functions are called and how they fail.

It is called through ctypes. Nothing is loaded when this module is imported; the library is opened when a
CUDA device first needs it. What is done with it is in `twofour.kernels.cusparselt`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from contextlib import suppress
from ctypes import c_int, c_int64, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import torch

from twofour.errors import TwoFourError

_SONAME = "libcusparseLt.so.0"
_ALIGNMENT = 256
_OPAQUE_BYTES = 16384  # its opaque structures took 11 KiB once and take 512 bytes now

#: The arguments of each function that we call, a letter each.
_LETTERS = {"p": c_void_p, "i": c_int, "u": c_uint32, "l": c_int64, "z": c_size_t}
_PROTOTYPES = {
    "Init": "p",
    "GetProperty": "ip",
    "DenseDescriptorInit": "ppllluii",
    "StructuredDescriptorInit": "ppllluiii",
    "MatDescriptorDestroy": "p",
    "MatmulDescriptorInit": "ppiippppi",
    "MatmulDescSetAttribute": "ppipz",
    "MatmulAlgSelectionInit": "pppi",
    "MatmulAlgSelectionDestroy": "p",
    "MatmulAlgSetAttribute": "ppipz",
    "MatmulAlgGetAttribute": "ppipz",
    "MatmulPlanInit": "pppp",
    "MatmulPlanDestroy": "p",
    "MatmulGetWorkspace": "ppp",
    "Matmul": "ppppppppppi",
    "SpMMACompressedSize2": "pppp",
    "SpMMACompress2": "ppiipppp",
}


def load() -> Any:
    """The opened library."""
    library, places = _open()
    if library is None:
        raise TwoFourError(
            f"cuSPARSELt was not found; looked for {_SONAME} in {', '.join(places)}.",
            hint="Install a CUDA build of PyTorch, or nvidia-cusparselt-cu12 or -cu13 to match it.",
        )
    return library


@functools.cache
def _open() -> tuple[Any, list[str]]:
    """The library, or None, and the places that were looked at."""
    places = ["the running process"]
    # A CUDA build of torch has it open already, and a second copy in one process serves nobody.
    if hasattr(os, "RTLD_NOLOAD"):
        with suppress(OSError):
            return _declared(ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)), places
    here = Path(torch.__file__).parent
    nvidia = importlib.util.find_spec("nvidia")
    found = list(nvidia.submodule_search_locations or []) if nvidia else []
    folders = [here / "lib"]
    for root in (*map(Path, found), here.parent / "nvidia"):
        folders += [root / "cusparselt/lib", root / "cusparselt/lib64", root / "cu13/lib"]
        folders += sorted(file.parent for file in root.glob(f"*/lib*/{_SONAME}"))
    for folder in dict.fromkeys(folders):
        places.append(str(folder))
        if (folder / _SONAME).exists():
            try:
                return _declared(ctypes.CDLL(str(folder / _SONAME))), places
            except OSError as error:
                places[-1] += f" (there, but: {error})"
    places.append("the system's library path")
    with suppress(OSError):
        return _declared(ctypes.CDLL(_SONAME)), places
    return None, places


def _declared(library: Any) -> Any:
    for name, letters in _PROTOTYPES.items():
        if hasattr(library, f"cusparseLt{name}"):  # older versions lack some
            getattr(library, f"cusparseLt{name}").argtypes = [_LETTERS[letter] for letter in letters]
    if hasattr(library, "cusparseLtGetErrorName"):
        library.cusparseLtGetErrorName.restype = ctypes.c_char_p
    return library


def call(library: Any, name: str, *arguments: Any, hint: str | None = None) -> None:
    status = getattr(library, f"cusparseLt{name}")(*arguments)
    if status:
        raise failure(library, name, status, hint)


def failure(library: Any, name: str, status: int, hint: str | None = None) -> TwoFourError:
    named = getattr(library, "cusparseLtGetErrorName", None)
    text = named(status).decode() if named is not None else "see cusparseStatus_t"
    more = "CUSPARSELT_LOG_LEVEL=5 in the environment makes the library say why."
    return TwoFourError(f"cusparseLt{name} failed: {text} (status {status}).", hint=hint or more)


def opaque() -> Any:
    """A zeroed structure for the library to fill, aligned beyond what it asks for (16 bytes)."""
    room = (ctypes.c_uint8 * (_OPAQUE_BYTES + _ALIGNMENT))()
    return (ctypes.c_uint8 * _OPAQUE_BYTES).from_buffer(room, -ctypes.addressof(room) % _ALIGNMENT)
