"""QuantizedLinear: a packed linear layer whose values are codes of 8 or 4 bits (see quantize/schemes.py).

It holds the same plain tensors, with `weight_scale` beside them: `weight_values` are the codes, and the dtype
of the scales is that of the layer: `.to(dtype)` converts them (exactly) and the bias, never the codes.

Where the scheme leaves activations alone, it is a `SparseLinear` whose weight is dequantized on a CPU;
`memory` is as there. Where it rounds them, the product is one of codes, and nothing is kept beside the packed
form. On a GPU nothing is kept in either case, and tokens are rounded only where codes are multiplied with
codes (kernels/dispatch_codes.py).

A convolution is a `SparseConv2d` with codes. It never rounds its activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from twofour.nn.conv import SparseConv2d
from twofour.nn.linear import SparseLinear
from twofour.nn.modules import Memory, PackedModule
from twofour.packed import Packed24
from twofour.quantize.schemes import Scheme
from twofour.select import Layer


class QuantizedLinear(SparseLinear):
    """`nn.Linear` with a packed 2:4 weight of 8 or 4 bits.

    >>> from twofour.quantize import SCHEMES
    >>> QuantizedLinear(64, 32, scheme=SCHEMES["int8"])
    QuantizedLinear(in_features=64, out_features=32, bias=True, memory=auto, scheme=int8)
    """

    scheme: Scheme

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, scheme: Scheme, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, scheme=scheme, **options)

    def extra_repr(self) -> str:
        group = f", group={self.scheme.group}" if self.scheme.group else ""
        return f"{super().extra_repr()}, scheme={self.scheme.name}{group}"


def put_quantized_(
    model: nn.Module, packed: Mapping[Layer, Packed24], scheme: Scheme, memory: Memory = "auto"
) -> None:
    """Replace layers by ones that hold these codes."""
    for layer, own in packed.items():
        module = model.get_submodule(layer.name)
        bias = module.bias if isinstance(module.bias, Tensor) else None
        new: PackedModule
        if isinstance(module, nn.Conv2d):
            new = SparseConv2d(module, layer.name, scheme=scheme, memory=memory, device="meta")
        else:
            rows, columns = layer.shape
            options: dict[str, Any] = {"name": layer.name, "memory": memory, "device": "meta"}
            new = QuantizedLinear(columns, rows, bias is not None, scheme=scheme, **options)
        new._set_packed(own, bias)
        model.set_submodule(layer.name, new.train(module.training))
