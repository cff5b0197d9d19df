"""PEFT's adapters on packed layers, with the real PEFT."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import twofour as package
from twofour.errors import InputError, TwoFourError
from twofour.nn.linear import SparseLinear

peft = pytest.importorskip("peft")

TOKENS = torch.randint(3, 90, (4, 24), generator=torch.Generator().manual_seed(0))
TARGETS = ["q_proj", "v_proj", "down_proj"]


def config(**options):
    return peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=options.pop("target_modules", TARGETS), **options
    )


def small_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16), nn.Linear(16, 4))
    return package.pack_(package.prune_(model))  # the last is too small, and stays dense


def make_adapters_count(model):
    """B is zero at first, and then the adapter does nothing."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)


def test_output_and_gradients_are_those_of_the_formula():
    model = peft.get_peft_model(small_model(), config(target_modules=["0"], lora_dropout=0.0))
    make_adapters_count(model)
    layer = model.base_model.model[0]
    assert isinstance(layer.base_layer, SparseLinear)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(5, 32, requires_grad=True)
    y = layer(x)
    got = torch.autograd.grad(y.square().sum(), (x, a, b))
    weight, bias = layer.base_layer.unpacked(), layer.base_layer.bias
    plain = x @ weight.t() + bias + 2.0 * (x @ a.t()) @ b.t()
    want = torch.autograd.grad(plain.square().sum(), (x, a, b))
    torch.testing.assert_close(y, plain)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture
def checkpoint(request, packed, pruned, tmp_path):
    """A packed checkpoint of 16 bits or of a scheme."""
    if request.param is None:
        return packed
    from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

    quantize_checkpoint(pruned, tmp_path / request.param, QuantizeOptions(request.param))
    return tmp_path / request.param


@pytest.mark.parametrize(
    ("checkpoint", "memory"),
    [(None, "small"), (None, "fast"), ("int4", "small"), ("int4", "fast"), ("int8", "auto"), ("fp8", "auto")],
    indirect=["checkpoint"],
)
def test_a_packed_language_model_is_trained_saved_and_loaded(checkpoint, tmp_path, memory):
    from twofour.nn.convert import set_memory

    packed = checkpoint
    base = set_memory(AutoModelForCausalLM.from_pretrained(packed), memory)
    before = {name: p.clone() for name, p in base.named_parameters()}
    model = peft.get_peft_model(base, config())
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * 3 * 2  # A and B of three layers in each of two blocks
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    losses = []
    for _ in range(8):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    with pytest.raises(TwoFourError, match=r"q_proj: .*would not be 2:4"):
        model.merge_and_unload()
    for name, value in before.items():
        inner, _, own = name.rpartition(".")
        inner = f"{inner}.base_layer" if inner.rpartition(".")[2] in TARGETS else inner
        assert torch.equal(base.get_parameter(f"{inner}.{own}"), value), name

    model.eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
        model.save_pretrained(tmp_path / "adapter")
        again = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(packed), tmp_path / "adapter"
        )  # which makes its config by itself
        torch.testing.assert_close(again(TOKENS).logits, logits, rtol=1e-4, atol=1e-5)
        with again.disable_adapter():
            without = again(TOKENS).logits
        plain = AutoModelForCausalLM.from_pretrained(packed)(TOKENS).logits
        torch.testing.assert_close(without, plain)
        assert not torch.allclose(without, logits, atol=1e-2)
        torch.testing.assert_close(again.unload()(TOKENS).logits, plain)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4", "int8-weight"])
