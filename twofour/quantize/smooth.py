"""Move scale from activations into weights, so that tokens with a few huge channels lose less in 8 bits.

A token is rounded with one scale for all of its channels: one that is a hundred times as large as the others
leaves them a hundredth of the codes. Dividing channel j of a norm's output by s_j and multiplying column j of
every layer that reads it by s_j changes nothing in the product (SmoothQuant, arXiv 2211.10438), and the
division folds into the norm's own weight and bias. A column of zeros stays one, so 2:4 is not touched.

The factors are powers of two: dividing and multiplying by them is exact in every float type.

Which norm feeds which layers is seen in a run, not known by name, and proved by running again: a norm that
adds one to its weight, or whose output somebody else reads as well, changes the outputs and is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour.calibrate.examples import evaluating
from twofour.errors import InputError
from twofour.prune.trace import Event, Trace, outputs_differ
from twofour.select import select

#: Tokens of the first window that a model is traced with.
TRACED_TOKENS = 64

#: No channel is scaled by more than two to this, either way: 16-bit weights must not overflow or vanish.
MOST = 6


@dataclass(frozen=True, eq=False)
class _Fed:
    """A norm and the layers that read its output."""

    norm: Event
    readers: list[Event]


@torch.no_grad()
def smooth_(
    model: nn.Module,
    windows: Tensor,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strength: float = 0.5,
    batch: int = 4,
) -> list[str]:
    """Smooth what can be, in place; the names of the norms that changed.

    `windows` [samples, length] are tokens of text. `strength` is how much of a channel's size goes into the
    weights, from 0 to 1.
    """
    if not 0 <= strength <= 1:
        raise InputError(f"smoothing has a strength from 0 to 1, not {strength}.")
    device = next(model.parameters()).device
    tokens = windows.to(device)
    with evaluating(model):
        example = {"input_ids": tokens[:1, :TRACED_TOKENS], "use_cache": False}
        trace = Trace(model, example)
        wanted = {layer.name for layer in select(model, include, exclude).layers}
        fed = _fed_by_norms(trace, wanted)
        largest = _largest_outputs(model, [f.norm.module for f in fed], tokens, batch)
        factors = [_factors(f, largest[f.norm.module], strength) for f in fed]
        plan = [(f, s) for f, s in zip(fed, factors, strict=True) if bool((s != 1).any())]
        if _holds(trace, plan):
            return [f.norm.name for f, _ in plan]
        # One of them is no plain norm: each for itself.
        return [f.norm.name for f, s in plan if _holds(trace, [(f, s)])]


def _fed_by_norms(trace: Trace, wanted: set[str]) -> list[_Fed]:
    """Modules with a weight for each channel whose output goes into layers that will all be quantized."""
    found = []
    times = [event.name for event in trace.events]
    owners: dict[int, int] = {}
    for parameter in trace.model.parameters():
        owners[parameter.data_ptr()] = 0
    for _, parameter in trace.model.named_parameters(remove_duplicate=False):
        owners[parameter.data_ptr()] += 1
    for norm in trace.events:
        own = list(norm.module.parameters(recurse=False))
        size = norm.output.shape[-1]
        if norm.layer is not None or isinstance(norm.module, nn.Embedding):
            continue
        if not own or any(p.shape != (size,) for p in own) or times.count(norm.name) > 1:
            continue
        at = norm.output.untyped_storage().data_ptr()
        readers = [
            e
            for e in trace.events
            if e.layer and e.layer.kind != "conv2d" and e.source == at and e.layer.shape[1] == size
        ]
        tied = any(owners[e.module.get_parameter("weight").data_ptr()] > 1 for e in readers)
        if readers and all(e.name in wanted for e in readers) and not tied:
            found.append(_Fed(norm, readers))
    return found


def _largest_outputs(
    model: nn.Module, norms: list[nn.Module], windows: Tensor, batch: int
) -> dict[nn.Module, Tensor]:
    """The largest magnitude in each channel of what the norms give for the windows."""
    largest: dict[nn.Module, Tensor] = {}

    def see(norm: nn.Module, _: object, out: Tensor) -> None:
        now = out.abs().flatten(0, -2).amax(0).float()
        largest[norm] = torch.maximum(largest[norm], now) if norm in largest else now

    hooks = [norm.register_forward_hook(see) for norm in norms]
    try:
        for tokens in windows.split(batch):
            model(tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return largest


def _factors(fed: _Fed, largest: Tensor, strength: float) -> Tensor:
    """s for every channel: a power of two, 1 where nothing comes or nobody reads."""
    weights = torch.stack([_columns(e).abs().amax(0) for e in fed.readers]).amax(0).float()
    known = (largest > 0) & (weights > 0) & largest.isfinite()
    exponent = strength * largest.log2() - (1 - strength) * weights.log2()
    # Only what differs from channel to channel matters.
    middle = exponent[known].median() if bool(known.any()) else exponent.new_zeros(())
    exponent = torch.where(known, (exponent - middle).round().clamp(-MOST, MOST), 0.0)
    return exponent.exp2()


def _columns(event: Event) -> Tensor:
    assert event.layer is not None
    return event.layer.to_matrix(event.module.get_parameter("weight"))  # a view for linear and Conv1D


def _apply(plan: Sequence[tuple[_Fed, Tensor]]) -> None:
    for fed, s in plan:
        for parameter in fed.norm.module.parameters(recurse=False):
            parameter.div_(s.to(parameter.dtype))
        for event in {e.name: e for e in fed.readers}.values():
            _columns(event).mul_(s.to(event.module.get_parameter("weight").dtype))


def _holds(trace: Trace, plan: Sequence[tuple[_Fed, Tensor]]) -> bool:
    """Apply the factors and see whether all outputs stay; if not, all is as before."""
    if not plan:
        return True
    readers = [event.name for fed, _ in plan for event in fed.readers]
    _apply(plan)
    outputs, of_readers = trace.run_again(readers)
    before = [*trace.outputs, *map(trace.output_of, readers)]
    if not outputs_differ(before, [*outputs, *of_readers]):
        return True
    _apply([(fed, 1 / s) for fed, s in plan])
    return False
