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
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twofour import kernels, ops
from twofour.calibrate.examples import call, evaluating
from twofour.errors import InputError
from twofour.kernels.reference import ACTIVATIONS
from twofour.kernels.reference import gate as gate_reference
from twofour.nn.fuse_norm import FusedNorm, as_fused_norm
from twofour.nn.fuse_rope import fuse_rope_, unfuse_rope_
from twofour.nn.linear import SparseLinear, watched
from twofour.nn.quantized import QuantizedLinear
from twofour.packed import Packed24

#: What gates are given to tell activations apart. Where they are negative, gelu and its form with tanh differ
#: by up to a tenth, and both from silu by more.
GATES = (-3.0, 6.0)

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


class FusedLinear(SparseLinear):
    """Several packed layers as one, their rows below each other."""

    def __init__(self, layers: dict[str, SparseLinear]) -> None:
        parts = list(layers.values())
        first = parts[0]
        rows = sum(part.out_features for part in parts)
        has_bias = any(part.bias is not None for part in parts)
        name = " + ".join(part.layer.name for part in parts)
        options: dict[str, Any] = {"memory": first.memory, "scheme": first.scheme, "device": "meta"}
        super().__init__(first.in_features, rows, has_bias, name=name, **options)
        self.names = list(layers)
        self.sizes = [part.out_features for part in parts]
        self.layer_names = [part.layer.name for part in parts]
        stored = [part.packed for part in parts]
        scales = [packed.scale.detach() for packed in stored if packed.scale is not None]
        packed = Packed24(
            torch.cat([packed.values.detach() for packed in stored]),
            torch.cat([packed.meta.detach() for packed in stored]),
            first.in_features,
            torch.cat(scales) if scales else None,
        )
        bias = None
        if has_bias:
            zeros = [first._own.new_zeros(part.out_features) for part in parts]
            bias = torch.cat([z if p.bias is None else p.bias for z, p in zip(zeros, parts, strict=True)])
        self._has_bias = [part.bias is not None for part in parts]
        self._learns = [part.bias is not None and part.bias.requires_grad for part in parts]
        self._set_packed(packed, bias)
        self.requires_grad_(False)
        self.register_state_dict_post_hook(_separate_keys)

    def split(self) -> list[SparseLinear]:
        """The layers that this one was made of."""
        made, whole = [], self.packed
        for i, (start, stop) in enumerate(self.ranges):
            options: dict[str, Any] = {"name": self.layer_names[i], "memory": self.memory, "device": "meta"}
            shape = (self.in_features, stop - start, self._has_bias[i])
            layer = (
                SparseLinear(*shape, **options)
                if self.scheme is None
                else QuantizedLinear(*shape, scheme=self.scheme, **options)
            )
            scale = None if whole.scale is None else whole.scale[start:stop].clone()
            values, meta = whole.values[start:stop].clone(), whole.meta[start:stop].clone()
            bias = self.bias[start:stop].detach() if self.bias is not None and self._has_bias[i] else None
            layer._set_packed(Packed24(values, meta, self.in_features, scale), bias)
            if layer.bias is not None:
                layer.bias.requires_grad_(self._learns[i])
            made.append(layer.train(self.training))
        return made

    @property
    def ranges(self) -> list[tuple[int, int]]:
        ends = list(itertools.accumulate(self.sizes))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def stored_as(self, name: str) -> dict[str, tuple[int, ...]]:
        beside = name[: name.rfind(".") + 1]
        parts = zip(self.names, self.sizes, strict=True)
        return {f"{beside}{part}": (size, self.in_features) for part, size in parts}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise InputError(
            "a fused model cannot load other weights.",
            layer=self.layer.name,
            hint="Call twofour.unfuse_(model) first.",
        )


