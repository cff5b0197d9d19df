"""Masks that hold in somebody's own training loop: a pruned weight stays exactly zero.

    masks = twofour.hold_masks(model)      # a model that is 2:4: prune_ it first
    masks.attach(optimizer)                # any number of optimizers, built before or after

Two things happen from then on, and nothing else changes:

1. A gradient is masked as soon as it is accumulated. So what looks at gradients (clipping, a scaler, the
   optimizer's moments) sees those of the sparse model, and LBFGS or Muon, where one entry influences
   another, work on the kept weights alone.
2. After every step of an attached optimizer its weights are masked. The first alone would do for SGD and
   Adam, where a zero with zero gradients and zero moments stays zero, but not for optimizers that mix
   entries, or whose moments are from before pruning.

The masks are buffers `weight_mask` of the layers: saved, loaded and moved with the model, and sharded with
the weights. There is no global state and no patched class; `remove` leaves a plain 2:4 model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from twofour.errors import InputError
from twofour.recover.mask_tensor import mask_of, require_fits, shard_like, zero_pruned_
from twofour.select import Layer, LeftAlone, require_layers, select, stacked_experts

#: The name of the buffer beside the weight.
MASK = "weight_mask"

#: Where DistributedDataParallel looks for buffers that it shall not broadcast before every forward.
_DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"


def hold_masks(model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Masks:
    """Give every eligible layer of a 2:4 model the mask of its zeros, and mask its gradients from now on.

    >>> from twofour import prune_
    >>> model = prune_(nn.Sequential(nn.Linear(64, 32)))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> hold_masks(model).attach(optimizer)
    Masks(1 layer, 1 optimizer)

    `include` and `exclude` are the patterns of `prune_`. A model that has masks already (a copy of a held
    one) keeps those; one that is held already gives the same object again. On the meta device the masks
    have no values either: load a state dict with masks before `attach`.
    """
    model = unwrapped(model)
    reshard(model)
    masked = [
        _masked_layer(name, module) for name, module in model.named_modules() if MASK in module._buffers
    ]
    if masked and not (include or exclude):
        layers = masked
    else:
        selection = require_layers(select(model, include, exclude))
        _require_none_hidden(model, selection.left)
        _require_none_stacked(model, include, exclude)
        layers = list(selection.layers)
        if masked and {x.name for x in masked} != {x.name for x in layers}:
            raise InputError(
                "the model has masks already, and of other layers than these patterns choose.",
                hint="Leave the patterns out, or remove() the masks first.",
            )
    if masked and (before := _holder(model, layers)):
        return before
    return Masks(model, layers)


class Masks:
    """The masks of a model and the optimizers that they are held against. Made by `hold_masks`."""

    def __init__(self, model: nn.Module, layers: Iterable[Layer]) -> None:
        self._model = model
        self._held = [_Held(layer, model.get_submodule(layer.name)) for layer in layers]
        self._attached: list[_Attached] = []
        # All weights are looked at before the first buffer is added: an error leaves the model as it was.
        masks = [held.found_mask() for held in self._held]
        for held, mask in zip(self._held, masks, strict=True):
            held.module.register_buffer(MASK, mask)
            held.load_handle = held.module.register_load_state_dict_post_hook(
                partial(_require_loaded_fits, held.layer)
            )
            if not mask.is_meta:
                zero_pruned_(held.weight, mask)  # -0.0 passes for zero, but is not what we promise
            held.watch(self)
        ddp_ignore(model, add=self._buffer_names())

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(held.layer for held in self._held)

    def attach(self, *optimizers: Optimizer) -> Masks:
        """Mask the weights of these optimizers after each of their steps.

        Call it once the model is where it will be trained: after `fully_shard`, which makes new parameters
        (the masks are sharded here), and after loading with `assign=True`.
        """
        inner = [_unwrapped_optimizer(optimizer) for optimizer in optimizers]
        if not self._held:
            raise InputError("these masks were removed.", hint="Call hold_masks again.")
        self._settle()
        parameters = {id(p) for p in self._model.parameters()}
        for optimizer in inner:
            if not any(id(p) in parameters for p in _parameters(optimizer)):
                raise InputError(
                    "the optimizer has none of the model's parameters.",
                    hint="Build it after fully_shard or load_state_dict(assign=True), which make new ones. "
                    "If it keeps copies of its own, call masks.apply() after each step instead of attach.",
                )
        for optimizer in inner:
            if all(attached.optimizer is not optimizer for attached in self._attached):
                self._attached.append(_Attached(optimizer, self._held))
        return self

    def detach(self, *optimizers: Optimizer) -> None:
        """Leave these optimizers alone again, or all of them. Gradients are masked until `remove`."""
        inner = [_unwrapped_optimizer(optimizer) for optimizer in optimizers]
        for attached in list(self._attached):
            if not inner or any(attached.optimizer is optimizer for optimizer in inner):
                attached.handle.remove()
                self._attached.remove(attached)

    def apply(self) -> None:
        """Mask all weights now, for updates that are not an attached optimizer's step."""
        for held in self._held:
            held.mask_weight()

    def remove(self) -> None:
        """Take everything away again: what is left is a plain 2:4 model, ready for `pack_`."""
        self.detach()
        ddp_ignore(self._model, remove=self._buffer_names())
        for held in self._held:
            held.release()
        self._held = []

    def _settle(self) -> None:
        """Follow the parameters to where they are now, and look whether they still fit their masks."""
        reshard(self._model)
        for held in self._held:
            mask = shard_like(held.mask, held.module.get_parameter("weight"))
            if mask.is_meta:
                raise InputError(
                    "the weight has no values yet (meta device).",
                    layer=held.layer.name,
                    hint="Load a state dict before attach.",
                )
            held.module._buffers[MASK] = mask
            held.watch(self)
            require_fits(held.layer, mask, held.weight)

    def _buffer_names(self) -> list[str]:
        return [f"{held.layer.name}.{MASK}".lstrip(".") for held in self._held]

    def __repr__(self) -> str:
        layers, optimizers = len(self._held), len(self._attached)
        return f"Masks({layers} layer{'s' * (layers != 1)}, {optimizers} optimizer{'s' * (optimizers != 1)})"


