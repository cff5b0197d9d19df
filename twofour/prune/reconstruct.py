"""Block reconstruction: what is left of a block learns to give what the dense model gives there.

Layer by layer, pruning minimises the error of each product by itself. The layers of a block could do more
together: one can undo what another did, and norms and biases can move as well. So, after its layers are
pruned, the block is tuned with Adam, the mask fixed: removed weights get no gradient and stay exactly zero.
Nothing is propagated beyond the block, so memory holds one block, its optimizer, and the states before and
after it.

The inputs are what the pruned blocks before really give. The aim lies between what the dense block would
make of them and what the dense model has at this depth (`follow`): the second asks a block to repair the
damage done before it, but not all of it can be repaired, and trying hard costs elsewhere. An error counts
relative to the token's own norm, because the next block normalises each token before it looks at it;
without this the few tokens with huge states (the first one of a window, usually) would take all the
attention.

One step of Adam moves every weight by about the learning rate, all n weights of a row perhaps in the same
direction of the output; the row's output moves by n·rate against its size of √n·(size of a weight). So the
learning rate is relative to the size of the tensor's weights and to 1/√n: the same share of the output in
every model, wide or narrow.

The first steps decide. Adam begins with steps of full length, whatever the gradient, in all weights at once.
In some blocks, where states of a few tokens are huge and nearly cancel, one such step multiplies the error by
twenty, and the gradients seen there spoil Adam's averages for the rest of the way. So the learning rate rises
slowly, and a tuning that has blown up all the same ends when the rise does and begins anew in smaller steps.

The guard: a part of the windows is not tuned on. How far to go on the way from the old weights to the tuned
ones is decided by the block's output error on these windows (`way_back.py`). If it is lowest at the start,
there is another attempt in smaller steps, and if that does not help either, the block keeps the weights that
it had. With little text it ends close to the start: a block has enough weights to learn a few thousand tokens
by heart.

How long to tune depends on the same question, whether the text says more than the block can learn by heart.
So it goes by rounds of some epochs: as long as most of what was gained on the windows tuned on was gained on
the others, too, there is another one, in larger steps.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.blocks import Block, Call
from twofour.errors import InputError
from twofour.prune.way_back import go_back_, restore_

#: The first part of the steps over which the learning rate rises: Adam knows little of the gradients yet.
WARM_UP = 0.3

#: How many times the error at the start the mean over these steps must reach for the tuning to be given up.
BLOWN_UP = 2.0

#: How much smaller the steps of the second attempt are.
SECOND_ATTEMPT = 0.125

#: How much larger those of the rounds after the first are.
LATER_ROUNDS = 2.0

#: Of the gain on the windows tuned on, how much the others must share for another round to be worth it.
CARRIES_OVER = 0.6

#: The learning rate of vectors, relative to their size: each value is an output channel's own.
VECTOR_RATE = 0.02

#: Share of a GPU's free memory that the states of all windows may take; more stays on the CPU.
RESIDENT_SHARE = 0.3


@dataclass(frozen=True)
class Reconstruct:
    """Options: `rate` of learning at its highest, relative as the module says; `epochs` over the windows that
    are tuned on, and one more from so many of their tokens on, in each of at most so many `rounds`; about
    `tokens` a step; `held_out`, the share of the
    windows that only the guard sees; `follow` as the module says, 0 the block and 1 the model; `norms`:
    whether norms and biases move too; `guard`: whether a tuning that does not help is taken back; `seed` of
    the order of the steps.
    """

    rate: float = 0.12
    epochs: int = 3
    one_more_from: int | None = None
    rounds: int = 3
    tokens: int = 512
    held_out: float = 0.125
    follow: float = 0.5
    norms: bool = True
    guard: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(f"reconstruct: rate must be a finite number above 0, got {self.rate}.")
        if self.rounds < 1:
            raise InputError(f"reconstruct: rounds must be at least 1, got {self.rounds}.")
        if self.epochs < 0 or self.tokens < 1:
            raise InputError(
                f"reconstruct: epochs must be at least 0 and tokens at least 1, "
                f"got {self.epochs} and {self.tokens}."
            )
        if not 0 <= self.follow <= 1:
            raise InputError(f"reconstruct: follow must be from 0 to 1, got {self.follow}.")
        if not 0 < self.held_out < 1:
            raise InputError(f"reconstruct: held_out must be between 0 and 1, got {self.held_out}.")

    def passes(self, tokens: float) -> int:
        """Over the windows tuned on, in a round, if these have so many tokens."""
        return self.epochs + (self.one_more_from is not None and tokens >= self.one_more_from)

    def batch(self, windows: Tensor) -> int:
        """Windows a step: `tokens` of them, and not so many that there is nothing to choose from."""
        samples, length = windows.shape
        return max(1, min(self.tokens // length, samples // 8))


@dataclass(frozen=True)
class Reconstructed:
    """The relative error of a block's held-out outputs before and after; whether the tuned weights stay."""

    error_before: float
    error_after: float
    kept: bool
    rounds: int
    seconds: float
    changed: tuple[str, ...]  # parameters of the block that are not weights of pruned layers


