"""Put packed modules into a model: `convert_` if it is 2:4 already, `swap_` for a skeleton to load."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from twofour.errors import InputError
from twofour.nn.conv import SparseConv2d
from twofour.nn.linear import SparseLinear
from twofour.nn.modules import Memory, PackedModule
from twofour.nn.quantized import QuantizedLinear
from twofour.quantize.schemes import Scheme
from twofour.select import Layer


def convert_(model: nn.Module, layers: Iterable[Layer], memory: Memory = "auto") -> None:
    """Replace layers by packed ones with the same weights: all of them or, when one is not 2:4, none."""
    new: dict[str, PackedModule] = {}
    for layer in layers:
        _require_parent(layer)
        module = model.get_submodule(layer.name)
        if isinstance(module, nn.Conv2d):
            new[layer.name] = SparseConv2d.from_dense(module, layer.name, memory)
        else:
            new[layer.name] = SparseLinear.from_dense(module, layer.name, memory)
    for name, packed in new.items():
        model.set_submodule(name, packed)


def swap_(
    model: nn.Module, layers: Iterable[Layer], memory: Memory = "auto", scheme: Scheme | None = None
) -> None:
    """Replace layers by empty packed ones of the same geometry, dtype and device, to load tensors into."""
    for layer in layers:
        _require_parent(layer)
        module = model.get_submodule(layer.name)
        weight = model.get_parameter(f"{layer.name}.weight")
        options = {"memory": memory, "device": weight.device, "dtype": weight.dtype}
        new: PackedModule
        if isinstance(module, nn.Conv2d):
            new = SparseConv2d(module, layer.name, scheme=scheme, **options)
        elif scheme is not None:
            out, features = layer.shape
            has_bias = module.bias is not None
            new = QuantizedLinear(features, out, has_bias, scheme=scheme, name=layer.name, **options)
        else:
            out, features = layer.shape
            new = SparseLinear(features, out, module.bias is not None, name=layer.name, **options)
        model.set_submodule(layer.name, new.train(module.training))


def _require_parent(layer: Layer) -> None:
    if not layer.name:
        raise InputError(
            "a layer on its own cannot be replaced in place.",
            hint="Wrap it in a module (nn.Sequential), or use SparseLinear.from_dense.",
        )


def packed_layers(model: nn.Module) -> dict[str, PackedModule]:
    """The packed modules of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, PackedModule)}


def stored_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the packed layers as a checkpoint has them, whether they are fused now or not."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in packed_layers(model).items():
        found |= module.stored_as(name)
    return found


def common_scheme(model: nn.Module) -> Scheme | None:
    """How the packed layers of a model are quantized. A checkpoint has one scheme for all."""
    found = {name: module.scheme for name, module in packed_layers(model).items()}
    schemes = set(found.values())
    if len(schemes) > 1:
        kinds = ", ".join(sorted("none" if s is None else str(s.as_config()) for s in schemes))
        raise InputError(
            f"the packed layers have different schemes ({kinds}), and a checkpoint holds one.",
            layer=next(name for name, scheme in found.items() if scheme is not next(iter(found.values()))),
            hint="Quantize all of them alike.",
        )
    return next(iter(schemes), None)


def set_memory(model: nn.Module, memory: Memory) -> nn.Module:
    """Choose for every packed layer between keeping a dense copy ("fast") and not ("small")."""
    for module in packed_layers(model).values():
        module.set_memory(memory)
    return model