class _Held:
    """One layer whose weight is held.

    The parameter is kept rather than looked up, because under FSDP2 `module.weight` is now the sharded
    parameter that the optimizer has, now the gathered one. The mask is looked up rather than kept, because
    `model.to(...)` and `load_state_dict(assign=True)` replace buffers.
    """

    def __init__(self, layer: Layer, module: nn.Module) -> None:
        self.layer = layer
        self.module = module
        self.weight = module.get_parameter("weight")
        self.gradient_handle: RemovableHandle | None = None
        self.load_handle: RemovableHandle | None = None

    @property
    def mask(self) -> Tensor:
        return self.module.get_buffer(MASK)

    def found_mask(self) -> Tensor:
        """The mask that came with the model, or that of the weight's zeros."""
        mask = self.module._buffers.get(MASK)
        if mask is None:
            return mask_of(self.layer, self.weight)
        mask = shard_like(mask, self.weight)
        require_fits(self.layer, mask, self.weight)
        return mask

    def watch(self, masks: Masks) -> None:
        """Mask the gradients of the parameter that the module has now."""
        weight = self.module.get_parameter("weight")
        if self.gradient_handle is not None:
            if weight is self.weight:
                return
            self.gradient_handle.remove()
        self.weight = weight
        for key, hook in list(_gradient_hooks(weight).items()):
            if isinstance(hook, _MaskGradient):  # of a `Masks` that was dropped without remove()
                del _gradient_hooks(weight)[key]
        frozen = not weight.requires_grad
        # torch takes hooks only for what is trained; one taken so stays through freezing and unfreezing.
        weight.requires_grad_(True)
        self.gradient_handle = weight.register_post_accumulate_grad_hook(_MaskGradient(masks, self.module))
        weight.requires_grad_(not frozen)

    def mask_weight(self) -> None:
        zero_pruned_(self.weight, self.mask)

    def release(self) -> None:
        for handle in (self.gradient_handle, self.load_handle):
            if handle is not None:
                handle.remove()
        delattr(self.module, MASK)


class _MaskGradient:
    """The hook on a parameter. A type of its own, so that a held model can be told from its copies.

    Its references are weak: Python's collector does not see those that a tensor's hooks have, so a model
    that is reachable from its own weight would never be freed.
    """

    def __init__(self, masks: Masks, module: nn.Module) -> None:
        self.masks = weakref.ref(masks)
        self.module = weakref.ref(module)

    def __call__(self, parameter: Tensor) -> None:
        module, gradient = self.module(), parameter.grad
        mask = None if module is None else module._buffers.get(MASK)
        if mask is None or gradient is None:  # an optimizer in the backward pass has used it up already
            return
        if gradient.requires_grad:  # create_graph=True: what the graph has saved must not change
            parameter.grad = torch.where(mask.bool(), gradient, 0)
        else:
            zero_pruned_(gradient, mask)


