"""The modules that `fuse_` puts in the place of others: several packed layers as one, a gated MLP as one.

A fused layer keeps the state dict of the layers that it was made of, and `split` gives them back.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twofour import kernels, ops
from twofour.errors import InputError
from twofour.kernels.reference import gate as gate_reference
from twofour.nn.linear import SparseLinear, watched
from twofour.nn.quantized import QuantizedLinear
from twofour.packed import Packed24


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
