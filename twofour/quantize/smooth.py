"""Move scale from activations into weights, so that tokens with a few huge channels lose less in 8 bits.

A token is rounded with one scale for all of its channels: one that is a hundred times as large as the others
leaves them a hundredth of the codes. Dividing channel j of a layer's input by s_j and multiplying column j of
the layer by s_j changes nothing in the product (SmoothQuant, arXiv 2211.10438), and the division is free
where it folds into whoever makes the channel: the weight and bias of a norm, or the row and bias of a layer
whose output is multiplied into the input (up_proj in a gated MLP: down(act(gate(x)) * up(x))). A row's own
scale takes the division up, and zeros stay zeros, so 2:4 is not touched.

The factors are powers of two: dividing and multiplying by them is exact in every float type.

Who makes the channels of which layers is seen in a run, not known by name, and proved by running again: a
norm that adds one to its weight, or channels that somebody else reads as well, change the outputs and are
left alone. Maker and readers lie within one block, so blocks are smoothed in their turn (`Smoothing`), one at
a time in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.blocks import Block, Call, find_blocks, run_blocks
from twofour.errors import InputError
from twofour.prune.trace import Event, Trace, outputs_differ, run
from twofour.select import select

#: How much of a channel's size goes into the weights, from 0 to 1.
STRENGTH = 0.5

#: No channel is scaled by more than two to this, either way: 16-bit weights must not overflow or vanish.
MOST = 6

#: How many of the layers before a layer are tried as the one whose rows are its channels.
CANDIDATES = 2

#: Share of the usual tolerance that outputs may move by: powers of two leave every bit as it was, unless
#: numbers of few bits get too small for them. So even a faint other reader is noticed.
NEARLY_EXACT = 0.01


@dataclass(frozen=True, eq=False)
class _Link:
    """Channels from who makes them (a norm, or a layer: its rows) to all layers that read them."""

    maker: Event
    readers: list[Event]

    @property
    def names(self) -> tuple[str, ...]:
        return self.maker.name, *(reader.name for reader in self.readers)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What changes with the channels."""
        yield from self.maker.module.parameters(recurse=False)
        for reader in self.readers:
            yield reader.module.get_parameter("weight")

    def scale_(self, s: Tensor) -> None:
        """The channels become so many times smaller, and what reads them larger."""
        for parameter in self.maker.module.parameters(recurse=False):
            if parameter.dim() == 1:  # a norm's vector, or a bias
                parameter.div_(s.to(parameter.dtype))
            else:
                _matrix(self.maker).div_(s.to(parameter.dtype)[:, None])
        for reader in self.readers:
            matrix = _matrix(reader)
            matrix.mul_(s.to(matrix.dtype))


class Smoothing:
    """Smooths blocks in place when their turn comes: for `run_blocks`, before or as the change of a block.

    What the blocks give stays the same, and their Gram matrices follow. All processes do the same, by the
    largest values that any of them saw.
    """

    def __init__(
        self,
        model: nn.Module,
        may_change: Callable[[str], bool] = lambda name: True,
        strength: float = STRENGTH,
    ) -> None:
        """`may_change` gets the full names of norms, biases and weights that are not rounded, and can forbid
        one: what depends on it is left as it is."""
        if not 0 <= strength <= 1:
            raise InputError(f"smoothing has a strength from 0 to 1, not {strength}.")
        every = list(model.named_parameters(remove_duplicate=False))
        owners = Counter(id(parameter) for _, parameter in every)
        self._shared = {name for name, parameter in every if owners[id(parameter)] > 1}
        self._may_change, self._strength = may_change, strength
        #: Norms and layers that give smaller channels now, by their full names, in order.
        self.makers: list[str] = []
        #: By the name of a block what changed in it beside the weights of its chosen layers.
        self.changed: dict[str, tuple[str, ...]] = {}

    @torch.no_grad()
    def __call__(self, block: Block) -> None:
        prefix = f"{block.name}."
        chosen = {layer.name.removeprefix(prefix): layer for layer in block.layers}

        def beside(maker: Event) -> list[str]:
            """What of a maker is not among the weights that are rounded."""
            own = (f"{maker.name}.{name}" for name, _ in maker.module.named_parameters(recurse=False))
            return [prefix + name for name in own if name.removesuffix(".weight") not in chosen]

        def may_be(maker: Event) -> bool:
            return all(name not in self._shared and self._may_change(name) for name in beside(maker))

        trace = _traced(block)
        links = _links(trace, set(chosen), may_be)
        in_all = [set(names) for names in parallel.of_all([link.names for link in links])]
        links = [link for link in links if all(link.names in names for names in in_all)]
        largest = _largest_inputs(block, links)
        factors = [_factors(*both, self._strength) for both in zip(links, largest, strict=True)]
        plan = [(link, s) for link, s in zip(links, factors, strict=True) if bool((s != 1).any())]
        if not _holds(trace, plan):  # one of them is not what it looked like: each for itself
            plan = [part for part in plan if _holds(trace, [part])]
        done: dict[str, None] = {}
        for link, s in plan:
            self.makers.append(prefix + link.maker.name)
            done |= dict.fromkeys(beside(link.maker))
            for gram in {id(g): g for g in (block.grams[chosen[e.name]] for e in link.readers)}.values():
                gram.divide(s)
        self.changed[block.name] = tuple(done)


