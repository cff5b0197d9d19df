"""The hidden directories beside OUT in which a run works, and what a later run must know to go on there.

One run at a time: the directory is locked for as long as it works there, which a killed process cannot forget
to undo. What is being done is in `run.json`; `--resume` with other settings, or with files that have become
others, is refused, for neither result would be what was asked for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from twofour.errors import InputError, TwoFourError
from twofour.io.checkpoint import Checkpoint, stamps
from twofour.version import __version__

#: What is being done, in each of them.
RUN = "run.json"

#: The directories in which is kept what took long: from there OUT can be written once more.
_WORK = ("blocks", "recover")

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "files may not become so large here",
}

#: Values longer than this are not shown when they differ.
_SHOWN = 60


def beside(out: Path, what: str) -> Path:
    """The hidden directory for that part of the work."""
    return out.absolute().parent / f".{out.absolute().name}.{what}"


@contextlib.contextmanager
def held(directory: Path, out: Path) -> Iterator[None]:
    """Make the directory, if it is not there, and let nobody else work in it meanwhile."""
    with readable_os_errors(out):
        descriptor = _locked(directory, out)
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(directory: Path, out: Path) -> int:
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise InputError(
                f"another run is writing {out}.", hint="Wait until it has ended, or choose another name."
            ) from None
        except OSError:  # a file system without locks: then there are none
            return descriptor
        # The run that held it may have ended in between, and taken it away or made it OUT.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(directory), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)


def empty(directory: Path) -> None:
    """Remove what is in the directory, not itself: it may be held."""
    for entry in directory.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def run_of(options: dict[str, Any], source: Checkpoint, *others: Checkpoint | str | Path) -> dict[str, Any]:
    """What must be the same for a run to go on with the work of an earlier one: options, files, program."""
    return {**options, "config": source.config, "files": stamps(source, *others), "twofour": __version__}


def describe_run(directory: Path, run: dict[str, Any], out: Path) -> None:
    partial = directory / f"{RUN}.partial"
    with readable_os_errors(out):
        partial.write_text(json.dumps(run, default=str), encoding="utf-8")
        partial.replace(directory / RUN)


def require_same_run(directory: Path, run: dict[str, Any]) -> None:
    """Refuse to go on with a run that was another one. `run` as of `run_of`."""
    anew = "leave out --resume to start anew."
    try:
        before = json.loads((directory / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = None
    if not isinstance(before, dict) or not isinstance(before.get("files"), dict):
        raise InputError(
            f"{directory / RUN} cannot be read, so there is no telling what was done there.",
            hint=anew.capitalize(),
        )
    now = json.loads(json.dumps(run, default=str))
    was, becomes = before.pop("files"), now.pop("files")
    changed = sorted(name for name in becomes if name in was and was[name] != becomes[name])
    other = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    other.sort(key=lambda key: key not in before or key not in now)  # what both have says more
    if other:
        shown = ", ".join(_change(key, before.get(key), now.get(key)) for key in other[:3])
        raise InputError(
            f"the run to resume had other settings: {shown}.", hint=f"Give the same ones, or {anew}"
        )
    if changed or was.keys() != becomes.keys():
        names = ", ".join(changed or sorted(was.keys() ^ becomes.keys()))
        raise InputError(f"files have changed since the run to resume: {names}.", hint=anew.capitalize())


def _change(key: str, before: Any, now: Any) -> str:
    if max(len(repr(before)), len(repr(now))) > _SHOWN:
        return key
    return f"{key} was {before!r}, is {now!r}"


@contextlib.contextmanager
def readable_os_errors(out: Path) -> Iterator[None]:
    """Full disks and unwritable places, in a sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if full := disk_full(error, out):
            raise full from error
        if isinstance(error, SafetensorError):
            raise TwoFourError(f"cannot write below {out}: {error}.") from error
        raise InputError(
            f"cannot write {out}: {error.strerror or error}.", hint="Choose another place."
        ) from error


def disk_full(error: BaseException, out: Path) -> InputError | None:
    """What to say where there was no room to write; None if the error is another one."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, SafetensorError):  # it has the number in its text only
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else None
    if number not in _FULL:
        return None
    return InputError(f"{_FULL[number]}: {out} could not be written.", hint=how_to_go_on(out))


def how_to_go_on(out: Path) -> str:
    """What to do about a full disk, by what is finished beside OUT."""
    if any(any(beside(out, what).glob("*.safetensors")) for what in _WORK):
        return "Free some space; with --resume it goes on from what is finished."
    return "Nothing of it was left. Free some space or choose another place."