def _separate_keys(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """A fused layer's tensors under the names that the separate layers had."""
    assert isinstance(module, FusedLinear)
    beside = prefix[: prefix.rstrip(".").rfind(".") + 1]
    for key in ("weight_values", "weight_meta", "weight_scale", "bias"):
        whole = state.pop(prefix + key, None)
        if whole is None:
            continue
        for i, (name, (start, stop)) in enumerate(zip(module.names, module.ranges, strict=True)):
            if key != "bias" or module._has_bias[i]:
                state[f"{beside}{name}.{key}"] = whole[start:stop]


class SharedInput(FusedLinear):
    """Layers that are called one after another with the same x: the first call computes them all."""

    def __init__(self, layers: dict[str, SparseLinear]) -> None:
        super().__init__(layers)
        self._kept: tuple[Seen, tuple[Tensor, ...], list[bool]] | None = None

    def part(self, x: Tensor, number: int) -> Tensor:
        kept, now = self._kept, Seen.of(x)
        if kept is None or not now.is_what(kept[0]) or not kept[2][number]:
            kept = (now, self(x).split(self.sizes, dim=-1), [True] * len(self.sizes))
        kept[2][number] = False
        # Once all have had theirs, x and the outputs are the caller's alone.
        self._kept = kept if any(kept[2]) else None
        return kept[1][number]

    def __getstate__(self) -> dict[str, Any]:
        # Outputs of a call that is not finished are no part of it.
        return {**super().__getstate__(), "_kept": None}


class Part(nn.Module):
    """In the place of one of the layers that a `SharedInput` computes."""

    def __init__(self, of: SharedInput, number: int) -> None:
        super().__init__()
        self._of = (of,)  # in a tuple it is no child of this module: it is already one of the parent
        self.number = number
        self.in_features, self.out_features = of.in_features, of.sizes[number]

    def forward(self, x: Tensor) -> Tensor:
        return self._of[0].part(x, self.number)

    @property
    def weight(self) -> Tensor:
        """The dense weight, to read."""
        start, stop = self._of[0].ranges[self.number]
        return self._of[0].weight[start:stop]

    @property
    def bias(self) -> Tensor | None:
        of = self._of[0]
        start, stop = of.ranges[self.number]
        return of.bias[start:stop] if of.bias is not None and of._has_bias[self.number] else None

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, fused"


class GatedMLP(nn.Module):
    """down(activate(gate(x)) * up(x)), all but down in one product."""

    def __init__(self, original: nn.Module, gate: str, up: str, down: str, activation: str) -> None:
        super().__init__()
        layers = {name: original.get_submodule(name) for name in (gate, up)}
        assert all(isinstance(layer, SparseLinear) for layer in layers.values())
        self.fused = FusedLinear(layers)  # type: ignore[arg-type]
        self.down_name, self.activation = down, activation
        self.add_module(down, original.get_submodule(down))
        self._original = (original,)
        for name in layers:
            setattr(original, name, None)  # its packed tensors are in `fused` now

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated(self.fused, x, self.activation)
        out: Tensor = self.get_submodule(self.down_name)(hidden)
        return out

    def separate(self) -> nn.Module:
        original = self._original[0]
        for name, layer in zip(self.fused.names, self.fused.split(), strict=True):
            setattr(original, name, layer)
        setattr(original, self.down_name, self.get_submodule(self.down_name))
        return original.train(self.training)


def gated(layer: SparseLinear, x: Tensor, activation: str) -> Tensor:
    """activate(first half of the layer's features) * second half, in one kernel where there is one."""
    x = layer._input(x)
    if layer.uses_dense(x) or (torch.is_grad_enabled() and x.requires_grad):
        return gate_reference(layer(x), activation)
    arguments = (*layer._operands(x), activation)
    direct = x.is_cuda and type(x) is Tensor and not watched()
    if layer.rounds_activations:
        own = kernels.dispatch_codes.quantized_gated_linear if direct else ops.quantized_gated_linear
        return own(*arguments)
    plain: Any = kernels.dispatch.gated_linear if direct else ops.gated_linear
    gated_sums: Tensor = plain(*arguments, layer._compressed)
    return gated_sums


def _separate(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, SparseLinear)]


class Seen(NamedTuple):
    """A tensor as a module was given it: changed in place it is another one."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Seen:
        # Tensors of inference mode have no version, and a compiler cannot ask for one.
        untold = torch.compiler.is_compiling() or tensor.is_inference()
        return cls(tensor, 0 if untold else tensor._version)

    def is_what(self, other: Seen | None) -> bool:
        return other is not None and self.tensor is other.tensor and self.version == other.version


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
    that all activations are alike there, and gate and up as well.
    """
    random = torch.Generator().manual_seed(0)
    shape = (*x.shape[:-1], gate.out_features)
    spread = torch.linspace(*GATES, math.prod(shape))[torch.randperm(math.prod(shape), generator=random)]
    first = spread.reshape(shape).to(x.device)
    second = torch.empty(shape).uniform_(0.5, 2, generator=random).to(x.device)
    last = torch.randn(*x.shape[:-1], down.out_features, generator=random).to(x)
    hidden: list[Tensor] = []

    def catch(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden.append(args[0])
        return (x.new_zeros(shape),)

    hooks = [
        gate.register_forward_hook(lambda *_: first),
        up.register_forward_hook(lambda *_: second),
        down.register_forward_pre_hook(catch),
        down.register_forward_hook(lambda *_: last),
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
