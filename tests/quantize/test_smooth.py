"""Smoothing changes nothing that can be seen from outside, and makes the tokens easier to round."""

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.prune import prune_
from twofour.quantize import smooth_
from twofour.quantize.activations import round_tokens

TOKENS = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(0))


def llama(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options,
    )
    return with_outliers(LlamaForCausalLM(config))


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return with_outliers(GPT2LMHeadModel(config))


@torch.no_grad()
def with_outliers(model):
    for name, module in model.named_modules():
        if "norm" in type(module).__name__.lower() and name:
            module.weight[5] = 60.0
            module.weight[9] = 0.01
            if getattr(module, "bias", None) is not None:
                module.bias.normal_()
    return prune_(model.eval())


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2])
def test_outputs_stay_and_rounding_gets_easier(make):
    model = make()
    before = copy.deepcopy(model)
    names = smooth_(model, TOKENS)
    assert len(names) == 4  # two in each block; the last norm feeds the head, which is left alone
    torch.testing.assert_close(model(TOKENS).logits, before(TOKENS).logits, rtol=1e-5, atol=1e-5)

    def lost(of):
        norm = of.get_submodule(names[0])
        seen = []
        hook = norm.register_forward_hook(lambda _, __, out: seen.append(out.flatten(0, 1)))
        of(TOKENS)
        hook.remove()
        codes, scale = round_tokens(seen[0], torch.int8)
        typical = seen[0].abs().median(0).values.clamp(min=1e-9)
        return float(((codes.float() * scale - seen[0]).abs() / typical).mean())

    assert lost(model) < 0.5 * lost(before)
    for (_, new), (name, old) in zip(model.named_parameters(), before.named_parameters(), strict=True):
        if old.dim() == 2:
            assert torch.equal(new == 0, old == 0), name  # a column times a power of two


@torch.no_grad()
def test_2_4_holds_and_factors_are_powers_of_two():
    model = llama()
    old = model.model.layers[0].self_attn.q_proj.weight.clone()
    smooth_(model, TOKENS)
    new = model.model.layers[0].self_attn.q_proj.weight
    assert check_pattern(new).legal
    kept = old != 0
    mantissa, _ = torch.frexp(new[kept] / old[kept])
    assert bool((mantissa == 0.5).all())
    assert not torch.equal(new, old)


class OnePlus(nn.Module):
    """A norm whose scale is one plus its weight: dividing the weight divides something else."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 0.3))
        self.weight.data[5] = 40

    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)


@torch.no_grad()
def test_what_is_no_plain_norm_is_left_as_it_was():
    model = llama()
    model.model.layers[1].input_layernorm = OnePlus()
    before = copy.deepcopy(model.state_dict())
    out = model(TOKENS).logits
    names = smooth_(model, TOKENS)
    assert "model.layers.1.input_layernorm" not in names
    assert len(names) == 3
    assert torch.equal(
        model.model.layers[1].input_layernorm.weight, before["model.layers.1.input_layernorm.weight"]
    )
    key = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[key], before[key])
    torch.testing.assert_close(model(TOKENS).logits, out, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_norm_with_another_reader_is_left_alone():
    """Excluding one of its readers keeps the norm as it is: the others cannot change without it."""
    model = llama()
    names = smooth_(model, TOKENS, exclude=["*.0.self_attn.k_proj"])
    assert "model.layers.0.input_layernorm" not in names
    assert len(names) == 3


def test_strength_is_checked():
    with pytest.raises(InputError, match="strength"):
        smooth_(llama(), TOKENS, strength=1.5)
