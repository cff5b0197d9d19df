"""SparseLinear: a drop-in `nn.Linear` whose weight is packed, run by whatever kernel was measured fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour import kernels, ops
from twofour.errors import InputError
from twofour.kernels import cusparselt
from twofour.nn.modules import Memory, PackedModule
from twofour.packed import ordered_shape, pack, validate
from twofour.select import Layer
from twofour.streamed import stream, within_reach


class SparseLinear(PackedModule):
    """`nn.Linear` with a packed 2:4 weight.

    >>> dense = nn.Linear(64, 32)
    >>> prune_(dense)                                # doctest: +SKIP
    >>> sparse = SparseLinear.from_dense(dense)      # doctest: +SKIP
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        layer = Layer(options.pop("name", "SparseLinear"), "linear", (out_features, in_features))
        super().__init__(layer, bias, **options)
        self.in_features = in_features
        self.out_features = out_features

    @classmethod
    def from_dense(
        cls, module: nn.Module, name: str = "SparseLinear", memory: Memory = "auto"
    ) -> SparseLinear:
        """Pack an `nn.Linear` or a transformers `Conv1D`, which must already be 2:4."""
        kind: Any = "linear" if isinstance(module, nn.Linear) else "conv1d"
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        matrix = weight.detach() if kind == "linear" else weight.detach().t()
        new = cls(matrix.shape[1], matrix.shape[0], bias is not None, name=name, memory=memory, device="meta")
        new._set_packed(pack(matrix, name), bias if isinstance(bias, Tensor) else None)
        return new.train(module.training)

    def _dense_pays(self) -> bool:
        values = self.weight_values
        if self.weight_scale is not None:
            return False  # codes are fewer bytes for few tokens, and are widened for many
        return kernels.dispatch.worth_keeping_dense(
            self.out_features, self.in_features, values.dtype, values.device.index
        )

    def _compress(self) -> None:
        values = self.weight_values
        rows, columns = self.out_features, self.in_features
        if self.weight_scale is not None or cusparselt.why_not(values.device, values.dtype, rows, columns):
            return
        own_kernel = kernels.dispatch.has_own_kernel(rows, columns, values.dtype, values.device)
        one_order = own_kernel and rows % 64 == 0
        if self.memory == "auto" and own_kernel and not one_order:
            return
        with torch.inference_mode(False), torch.no_grad():
            dense = self.unpacked()
            compressed = cusparselt.compress(dense)
            front = compressed[: values.nbytes].view(values.dtype).view(values.shape)
            if one_order:
                behind = compressed[values.nbytes :][: self.weight_meta.nbytes]
                behind = behind.view(ordered_shape(rows, columns))
                if _are_packed(front, behind, dense):  # so in 0.8.0
                    self.compressed_weight, values.data, self.weight_meta.data = compressed, front, behind
                    return
            # So in every version that was looked at, unless a group keeps fewer than two.
            if (self.memory == "fast" or not own_kernel) and torch.equal(front, values):
                self.compressed_weight, values.data = compressed, front

    def _stream(self) -> None:
        values, scale = self.weight_values.detach(), self.weight_scale
        if scale is None:
            return
        of = (self.out_features, self.in_features, scale.dtype, values.device, values.dtype, scale.shape[1])
        if kernels.dispatch_codes.wants_stream(*of) and within_reach(scale):
            with torch.inference_mode(False), torch.no_grad():
                self._set_data(*stream(values, self.weight_meta.detach(), scale.detach()))

    def forward(self, x: Tensor) -> Tensor:
        x = self._input(x)
        packed = self._operands(x)
        if self.rounds_activations:
            if may_skip_operator(x):
                return kernels.dispatch_codes.quantized_linear(*packed)
            return ops.quantized_linear(*packed)
        if self.uses_dense(x):
            return F.linear(x, self.weight, self.bias)
        if may_skip_operator(x):
            return kernels.dispatch.linear(*packed, self._compressed)
        return ops.linear(*packed, self._compressed)

    def _operands(self, x: Tensor) -> tuple[Tensor, Any, Any, Any, Tensor | None, int]:
        """What the operators take first. Looked up where it lies: by attribute each takes a microsecond of
        the twenty that a call takes."""
        held: dict[str, Any] = self._parameters
        if "weight_values" not in held:
            held = vars(self)  # a replica of nn.DataParallel has them there
        return (x, held["weight_values"], held["weight_meta"], self.weight_scale, self.bias, self.in_features)

    @property
    def _compressed(self) -> Tensor | None:
        compressed = self._buffers["compressed_weight"]
        if compressed is None or torch.compiler.is_exporting():
            return None  # it is this GPU's own, and an exported program may run on another
        if torch.compiler.is_compiling():
            return compressed
        # Somebody may have put other values in the place of those that live in it.
        values = self._parameters.get("weight_values")
        return compressed if values is not None and values.data_ptr() == compressed.data_ptr() else None

    def uses_dense(self, x: Tensor) -> bool:
        """Whether x is multiplied with the dense weight: there is one, and on a GPU it is the fastest."""
        if self._buffers["dense_weight"] is None:
            return False
        if not x.is_cuda or self.weight_scale is not None or x.dtype != self.weight_values.dtype:
            return True
        tokens = x.numel() // self.in_features
        return kernels.dispatch.dense_is_fastest(
            self.out_features, self.in_features, tokens, x.dtype, x.device.index
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, memory={self.memory}"
        )


def may_skip_operator(x: Tensor) -> bool:
    """Without gradients or tracing there is nothing that an operator adds to its kernel but 10 µs."""
    return x.is_cuda and type(x) is Tensor and not torch.is_grad_enabled() and not watched()


def watched() -> bool:
    """Whether somebody watches the operators: a compiler, an exporter, a mode that counts or records them."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _are_packed(values: Tensor, meta: Tensor, dense: Tensor) -> bool:
    """Whether these are a packed form of a matrix: also with zeros in other places than `pack` puts them."""
    try:
        validate(values, meta, dense.shape[1])
    except InputError:
        return False
    return torch.equal(ops.unpack(values, meta, None, dense.shape[1]), dense)
