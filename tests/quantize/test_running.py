"""Quantized layers on a CPU, each against float64 on the dequantized values, and in every corner."""

import copy
import io

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from twofour import ops
from twofour.errors import InputError
from twofour.io.quantize import quantize_
from twofour.kernels import reference
from twofour.nn import SparseConv2d
from twofour.nn.quantized import QuantizedLinear
from twofour.packed import unpack
from twofour.pattern import check_pattern
from twofour.prune import prune_
from twofour.quantize.schemes import SCHEMES

NAMES = list(SCHEMES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(name, columns=172, rows=24, dtype=torch.float32, bias=True, memory="auto", group=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias).to(dtype))
    return quantize_(prune_(model), name, memory=memory, group=group)[0]


def float64(module, x):
    """The product that the scheme defines, in float64: of tokens as they are, or rounded one by one."""
    weight = module.packed.unpack(torch.float32).double()
    x = x.double()
    if module.scheme.rounds_activations:
        limit = module.scheme.range[1]
        rows = []
        for token in x.reshape(-1, x.shape[-1]):
            scale = token.abs().max().float().item() / limit or 1.0
            scaled = (token / scale).float()
            if module.scheme.codes == "int8":
                rows.append(scaled.round().clamp(-127, 127).double() * scale)
            else:
                rows.append(scaled.clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale)
        x = torch.stack(rows).reshape(x.shape)
    y = x @ weight.t()
    return (y if module.bias is None else y + module.bias.double()).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("columns", "memory"), [(172, "small"), (172, "fast"), (130, "auto"), (288, "small")]
)
def test_the_product(name, dtype, columns, memory):
    module = layer(name, columns, dtype=dtype, memory=memory, bias=columns != 130)
    x = torch.randn(3, 5, columns).to(dtype)
    y = module(x).detach()
    assert y.dtype == dtype
    assert y.shape == (3, 5, 24)
    wanted = float64(module, x)
    # A token near the middle of two codes may go either way; that is one code of one weight.
    allowed = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert float((y.double() - wanted).norm() / wanted.norm()) < allowed