def reconstruct_(
    block: Block, options: Reconstruct, may_change: Callable[[str], bool] = lambda name: True
) -> Reconstructed:
    """Tune what is left of a block whose `layers` are pruned, in place.

    `may_change` gets the full names of norms and biases and can forbid one.
    """
    start = time.perf_counter()
    layers = {layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers}
    weights = [block.module.get_parameter(f"{name}.weight") for name in layers]
    rows = [layer.rows for layer in layers.values()]
    beside: dict[str, nn.Parameter] = {}
    if options.norms:
        beside = {
            name: parameter
            for name, parameter in _norms_and_biases(block.module, set(layers)).items()
            if may_change(f"{block.name}.{name}")
        }
    held = max(1, round(options.held_out * len(block.calls)))
    tuned_on = len(block.calls) - held
    if not tuned_on:
        raise InputError(
            "block reconstruction needs at least two windows, one to tune on and one to check on.",
            layer=block.name,
            hint="Calibrate on more --samples.",
        )
    with _float32(block.module), _states_on_device(block) as batches, _deterministic(block.device):
        checked = batches[tuned_on:]
        before = _error(block, checked)
        if not math.isfinite(before):
            raise InputError(
                "what the block gives is NaN or infinite.",
                layer=block.name,
                hint="Run the calibration in bfloat16 or float32: float16 overflows in some models.",
            )
        parameters = [*weights, *beside.values()]
        rates = [options.rate * _matrix_scale(weight, n) for weight, n in zip(weights, rows, strict=True)]
        rates += [VECTOR_RATE * _size(vector) for vector in beside.values()]

        def attempt(best: float, scale: float, turn: int) -> float:
            """Tune for a round. The error on the windows held out: `best`, if it did not get lower."""
            saved = [parameter.detach().clone() for parameter in parameters]
            scaled = [scale * rate for rate in rates]
            limit = BLOWN_UP * before if options.guard else math.inf
            finished = _tune(block, parameters, scaled, batches[:tuned_on], options, turn, limit)
            if not options.guard:
                return _error(block, checked)
            if finished:
                return go_back_(parameters, saved, best, lambda: _error(block, checked))
            restore_(parameters, saved)
            return best

        probe = batches[: min(held, tuned_on)]
        probe_before = _error(block, probe) if options.rounds > 1 else 0.0
        rounds = 1
        after = attempt(before, 1.0, 0)
        if after == before:
            after = attempt(before, SECOND_ATTEMPT, 0)
        else:
            while rounds < options.rounds:
                gain, gain_tuned = before - after, probe_before - _error(block, probe)
                if not gain * probe_before >= CARRIES_OVER * gain_tuned * before > 0:
                    break
                better = attempt(after, LATER_ROUNDS, rounds)
                if better == after:
                    break
                after = better
                rounds += 1
    kept = after < before or not options.guard
    changed = tuple(f"{block.name}.{name}" for name in beside) if kept else ()
    return Reconstructed(before, after, kept, rounds if kept else 0, time.perf_counter() - start, changed)


Batch = tuple[Call, Tensor]


