"""Norms as one kernel: only what computes just that, and with the same weight under the same name."""

import copy

import pytest
import torch
from torch import nn

from tests.nn.test_fuse import tiny_llama
from twofour.nn import fuse_, unfuse_
from twofour.nn.fuse_norm import FusedNorm, as_fused_norm


class Norm(nn.Module):
    """RMSNorm as transformers spells it out, with what could be different about it."""

    def __init__(self, size=48, eps=1e-6, used_eps=None, offset=0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.variance_epsilon = eps
        self.used_eps, self.offset = used_eps or eps, offset

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.used_eps)
        return (self.offset + self.weight) * wide.to(x.dtype)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48))
        self.eps = 1e-6

    def forward(self, x, by):
        return x * self.weight * by


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_the_same_within_rounding(dtype):
    norm = Norm().to(dtype)
    fused = as_fused_norm(norm)
    assert isinstance(fused, FusedNorm)
    for x in (torch.randn(3, 5, 48), torch.randn(1, 48) * 1e-3, torch.zeros(2, 48), torch.randn(0, 48)):
        torch.testing.assert_close(fused(x.to(dtype)), norm(x.to(dtype)))
    assert torch.equal(
        fused(torch.ones(2, 48, dtype=torch.float64)), norm(torch.ones(2, 48, dtype=torch.float64))
    )


@pytest.mark.parametrize(
    "other",
    [Norm(used_eps=1e-5), Norm(offset=1.0), Centred(), Scale(), nn.RMSNorm(48, eps=1e-6), nn.LayerNorm(48)],
    ids=["other epsilon", "one plus the weight", "centred", "scale", "torch's own", "LayerNorm"],
)
def test_what_is_something_else_stays(other):
    assert as_fused_norm(other) is None


def test_a_norm_that_somebody_watches_stays():
    norm = Norm()
    norm.register_forward_hook(lambda *_: None)
    assert as_fused_norm(norm) is None


@torch.no_grad()
def test_in_a_model_and_back():
    tokens = torch.randint(100, (2, 9), generator=torch.Generator().manual_seed(1))
    model = tiny_llama()
    before, wanted = model.state_dict(), model(tokens).logits
    kinds = {name: type(m) for name, m in model.named_modules()}
    fuse_(model)
    assert sum(isinstance(m, FusedNorm) for m in model.modules()) == 5
    torch.testing.assert_close(model(tokens).logits, wanted)
    assert model.state_dict().keys() == before.keys()
    double = copy.deepcopy(model).bfloat16()
    unfuse_(double)
    assert {name: type(m) for name, m in double.named_modules()} == kinds
    assert double.model.norm.weight.dtype == torch.bfloat16
    unfuse_(model)
    assert torch.equal(model(tokens).logits, wanted)


@torch.no_grad()
def test_a_dense_model_has_its_norms_fused_and_no_products():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4)).eval()
    tokens = torch.arange(12)[None]
    wanted = model(tokens).logits
    assert fuse_(model) == 0
    assert sum(isinstance(m, FusedNorm) for m in model.modules()) == 5
    torch.testing.assert_close(model(tokens).logits, wanted)
