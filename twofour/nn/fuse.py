"""Fewer, larger kernels: layers that get the same input become one, and a gated MLP's activation its end.

    fuse_(model)      q, k and v become one product; gate, up and the activation between them one kernel;
                      every RMSNorm one kernel (see fuse_norm.py), and every rotary embedding (fuse_rope.py)
    unfuse_(model)    as it was

The rows of packed matrices simply concatenate, so nothing is repacked and no memory is added. What belongs
together is seen in one run over an example, not known by name: layers of one module that were given the very
same tensor are fused, and a module with three packed layers is taken for a gated MLP if it is
`down(activate(gate(x)) * up(x))` for known numbers in the place of what its layers give.

A fused model computes the same and keeps its state dict: names and tensors are those of the separate layers,
so `save_pretrained` writes what it wrote before. To load other weights into it, or to give layers adapters,
unfuse it first.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.examples import call, evaluating
from twofour.errors import InputError
from twofour.kernels.reference import ACTIVATIONS
from twofour.nn.fuse_norm import FusedNorm, as_fused_norm
from twofour.nn.fuse_rope import fuse_rope_, unfuse_rope_
from twofour.nn.fused import GatedMLP, Part, Seen, SharedInput
from twofour.nn.linear import SparseLinear
from twofour.nn.quantized import QuantizedLinear

#: What gates are given to tell activations apart. Where they are negative, gelu and its form with tanh differ
#: by up to a tenth, and both from silu by more.
GATES = (-3.0, 6.0)

#: What some gates, and some factors, are given besides: beyond any limit they may be clamped to, as there are
#: models with, and so that products with the other side's numbers are still within 16 bits.
LARGE = 3e4

#: On how many numbers of each of an input's dimensions but the last that is told.
LOOK = 8

#: How far from activate(gate) * up a hidden value may be, relative: a few roundings, of float32 at least.
TOLERANCE = 1e-3


@torch.no_grad()
def fuse_(model: nn.Module, example: Any = None) -> Fused:
    """Fuse what can be fused, in place, for inference; how many layers were taken together.

    `example` is what the model is called with once (see `twofour.calibrate.examples`), to see which layers
    share an input. A transformers model needs none. In a dense model the norms and the rotary embeddings are
    fused, and nothing else.
    """
    norms = 0
    for path, module in list(model.named_modules()):
        norm = as_fused_norm(module)
        if norm is not None and path:
            model.set_submodule(path, norm)
            norms += 1
    rotary, left = fuse_rope_(model)
    before = len(_separate(model))
    if before:
        _fuse_products(model, example)
    return Fused(before - len(_separate(model)), norms, rotary, left)


class Fused(int):
    """How many packed layers `fuse_` took together, and beside that number:

    norms, rotary   how many norms and rotary embeddings are one kernel each since then
    left            attention modules that keep their rotary embedding as it is, by name, and why
    """

    norms: int
    rotary: int
    left: dict[str, str]

    def __new__(cls, layers: int, norms: int, rotary: int, left: dict[str, str]) -> Fused:
        made = super().__new__(cls, layers)
        made.norms, made.rotary, made.left = norms, rotary, left
        return made


def _fuse_products(model: nn.Module, example: Any) -> None:
    seen = _inputs(model, example)
    for path, module in list(model.named_modules()):
        fused = _as_gated_mlp(module, seen)
        if fused is not None:
            model.set_submodule(path, fused.train(module.training))
    for module in list(model.modules()):
        if not isinstance(module, GatedMLP):
            _share_inputs(module, seen)


def unfuse_(model: nn.Module) -> nn.Module:
    """Undo `fuse_`."""
    for path, module in list(model.named_modules()):
        unfuse_rope_(module)
        if isinstance(module, GatedMLP | FusedNorm):
            model.set_submodule(path, module.separate())
        elif isinstance(module, SharedInput):
            parent = model.get_submodule(path.rpartition(".")[0])
            for name, layer in zip(module.names, module.split(), strict=True):
                setattr(parent, name, layer)
            delattr(parent, path.rpartition(".")[2])
    return model


def _separate(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


def _inputs(model: nn.Module, example: Any) -> dict[nn.Module, Seen]:
    """What every module that holds packed layers, and every packed layer, was given in one run."""
    seen: dict[nn.Module, Seen] = {}

    def see(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [v for v in (*args, *named.values()) if isinstance(v, Tensor)]
        if given:
            seen[module] = Seen.of(given[0])

    hooks = [
        module.register_forward_pre_hook(see, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, SparseLinear)
        or any(isinstance(child, SparseLinear) for child in module.children())
    ]
    try:
        with evaluating(model):
            call(model, _example_of(model) if example is None else example)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _example_of(model: nn.Module) -> Any:
    """What a transformers model can be called with."""
    dummy: Any = getattr(model, "dummy_inputs", None)
    if dummy is None:
        raise InputError(
            "which layers share an input is seen in one run over an example.",
            hint="Give fuse_ a second argument to call the model with.",
        )
    return {"input_ids": dummy["input_ids"]}


def _as_gated_mlp(module: nn.Module, seen: dict[nn.Module, Seen]) -> GatedMLP | None:
    """The module fused, if it is a gated MLP and nothing else."""
    layers = {name: child for name, child in module.named_children() if isinstance(child, SparseLinear)}
    x = seen.get(module)
    if len(layers) != 3 or x is None or isinstance(module, GatedMLP):
        return None
    for gate, up, down in itertools.permutations(layers):
        a, b, c = layers[gate], layers[up], layers[down]
        if a.layer.shape != b.layer.shape or c.in_features != a.out_features or not _alike([a, b]):
            continue
        if not (x.is_what(seen.get(a)) and x.is_what(seen.get(b))):
            continue
        activation = _activation_between(module, x.tensor, a, b, c)
        if activation is not None:
            return GatedMLP(module, gate, up, down, activation)
    return None


def _activation_between(
    module: nn.Module, x: Tensor, gate: SparseLinear, up: SparseLinear, down: SparseLinear
) -> str | None:
    """The activation if the module is down(activate(gate) * up) and nothing else, by one run of it.

    In that run its layers give chosen numbers: what they give by themselves may be so small, or so large,
    that all activations are alike there, and gate and up as well. A module may change them in place.
    """
    if not x.numel():
        return None
    x = x[tuple(slice(LOOK) for _ in x.shape[:-1])].clone()
    shape = (*x.shape[:-1], gate.out_features)
    first, second = (numbers.to(x.device) for numbers in _gates_and_factors(shape))
    last = torch.linspace(-1, 1, math.prod(x.shape[:-1]) * down.out_features, device="cpu")
    last = last.reshape(*x.shape[:-1], -1).to(x)
    hidden: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (x.new_zeros(shape),)

    hooks = [
        gate.register_forward_hook(lambda *_: first.clone()),
        up.register_forward_hook(lambda *_: second.clone()),
        down.register_forward_pre_hook(catch),
        down.register_forward_hook(lambda *_: last.clone()),
    ]
    try:
        out = module(x)
    except Exception:  # whatever it is, it is not called with one tensor as an MLP is
        return None
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(out, Tensor) or not torch.equal(out, last):
        return None
    if len(hidden) != 1 or hidden[0].shape != shape or not hidden[0].is_floating_point():
        return None
    allowed = max(TOLERANCE, 2 * torch.finfo(hidden[0].dtype).eps)
    for activation, function in ACTIVATIONS.items():
        wanted = function(first) * second
        if bool(((hidden[0].float() - wanted).abs() <= allowed * wanted.abs()).all()):
            return activation
    return None


def _gates_and_factors(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The chosen numbers: every eighth gate is large, and the factor of every eighth other one."""
    cpu: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
    count = math.prod(shape)
    place = torch.randperm(count, **cpu)
    gates = torch.linspace(*GATES, count, dtype=torch.float32, device="cpu")[place]
    factors = torch.rand(count, dtype=torch.float32, **cpu) + 0.5
    factors[torch.rand(count, **cpu) < 0.5] *= -1
    kind = place % 8
    gates[kind == 0] = LARGE
    gates[kind == 1] = 0.5
    factors[kind == 1] *= LARGE
    return gates.reshape(shape), factors.reshape(shape)


def _share_inputs(parent: nn.Module, seen: dict[nn.Module, Seen]) -> None:
    """Fuse the packed layers right below a module that were given the same tensor."""
    children = [(n, c) for n, c in parent.named_children() if isinstance(c, SparseLinear) and c in seen]
    for number, x in enumerate(dict.fromkeys(seen[child] for _, child in children)):
        layers = {name: child for name, child in children if x.is_what(seen[child])}
        if len(layers) < 2 or not _alike(list(layers.values())):
            continue
        fused = SharedInput(layers)
        for part, name in enumerate(layers):
            setattr(parent, name, Part(fused, part))
        parent.add_module(f"fused_{number}", fused.train(parent.training))


def _alike(layers: list[SparseLinear]) -> bool:
    """Whether the layers' tensors can be put below each other."""
    first = layers[0]
    return type(first) in (SparseLinear, QuantizedLinear) and all(
        type(other) is type(first)
        and other.scheme == first.scheme
        and other.in_features == first.in_features
        and other.weight_values.dtype == first.weight_values.dtype
        and other.weight_values.device == first.weight_values.device
        and (other.weight_scale is None) == (first.weight_scale is None)
        for other in layers
    )
