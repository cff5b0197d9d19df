"""transformers' part: `from_pretrained` and `save_pretrained` of packed checkpoints.

Registered with transformers as the quantizer "twofour" (see `twofour/__init__.py` for when). It swaps the
packed modules into the skeleton before the weights are loaded, checks the files against the config, and
validates every packed tensor afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from twofour.calibrate.experts import OpenExperts, makes_one_of, open_experts_
from twofour.errors import InputError
from twofour.io.format import METHOD, format_version, lowrank_ranks, packed_modules, scheme_of, stub
from twofour.io.structure import name_variants, renaming
from twofour.io.writer import shard_metadata
from twofour.nn.convert import common_scheme, packed_layers, stored_layers, swap_
from twofour.nn.lowrank import empty_lowrank_, lowrank_layers
from twofour.packed import packed_shapes
from twofour.quantize.schemes import Scheme
from twofour.select import Layer, as_layer, stacked_experts
from twofour.version import __version__

#: Tensors that a packed checkpoint has instead of dense weights.
_PARTS = ("weight_values", "weight_meta", "weight_scale", "lowrank_left", "lowrank_right")


@register_quantization_config(METHOD)
class TwoFourConfig(QuantizationConfigMixin):
    """`config.quantization_config` of a packed model."""

    def __init__(
        self,
        modules: dict[str, Any] | None = None,
        format_version: int = 1,
        pattern: str = "2:4",
        scheme: dict[str, Any] | None = None,
        made: list[str] | None = None,
        lowrank: dict[str, int] | None = None,
        twofour_version: str = __version__,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD
        self.format_version = format_version
        self.pattern = pattern
        self.scheme = scheme
        self.modules = modules or {}
        self.made = made or []
        self.lowrank = lowrank or {}
        self.twofour_version = twofour_version
        lowrank_ranks(self.to_dict())
        packed_modules(self.to_dict())  # refuses what cannot be read, before anything is built


@register_quantizer(METHOD)
class TwoFourQuantizer(HfQuantizer):
    quantization_config: TwoFourConfig
    requires_calibration = True  # that is: it loads packed checkpoints, it does not make them
    _apart: tuple[str, ...] = ()  # weights of stacked experts that were taken apart
    _renamed: dict[str, torch.dtype]  # what to load tensors as that have another name in the files
    _shapes: dict[str, torch.Size]  # of all tensors before they are loaded

    def update_attn_implementation(self, config: Any) -> Any:
        return _without_sentence(config)

    def update_tp_plan(self, config: Any) -> Any:
        # The same hook by its older name: the only ones that see the config before the files are looked up.
        return _without_sentence(config)

    def update_weight_conversions(self, weight_conversions: list[Any], *rest: Any) -> list[Any]:
        """Experts that are packed one by one are not put together while they are loaded."""
        kept = [rule for rule in weight_conversions if not makes_one_of(rule, self._apart)]
        return list(super().update_weight_conversions(kept, *rest))

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        self._apart = _open_packed_experts(model, self.quantization_config.modules)
        layers = list(_layers_of(model, self.quantization_config.modules))
        lowrank = self.quantization_config.lowrank
        scheme = scheme_of(self.quantization_config.to_dict())
        _require_tensors(model, layers, lowrank, scheme, kwargs.get("checkpoint_files"))
        with torch.device("meta"):
            swap_(model, layers, scheme=scheme)
            names, renamed = {x.name for x in layers}, renaming(model)
            for name, rank in lowrank.items():
                own = next((n for n in name_variants(model, _module(renamed, name)) if n in names), None)
                if own is not None:  # else it is part of a head that this class does not have
                    empty_lowrank_(model.get_submodule(own), rank, own)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        container = set if isinstance(ignored, set) else list  # newer and older transformers
        stubs = [
            re.escape(name_variants(model, renamed(key))[-1]) + "$"
            for key in stub(self.quantization_config.modules)
        ]
        self._renamed = _dtypes_of_renamed(model, renamed, kwargs.get("checkpoint_files"))
        model._keys_to_ignore_on_load_unexpected = container([*(ignored or ()), *stubs])  # type: ignore[assignment]
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name, tensor.shape)
            if tensor.shape != expected:  # transformers takes any shape for what a quantizer loads
                raise InputError(
                    f"the file's shape is {list(tensor.shape)}, and the model's {list(expected)}.", layer=name
                )
        for name, dtype in self._renamed.items():  # some versions leave these as they are in the files
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype)
        for name, module in packed_layers(model).items():
            module.freeze()
            if module.scheme is not None and module.weight_values.dtype != module.scheme.stored:
                # Some versions convert fp8 as any float; every wider type holds it exactly, so back it goes.
                module.weight_values.data = module.weight_values.data.to(module.scheme.stored)
            if module.weight_values.device.type != "meta":  # "meta": offloaded, and not here to look at
                module.validate(name)
                module.settle()
        return model

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        self.quantization_config = _config_of(model, self.quantization_config.made)
        model.config.quantization_config = self.quantization_config  # type: ignore[union-attr]
        if any(isinstance(module, OpenExperts) for module in model.modules()):
            # Names as the config lists them; transformers would put older ones in the file.
            model._weight_conversions = []  # type: ignore[assignment]
        state = {**model.state_dict(), **stub(stored_layers(model))}
        here = {k: v for k, v in state.items() if v.device.type != "meta"}  # "meta": offloaded
        return state, shard_metadata(here)

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True  # adapters beside the frozen packed weights

    @property
    def is_compileable(self) -> bool:
        return True


def mark_packed(model: Any, made: str = "pack") -> None:
    """Make `save_pretrained` of a model that was packed in memory write the packed format."""
    config = _config_of(model, made=[made])
    model.config.quantization_config = config
    model.hf_quantizer = TwoFourQuantizer(config, pre_quantized=True)
    model.is_quantized = True
    model.quantization_method = METHOD


def _config_of(model: nn.Module, made: list[str]) -> TwoFourConfig:
    shapes = {name: list(shape) for name, shape in stored_layers(model).items()}
    ranks = {name: module.rank for name, module in lowrank_layers(model).items() if name in shapes}
    scheme = common_scheme(model)
    return TwoFourConfig(
        modules=shapes,
        made=made,
        lowrank=ranks,
        scheme=None if scheme is None else scheme.as_config(),
        format_version=format_version(ranks, scheme),
    )


def _without_sentence(config: Any) -> Any:
    if getattr(config, "transformers_weights", None) is not None:
        config.transformers_weights = None
    return config


def _layers_of(model: nn.Module, modules: dict[str, Any]) -> Iterable[Layer]:
    """The config's modules as layers of this model, which may be the body or the whole of the one saved."""
    here = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    is_body = not hasattr(model, prefix)
    renamed = renaming(model)
    for name, shape in modules.items():
        own = next((n for n in name_variants(model, _module(renamed, name)) if n in here), None)
        if own is None:
            if is_body and not name.startswith(prefix + "."):
                continue  # part of a head, which this class does not have
            raise InputError("the config lists this module, but the model has none of that name.", layer=name)
        layer = as_layer(own, here[own])
        if isinstance(layer, str):
            raise InputError(f"the config lists this module, but it is {layer}.", layer=name)
        if layer.shape != tuple(shape):
            raise InputError(
                f"quantization_config says {list(shape)} but the model's layer is {list(layer.shape)}.",
                layer=name,
                hint="Its config.json belongs to another model.",
            )
        yield layer


