"""A transformer run block by block, so that each block can be changed before the next one sees its outputs.

The first block's inputs are caught by running the model up to it. Then, for one block at a time: all
windows pass through it while the inputs of its layers are summed up as Gram matrices; the caller changes
the block; all windows pass through it again, and what comes out is the input of the next. So every layer is
pruned on what the pruned layers before it really give. Only one block has to be on the device; the states
between blocks stay there too while they take a small part of its memory, and on the CPU otherwise (`Shelf`).
Layers that get the very same input (q, k and v; gate and up) share one Gram matrix.

A caller that tunes a block needs to know what it should give, and there are two answers: what the dense
block gives for the inputs that it now gets, or what the dense model has at this depth, with everything that
was lost so far repaired. For the second, another set of states goes along through the blocks as they were
before the change, or through those of another model, the teacher. `follow` is how much of the second is in
the targets.

Nothing here knows a model by name: the blocks are the longest list of modules that the chosen layers are
in, and whatever else the model passes to a block (masks, positions) is caught with the states and passed
on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.examples import evaluating
from twofour.calibrate.observe import observe
from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.progress import OnProgress, silent
from twofour.select import Layer


class _Caught(Exception):
    """Raised to leave the model once its first block has been reached."""


@dataclass
class Call:
    """One batch on its way through the blocks: the states, and what else a block is called with."""

    states: Tensor
    rest: tuple[Any, ...]
    named: dict[str, Any]

    def through(
        self, block: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None
    ) -> Tensor:
        """What the block gives for it. With `dtype`, all that is floating point is converted first."""
        states, rest, named = to_device((self.states, self.rest, self.named), device, dtype)
        out = block(states, *rest, **named)
        return out if isinstance(out, Tensor) else out[0]


@dataclass
class Block:
    """A block whose turn it is.

    `grams` are the statistics of its layers' inputs, `calls` what it is called with, both after the change
    of all blocks before it; a Gram matrix that is taken out is freed. `targets`, where asked for, are what
    it should give, call by call, and `origins`, with `follow`, what the model as it was would give to it.
    With a teacher these are what it gives, and `teacher` is its block.
    """

    number: int
    name: str
    module: nn.Module
    layers: list[Layer]
    grams: dict[Layer, Gram]
    calls: list[Call]
    targets: list[Tensor]
    device: torch.device
    origins: list[Tensor] = field(default_factory=list)
    teacher: nn.Module | None = None


#: Share of a GPU's free memory that the states of all windows may take; otherwise they are kept on the CPU.
RESIDENT_SHARE = 0.25

#: What passes through a block at a time: so many windows on a CPU, which is busy with one, and windows of so
#: many tokens on a GPU, which is not. Constants: rounding depends on it, and a resumed run must do the same.
CPU_WINDOWS = 4
GPU_TOKENS = 16384

#: Called for each block that has chosen layers; changes its weights.
Change = Callable[[Block], object]


class Weights(Protocol):
    """Who has the weights of the blocks, and puts those of one on the device for its turn."""

    def bring(self, number: int, block: nn.Module, device: torch.device) -> None:
        """The block's parameters and buffers are on the device after this."""

    def release(self, number: int, block: nn.Module) -> None:
        """The block will not run again."""


class InModel:
    """The weights of a model that is in memory: each block goes to the device and back."""

    def __init__(self) -> None:
        self._home = torch.device("cpu")

    def bring(self, number: int, block: nn.Module, device: torch.device) -> None:
        self._home = next((parameter.device for parameter in block.parameters()), device)
        block.to(device)

    def release(self, number: int, block: nn.Module) -> None:
        block.to(self._home)


@dataclass(frozen=True)
class Teacher:
    """A model of the same build, to follow in place of what the changed one was; who has its weights."""

    model: nn.Module
    weights: Weights = field(default_factory=InModel)