@torch.enable_grad()
def _tune(
    block: Block,
    parameters: list[nn.Parameter],
    rates: list[float],
    batches: list[Batch],
    options: Reconstruct,
    turn: int,
    limit: float,
) -> bool:
    """Adam over the batches in random order, the learning rates falling along a cosine.

    Zeros of matrices stay zeros. It ends early, with False, if the mean error of the first steps is above
    the limit.
    """
    # As a product with ones and zeros, which is ten times as fast as filling where a mask says so.
    kept = [(p, (p.detach() != 0).float()) for p in parameters if p.dim() > 1]
    wanted = [parameter.requires_grad for parameter in block.module.parameters()]
    block.module.requires_grad_(False)
    groups = []
    for parameter, rate in zip(parameters, rates, strict=True):
        parameter.requires_grad_(True)
        groups.append({"params": [parameter], "lr": 0.0, "highest": rate})
    adam = torch.optim.Adam(groups, fused=True)
    random = torch.Generator().manual_seed((options.seed * 1_000_003 + block.number) * 101 + turn)
    here = float(sum(aim.shape[:-1].numel() for _, aim in batches))
    steps = options.passes(parallel.mean(here) * parallel.processes()) * len(batches)
    risen = math.ceil(WARM_UP * steps)
    total = torch.zeros((), device=block.device)
    finished = True
    order: list[int] = []
    for step in range(steps):
        if not order:
            order = torch.randperm(len(batches), generator=random).tolist()
        share = _schedule(step, steps)
        for group in adam.param_groups:
            group["lr"] = share * group["highest"]
        adam.zero_grad()
        loss = _loss(block, *batches[order.pop()])
        if step < risen:
            total += loss.detach()
        elif step == risen and not parallel.mean(float(total)) <= limit * risen:  # also if it is NaN
            finished = False
            break
        loss.backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parallel.mean_(parameter.grad)
        for weight, ones in kept:
            if weight.grad is not None:
                # No gradient, no momentum, no step: what was removed stays at exactly +0.
                weight.grad.mul_(ones)
        adam.step()
    adam.zero_grad()
    for weight, ones in kept:  # an infinite gradient times zero is not zero
        weight.data.masked_fill_(ones == 0, 0.0)
    for parameter, flag in zip(block.module.parameters(), wanted, strict=True):
        parameter.requires_grad_(flag)
    return finished


def _schedule(step: int, steps: int) -> float:
    """The learning rate as a share of its highest: a short rise, then half a cosine down to nothing."""
    return min(1.0, (step + 1) / (WARM_UP * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _loss(block: Block, call: Call, target: Tensor) -> Tensor:
    """Squared error over squared norm, each token by itself, then the mean over tokens."""
    device = block.device
    if device.type == "cuda":
        with torch.autocast("cuda", torch.bfloat16):
            out = call.through(block.module, device)
    else:
        out = call.through(block.module, device, torch.float32)
    wanted = target.to(device).float()
    lost = (out.float() - wanted).square().sum(-1)
    size = wanted.square().sum(-1)
    # A token of zeros has no norm; any positive divisor keeps it finite.
    return (lost / size.clamp(min=torch.finfo(torch.float32).tiny ** 0.5)).mean()


@torch.no_grad()
def _error(block: Block, batches: list[Batch]) -> float:
    return parallel.mean(sum(float(_loss(block, *batch)) for batch in batches) / len(batches))


def _size(values: Tensor) -> float:
    """Root mean square of what is not zero. Biases may be zero throughout: then that of usual outputs, 1."""
    count = int(values.detach().count_nonzero())
    return math.sqrt(float(values.detach().square().sum()) / count) if count else 1.0


def _matrix_scale(weight: Tensor, rows: int) -> float:
    """The size of a weight over the root of how many a row has."""
    per_row = int(weight.detach().count_nonzero()) / rows
    return _size(weight) / math.sqrt(max(per_row, 1.0))


def _norms_and_biases(module: nn.Module, pruned: set[str]) -> dict[str, nn.Parameter]:
    """Vectors of the block that may move: biases of pruned layers, and modules that hold vectors only.

    A matrix that is not pruned was left alone on purpose (an excluded layer, a router), and so is its bias.
    """
    found: dict[str, nn.Parameter] = {}
    for name, inner in module.named_modules():
        own = dict(inner.named_parameters(prefix=name, recurse=False))
        if name in pruned or all(parameter.dim() <= 1 for parameter in own.values()):
            found |= {key: p for key, p in own.items() if p.dim() <= 1 and p.is_floating_point()}
    return found


@contextlib.contextmanager
def _float32(module: nn.Module) -> Iterator[None]:
    """The parameters in float32: steps of a fraction of a percent are lost in 16 bits."""
    before = [
        (parameter, parameter.dtype) for parameter in module.parameters() if parameter.is_floating_point()
    ]
    for parameter, _ in before:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in before:
            parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _states_on_device(block: Block) -> Iterator[list[Batch]]:
    """The calls and targets; on a GPU with room for all of them there, as each is needed many times."""
    batches = list(zip(block.calls, block.targets, strict=True))
    if block.device.type == "cuda":
        needed = sum(call.states.nbytes + target.nbytes for call, target in batches)
        if needed < RESIDENT_SHARE * torch.cuda.mem_get_info(block.device)[0]:
            batches = [
                (Call(call.states.to(block.device), call.rest, call.named), target.to(block.device))
                for call, target in batches
            ]
    yield batches


@contextlib.contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """On a GPU the gradients of attention are summed in any order unless one asks for the same bits."""
    if device.type != "cuda":
        yield
        return
    was, only_warned = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