class _Attached:
    """An optimizer, and which of the held weights are its own."""

    def __init__(self, optimizer: Optimizer, held: list[_Held]) -> None:
        self.optimizer = optimizer
        self.held = held
        self.handle = optimizer.register_step_post_hook(self.after_step)
        self.count = -1
        self.own: list[_Held] = []
        self._look()

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Groups can be added at any time, and the others' weights are not ours to spend time on.
        if sum(len(group["params"]) for group in optimizer.param_groups) != self.count:
            self._look()
        for held in self.own:
            held.mask_weight()

    def _look(self) -> None:
        parameters = {id(p) for p in _parameters(self.optimizer)}
        self.count = sum(len(group["params"]) for group in self.optimizer.param_groups)
        self.own = [held for held in self.held if id(held.weight) in parameters]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _require_loaded_fits(layer: Layer, module: nn.Module, incompatible_keys: object) -> None:
    """After `load_state_dict`. Knows nothing of the `Masks`: copies of the model have this hook as well."""
    mask = module._buffers.get(MASK)
    if mask is not None:
        require_fits(layer, mask, module.get_parameter("weight"))


def _holder(model: nn.Module, layers: Iterable[Layer]) -> Masks | None:
    """Who holds these layers now. Copies and unpickled models have masks, but no hooks on their gradients."""
    for layer in layers:
        weight = model.get_parameter(f"{layer.name}.weight".lstrip("."))
        for hook in _gradient_hooks(weight).values():
            if isinstance(hook, _MaskGradient):
                return hook.masks()
    return None


def _gradient_hooks(weight: Tensor) -> dict[int, Any]:
    return getattr(weight, "_post_accumulate_grad_hooks", None) or {}


def _masked_layer(name: str, module: nn.Module) -> Layer:
    """A layer that has a mask was eligible when it got it, whatever class `fully_shard` made of it since."""
    shape = tuple(module.get_parameter("weight").shape)
    if isinstance(module, nn.Conv2d):
        return Layer(name, "conv2d", shape)
    return (
        Layer(name, "linear", shape) if isinstance(module, nn.Linear) else Layer(name, "conv1d", shape[::-1])
    )


def _require_none_hidden(model: nn.Module, left: Iterable[LeftAlone]) -> None:
    """`fully_shard(layer)` changes the class of the layer, so that `select` does not know it any more."""
    for one in left:
        module = model.get_submodule(one.name)
        if isinstance(module, nn.Linear | nn.Conv2d) and hasattr(module, "set_reshard_after_backward"):
            raise InputError(
                "it is sharded on its own, and cannot be told from a layer with a forward of its own.",
                layer=one.name,
                hint="Call hold_masks before fully_shard.",
            )


def _require_none_stacked(model: nn.Module, include: Sequence[str], exclude: Sequence[str]) -> None:
    """Experts in one tensor are no layers, and `prune_` prunes them: held by nothing, they would be lost.

    They are not taken apart here: that makes new parameters, and an optimizer or a wrapper may have the old.
    """
    for name, module in model.named_modules():
        wanted = not include or any(fnmatchcase(name, pattern) for pattern in include)
        left = any(fnmatchcase(name, pattern) for pattern in exclude)
        if isinstance(stacked_experts(module), tuple) and wanted and not left:
            raise InputError(
                "its experts are one tensor, and masks are held for layers.",
                layer=name,
                hint="Call twofour.calibrate.experts.open_experts_(model) before the optimizer is built, "
                f'or leave it out with exclude=["*.{name.rpartition(".")[2]}"].',
            )


def reshard(model: nn.Module) -> None:
    """Have FSDP2 show its sharded parameters: after a forward the root's are still the gathered ones."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):
            module.reshard()  # type: ignore[operator]


def ddp_ignore(model: nn.Module, add: Sequence[str] = (), remove: Sequence[str] = ()) -> None:
    """Have DDP not send these buffers before every forward: each process has the same by itself."""
    names = [name for name in getattr(model, _DDP_IGNORED, ()) if name not in remove] + list(add)
    if names:
        setattr(model, _DDP_IGNORED, names)
    elif hasattr(model, _DDP_IGNORED):
        delattr(model, _DDP_IGNORED)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel and torch.compile, so that names are the model's own."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _unwrapped_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer itself: Accelerate's wrapper has one inside, whose step it calls."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise InputError(
            f"{type(optimizer).__name__} is not a torch optimizer.",
            hint="Call masks.apply() after each of its steps instead of attach.",
        )
    return optimizer
