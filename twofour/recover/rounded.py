"""Training with the rounding of a later `quantize` in the loop, so that the weights learn to live with it.

    forward    multiplies with the weight as `quantize --rounding nearest` would store it: the same search for
               the scales, the same codes; activations are rounded where the scheme rounds them
    backward   hands the gradient straight through both
    step       moves the weights themselves, in float32: many small steps make one change of a code

Scales are not learnt but found anew from the weights after every step. So what is trained is a function of
the weights alone: there is nothing to save with them, a resumed run has the scales it had, and the model that
comes out is a 2:4 model as any other, of which `quantize --rounding nearest` makes the very codes that were
evaluated. The weights are rounded to the dtype they will be stored in before they get their codes, for that
is what `quantize` will find. (Where sums are added up in another order, on another device, two scales with
the same error may swap.)

A scale belongs to a row and the code of zero is zero, so a pruned weight stays out of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twofour.quantize.rounding import scale_factors, search_scale
from twofour.quantize.schemes import Scheme
from twofour.recover.derived import derive, largest_two, plain_again
from twofour.recover.fused import Fused
from twofour.recover.mask_tensor import cuts_groups, is_sharded, with_whole_groups
from twofour.recover.masks import ddp_ignore, reshard
from twofour.select import Layer

#: Weights whose scales are searched together. The search is a few hundred kernels, which for small layers
#: take longer to start than to run.
TOGETHER = 1 << 24

_SCALE = "rounding_scale"


class RoundedLayers:
    """Lets these layers multiply with rounded weights, in somebody's own loop.

    >>> from twofour import prune_
    >>> from twofour.quantize import SCHEMES
    >>> from twofour.select import select
    >>> model = prune_(nn.Sequential(nn.Linear(64, 32)))
    >>> layers = select(model).layers
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> rounded = RoundedLayers(model, layers, SCHEMES["int4"])
    >>> for step in range(2):
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     optimizer.step()
    ...     rounded.refresh()
    >>> rounded.stop()
    >>> model
    Sequential(
      (0): Linear(in_features=64, out_features=32, bias=True)
    )

    `stored` are the dtypes that weights will be stored in, by the names of their parameters, where that is
    not the one they have. `fully_shard` and moves to another device may follow; then call `refresh`.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        scheme: Scheme,
        stored: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._model, self._layers, self._scheme = model, tuple(layers), scheme
        self._stored = dict(stored or {})
        self.start()

    def start(self) -> None:
        """From now on the layers round. They may have moving masks, which come first."""
        for layer in self._layers:
            module: Any = self._model.get_submodule(layer.name)
            weight = module.get_parameter("weight")
            derive(module, layer)
            module.rounds_to = self._scheme
            module.rounds_from = self._stored.get(f"{layer.name}.weight", weight.dtype)
            width = self._scheme.scale_width(layer.columns)
            scale = torch.ones(layer.rows, width, device=weight.device)
            module.register_buffer(_SCALE, scale, persistent=False)
        ddp_ignore(self._model, add=self._buffer_names())
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the scales of the weights as they are now: after every step, and after loading others."""
        reshard(self._model)
        for some in self._batches():
            modules: list[Any] = [self._model.get_submodule(layer.name) for layer in some]
            matrices = [_matrix(layer, module) for layer, module in zip(some, modules, strict=True)]
            search = fused_search if matrices[0].is_cuda else search_scale
            found = search(torch.cat(matrices), self._scheme, modules[0].rounds_from)
            scales = found.split([len(matrix) for matrix in matrices])
            for module, scale in zip(modules, scales, strict=True):
                module.rounding_scale.copy_(_of_all_rows(scale, module))

    def stop(self) -> None:
        """Leave the weights themselves, in layers as they were."""
        ddp_ignore(self._model, remove=self._buffer_names())
        for layer in self._layers:
            module: Any = self._model.get_submodule(layer.name)
            delattr(module, _SCALE)
            del module.rounds_from
            module.rounds_to = None
            plain_again(module)

    def _batches(self) -> Iterator[list[Layer]]:
        """Layers of the same width and dtype, as many as make up `TOGETHER` weights."""
        alike: dict[tuple[int, torch.dtype], list[Layer]] = {}
        for layer in self._layers:
            module: Any = self._model.get_submodule(layer.name)
            some = alike.setdefault((layer.columns, module.rounds_from), [])
            if some and sum(other.rows * other.columns for other in some) >= TOGETHER:
                yield some.copy()
                some.clear()
            some.append(layer)
        yield from alike.values()

    def _buffer_names(self) -> list[str]:
        return [f"{layer.name}.{_SCALE}".lstrip(".") for layer in self._layers]


def fused_search(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """`search_scale`, whose passes over the weights, eight for each of its candidates, become one kernel.

    The candidates are made out of its sight: a compiler leaves out their rounding to bfloat16.
    """
    rows, columns = weight.shape
    size = scheme.group or columns
    grouped = F.pad(weight, (0, -columns % size)).reshape(rows, -1, size)
    largest = grouped.abs().amax(-1)
    scales = torch.stack([scheme.rounded_scale(largest * f, dtype) for f in scale_factors(scheme)])
    errors = _fused_errors(grouped, scales, scheme)
    number = torch.arange(len(scales), device=weight.device).view(-1, 1, 1)
    # The first of equals, as there. None is the least where weights are NaN: that run ends soon.
    best = torch.where(errors == errors.amin(0), number, len(scales) - 1).amin(0)
    return scales.gather(0, best[None]).squeeze(0)


def _errors(grouped: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """Of each candidate [c, rows, width] the squared error of its groups [rows, width, size]."""
    scales = scales[..., None]
    return (scheme.to_codes(grouped / scales) * scales - grouped).square().sum(-1)


_fused_errors = Fused(_errors, "the search for scales")


def _matrix(layer: Layer, module: Any) -> Tensor:
    """What has codes of a layer, as it will be stored; of a sharded one the rows of this process."""
    layer, weight = with_whole_groups(layer, module.get_parameter("weight"))
    if module.mask_moves:
        weight = torch.where(largest_two(layer, weight), weight, 0)
    return layer.to_matrix(weight.to(module.rounds_from).float())


def _of_all_rows(scale: Tensor, module: Any) -> Tensor:
    """The scales of the whole weight, for that is what a forward gathers."""
    whole, weight = module.rounding_scale, module.get_parameter("weight")
    if not is_sharded(weight) or cuts_groups(module.derived_layer, weight):  # which was gathered before
        return scale
    from torch.distributed.tensor import DTensor

    placed: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(scale, weight.device_mesh, weight.placements, **placed).full_tensor()
