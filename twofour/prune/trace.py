"""A model watched while it runs: which layers, in which order, on which tensors, and what came out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import Call
from twofour.calibrate.examples import call, evaluating
from twofour.select import Layer, as_layer

#: How far the outputs may move, in relation to their size. Sums in another order differ by about 1e-6 in
#: float32 and 1e-2 in the 16-bit types; a wrong permutation moves them by about as much as they are.
#: (float64 models count in float32 here and there, so they get no tighter bound.)
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}

#: How many layers before a layer are looked at for what made its inputs.
LOOK_BACK = 8


@dataclass(frozen=True, eq=False)
class Event:
    """A module that ran: what went in and came out. The tensors are held, so memory is not used twice and a
    tensor's address says which one it is."""

    name: str
    module: nn.Module
    layer: Layer | None
    input: Tensor
    output: Tensor

    @property
    def source(self) -> int:
        return self.input.untyped_storage().data_ptr()  # views of a tensor have its storage

    @property
    def outs(self) -> int:
        return self.layer.shape[0] if self.layer else 0


class Trace:
    """The model's layers in the order in which they run, and its outputs, to compare with."""

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.example_inputs = model, example_inputs
        watched = {
            name: module
            for name, module in model.named_modules()
            if module._parameters or "norm" in type(module).__name__.lower()
        }
        self.events, self.outputs = _watch(model, example_inputs, watched)
        self.first = {event.name: event for event in reversed(self.events)}

    def output_of(self, name: str) -> Tensor:
        return self.first[name].output

    def normed(self, size: int) -> set[int]:
        """Which tensors (see `Event.source`) of that many channels are a norm's output."""
        return {
            event.output.untyped_storage().data_ptr()
            for event in self.events
            if event.layer is None
            and event.output.shape[-1:] == (size,)
            and not isinstance(event.module, nn.Embedding)
        }

    def run_again(self, names: Sequence[str]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of the model, and those of some layers when they ran first, as it is now."""
        watched = {name: self.first[name].module for name in names}
        events, outputs = _watch(self.model, self.example_inputs, watched)
        first = {event.name: event.output for event in reversed(events)}
        return outputs, [first[name] for name in names]

    def before(self, i: int) -> Iterator[Event]:
        """The events before one, nearest first."""
        return reversed(self.events[max(0, i - LOOK_BACK) : i])


def _watch(
    model: nn.Module, example_inputs: Any, watched: Mapping[str, nn.Module]
) -> tuple[list[Event], list[Tensor]]:
    events: list[Event] = []

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
            output = output[0] if isinstance(output, tuple | list) and output else output
            if tensors and isinstance(output, Tensor):
                layer = as_layer(name, module)
                known = layer if isinstance(layer, Layer) else None
                # A copy, because what follows may work in place. Of norms the tensor itself: who reads it?
                events.append(Event(name, module, known, tensors[0], output.clone() if known else output))

        return note

    hooks = [m.register_forward_hook(hook(name), with_kwargs=True) for name, m in watched.items()]
    try:
        return events, run(model, example_inputs)
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def run(model: nn.Module, example_inputs: Any) -> list[Tensor]:
    """The tensors that the model gives for these inputs; what it caches (keys, values) is not among them.

    The inputs are an example as `call` takes it or, for a block of a model, what that block is called with.
    """
    with evaluating(model):
        if isinstance(example_inputs, Call):
            out: Any = example_inputs.through(model, next(model.parameters()).device)
        else:
            out = call(model, example_inputs)
    return [tensor.clone() for tensor in _tensors(out)]


def outputs_differ(before: Sequence[Tensor], after: Sequence[Tensor], times: float = 1) -> bool:
    """Whether one of the outputs moved by more than rounding (`times` as much) explains."""
    return any(
        not relative_change(old, new) <= times * TOLERANCE[old.dtype]  # NaN differs as well
        for old, new in zip(before, after, strict=True)
    )


def relative_change(old: Tensor, new: Tensor) -> float:
    """‖new - old‖ / ‖old‖; of an output of zeros, 0 if it still is and infinity if not."""
    distance, size = (float(torch.linalg.vector_norm(x.double())) for x in (new.double() - old, old))
    return distance / size if size else (0.0 if distance == 0 else torch.inf)


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.dtype in TOLERANCE:
            yield out
    elif isinstance(out, Mapping):
        for value in out.values():
            yield from _tensors(value)
    elif isinstance(out, tuple | list):
        for value in out:
            yield from _tensors(value)