def test_gradients_through_quantized_layers_are_those_of_the_dequantized_weight(scheme):
    """Of the layer itself, and of what comes before it; tokens count as what they were rounded to."""
    from twofour.io.quantize import quantize_
    from twofour.nn.quantized import QuantizedLinear
    from twofour.quantize.activations import as_rounded

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    model = peft.get_peft_model(
        quantize_(package.prune_(model), scheme), config(target_modules=["0", "1"], lora_dropout=0.0)
    )
    make_adapters_count(model)
    layers = [model.base_model.model[i] for i in (0, 1)]
    assert all(isinstance(layer.base_layer, QuantizedLinear) for layer in layers)
    adapters = [(layer.lora_A["default"].weight, layer.lora_B["default"].weight) for layer in layers]
    trained = [parameter for pair in adapters for parameter in pair]
    x = torch.randn(5, 32)
    got = torch.autograd.grad(model(x).square().sum(), trained)
    h = x
    for layer, (a, b) in zip(layers, adapters, strict=True):
        base = layer.base_layer
        tokens = h + (as_rounded(h, base.scheme) - h).detach()  # straight through
        h = tokens @ base.unpacked().t() + base.bias + 2.0 * (h @ a.t()) @ b.t()
    # A token near the middle of two codes may go either way.
    pairs = [(model(x), h), *zip(got, torch.autograd.grad(h.square().sum(), trained), strict=True)]
    for ours, theirs in pairs:
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_transformers_own_way_to_add_an_adapter(packed):
    model = AutoModelForCausalLM.from_pretrained(packed)
    model.add_adapter(config())
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    gradients = [n for n, p in model.named_parameters() if p.grad is not None]
    assert len(gradients) == 12
    assert all("lora_" in name for name in gradients)


def test_gradients_pass_through_checkpointing_and_autocast(packed):
    model = AutoModelForCausalLM.from_pretrained(packed)
    model.gradient_checkpointing_enable()
    model = peft.get_peft_model(model, config()).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    named = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert all(g is not None and g.dtype == torch.float32 for g in named.values())
    assert all(g.any() for n, g in named.items() if "lora_B" in n)  # those of A are zero while B is


def test_merging_is_refused_with_the_reason_before_anything_is_merged():
    model = peft.get_peft_model(small_model(), config(target_modules=["0", "3"]))
    make_adapters_count(model)
    x = torch.randn(3, 32)
    before = model(x)
    for merge in (model.merge_and_unload, model.merge_adapter, model.base_model.model[0].merge):
        with pytest.raises(TwoFourError, match=r"^0: .*would not be 2:4.*--recipe lora"):
            merge()
        assert not isinstance(model.base_model.model[3], nn.Linear)
        assert not model.base_model.model[3].merged
        assert torch.equal(model(x), before)


def test_what_would_write_to_the_packed_weight_is_refused():
    for init in ("pissa", "pissa_niter_4", "olora"):
        with pytest.raises(InputError, match=r"^0: .*would change the weight"):
            peft.get_peft_model(small_model(), config(target_modules=["0"], init_lora_weights=init))
    with pytest.raises(InputError, match=r"^0: use_dora=True would unpack"):
        peft.get_peft_model(small_model(), config(target_modules=["0"], use_dora=True))
    for init in (False, "gaussian", "orthogonal"):
        peft.get_peft_model(small_model(), config(target_modules=["0"], init_lora_weights=init))


def test_a_dense_layer_gets_peft_s_own_adapter_and_merges():
    model = peft.get_peft_model(small_model(), config(target_modules=["3"]))
    make_adapters_count(model)
    x = torch.randn(3, 32)
    before = model(x)
    torch.testing.assert_close(model.merge_and_unload()(x), before)


KNOWS = "c = peft.LoraConfig(); print([k.__name__ for k in c._custom_modules])"


@pytest.mark.parametrize(
    "imports",
    [
        "import peft, twofour",
        # transformers asks whether peft could be imported, long before it is
        "import twofour; from transformers.utils import is_peft_available; is_peft_available(); import peft",
    ],
)
def test_peft_knows_us_in_whatever_order(imports):
    ran = subprocess.run([sys.executable, "-c", f"{imports}; {KNOWS}"], capture_output=True, text=True)
    assert ran.stdout.strip() == "['SparseLinear']", ran.stderr