class Shelf:
    """Where the states of all windows are between two blocks.

    On the block's device, if all that is to be kept takes no more than a share of its free memory. Otherwise
    on the CPU, in memory that a GPU reads and writes by itself: copies then wait in the same queue as the
    work of the blocks, and nobody waits for them until `settle`. Which of the two it is changes no bits.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.resident = device.type != "cuda" or nbytes < RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]

    def put(self, states: Tensor) -> Tensor:
        """The states where they are to be kept."""
        if self.resident:
            return states.to(self.device)
        kept = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        return kept.copy_(states, non_blocking=True)

    def settle(self) -> None:
        """After this the CPU, too, may read what was put away."""
        if not self.resident:
            torch.cuda.synchronize(self.device)


def find_blocks(model: nn.Module, layers: Sequence[Layer]) -> tuple[str, nn.ModuleList]:
    """The list of modules that holds the most of the layers, and its name."""
    best: tuple[int, str, nn.ModuleList | None] = (0, "", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            inside = sum(layer.name.startswith(f"{name}.") for layer in layers)
            # An outer list holds what an inner one does: the first with the most is the outermost.
            if inside > best[0]:
                best = (inside, name, module)
    if best[2] is None:
        raise InputError(
            "the model has no list of blocks to calibrate one after another.",
            hint="Prune it with --method magnitude.",
        )
    return best[1], best[2]


@torch.no_grad()
def run_blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    change: Change,
    *,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    follow: float | None = None,
    teacher: Teacher | None = None,
    prepare: Change | None = None,
    finished: int = 0,
    restore: Callable[[int], None] | None = None,
    weights: Weights | None = None,
    on_progress: OnProgress = silent,
) -> None:
    """Pass the windows [samples, length] through the model, changing block after block.

    The first `finished` blocks were changed in an earlier run: `restore` puts the new weights of one back,
    after what the old ones give was seen, and the windows only pass through. Blocks get targets if there is
    a `follow`, from 0 (the block) to 1 (the model, or the `teacher`). `prepare` comes just before `change`,
    and may put a block into another form that gives the same. `weights` brings those of a block that are not
    in memory.
    """
    name, blocks = find_blocks(model, layers)
    outside = [layer.name for layer in layers if not layer.name.startswith(f"{name}.")]
    if outside:
        raise InputError(
            f"{len(outside)} chosen layers are outside the blocks {name}.*, so their inputs are not seen.",
            layer=outside[0],
            hint="Leave them out with --exclude.",
        )
    device = torch.device(device)
    weights = weights or InModel()
    with evaluating(model, *([teacher.model] if teacher else [])):
        together = batch or windows_at_once(windows, device)
        calls = _catch(model, blocks[0], parallel.share_of(windows), together)
        copies = 1 + bool(follow) + (follow is not None)  # of a window: its own, the dense model's, targets
        shelf = Shelf(device, copies * sum(call.states.nbytes for call in calls))
        for call in calls:
            call.states = shelf.put(call.states)
        shelf.settle()
        _share_and_move(calls, shelf)
        dense = [call.states for call in calls] if follow else []
        taught_by = find_blocks(teacher.model, layers)[1] if teacher else blocks
        if teacher:
            start = _catch(teacher.model, taught_by[0], parallel.share_of(windows), together)
            dense = [shelf.put(call.states) for call in start]
            shelf.settle()
        for number, block in enumerate(blocks):
            prefix = f"{name}.{number}."
            own = [layer for layer in layers if layer.name.startswith(prefix)]
            weights.bring(number, block, device)
            if teacher:
                teacher.weights.bring(number, taught_by[number], device)
            todo = bool(own) and number >= finished
            targets: list[Tensor] = []
            grams: dict[Layer, Gram] = {}
            if todo:
                of_block = follow is not None and follow < 1
                grams = observe(
                    block, own, prefix, calls, shelf, targets if of_block and not teacher else None
                )
                if of_block and teacher:
                    targets = [shelf.put(call.through(taught_by[number], device)) for call in calls]
                    shelf.settle()
            origins = list(dense) if todo else []
            if follow:
                for i, call in enumerate(calls):
                    followed = Call(dense[i], call.rest, call.named)
                    dense[i] = shelf.put(followed.through(taught_by[number], device))
                shelf.settle()
                if follow == 1:
                    targets = list(dense)
                else:
                    for target, of_model in zip(targets, dense, strict=False):  # there may be none
                        target.lerp_(of_model, follow)
            if number < finished:
                if restore is not None:
                    restore(number)
            elif todo:
                theirs = taught_by[number] if teacher else None
                turn = Block(number, prefix[:-1], block, own, grams, calls, targets, device, origins, theirs)
                if prepare is not None:
                    prepare(turn)
                change(turn)
                del turn, grams, origins  # gigabytes, in a large model
            if number + 1 < len(blocks):
                pass_through(block, calls, shelf)
            weights.release(number, block)
            if teacher:
                teacher.weights.release(number, taught_by[number])
            on_progress(number + 1, len(blocks), f"block {number}")


def windows_at_once(windows: Tensor, device: torch.device) -> int:
    """How many of the windows pass through a block together, unless a method has its own idea."""
    return max(1, GPU_TOKENS // windows.shape[1]) if device.type == "cuda" else CPU_WINDOWS


def _catch(model: nn.Module, first: nn.Module, windows: Tensor, batch: int) -> list[Call]:
    """What the first block is called with, batch by batch."""
    calls: list[Call] = []

    def catch(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if args:
            calls.append(Call(args[0], args[1:], dict(named)))
        else:
            rest = {key: value for key, value in named.items() if key != "hidden_states"}
            calls.append(Call(named["hidden_states"], (), rest))
        raise _Caught

    hook = first.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        for tokens in windows.split(batch):
            try:
                model(tokens, use_cache=False)
            except _Caught:
                continue
    finally:
        hook.remove()
    return calls


def _share_and_move(calls: list[Call], shelf: Shelf) -> None:
    """Keep what is passed beside the states (masks, positions) once where it is the same for all windows.

    On the device, then. What differs from batch to batch goes where the states are.
    """
    beside = calls[0].rest, calls[0].named
    moved = to_device(beside, shelf.device)
    for call in calls:
        if _equal((call.rest, call.named), beside):
            call.rest, call.named = moved
        elif shelf.resident:
            call.rest, call.named = to_device((call.rest, call.named), shelf.device)


def pass_through(block: nn.Module, calls: list[Call], shelf: Shelf) -> None:
    """The states of all windows become what the block gives for them."""
    for call in calls:
        call.states = shelf.put(call.through(block, shelf.device))
    shelf.settle()


def to_device(thing: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> Any:
    """Tensors inside tuples, lists and dictionaries moved to a device; floating-point ones to a dtype."""
    if isinstance(thing, Tensor):
        # Towards a GPU without waiting: what uses it there waits in the same queue.
        return thing.to(
            device,
            dtype if thing.is_floating_point() else None,
            non_blocking=torch.device(device).type == "cuda",
        )
    if isinstance(thing, tuple | list):
        return type(thing)(to_device(part, device, dtype) for part in thing)
    if isinstance(thing, dict):
        return {key: to_device(value, device, dtype) for key, value in thing.items()}
    return thing


def _equal(a: Any, b: Any) -> bool:
    """Whether two arguments are the same, as far as can be told: tensors by their values."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.device == b.device and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    return isinstance(a, bool | int | float | str) and a == b