def smooth_(
    model: nn.Module,
    windows: Tensor,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strength: float = STRENGTH,
    batch: int = 4,
) -> list[str]:
    """Smooth what can be, in place; the names of the norms and layers whose outputs are smaller now.

    `windows` [samples, length] are tokens of text. `strength` is how much of a channel's size goes into the
    weights, from 0 to 1.
    """
    smoothing = Smoothing(model, strength=strength)
    chosen = select(model, include, exclude).layers
    blocks, _ = find_blocks(model, chosen)
    layers = [layer for layer in chosen if layer.name.startswith(f"{blocks}.")]
    device = next(model.parameters()).device
    run_blocks(model, layers, windows.to(device), smoothing, device=device, batch=batch)
    return smoothing.makers


def _traced(block: Block) -> Trace:
    """The block watched on its first window: a trace holds everything, so a whole batch may be too much."""
    call = block.calls[0]
    windows = len(call.states)

    def first(thing: Any) -> Any:
        if isinstance(thing, Tensor):
            return thing[:1] if thing.dim() and len(thing) == windows else thing
        if isinstance(thing, tuple | list):
            return type(thing)(map(first, thing))
        return {key: first(value) for key, value in thing.items()} if isinstance(thing, dict) else thing

    try:
        return Trace(block.module, Call(first(call.states), first(call.rest), first(call.named)))
    except (RuntimeError, ValueError, IndexError):
        return Trace(block.module, call)  # something beside the states was cut wrongly, or not at all


def _links(trace: Trace, wanted: set[str], may_be: Callable[[Event], bool]) -> list[_Link]:
    """The channels whose readers will all be rounded, and that have a maker that may change.

    Layers that not every token passes (experts) are left out: whether they run depends on the text.
    """
    times = Counter(event.name for event in trace.events)
    tokens = trace.outputs[0][..., 0].numel()
    found = []
    seen = set()
    for i, reader in enumerate(trace.events):
        if reader.layer is None or reader.source in seen:
            continue
        seen.add(reader.source)
        readers = [event for event in trace.events if event.layer and event.source == reader.source]
        channels = reader.layer.shape[1]
        if any(
            event.name not in wanted
            or times[event.name] > 1
            or event.layer is None
            or event.layer.kind == "conv2d"
            or event.layer.shape[1] != channels
            or event.input[..., 0].numel() != tokens
            for event in readers
        ):
            continue
        makers = (m for m in _makers(trace, i, channels, tokens) if times[m.name] == 1 and may_be(m))
        if maker := next((m for m in makers if m.layer is None or _multiplies(trace, m, reader)), None):
            found.append(_Link(maker, readers))
    return found


def _makers(trace: Trace, i: int, channels: int, tokens: int) -> list[Event]:
    """Who may make the channels that the layer of event i reads, the likeliest first."""
    modules = [
        event
        for event in trace.events
        if event.layer is None
        and not isinstance(event.module, nn.Embedding)
        and event.output.untyped_storage().data_ptr() == trace.events[i].source
    ]
    if modules:
        vectors = [list(event.module.parameters(recurse=False)) for event in modules]
        return [
            event
            for event, own in zip(modules, vectors, strict=True)
            if own and all(parameter.shape == (channels,) for parameter in own)
        ]
    layers = [
        event
        for event in trace.before(i)
        if event.layer
        and event.layer.kind != "conv2d"
        and event.outs == channels
        and event.output[..., 0].numel() == tokens
    ]
    return layers[:CANDIDATES]


