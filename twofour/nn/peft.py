"""PEFT's LoRA adapters on packed layers: the packed weight is frozen, the adapter is trained beside it.

    import peft, twofour                                              # in either order
    model = AutoModelForCausalLM.from_pretrained("packed")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))

PEFT knows layer types by a list. It has a place for others, `LoraConfig._register_custom_module`, but there
each config object has to be told, also those that PEFT reads from a file by itself. So we tell every config
as it is made; importing this module does that, and `import twofour` sees to it (see _import_hook.py).

The packed weight may be one of 8 or 4 bits (a `QuantizedLinear` is a `SparseLinear`): the adapter then stays
in the layer's own dtype, sees its input as it was before it was rounded, and gradients pass the rounding
straight through.

Such an adapter can be trained, saved, loaded, switched and unloaded, but not merged: it is a dense matrix,
and the sum with a 2:4 weight would not be 2:4. `twofour.recover.lora` has adapters that can be merged.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, NoReturn

from peft import LoraConfig, LoraModel
from peft.tuners import lora
from torch import nn

from twofour.errors import InputError, TwoFourError
from twofour.nn.linear import SparseLinear

#: Ways to begin that leave the frozen weight as it is. The others (PiSSA, OLoRA, LoftQ, ...) write to it.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


class PackedLoraLinear(lora.Linear):
    """PEFT's adapter around a packed linear layer. y = packed(x) + scaling·B·(A·dropout(x))."""

    @property
    def lora_variants(self) -> dict[Any, Any]:
        """Plain LoRA only: DoRA and its kin compute with the dense weight, or write to it."""
        return {(): None}

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, SparseLinear)
        return module.in_features, module.out_features

    def update_layer(self, adapter_name: str, r: int, *args: Any, **kwargs: Any) -> None:
        # PEFT before 0.19 gives each setting on its own, later versions the config.
        given = vars(kwargs["config"]) if "config" in kwargs else kwargs
        if given.get("use_dora"):
            raise InputError(
                "use_dora=True would unpack the weight in every step.", layer=self._name, hint="Leave it out."
            )
        begin = given.get("init_lora_weights", True)
        if begin not in _BEGINNINGS:
            raise InputError(
                f"init_lora_weights={begin!r} would change the weight, and a packed one is frozen.",
                layer=self._name,
                hint="Use True or 'gaussian'.",
            )
        super().update_layer(adapter_name, r, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> NoReturn:
        _refuse_merge(self._name)

    @property
    def _name(self) -> str:
        return self.get_base_layer().layer.name


def _refuse_merge(name: str) -> NoReturn:
    raise TwoFourError(
        "the adapter cannot be merged: it is dense, and its sum with the 2:4 weight would not be 2:4.",
        layer=name,
        hint="Keep it beside the weight (save_pretrained writes the adapter alone), or, for one that merges, "
        "use masked adapters on the pruned model before it is packed: twofour recover --recipe lora.",
    )


def _tell_every_config() -> None:
    make = LoraConfig.__post_init__

    @wraps(make)
    def make_and_tell(self: Any) -> None:
        make(self)
        self._register_custom_module({SparseLinear: PackedLoraLinear})

    LoraConfig.__post_init__ = make_and_tell


def _refuse_merges_at_once() -> None:
    """Where some layers are packed and others not, refuse before PEFT has merged the first of the others."""
    check = LoraModel._check_merge_allowed

    @wraps(check)
    def check_and_refuse(self: Any) -> None:
        for module in self.model.modules():
            if isinstance(module, PackedLoraLinear):
                _refuse_merge(module._name)
        check(self)

    LoraModel._check_merge_allowed = check_and_refuse


_tell_every_config()
_refuse_merges_at_once()
