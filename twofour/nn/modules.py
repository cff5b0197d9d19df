"""What SparseLinear (linear.py) and SparseConv2d (conv.py) share: drop-in layers whose weight is packed.

They hold nothing but plain tensors (`weight_values`, `weight_meta`, perhaps `weight_scale`, `bias`), so
`.to()`, `deepcopy`, `state_dict`, safetensors, FSDP, `torch.compile` and `torch.export` work as for any
module. The packed tensors are frozen parameters rather than buffers because offloading and sharding
tools move parameters only.

How much memory a layer may use is its `memory`:

             CPU                                       GPU
    "small"  the weight is unpacked in every call      only the packed form: 9/16 of the dense bytes
    "auto"   as "fast" while there is memory to spare  the same, on Hopper in cuSPARSELt's form; elsewhere
                                                       with cuSPARSELt's positions beside ours: 10/16
    "fast"   the dense weight is kept as well          as "auto", but 10/16 where one order of positions
                                                       cannot serve both; and the dense weight where that was
                                                       measured to be fastest or nothing sparse can run (a
                                                       convolution)

What is kept beside the packed form is never in the state dict. cuSPARSELt is a little ahead of our kernels
for some shapes and many tokens, and wants its own form: our values, then positions in an order of its own.
`weight_values` becomes a view into it. So does `weight_meta` on Hopper, if rows and columns fit: our kernels
read positions in that order too (packed.py). Elsewhere these are there twice. Weights of 4 bits lie in the
order of their kernel on Hopper (streamed.py), unless "small". The state dict has all as files have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from twofour import kernels, ops
from twofour.errors import InputError
from twofour.packed import BITS, Packed24, as_stored, packed_shapes, validate
from twofour.quantize.schemes import Scheme
from twofour.select import Layer
from twofour.streamed import is_streamed

Memory = Literal["auto", "fast", "small"]

#: What quantized layers can compute in.
COMPUTED = (torch.float32, torch.float16, torch.bfloat16)

__all__ = ["Memory", "PackedModule", "kernels"]  # kernels: for its registrations


class PackedModule(nn.Module):
    """A layer that holds the packed tensors, and derived forms of them as its `memory` says."""

    weight_values: nn.Parameter
    weight_meta: nn.Parameter
    weight_scale: nn.Parameter | None
    bias: nn.Parameter | None
    dense_weight: Tensor | None
    compressed_weight: Tensor | None

    def __init__(
        self,
        layer: Layer,
        bias: bool,
        *,
        memory: Memory = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        super().__init__()
        _require_memory(memory)
        self.layer, self.scheme = layer, scheme
        stored = dtype if scheme is None else scheme.stored
        values, meta = packed_shapes(layer.rows, layer.columns, stored)
        self.weight_values = _frozen(torch.zeros(values, device=device, dtype=stored))
        # 0x44: every group names its positions 0 and 1, so a new layer is a legal matrix of zeros.
        nibbles = torch.full(meta, 0x44, device=device, dtype=torch.uint8)
        if -(-layer.columns // 4) % 2:
            nibbles[:, -1] = 0x04
        self.weight_meta = _frozen(nibbles)
        self.weight_scale = None
        if scheme is not None:
            width = scheme.scale_width(layer.columns)
            self.weight_scale = _frozen(torch.ones(layer.rows, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(layer.rows, device=device, dtype=dtype)) if bias else None
        self.register_buffer("dense_weight", None, persistent=False)
        self.register_buffer("compressed_weight", None, persistent=False)
        self.register_state_dict_post_hook(_as_stored)
        self.memory: Memory = memory

    @property
    def packed(self) -> Packed24:
        values, meta, scale = as_stored(self.weight_values, self.weight_meta, self.weight_scale)
        return Packed24(values, meta, self.layer.columns, scale)

    @property
    def rounds_activations(self) -> bool:
        """Whether the inputs are rounded as the weight is, so that codes are multiplied with codes."""
        return self.scheme is not None and self.scheme.rounds_activations

    @property
    def weight(self) -> Tensor:
        """The dense weight, to read: some models look at it (T5 at its dtype, Mamba multiplies with it)."""
        return self.unpacked() if self.dense_weight is None else self.dense_weight

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight, unpacked now: [out, in] or [O, C, R, S]."""
        packed = (self.weight_values, self.weight_meta, self.weight_scale)
        return self.layer.from_matrix(ops.unpack(*packed, self.layer.columns, dtype))

    def stored_as(self, name: str) -> dict[str, tuple[int, ...]]:
        """The layers that a checkpoint has of a module of this name, and their shapes."""
        return {name: self.layer.shape}

    def freeze(self) -> None:
        """Packed tensors have no gradient; loaders that make parameters anew forget that."""
        for tensor in (self.weight_values, self.weight_meta, self.weight_scale):
            if tensor is not None:
                tensor.requires_grad_(False)

    def validate(self, name: str | None = None) -> None:
        """Refuse damaged packed tensors, by name."""
        name = name or self.layer.name
        validate(self.weight_values, self.weight_meta, self.layer.columns, self.weight_scale, name)

    def set_memory(self, memory: Memory) -> None:
        _require_memory(memory)
        self.memory = memory
        self.settle()

    def settle(self) -> None:
        """Keep or drop derived forms as `memory` says, for the device that the tensors are on now."""
        self._drop_derived()
        device = self.weight_values.device.type
        if device == "meta" or self.memory == "small":
            return
        if self._keeps_dense(device):
            with torch.inference_mode(False), torch.no_grad():  # it must serve training as well
                self.dense_weight = self.unpacked()
        if device == "cuda":
            self._compress()
            self._stream()

    def _keeps_dense(self, device: str) -> bool:
        if self.rounds_activations:
            return False  # the product is one of codes
        if device == "cuda":
            return self.memory == "fast" and self._dense_pays()
        return self.memory == "fast" or (device == "cpu" and self._memory_to_spare())

    def _drop_derived(self) -> None:
        self.dense_weight = None
        if self.compressed_weight is not None:
            self.weight_values.data = self.weight_values.detach().clone()  # out of the memory they shared
            self.compressed_weight = None
        with torch.inference_mode(False), torch.no_grad():
            stored = as_stored(self.weight_values.detach(), self.weight_meta.detach(), self.weight_scale)
            self._set_data(*stored)

    def _set_data(self, values: Tensor, meta: Tensor, scale: Tensor | None) -> None:
        self.weight_values.data, self.weight_meta.data = values, meta
        if scale is not None and self.weight_scale is not None:
            self.weight_scale.data = scale.detach()

    def _dense_pays(self) -> bool:
        """Whether the dense weight is ever the fastest on the GPU: no sparse kernel runs a convolution."""
        return True

    def _compress(self) -> None:
        """Make cuSPARSELt's form where it can be used, and let the values live in it."""

    def _stream(self) -> None:
        """Put the tensors in threads' order where a kernel wants that."""

    def _memory_to_spare(self) -> bool:
        import psutil

        memory = psutil.virtual_memory()
        dense_bytes = self.layer.rows * self.layer.columns * self._own.element_size()
        return memory.available - dense_bytes > max(memory.total // 4, 1 << 30)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedModule:
        moved = fn(self._own.detach()[:0])
        if moved.dtype not in (BITS if self.scheme is None else COMPUTED):
            raise InputError(f"a packed weight cannot be {moved.dtype}.", layer=self.layer.name)
        # What is derived is made again rather than moved: a dense weight must not follow to a GPU.
        self._drop_derived()
        with self._codes_as_integers():
            super()._apply(fn, recurse)
        self.settle()
        return self

    @property
    def _own(self) -> Tensor:
        """The tensor whose dtype is the layer's: its values, or the scales of its codes."""
        name = "weight_values" if self.weight_scale is None else "weight_scale"
        own: Tensor | None = self._parameters.get(name)  # quicker than by attribute
        return getattr(self, name) if own is None else own  # as a replica of nn.DataParallel has it

    @contextmanager
    def _codes_as_integers(self) -> Iterator[None]:
        """fp8 codes are not to be converted when the layer's dtype is, though torch calls them floats."""
        if self.scheme is None or not self.weight_values.is_floating_point():
            yield
            return
        self.weight_values.data = self.weight_values.data.view(torch.int8)
        try:
            yield
        finally:
            self.weight_values.data = self.weight_values.data.view(self.scheme.stored)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy. cuSPARSELt's form is one GPU's own, and others live in its memory; so is
        threads' order. The copy gets what is stored, and makes its own."""
        state = self.__dict__.copy()
        if self.compressed_weight is not None or is_streamed(self.weight_meta):
            state["_buffers"] = {**self._buffers, "compressed_weight": None}
            packed = self.packed
            stored = {"weight_values": packed.values.clone(), "weight_meta": packed.meta}
            stored |= {} if packed.scale is None else {"weight_scale": packed.scale}
            frozen = {name: _frozen(tensor.detach()) for name, tensor in stored.items()}
            state["_parameters"] = {**self._parameters, **frozen}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.weight_values.is_cuda:
            self.settle()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._drop_derived()  # files have the tensors in their own order
        super()._load_from_state_dict(*args, **kwargs)
        self.settle()

    def _set_packed(self, packed: Packed24, bias: Tensor | None) -> None:
        self.weight_values = _frozen(packed.values)
        self.weight_meta = _frozen(packed.meta)
        self.weight_scale = None if packed.scale is None else _frozen(packed.scale)
        if bias is not None:
            # Its own copy: converting this layer must not convert the dense one it was made from.
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        self.settle()

    def _input(self, x: Tensor) -> Tensor:
        """x in the dtype to compute in: the layer's own, or autocast's where that is on."""
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device):
            return x.to(torch.get_autocast_dtype(device))
        own = self._own
        if x.dtype != own.dtype:
            raise InputError(
                f"the input is {x.dtype} but the layer is {own.dtype}.",
                layer=self.layer.name,
                hint="Convert one of them with .to(dtype).",
            )
        return x


def _require_memory(memory: str) -> None:
    if memory not in get_args(Memory):
        raise InputError(f"memory must be auto, fast or small, not {memory!r}.")


def _as_stored(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The packed tensors as files have them, however they lie in memory."""
    names = [prefix + name for name in ("weight_values", "weight_meta", "weight_scale")]
    values, meta, scale = (state.get(name) for name in names)
    if values is not None and meta is not None:
        stored = zip(names, as_stored(values, meta, scale), strict=True)
        state.update({name: tensor for name, tensor in stored if tensor is not None})


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
