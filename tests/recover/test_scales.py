"""Training the scales of a quantized model: no code changes, and what comes back is a quantized model."""

import copy

import pytest
import torch
from torch import nn

import twofour
from twofour.errors import InputError
from twofour.nn.quantized import QuantizedLinear
from twofour.quantize.schemes import SCHEMES, scheme_named
from twofour.recover import Recover
from twofour.recover.scales import LearntScales, learn_scales_, put_back_

LENGTH = 24


def group_of(name):
    return 32 if name == "int4" else None


def small(seed=0, **changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 40}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**{**shape, "initializer_range": 0.3, **changed})).eval()


def quantized(model, name):
    return twofour.quantize_(
        twofour.prune_(copy.deepcopy(model)), name, group=group_of(name), rounding="nearest"
    )


def windows(count=64):
    return torch.randint(0, 40, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def tensors(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", list(SCHEMES))
def test_gradients_are_those_of_a_plain_product(name):
    """Of columns that do not fill their last group, too."""
    torch.manual_seed(0)
    scheme = scheme_named(name, group_of(name))
    model = nn.Sequential(twofour.prune_(nn.Sequential(nn.Linear(44, 24)))[0])
    model = twofour.quantize_(model, name, group=group_of(name), rounding="nearest")
    codes, scale = (t.clone() for t in (model[0].unpacked(torch.float32), model[0].weight_scale.float()))
    spread = scale.repeat_interleave(32, 1)[:, :44] if scheme.group else scale
    codes = (codes / spread).round(decimals=4)
    x, wanted = torch.randn(5, 44), torch.randn(5, 24)
    before = model(x)
    (learning,) = learn_scales_(model, {}).values()
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    torch.nn.functional.mse_loss(model(x), wanted, reduction="sum").backward()
    # By hand: y = x̂·(codes·scale)ᵀ + b, and the factor is e to the change.
    from twofour.quantize.activations import as_rounded

    plain = scale.clone().requires_grad_()
    weight = codes * (plain.repeat_interleave(32, 1)[:, :44] if scheme.group else plain)
    y = torch.nn.functional.linear(as_rounded(x, scheme), weight, model[0].bias.detach())
    torch.nn.functional.mse_loss(y, wanted, reduction="sum").backward()
    torch.testing.assert_close(learning.scale_change.grad, plain.grad * scale, rtol=1e-3, atol=1e-3)
    assert learning.scale_change.grad.abs().max() > 0


@pytest.mark.parametrize("name", list(SCHEMES))
def test_no_code_changes_and_the_model_learns(name):
    teacher = small()
    model = quantized(teacher, name)
    before, data = tensors(model), windows()
    logits = model(data[:4]).logits
    options = Recover(tokens=60 * 8 * LENGTH, batch=8, lr=5e-3, eval_every=20)
    twofour.recover_(model, data, teacher, options, held_out=data[:8])
    after = tensors(model)
    assert set(after) == set(before)
    same = {key for key in before if torch.equal(as_bytes(before[key]), as_bytes(after[key]))}
    assert {key for key in before if key.endswith(("weight_values", "weight_meta"))} <= same
    assert not {key for key in same if key.endswith(("weight_scale", "norm.weight"))}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= same
    kinds = {type(module) for name, module in model.named_modules() if name.endswith("proj")}
    assert kinds == {QuantizedLinear}
    for key, scale in after.items():
        if key.endswith("weight_scale"):
            assert torch.equal(scale, scale.bfloat16().to(scale.dtype))  # eight significant bits
            assert bool((scale * before[key] > 0).all())
    wanted = teacher(data[:4]).logits.log_softmax(-1)

    def divergence(logits):
        return torch.nn.functional.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="sum")

    with torch.no_grad():
        assert divergence(model(data[:4]).logits) < 0.9 * divergence(logits)
    assert not any(p.requires_grad for key, p in model.named_parameters() if ".weight_" in key)
    assert model.model.embed_tokens.weight.requires_grad


def test_a_model_of_16_bit_comes_back_in_16_bit():
    model = quantized(small().to(torch.bfloat16), "int4")
    data = windows(24)
    options = Recover(tokens=4 * 8 * LENGTH, batch=8, lr=3e-3)
    twofour.recover_(model, data, options=options, held_out=data[:8])
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}
    again = quantized(small().to(torch.bfloat16), "int4")
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(data[:2]).logits, again(data[:2]).logits)


def test_layers_come_back_after_an_error():
    model = quantized(small(), "int8")
    before, data = tensors(model), windows(16)

    def fail(done, total, label):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        twofour.recover_(
            model, data, options=Recover(tokens=8 * LENGTH, batch=8), held_out=data, on_progress=fail
        )
    assert {type(m) for name, m in model.named_modules() if name.endswith("proj")} == {QuantizedLinear}
    assert set(tensors(model)) == set(before)


def test_what_was_learnt_is_what_is_put_back():
    model = twofour.quantize_(
        twofour.prune_(nn.Sequential(nn.Linear(64, 32))), "int4", group=32, rounding="nearest"
    )
    start = model[0].weight_scale.clone()
    learning = learn_scales_(model, {})
    assert isinstance(model[0], LearntScales)
    with torch.no_grad():
        learning["0"].scale_change.fill_(0.5)
    x = torch.randn(3, 64)
    expected = model(x)
    put_back_(model, learning)
    torch.testing.assert_close(model[0].weight_scale.detach(), start * 1.6487, rtol=5e-3, atol=0)
    torch.testing.assert_close(model(x), expected.detach(), rtol=1e-4, atol=1e-5)


def test_refusals():
    data, teacher = windows(16), small()
    codes = quantized(teacher, "int8")
    quick = {"tokens": 8 * LENGTH, "batch": 8}
    for recipe in ("masked", "distill", "adaptive", "lora"):
        with pytest.raises(InputError, match=f"quantized, and {recipe} trains weights"):
            twofour.recover_(codes, data, teacher, Recover(recipe=recipe, **quick))
    with pytest.raises(InputError, match="for quantized models"):
        twofour.recover_(twofour.prune_(small()), data, options=Recover(recipe="scales", **quick))
    with pytest.raises(InputError, match="quantized already"):
        twofour.recover_(codes, data, teacher, Recover(scheme="int4", **quick))
    with pytest.raises(InputError, match="--fsdp"):
        twofour.recover_(codes, data, teacher, Recover(fsdp=True, **quick))
    twofour.fuse_(codes)
    with pytest.raises(InputError, match="fused"):
        twofour.recover_(codes, data, teacher, Recover(**quick))
    conv = twofour.quantize_(twofour.prune_(nn.Sequential(nn.Conv2d(16, 16, 3))), "int8", rounding="nearest")
    with pytest.raises(InputError, match="convolution"):
        learn_scales_(conv, {})


def test_the_weight_can_be_read_and_inputs_have_their_gradient():
    torch.manual_seed(0)
    model = twofour.quantize_(
        twofour.prune_(nn.Sequential(nn.Linear(44, 24, bias=False))), "int4", group=32, rounding="nearest"
    )
    weight = model[0].unpacked().float()
    (learning,) = learn_scales_(model, {}).values()
    torch.testing.assert_close(learning.weight.detach(), weight)
    x = torch.randn(2, 3, 44, requires_grad=True)
    wanted = torch.randn(2, 3, 24)
    (model(x) * wanted).sum().backward()
    torch.testing.assert_close(x.grad, wanted @ weight)
