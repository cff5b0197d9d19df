"""RMSNorm as one kernel, where a model spells it out as eight.

transformers writes the norm step by step (to float32, square, mean, …), and without a compiler each step is a
kernel that reads and writes the whole activation. Beside products that 2:4 has made faster that is a large
part of what is left, so `fuse_` replaces it by torch's own `rms_norm`, which is one kernel and rounds once
instead of twice. A dense model gets the same from `fuse_`: a fair comparison gives it to both.

What an RMSNorm is, is seen by calling it, not known by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

#: How far the one kernel may be from the module, as a share of the largest output: a few roundings.
ROUNDINGS = 4

#: Sizes of inputs to try. At the small one epsilon decides, so a wrong one is seen.
SCALES = (1.0, 1e-3)


class FusedNorm(nn.Module):
    """In the place of a module that computes x / √(mean(x²) + eps) · weight."""

    def __init__(self, original: nn.Module, eps: float) -> None:
        super().__init__()
        self.weight = original.get_parameter("weight")
        self.eps = eps
        self._original = (original,)  # in a tuple it is no child of this module

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # the one kernel wants the same, the module knows what it does then
            out: Tensor = self._original[0](x)
            return out
        return rms_norm(x, self.weight.shape, self.weight, self.eps)

    def separate(self) -> nn.Module:
        original = self._original[0]
        original.weight = self.weight  # moved with the model, so it may be another object by now
        return original.train(self.training)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


@torch.no_grad()
def as_fused_norm(module: nn.Module) -> FusedNorm | None:
    """The module as one kernel, if it is an RMSNorm and nothing else."""
    eps = _epsilon(module)
    if eps is None or isinstance(module, FusedNorm | nn.RMSNorm):
        return None
    weight = module.get_parameter("weight")
    random = torch.Generator().manual_seed(0)
    like = torch.randn(8, weight.shape[0], generator=random, device="cpu").to(weight)
    for scale in SCALES:
        x = like * scale
        try:
            wanted = module(x)
        except Exception:  # whatever it is, it is not called with one tensor as a norm is
            return None
        got = rms_norm(x, weight.shape, weight, eps)
        if not (isinstance(wanted, Tensor) and wanted.shape == got.shape and wanted.dtype == got.dtype):
            return None
        allowed = ROUNDINGS * torch.finfo(got.dtype).eps * float(wanted.abs().max())
        if not float((got - wanted).abs().max()) <= allowed:
            return None
    return FusedNorm(module, eps).train(module.training)


def _epsilon(module: nn.Module) -> float | None:
    """What a module with one vector named weight and nothing else calls its epsilon."""
    parameters = dict(module.named_parameters())
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    if list(parameters) != ["weight"] or parameters["weight"].dim() != 1 or hooked:
        return None
    if not parameters["weight"].is_floating_point() or parameters["weight"].is_meta:
        return None
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None
