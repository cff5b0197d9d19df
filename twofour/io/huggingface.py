"""transformers' part: `from_pretrained` and `save_pretrained` of packed checkpoints.

Registered with transformers as the quantizer "twofour" (see `twofour/__init__.py` for when). It swaps the
packed modules into the skeleton before the weights are loaded, checks the files against the config, and
validates every packed tensor afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from twofour.errors import InputError
from twofour.io.format import METHOD, format_version, lowrank_ranks, packed_modules, scheme_of, stub
from twofour.io.structure import name_variants
from twofour.io.writer import shard_metadata
from twofour.nn.convert import common_scheme, packed_layers, stored_layers, swap_
from twofour.nn.lowrank import empty_lowrank_, lowrank_layers
from twofour.packed import packed_shapes
from twofour.quantize.schemes import Scheme
from twofour.select import Layer, as_layer
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

    def update_attn_implementation(self, config: Any) -> Any:
        return _without_sentence(config)

    def update_tp_plan(self, config: Any) -> Any:
        # The same hook by its older name: the only ones that see the config before the files are looked up.
        return _without_sentence(config)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        layers = list(_layers_of(model, self.quantization_config.modules))
        lowrank = self.quantization_config.lowrank
        scheme = scheme_of(self.quantization_config.to_dict())
        _require_tensors(model, layers, lowrank, scheme, kwargs.get("checkpoint_files"))
        with torch.device("meta"):
            swap_(model, layers, scheme=scheme)
            for name, rank in lowrank.items():
                own = next((n for n in name_variants(model, name) if n in {x.name for x in layers}), None)
                if own is not None:  # else it is part of a head that this class does not have
                    empty_lowrank_(model.get_submodule(own), rank, own)
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        container = set if isinstance(ignored, set) else list  # newer and older transformers
        stubs = [
            re.escape(name_variants(model, key)[-1]) + "$" for key in stub(self.quantization_config.modules)
        ]
        model._keys_to_ignore_on_load_unexpected = container([*(ignored or ()), *stubs])  # type: ignore[assignment]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
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
    for name, shape in modules.items():
        own = next((n for n in name_variants(model, name) if n in here), None)
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
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (not a dict)
                if key.rpartition(".")[2] in _PARTS:
                    found[key] = tuple(opened.get_slice(key).get_shape())
    for key in (f"{name}.lowrank_{side}" for name in lowrank for side in ("left", "right")):
        if not any(variant in found for variant in name_variants(model, key)):
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