def _open_packed_experts(model: nn.Module, modules: dict[str, Any]) -> tuple[str, ...]:
    """Take stacked experts apart if the config lists some of them; the names of the weights that are gone."""
    stacked = {
        name: weights
        for name, module in model.named_modules()
        if isinstance(weights := stacked_experts(module), tuple)
    }
    renamed = renaming(model)
    inside = (v for name in modules for v in name_variants(model, _module(renamed, name)))
    if not any(name.startswith(tuple(f"{module}." for module in stacked)) for name in inside):
        return ()
    if not hasattr(HfQuantizer, "update_weight_conversions"):
        raise InputError(
            "this version of transformers cannot load packed experts.", hint="Upgrade transformers."
        )
    open_experts_(model)
    return tuple(f"{name}.{own}" for name, weights in stacked.items() for own in weights)


def _dtypes_of_renamed(
    model: nn.Module, renamed: Callable[[str], str], files: list[str] | None
) -> dict[str, torch.dtype]:
    """The floating-point parameters that the files call otherwise, and what they are in the model."""
    from safetensors import safe_open

    here = dict(model.named_parameters())
    found: dict[str, torch.dtype] = {}
    for file in files or ():
        with safe_open(file, framework="pt") as opened:
            for key in (k for k in opened.keys() if renamed(k) != k):  # noqa: SIM118 (not a dict)
                name = next((n for n in name_variants(model, renamed(key)) if n in here), None)
                if name is not None and here[name].is_floating_point():
                    found[name] = here[name].dtype
    return found


def _module(renamed: Callable[[str], str], name: str) -> str:
    """What the model calls a module that files name so: only tensors are renamed by rule."""
    return renamed(f"{name}.weight_values").removesuffix(".weight_values")


def _require_tensors(
    model: nn.Module,
    layers: list[Layer],
    lowrank: dict[str, int],
    scheme: Scheme | None,
    files: list[str] | None,
) -> None:
    """Refuse a file that lacks a packed tensor: transformers would fill it at random and only warn."""
    if not files:
        return
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    renamed = renaming(model)
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                if key.rpartition(".")[2] in _PARTS:
                    found[renamed(key)] = tuple(opened.get_slice(key).get_shape())
    for key in (f"{name}.lowrank_{side}" for name in lowrank for side in ("left", "right")):
        if not any(variant in found for variant in name_variants(model, renamed(key))):
            raise InputError(f"the checkpoint has no {key}.", layer=key.rpartition(".")[0])
    for layer in layers:
        values, meta = packed_shapes(layer.rows, layer.columns, scheme.stored if scheme else None)
        wanted = {"values": values, "meta": meta}
        if scheme is not None:
            wanted["scale"] = (layer.rows, scheme.scale_width(layer.columns))
        for what, shape in wanted.items():
            key = f"{layer.name}.weight_{what}"
            in_file = next((found[k] for k in name_variants(model, key) if k in found), None)
            if in_file is None:
                raise InputError(f"the checkpoint has no {key}.", layer=layer.name)
            if in_file != shape:
                raise InputError(
                    f"weight_{what} in the file is {list(in_file)}, and the config asks for {list(shape)}.",
                    layer=layer.name,
                )