@pytest.mark.parametrize("columns", [2048, 2052, 4096, 6000])
def test_int8_sums_are_exact(columns):
    module = layer("int8", columns, 16, bias=False)
    with torch.no_grad():
        module.weight_values[:2] = torch.tensor(
            [[127], [-127]], dtype=torch.int8
        )  # the largest sums there are
    codes = torch.randint(-127, 128, (5, columns), dtype=torch.int8)
    assert len(codes) > reference.FEW
    codes[:, 0] = 127  # so the scale of each token is 1
    codes[3:] = torch.tensor([[127], [-127]], dtype=torch.int8)
    codes[4, 0], codes[4, columns // 2] = 126, 125  # an odd one more
    weight = unpack(module.weight_values, module.weight_meta, columns).double()
    sums = codes.double() @ weight.t()
    wanted = sums.float() * module.weight_scale.float().t()
    assert float(sums.abs().max()) > 0.99 * 127 * 127 * columns / 2
    assert torch.equal(module(codes.float()), wanted)
    assert torch.equal(module(codes[3:].float()), wanted[3:])


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_corners_of_activations(name):
    module = layer(name, 64, 16)
    x = torch.randn(8, 64)
    x[1] = 0
    x[2, 3] = torch.inf
    x[3, 60] = torch.nan
    x[4] *= 1e30
    x[5] *= 1e-43
    x[6, 1:] = 0
    clean = module(x[[0, 6, 7]])
    y = module(x)
    assert torch.equal(y[1], module.bias)
    assert bool(y[2].isnan().all())
    assert bool(y[3].isnan().all())
    assert bool(y[4].isfinite().all())
    assert bool(y[5].isfinite().all())
    assert torch.equal(y[[0, 6, 7]], clean)  # other tokens do not notice
    assert module(torch.empty(0, 64)).shape == (0, 16)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_stay_in_their_token(name):
    module = layer(name, 64, 16)
    x = torch.randn(3, 64)
    clean = module(x)
    x[1] = torch.nan
    y = module(x)
    assert bool(y[1].isnan().all())
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_and_of_one_value(name):
    model = nn.Sequential(nn.Linear(64, 16, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[1, 7] = 3.0
        model[0].weight[2, 7] = -3e-5
    module = quantize_(model, name)[0]
    y = module(torch.ones(1, 64))
    assert not bool(y[0, [0, *range(3, 16)]].any())
    assert y[0, 1].item() == pytest.approx(3.0, rel=0.1)
    assert y[0, 2].item() == pytest.approx(-3e-5, rel=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_dtypes_change_and_weights_do_not(name):
    module = layer(name, 172)
    before = module.packed.unpack(torch.float32)
    values = module.weight_values.detach().clone().view(torch.uint8)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        module.to(dtype)
        assert module.weight_values.dtype == SCHEMES[name].stored
        assert module.weight_scale.dtype == module.bias.dtype == dtype
        assert module(torch.randn(2, 172, dtype=dtype)).dtype == dtype
    assert torch.equal(module.packed.unpack(torch.float32), before)
    assert torch.equal(module.weight_values.view(torch.uint8), values)
    with pytest.raises(InputError, match="float64"):
        module.double()
    with pytest.raises(InputError, match=r"input is torch\.bfloat16"):
        module(torch.randn(2, 172).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(2, 172)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_plain_tensors(name, tmp_path):
    """deepcopy, pickle of the state, safetensors, meta and back, all bit for bit."""
    module = layer(name)
    x = torch.randn(2, 172)
    y = module(x)
    assert torch.equal(copy.deepcopy(module)(x), y)
    save_file(module.state_dict(), tmp_path / "a.safetensors")
    other = QuantizedLinear(172, 24, scheme=SCHEMES[name])
    other.validate()
    assert not bool(other(x).any())
    other.load_state_dict(load_file(tmp_path / "a.safetensors"))
    assert torch.equal(other(x), y)
    stream = io.BytesIO()
    torch.save(module.state_dict(), stream)
    stream.seek(0)
    empty = QuantizedLinear(172, 24, scheme=SCHEMES[name], device="meta").to_empty(device="cpu")
    empty.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(empty(x), y)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_and_exports_whole(name):
    module = layer(name, 64, memory="small")
    x = torch.randn(4, 64)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    exported = torch.export.export(module, (x,)).module()
    torch.testing.assert_close(exported(x), module(x))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_opcheck(name):
    module = layer(name, 30, 16)
    packed = (module.weight_values, module.weight_meta, module.weight_scale)
    x = torch.randn(3, 30, requires_grad=True)
    bias = torch.randn(16, requires_grad=True)
    # Its test of the schema compares arguments before and after, and torch cannot compare fp8.
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    checks += ["test_schema"] if name == "int8" else []
    torch.library.opcheck(ops.quantized_linear, (x, *packed, bias, 30), test_utils=checks)
    torch.library.opcheck(ops.quantized_linear, (torch.randn(2, 2, 30), *packed, None, 30), test_utils=checks)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_go_straight_through(name):
    module = layer(name, 64)
    x = torch.randn(3, 64, requires_grad=True)
    out = torch.randn(3, 24)
    module(x).backward(out)
    torch.testing.assert_close(x.grad, out @ module.unpacked())
    torch.testing.assert_close(module.bias.grad, out.sum(0))
    assert not module.weight_values.requires_grad
    assert not module.weight_scale.requires_grad


def test_strips_of_rows_give_the_same(monkeypatch):
    for name in NAMES:
        module = layer(name, 64, 24, memory="small")
        x = torch.randn(5, 64)
        whole = module(x)
        monkeypatch.setattr(reference, "STRIP", 64 * 7)
        torch.testing.assert_close(module(x), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_hold_codes(name):
    torch.manual_seed(0)
    model = prune_(nn.Sequential(nn.Conv2d(20, 24, 3, padding=1)))
    dense = copy.deepcopy(model)
    quantize_(model, name)
    assert isinstance(model[0], SparseConv2d)
    assert model[0].weight_values.dtype == SCHEMES[name].stored
    x = torch.randn(2, 20, 8, 8)
    wanted = dense(x)
    assert float((model(x) - wanted).detach().norm() / wanted.detach().norm()) < 0.15
    assert check_pattern(model[0].packed.unpack()).legal


def test_fuse_leaves_quantized_layers_alone():
    from twofour.nn import fuse_

    model = quantize_(prune_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), "int8")
    x = torch.randn(2, 64)
    before = model(x)
    assert fuse_(model, x) == 0
    assert torch.equal(model(x), before)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_autocast_computes_as_the_layer_does_in_its_dtype(name, dtype):
    """Sums of codes are beyond float16's largest number: autocast must not reach into the product."""
    module = layer(name, columns=512)
    x = torch.randn(9, 512)
    with torch.autocast("cpu", dtype):
        got = module(x)
    wanted = float64(module, x.to(dtype))
    assert got.dtype == dtype
    assert (got.double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.parametrize("name", ["int8", "int8-weight"])
def test_a_convolution_keeps_its_dense_weight_where_that_was_asked_for(name):
    model = nn.Sequential(nn.Conv2d(32, 16, 3))
    module = quantize_(prune_(model), name, memory="fast")[0]
    assert module.dense_weight is not None
    assert not module.rounds_activations
