"""SparseConv2d: a drop-in convolution whose weight is packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from twofour.nn.modules import Memory, PackedModule
from twofour.packed import pack
from twofour.select import Layer


class SparseConv2d(PackedModule):
    """`nn.Conv2d` (ungrouped) with a packed 2:4 weight whose groups run along the input channels."""

    def __init__(self, module: nn.Conv2d, name: str = "SparseConv2d", **options: Any) -> None:
        """A convolution with the geometry of `module`; see `from_dense` for its weight too."""
        super().__init__(
            Layer(name, "conv2d", tuple(module.weight.shape)), module.bias is not None, **options
        )
        self.stride, self.dilation = module.stride, module.dilation
        self.padding, self.padding_mode = module.padding, module.padding_mode
        self.padding_of_input = module._reversed_padding_repeated_twice

    @classmethod
    def from_dense(
        cls, module: nn.Conv2d, name: str = "SparseConv2d", memory: Memory = "auto"
    ) -> SparseConv2d:
        """Pack an `nn.Conv2d`, which must already be 2:4 along its input channels."""
        new = cls(module, name, memory=memory, device="meta")
        new._set_packed(pack(new.layer.to_matrix(module.weight.detach()), name), module.bias)
        return new.train(module.training)

    @property
    def rounds_activations(self) -> bool:
        """Never: no kernel multiplies codes with codes here, so rounding would save nothing."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        x = self._input(x)
        weight = self.unpacked(x.dtype) if self.dense_weight is None else self.dense_weight
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self.padding_of_input, mode=self.padding_mode)
            padding = (0, 0)
        bias = self.bias if self.bias is None or self.dense_weight is not None else self.bias.to(x.dtype)
        return F.conv2d(x, weight, bias, self.stride, padding, self.dilation)

    def extra_repr(self) -> str:
        out, channels, *kernel = self.layer.shape
        return (
            f"{channels}, {out}, kernel_size={tuple(kernel)}, stride={self.stride}, padding={self.padding}, "
            f"bias={self.bias is not None}, memory={self.memory}"
        )
