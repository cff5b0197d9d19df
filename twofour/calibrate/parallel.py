"""Calibration over several processes (`torchrun`): each has its share of the windows, and they add up.

Every process holds the whole model and changes it in the same way: what the decisions depend on (Gram
matrices, gradients, errors) is summed over all, so that all see the same bits. Only the first one writes.
Without a process group everything here does nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from twofour.errors import InputError


def launched() -> int:
    """Processes that `torchrun` started, of which this is one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def active() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if active() else 0


def processes() -> int:
    return dist.get_world_size() if active() else 1


def is_first() -> bool:
    return rank() == 0


@contextmanager
def group_of_torchrun() -> Iterator[None]:
    """The process group that `torchrun` started us in, if it did, with a GPU for each process."""
    if launched() == 1 or dist.is_initialized():
        yield
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End a process of `torchrun` whose work is done, at once.

    Threads of torch that belong to a process group now and then outlive it, and the usual end of the process
    then aborts ("terminate called without an active exception"), whereupon torchrun stops the others, who may
    still be writing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def require_alone(verb: str) -> None:
    """Refuse to be one of several processes of `torchrun`, who would all write the same files."""
    if launched() > 1:
        raise InputError(
            f"{verb} runs in one process, and this is one of {launched()}.",
            hint="Start it without torchrun.",
        )


def share_of(windows: Tensor) -> Tensor:
    """This process's windows: as many for each, so a remainder is left out."""
    if not active():
        return windows
    count = len(windows) // dist.get_world_size()
    if not count:
        raise InputError(
            f"{len(windows)} windows are fewer than the {dist.get_world_size()} processes.",
            hint="Calibrate on more --samples.",
        )
    start = dist.get_rank() * count
    return windows[start : start + count]


def sum_(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if active():
        dist.all_reduce(tensor)
    return tensor


def max_(tensor: Tensor) -> Tensor:
    """The largest of all processes, element by element, in place."""
    if active():
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def mean_(tensor: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    return sum_(tensor).div_(dist.get_world_size()) if active() else tensor


def mean(value: float) -> float:
    return float(mean_(torch.tensor(value, dtype=torch.float64))) if active() else value


def of_first(thing: Any) -> Any:
    """What the first process has, for all."""
    if not active():
        return thing
    box = [thing]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def of_all(thing: Any) -> list[Any]:
    """What every process has, in their order."""
    if not active():
        return [thing]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, thing)
    return found


def wait() -> None:
    """Until all processes are here."""
    if active():
        dist.barrier()
