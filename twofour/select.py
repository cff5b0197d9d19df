"""Which layers of a model become 2:4, and for every other layer the reason why not.

Eligible are plain `nn.Linear`, transformers' `Conv1D` (GPT-2: a Linear stored transposed) and ungrouped
`nn.Conv2d`. Left alone by default: embeddings and norms (not matrices that multiply activations), output
heads and expert routers (small share of the time, large share of the accuracy), and layers too small to
gain anything. `include` and `exclude` are shell-style patterns over module names; what `include` names
explicitly is taken even if it is a head, a router or small. Experts that are stored as one tensor are taken
apart into `nn.Linear`s first (`twofour.calibrate.experts`).

`Layer` knows how a layer's weight is laid out as the matrix that the rule applies to:

    Linear  [n, k]        as it is
    Conv1D  [k, n]        transposed
    Conv2d  [O, C, R, S]  [O, R·S·C], channels innermost and padded with zeros to a multiple of 4,
                          so that groups run along C
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import Tensor, nn

from twofour.errors import InputError

Kind = Literal["linear", "conv1d", "conv2d"]

#: Sides below this are cheaper dense: the kernel launch outweighs the product.
SMALLEST_SIDE = 16

#: Names of output heads in models that do not say which of their modules is one.
HEADS = ("lm_head", "embed_out", "head", "heads", "classifier", "score", "qa_outputs", "output_projection")

#: Names of expert routers: tiny, and a wrong expert costs more than a wrong weight.
ROUTERS = ("router", "gate", "shared_expert_gate", "wg")


@dataclass(frozen=True)
class Layer:
    """An eligible layer: its module's name, what it is, and its shape as [out, in] or [O, C, R, S]."""

    name: str
    kind: Kind
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Width of the matrix; for a convolution with its channels padded to a multiple of 4."""
        if self.kind != "conv2d":
            return self.shape[1]
        _, channels, height, width = self.shape
        return height * width * (channels + -channels % 4)

    def padding(self, row_multiple: int, column_multiple: int) -> tuple[int, int]:
        """Rows and columns of zeros that a backend needing such multiples adds."""
        return -self.rows % row_multiple, -self.columns % column_multiple

    def to_matrix(self, weight: Tensor) -> Tensor:
        """The module's weight as [rows, columns]."""
        if self.kind == "linear":
            return weight
        if self.kind == "conv1d":
            return weight.t()
        channels_last = weight.permute(0, 2, 3, 1)
        return nn.functional.pad(channels_last, (0, -weight.shape[1] % 4)).reshape(self.rows, self.columns)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of `to_matrix`, in the module's own layout."""
        if self.kind == "linear":
            return matrix
        if self.kind == "conv1d":
            return matrix.t().contiguous()
        out, channels, height, width = self.shape
        return matrix.reshape(out, height, width, -1)[..., :channels].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class LeftAlone:
    """A layer that stays as it is, and why."""

    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class Selection:
    layers: tuple[Layer, ...]
    left: tuple[LeftAlone, ...]


