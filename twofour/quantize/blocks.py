"""Rounding block by block: a layer's inputs as they are when its turn comes, beside what they should be.

A layer is rounded on the inputs that it gets from the rounded ones before it, also those of its own block;
where the scheme rounds activations, on what is left of them. Beside these go the inputs that it had in the
model as it was, or has in the dense model that the rounded one should be near to (the teacher): see
quantize/target.py for what is made of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import Block, Call, Teacher, run_blocks
from twofour.calibrate.statistics import Gram
from twofour.calibrate.windows import require_windows
from twofour.pattern import require_finite
from twofour.prune.hessian import relative_output_error
from twofour.prune.reconstruct import Reconstruct, Reconstructed
from twofour.quantize.activations import as_rounded, round_inputs
from twofour.quantize.rounding import Quantized, Rounding, quantize_matrix, require_two_four
from twofour.quantize.schemes import Scheme
from twofour.quantize.target import Drift, fitted_target
from twofour.quantize.tune import TUNING_TO_DENSE, tune_
from twofour.select import Layer

#: One window of so many says how much of a shift carries over.
HOLD_OUT = 4


class Keeper(Protocol):
    """What becomes of a rounded block: it goes into the model that is quantized, or into a file."""

    def __call__(self, block: Block, rounded: dict[Layer, Rounded], tuned: Reconstructed | None) -> None:
        """Keep the layers, and of `tuned.changed` the norms and biases, which it may round to how they are
        stored: what the module holds afterwards is what the blocks behind it get to see."""


@dataclass(frozen=True)
class Rounded:
    """A layer's codes; how far its weights are off, relative, and its outputs, squared and relative, over so
    many tokens."""

    codes: Quantized
    error: float
    output_error: float
    tokens: int


def quantize_blocks(
    model: nn.Module,
    layers: Sequence[Layer],
    windows: Tensor,
    scheme: Scheme,
    rounding: Rounding,
    keep: Keeper,
    *,
    device: torch.device | str,
    tune: Reconstruct | None = None,
    teacher: Teacher | None = None,
    fit: bool = True,
    may_change: Callable[[str], bool] = lambda name: True,
    dtypes: dict[Layer, torch.dtype] | None = None,
    restore: Callable[[int], list[Layer]] | None = None,
    **options: Any,
) -> None:
    """Round the layers block by block, and tune each block if there is a `tune`. `keep` is given the results.
    The blocks behind it get to see what is stored, with activations rounded as they will be. With a `teacher`
    all this is done to come near to it, and not to the model as it was; without `fit` only the tuning, which
    then begins with what the layers do themselves. `restore` puts a finished block back
    and says which layers it had. `may_change` can forbid to tune a norm or bias."""

    def change(block: Block) -> None:
        before = {layer: _weight(block, layer).detach().clone() for layer in block.layers}
        own = {layer: dtypes[layer] if dtypes else weight.dtype for layer, weight in before.items()}
        rounded: dict[Layer, Quantized] = {}
        grams: dict[Layer, Gram] = {}
        aims: dict[Layer, Tensor] = {}  # what layers should do, where that is not what they did
        plain = (([layer], block.grams.pop(layer), None) for layer in list(block.layers))
        for stage, gram, drift in plain if rounding == "nearest" else inputs_in_order(block, scheme):
            matrices = {layer: layer.to_matrix(before[layer]) for layer in stage}
            if block.teacher is not None and not fit:
                drift = None
            elif block.teacher is not None and drift is not None:
                aims |= {layer: layer.to_matrix(_weight(block, layer, block.teacher)) for layer in stage}
            together = (matrices, aims, scheme, rounding, gram, drift, follow, own)
            for layer, codes in _round_together(*together).items():
                rounded[layer], grams[layer] = codes, gram
                put(block, layer, codes)
                rounding_inputs(layer)
        tuned = None
        if tune is not None:
            rounded, tuned = tune_(block, rounded, scheme, own, may_change, tune)
        found = {}
        for layer, codes in rounded.items():
            put(block, layer, codes)
            matrix, new = layer.to_matrix(before[layer]), codes.weight()
            error = relative_output_error(aims.get(layer, matrix), new, grams[layer])
            found[layer] = Rounded(codes, relative_error(matrix, new), error, grams[layer].tokens)
        keep(block, found, tuned)

    def put(block: Block, layer: Layer, codes: Quantized) -> None:
        weight = _weight(block, layer)
        weight.copy_(layer.from_matrix(codes.packed(layer.name).unpack(weight.dtype)))

    def restore_and_round(number: int) -> None:
        if restore is not None:
            for layer in restore(number):
                rounding_inputs(layer)

    def rounding_inputs(layer: Layer) -> None:
        if scheme.rounds_activations:
            hooks.append(round_inputs(model.get_submodule(layer.name), scheme))

    require_windows(windows, model)
    hooks: list[Any] = []
    here = windows.to(next(model.parameters()).device)
    options |= {"device": device, "restore": restore_and_round, "teacher": teacher}
    to_dense = teacher is not None or rounding == "joint"
    follow = TUNING_TO_DENSE.follow if to_dense else 1.0
    options |= {"follow": None if rounding == "nearest" and tune is None else follow}
    options |= {"batch": None if tune is None else tune.batch(windows)}
    try:
        run_blocks(model, layers, here, change, **options)
    finally:
        for hook in hooks:
            hook.remove()


def relative_error(before: Tensor, after: Tensor) -> float:
    """How much of a matrix was lost, as a share of its norm."""
    norm = float(torch.linalg.vector_norm(before, dtype=torch.float32))
    return float(torch.linalg.vector_norm(before.float() - after)) / norm if norm else 0.0


def _round_together(
    matrices: Mapping[Layer, Tensor],
    aims: Mapping[Layer, Tensor],
    scheme: Scheme,
    rounding: Rounding,
    gram: Gram,
    drift: Drift | None,
    follow: float,
    dtypes: Mapping[Layer, torch.dtype],
) -> dict[Layer, Quantized]:
    """Layers with the same input as one matrix: rows are rounded for themselves, and columns one by one, so
    that q, k and v together take the time of one of them."""
    found: dict[Layer, Quantized] = {}
    for dtype in dict.fromkeys(dtypes[layer] for layer in matrices):
        some = {layer: matrix for layer, matrix in matrices.items() if dtypes[layer] == dtype}
        for layer, matrix in some.items():  # while it can still be said which layer it is
            (require_finite if rounding == "joint" else require_two_four)(matrix, layer.name)
        names = ", ".join(layer.name for layer in some)
        stacked = torch.cat(list(some.values()))
        target = stacked
        if drift is not None:
            aim = torch.cat([aims.get(layer, matrix) for layer, matrix in some.items()])
            target = fitted_target(stacked, gram, drift, aim, follow)
        rounded = quantize_matrix(stacked, scheme, rounding, gram, names, dtype, target)
        rows = [len(matrix) for matrix in some.values()]
        parts = zip(some, rounded.codes.split(rows), rounded.scale.split(rows), strict=True)
        found |= {layer: Quantized(codes, scale, scheme) for layer, codes, scale in parts}
    return found


class _Reached(Exception):
    """Raised to leave the block once a layer has had its input."""


def inputs_in_order(block: Block, scheme: Scheme) -> Iterator[tuple[list[Layer], Gram, Drift | None]]:
    """The layers as they run, those with the same input together, with G and D of it when their turn comes.

    The caller changes them before it asks for the next. Layers that not every token passes (experts) have
    the statistics that the block came with, and no D: who knows which tokens would have come.
    """
    original = block.teacher or copy.deepcopy(block.module)
    for stage in _stages(block):
        gram = block.grams[stage[0]]
        for layer in stage:
            del block.grams[layer]
        measured = _measure(block, original, stage[0], scheme)
        yield (stage, *measured) if measured is not None else (stage, gram, None)


def _stages(block: Block) -> list[list[Layer]]:
    """The layers in the order in which they run, those with the same input together."""
    order: list[Layer] = []
    hooks = [
        _module(block.module, block, layer).register_forward_pre_hook(lambda *_, own=layer: order.append(own))
        for layer in block.layers
    ]
    try:
        block.calls[0].through(block.module, block.device)
    finally:
        for hook in hooks:
            hook.remove()
    stages: dict[int, list[Layer]] = {}
    for layer in dict.fromkeys([*order, *block.layers]):
        stages.setdefault(id(block.grams[layer]), []).append(layer)
    return list(stages.values())


def _measure(block: Block, original: nn.Module, layer: Layer, scheme: Scheme) -> tuple[Gram, Drift] | None:
    """G and D of a layer's input over all windows; None where tokens do not all pass, or pass twice."""
    gram, held_gram = (Gram(layer.columns, block.device) for _ in range(2))
    drift, held_drift = (torch.zeros_like(gram.mean) for _ in range(2))
    windows = 0
    for call, origin in zip(block.calls, block.origins, strict=True):
        now = _input(block.module, block, layer, call)
        before = _input(original, block, layer, Call(origin, call.rest, call.named))
        tokens = call.states[..., 0].numel()
        if now is None or before is None or not now.shape[0] == before.shape[0] == tokens:
            return None
        now = as_rounded(now, scheme)
        together = call.states.shape[0] if call.states.dim() > 2 else 1
        numbers = torch.arange(windows, windows + together, device=now.device)
        held_out = (numbers % HOLD_OUT == HOLD_OUT - 1).repeat_interleave(tokens // together)
        _add(gram, drift, now, before)
        _add(held_gram, held_drift, now[held_out], before[held_out])
        windows += together
    return gram, Drift(drift, (held_gram, held_drift) if held_gram.tokens else None)


def _add(gram: Gram, drift: Tensor, now: Tensor, before: Tensor) -> None:
    """Tokens to G and D, which are running means both."""
    if not len(now):
        return
    gram.add(now)
    share = len(now) / gram.tokens
    drift.addmm_((before - now).float().t(), now.float(), beta=1 - share, alpha=share / len(now))


def _input(module: nn.Module, block: Block, layer: Layer, call: Call) -> Tensor | None:
    """What the layer gets in this call, [tokens, k]."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args[0].reshape(-1, args[0].shape[-1]))
        raise _Reached

    hook = _module(module, block, layer).register_forward_pre_hook(see)
    try:
        call.through(module, block.device)
    except _Reached:
        pass
    finally:
        hook.remove()
    return seen[0] if seen else None


def _weight(block: Block, layer: Layer, module: nn.Module | None = None) -> nn.Parameter:
    return _module(module or block.module, block, layer).get_parameter("weight")


def _module(module: nn.Module, block: Block, layer: Layer) -> nn.Module:
    return module.get_submodule(layer.name.removeprefix(f"{block.name}."))