def _multiplies(trace: Trace, maker: Event, reader: Event) -> bool:
    """Whether the reader's channels are what the layer gives times something else, token by token.

    Then they double for the last token if the layer gives twice as much for it, and nothing else moves. (What
    attention reads spreads over tokens: it might be read in another block as well, where nobody would know.)
    """
    seen: list[Tensor] = []

    def double(_: nn.Module, args: object, out: Tensor) -> Tensor:
        return _last_doubled(out)

    hooks = [
        maker.module.register_forward_hook(double),
        reader.module.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone())),
    ]
    try:
        run(trace.model, trace.example_inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return bool(seen) and _same([_last_doubled(reader.input)], seen[:1])


def _last_doubled(x: Tensor) -> Tensor:
    doubled = x.clone()
    doubled[..., -1, :] *= 2
    return doubled


def _largest_inputs(block: Block, links: Sequence[_Link]) -> list[Tensor]:
    """The largest magnitude in each channel of what the links' readers get in all calls, of all processes."""
    largest = [torch.zeros(_matrix(link.readers[0]).shape[1], device=block.device) for link in links]
    hooks = []
    for link, most in zip(links, largest, strict=True):

        def see(_: nn.Module, args: tuple[Tensor, ...], most: Tensor = most) -> None:
            torch.maximum(most, args[0].abs().flatten(0, -2).amax(0).float(), out=most)

        hooks.append(link.readers[0].module.register_forward_pre_hook(see))
    try:
        for call in block.calls if links else ():
            call.through(block.module, block.device)
    finally:
        for hook in hooks:
            hook.remove()
    return [parallel.max_(most) for most in largest]


def _factors(link: _Link, largest: Tensor, strength: float) -> Tensor:
    """s for every channel: a power of two, 1 where nothing comes or nobody reads.

    A column counts by its root mean square, with the largest weight of each row as the unit: that is how the
    scale of the row sees it. (By the largest weight of the column, one large row would decide for all.)
    """
    weights = torch.stack([_square_of_columns(_matrix(reader)) for reader in link.readers]).mean(0).sqrt()
    known = (largest > 0) & (weights > 0) & largest.isfinite()
    exponent = strength * largest.log2() - (1 - strength) * weights.log2()
    # Only what differs from channel to channel matters.
    middle = exponent[known].median() if bool(known.any()) else exponent.new_zeros(())
    exponent = torch.where(known, (exponent - middle).round().clamp(-MOST, MOST), 0.0)
    return exponent.exp2()


def _square_of_columns(matrix: Tensor) -> Tensor:
    wide = matrix.float()
    largest = wide.abs().amax(1, keepdim=True)
    return wide.div(torch.where(largest > 0, largest, 1.0)).square_().mean(0)


def _matrix(event: Event) -> Tensor:
    assert event.layer is not None
    return event.layer.to_matrix(event.module.get_parameter("weight"))  # a view for linear and Conv1D


def _holds(trace: Trace, plan: Sequence[tuple[_Link, Tensor]]) -> bool:
    """Apply the factors and see whether all outputs stay, in every process; if not, all is as before."""
    if not plan:
        return True
    changed = {parameter: parameter.clone() for link, _ in plan for parameter in link.parameters()}
    readers = [event.name for link, _ in plan for event in link.readers]
    for link, s in plan:
        link.scale_(s)
    outputs, of_readers = trace.run_again(readers)
    before = [*trace.outputs, *map(trace.output_of, readers)]
    if all(parallel.of_all(_same(before, [*outputs, *of_readers]))):
        return True
    for parameter, old in changed.items():
        parameter.copy_(old)
    return False


def _same(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether all is as it was, every token by itself: in some models the first one is a thousand times as
    large as the others, and no change of these would be seen beside it."""
    sizes = [torch.linalg.vector_norm(old.double(), dim=-1, keepdim=True) for old in before]
    sizes = [torch.where(size > 0, size, 1.0) for size in sizes]
    old, new = (
        [(x.double() / size).to(x.dtype) for x, size in zip(some, sizes, strict=True)]
        for some in (before, after)
    )
    return not outputs_differ(old, new, times=NEARLY_EXACT)