def select(model: nn.Module, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Selection:
    """Sort the layers of a model into those to make 2:4 and those to leave alone.

    >>> select(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))).layers
    (Layer(name='0', kind='linear', shape=(64, 64)),)
    """
    layers: list[Layer] = []
    left: list[LeftAlone] = []
    matched: set[str] = set()
    shared = _shared_weights(model)
    for name, module in _with_own_parameters(model):
        hits = {p for p in (*include, *exclude) if fnmatchcase(name, p)}
        matched |= hits
        layer = as_layer(name, module)
        if isinstance(layer, str):
            reason = layer
        elif name in shared:
            reason = f"shares its weight with {shared[name]}"
        elif hits & set(exclude):
            reason = "excluded by " + ", ".join(sorted(hits & set(exclude)))
        elif include and not hits & set(include):
            reason = "not named by --include"
        elif not include and (by_default := _default_reason(model, layer)):
            reason = by_default
        else:
            layers.append(layer)
            continue
        left.append(LeftAlone(name, type(module).__name__, reason))
    if unmatched := [p for p in (*include, *exclude) if p not in matched]:
        raise InputError(
            f"no layer of the model matches {', '.join(map(repr, unmatched))}.",
            hint=f"Names look like {_example_names(layers, left)}.",
        )
    return Selection(tuple(layers), tuple(left))


def require_layers(selection: Selection) -> Selection:
    """Refuse a selection with nothing in it, saying why each candidate was left alone."""
    if not selection.layers:
        reasons = sorted({f"{x.type}: {x.reason}" for x in selection.left})
        raise InputError(
            "no layer of this model can be made 2:4.", hint="Left alone: " + "; ".join(reasons[:6]) + "."
        )
    return selection


def as_layer(name: str, module: nn.Module) -> Layer | str:
    """The layer, or the reason why its type cannot be one."""
    kind = type(module)
    weight = module._parameters.get("weight")
    if isinstance(module, nn.Linear | nn.Conv2d) and (weight is None or nn.parameter.is_lazy(weight)):
        return "its weight is computed or not there yet (weight_norm, torch's prune, a lazy module)"
    shape = () if weight is None else tuple(weight.shape)
    if kind is nn.Linear:
        return Layer(name, "linear", shape)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return Layer(name, "conv1d", shape[::-1])
    if kind is nn.Conv2d:
        assert isinstance(module, nn.Conv2d)
        if module.groups != 1:
            return f"a convolution in {module.groups} groups has no single matrix"
        return Layer(name, "conv2d", shape)
    if isinstance(module, nn.Linear | nn.Conv2d):
        return f"{kind.__name__} is a subclass whose forward may not be a plain product"
    if experts := stacked_experts(module):
        return experts if isinstance(experts, str) else "its experts are stored as one tensor"
    return "packed already" if hasattr(module, "weight_meta") else "not a Linear, Conv1D or Conv2d"


def stacked_experts(module: nn.Module) -> tuple[str, ...] | str | None:
    """The names of a module's weights [experts, out, in], the up side first; why not, if it has such experts
    but in another form; None if it has none.

    transformers marks such modules: its decorator `use_experts_implementation` leaves these attributes on a
    class of any model, and says with them that it computes down(activation(up(x))) for each expert.
    """
    if not all(hasattr(module, mark) for mark in ("num_experts", "is_transposed", "has_bias", "_apply_gate")):
        return None
    weights = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    own = set(weights) | {f"{name}_bias" for name in weights}
    if module.is_transposed:
        return "its experts are stored as [in, out], and groups of four run along the inputs"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    if any(name not in own for name, _ in module.named_parameters()):
        return "it has parameters beside the weights of its experts"
    for name in weights:
        weight = module._parameters.get(name)
        if weight is None or weight.dim() != 3 or len(weight) != module.num_experts:
            return f"its {name} is not [experts, out, in]"
        if not weight.is_floating_point():
            return f"its {name} is quantized"
    return weights


def _default_reason(model: nn.Module, layer: Layer) -> str | None:
    """Why a layer of the right type is left alone unless it is asked for."""
    last = layer.name.rpartition(".")[2]
    # A transformers model keeps its body under one attribute; what stands beside it is the head.
    body = getattr(model, "base_model_prefix", "")
    if (
        (body and hasattr(model, body) and not layer.name.startswith(body + "."))
        or last in HEADS
        or layer.name == "fc"
    ):
        return "an output head"
    if last in ROUTERS:
        return "an expert router"
    side = min(layer.shape[0], layer.shape[1])
    if side < SMALLEST_SIDE:
        return f"too small: {side} channels on one side, and below {SMALLEST_SIDE} there is nothing to gain"
    return None


def _with_own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            yield name, module


def _shared_weights(model: nn.Module) -> dict[str, str]:
    """Modules whose weight belongs to another one too (tied embeddings): changing one changes both."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, _, own = name.rpartition(".")
        if own == "weight":
            owners.setdefault(id(parameter), []).append(module)
    shared: dict[str, str] = {}
    for names in owners.values():
        if len(names) > 1:
            shared |= {name: next(other for other in names if other != name) for name in names}
    return shared


def _example_names(layers: list[Layer], left: list[LeftAlone]) -> str:
    names = [x.name for x in layers] + [x.name for x in left]
    return ", ".join(repr(n) for n in names[:: max(1, len(names) // 3)][:3])
