"""Packed modules in a model: converted with their weights, or swapped in empty."""

import copy

import pytest
import torch
from torch import nn

from twofour.errors import InputError
from twofour.nn import SparseConv2d, SparseLinear, convert_, packed_layers, set_memory, swap_
from twofour.prune import prune_
from twofour.select import select


@pytest.fixture
def model():
    """A pruned convolution and two Linears, one of them nested, and a norm that stays."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32, bias=False)})

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(18, 32, 3, padding=1)
            self.block = block
            self.norm = nn.LayerNorm(32)

        def forward(self, x):
            x = self.conv(x).mean((-1, -2))
            return self.norm(self.block["down"](self.block["up"](x).relu()))

    return prune_(Model())


@pytest.fixture(scope="module")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    return prune_(GPT2LMHeadModel(config).eval())


def images():
    return torch.randn(2, 18, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_convert_keeps_the_numbers(model, memory):
    expected = model(images())
    layers = select(model).layers
    assert [layer.name for layer in layers] == ["conv", "block.up", "block.down"]
    convert_(model, layers, memory)
    assert type(model.conv) is SparseConv2d
    assert type(model.block["up"]) is SparseLinear
    assert model.block["down"].bias is None
    assert all(m.memory == memory for m in packed_layers(model).values())
    torch.testing.assert_close(model(images()), expected)


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_convert_a_gpt2(gpt2, memory):
    tokens = torch.arange(12).reshape(2, 6)
    packed = copy.deepcopy(gpt2)
    convert_(packed, select(packed).layers, memory)
    assert len(packed_layers(packed)) == 4
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens).logits, gpt2(tokens).logits, rtol=1e-4, atol=1e-5)
    assert packed.lm_head.weight is packed.transformer.wte.weight


def test_convert_is_all_or_nothing(model):
    layers = select(model).layers
    with torch.no_grad():
        model.block["down"].weight[5, 8:11] = 1.0  # the last of the three layers
    before = dict(model.named_modules())
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"block\.down: row 5, group 2"):
        convert_(model, layers)
    after = dict(model.named_modules())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_convert_only_what_is_named(model):
    convert_(model, select(model, include=["block.up"]).layers)
    assert list(packed_layers(model)) == ["block.up"]
    assert type(model.conv) is nn.Conv2d


def test_the_packed_state_dict(model):
    convert_(model, select(model).layers, "fast")
    names = set(model.state_dict())
    assert names == {
        "conv.weight_values",
        "conv.weight_meta",
        "conv.bias",
        "block.up.weight_values",
        "block.up.weight_meta",
        "block.up.bias",
        "block.down.weight_values",
        "block.down.weight_meta",
        "norm.weight",
        "norm.bias",
    }
    # 18 channels are padded to 20: nine places of five groups, two values and half a byte each.
    assert model.conv.weight_values.shape == (32, 90)
    assert model.conv.weight_meta.shape == (32, 23)
    assert model.block["down"].weight_values.shape == (32, 32)
    assert model.block["down"].weight_meta.shape == (32, 8)


@pytest.mark.parametrize("convert", [convert_, swap_])
def test_the_training_flag_and_frozen_biases_are_kept(model, convert):
    model.block.eval()
    model.conv.bias.requires_grad_(False)
    convert(model, select(model).layers)
    assert model.conv.training
    assert not model.block["up"].training
    if convert is convert_:
        assert not model.conv.bias.requires_grad
        assert model.block["up"].bias.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory", ["fast", "small"])
def test_a_swapped_skeleton_loads_the_tensors_of_a_converted_model(model, dtype, memory):
    model.to(dtype)
    expected = model(images().to(dtype))
    skeleton = copy.deepcopy(model)
    convert_(model, select(model).layers)
    swap_(skeleton, select(skeleton).layers, memory)
    assert all(m.weight_values.dtype == dtype for m in packed_layers(skeleton).values())
    assert not skeleton.conv.unpacked().any()
    skeleton.load_state_dict(model.state_dict())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(skeleton(images().to(dtype)), expected, rtol=tolerance, atol=tolerance)


def test_a_skeleton_on_meta_takes_tensors_by_assignment(gpt2):
    tokens = torch.arange(12).reshape(2, 6)
    source = copy.deepcopy(gpt2)
    convert_(source, select(source).layers)
    skeleton = copy.deepcopy(gpt2).to("meta")
    swap_(skeleton, select(skeleton).layers, "fast")
    packed = packed_layers(skeleton)
    assert set(packed) == set(packed_layers(source))
    assert all(m.weight_values.is_meta and m.dense_weight is None for m in packed.values())
    skeleton.load_state_dict(source.state_dict(), assign=True)
    assert all(m.dense_weight is not None for m in packed.values())
    with torch.no_grad():
        torch.testing.assert_close(skeleton(tokens).logits, gpt2(tokens).logits, rtol=1e-4, atol=1e-5)


def test_packed_layers_and_set_memory_reach_every_layer(model):
    convert_(model, select(model).layers, "small")
    packed = packed_layers(model)
    assert list(packed) == ["conv", "block.up", "block.down"]
    assert packed["block.up"] is model.block["up"]
    assert all(m.dense_weight is None for m in packed.values())
    assert set_memory(model, "fast") is model
    assert all(m.dense_weight is not None for m in packed.values())
    set_memory(model, "small")
    assert all(m.dense_weight is None for m in packed.values())
    with pytest.raises(InputError, match="memory must be"):
        set_memory(model, "huge")


@pytest.mark.parametrize("convert", [convert_, swap_])
def test_a_bare_layer_cannot_be_replaced_in_place(convert):
    linear = prune_(nn.Linear(32, 32))
    with pytest.raises(InputError):
        convert(linear, select(linear).layers)


def test_packed_layers_are_not_selected_again(model):
    convert_(model, select(model).layers)
    assert select(model).layers == ()
