"""The operators as PyTorch sees them: schema, fake shapes, gradients, against the dense product."""

import pytest
import torch
from torch.nn import functional as F

from twofour import kernels, ops
from twofour.errors import TwoFourError
from twofour.packed import pack

assert kernels  # imported for its registrations

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def two_four(rows, columns, dtype=torch.float32):
    """A random 2:4 matrix: two places of every group, drawn at random."""
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    groups = -(-columns // 4)
    places = torch.rand(rows, groups, 4, generator=draw).argsort(-1)
    weight = torch.randn(rows, groups, 4, generator=draw).where(places < 2, 0.0)
    return weight.reshape(rows, groups * 4)[:, :columns].to(dtype)


def close(actual, expected):
    limit = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


BATCHES = [(), (3,), (2, 3), (0,), (2, 0)]


# opcheck: schema, fake against real, autograd registration, compiled with dynamic shapes


@pytest.mark.parametrize(
    ("batch", "columns", "bias", "scaled"),
    [
        ((3,), 16, False, False),
        ((), 16, True, False),
        ((2, 3), 13, True, False),
        ((0,), 8, True, False),
        ((3,), 12, False, True),
        ((2, 2), 9, True, True),
    ],
)
def test_opcheck_linear(batch, columns, bias, scaled):
    packed = pack((two_four(6, columns) * 10).to(torch.int8 if scaled else torch.float32))
    scale = torch.rand(6, 1) if scaled else None
    x = torch.randn(*batch, columns, requires_grad=True)
    b = torch.randn(6, requires_grad=True) if bias else None
    torch.library.opcheck(ops.linear, (x, packed.values, packed.meta, scale, b, columns))


@pytest.mark.parametrize(
    ("batch", "columns", "scaled"), [((3,), 16, False), ((2, 2), 13, True), ((0,), 5, False)]
)
def test_opcheck_linear_input_grad(batch, columns, scaled):
    packed = pack((two_four(6, columns) * 10).to(torch.int8 if scaled else torch.float32))
    scale = torch.rand(6, 1) if scaled else None
    args = (torch.randn(*batch, 6), packed.values, packed.meta, scale, columns)
    torch.library.opcheck(ops.linear_input_grad, args)


def test_opcheck_linear_input_grad_of_a_gradient_that_has_one():
    """As in a backward with create_graph."""
    packed = pack(two_four(6, 12))
    grad = torch.randn(3, 6, requires_grad=True)
    torch.library.opcheck(ops.linear_input_grad, (grad, packed.values, packed.meta, None, 12))


@pytest.mark.parametrize(
    ("columns", "scale", "dtype"),
    [(16, None, None), (13, None, torch.float16), (16, 4, None), (9, 1, torch.bfloat16)],
)
def test_opcheck_unpack(columns, scale, dtype):
    packed = pack((two_four(6, columns) * 10).to(torch.int8 if scale else torch.float32))
    scales = torch.rand(6, scale) if scale else None
    torch.library.opcheck(ops.unpack, (packed.values, packed.meta, scales, columns, dtype))


def test_opcheck_unpack_of_experts():
    packed = pack(torch.stack([two_four(4, 12), two_four(4, 12)]))
    torch.library.opcheck(ops.unpack, (packed.values, packed.meta, None, 12))


# Numbers


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(8, 16), (5, 13), (1, 1), (7, 12)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_linear_and_its_gradients_are_the_dense_ones(batch, rows, columns, dtype):
    weight = two_four(rows, columns, dtype)
    packed = pack(weight)
    x = torch.randn(*batch, columns).to(dtype)
    bias = torch.randn(rows).to(dtype)
    direction = torch.randn(*batch, rows).to(dtype)

    def run(function):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = function(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, direction)

    sparse = run(lambda x, b: ops.linear(x, packed.values, packed.meta, None, b, columns))
    dense = run(lambda x, b: F.linear(x, weight, b))
    for actual, expected in zip(sparse, dense, strict=True):
        close(actual, expected)


def test_second_derivatives_are_the_dense_ones():
    weight = two_four(5, 12)
    packed = pack(weight)
    x = torch.randn(3, 12, requires_grad=True)
    penalties = []
    for y in (ops.linear(x, packed.values, packed.meta, None, None, 12), F.linear(x, weight)):
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.pow(2).sum(), x)[0])
    torch.testing.assert_close(*penalties, rtol=1e-4, atol=1e-3)


def test_only_the_gradients_that_are_asked_for():
    weight = two_four(5, 12)
    packed = pack(weight)
    x, bias = torch.randn(3, 12), torch.randn(5, requires_grad=True)
    ops.linear(x, packed.values, packed.meta, None, bias, 12).sum().backward()
    close(bias.grad, torch.full((5,), 3.0))
    assert x.grad is None
    y = ops.linear(x, packed.values, packed.meta, None, bias.detach(), 12)
    assert not y.requires_grad


def test_the_bias_gradient_has_the_dtype_of_the_bias():
    packed = pack(two_four(5, 12, torch.bfloat16))
    bias = torch.zeros(5, requires_grad=True)
    y = ops.linear(torch.ones(3, 12).bfloat16(), packed.values, packed.meta, None, bias, 12)
    y.sum().backward()
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [3.0] * 5


@pytest.mark.parametrize("width", [1, 4])
def test_scales_multiply_the_rows_or_groups(width):
    weight = (two_four(6, 16) * 10).to(torch.int8)
    packed = pack(weight)
    scale = torch.rand(6, width) + 0.5
    dense = weight.float() * scale.repeat_interleave(16 // width, dim=1)
    x, direction = torch.randn(3, 16, requires_grad=True), torch.randn(3, 6)
    y = ops.linear(x, packed.values, packed.meta, scale, None, 16)
    torch.testing.assert_close(y, x @ dense.T, rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad(y, x, direction)
    torch.testing.assert_close(grad, direction @ dense, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ops.unpack(packed.values, packed.meta, scale, 16), dense)


@pytest.mark.parametrize("view", ["transposed", "strided", "expanded"])
def test_inputs_that_are_not_contiguous(view):
    weight = two_four(6, 12)
    packed = pack(weight)
    x = {
        "transposed": torch.randn(12, 5).t(),
        "strided": torch.randn(5, 24)[:, ::2],
        "expanded": torch.randn(1, 12).expand(5, 12),
    }[view]
    close(ops.linear(x, packed.values, packed.meta, None, None, 12), x.contiguous() @ weight.T)
    grad = torch.randn(6, 5).t()
    close(ops.linear_input_grad(grad, packed.values, packed.meta, None, 12), grad.contiguous() @ weight)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_extreme_weights_come_through_exactly(dtype):
    """A product with the identity copies: largest, smallest normal and negative values unharmed."""
    info = torch.finfo(dtype)
    weight = torch.zeros(3, 12, dtype=dtype)
    weight[0, 1], weight[0, 3], weight[1, 6], weight[1, 7] = info.max, info.min, info.tiny, -info.tiny
    weight[2, 10], weight[2, 8] = info.eps, -1.0
    packed = pack(weight)
    eye = torch.eye(12, dtype=dtype)
    assert torch.equal(ops.linear(eye, packed.values, packed.meta, None, None, 12), weight.T)
    rows = torch.eye(3, dtype=dtype)
    assert torch.equal(ops.linear_input_grad(rows, packed.values, packed.meta, None, 12), weight)


def test_infinite_and_nan_inputs_reach_the_output_as_in_a_dense_product():
    weight = two_four(6, 12)
    packed = pack(weight)
    x = torch.randn(4, 12)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    y = ops.linear(x, packed.values, packed.meta, None, None, 12)
    dense = F.linear(x, weight)
    close(y[[0, 3]], dense[[0, 3]])
    assert torch.equal(y[2].isnan(), torch.ones(6).bool())
    assert not y[1].isfinite().any()  # inf · 0 is NaN


# What is refused


@pytest.mark.parametrize("op", ["linear", "unpack"])
def test_packed_weights_are_frozen(op):
    packed = pack(two_four(6, 12))
    values, x = packed.values.requires_grad_(), torch.randn(3, 12, requires_grad=True)
    if op == "linear":
        y = ops.linear(x, values, packed.meta, None, None, 12)
    else:
        y = x @ ops.unpack(values, packed.meta, None, 12).T
    with pytest.raises(TwoFourError, match="frozen"):
        y.sum().backward()


def test_shapes_of_fakes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        values, meta = torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(6, 2, dtype=torch.uint8)
        x = torch.empty(2, 3, 13, dtype=torch.bfloat16)
        y = ops.linear(x, values, meta, None, None, 13)
        assert (y.shape, y.dtype) == ((2, 3, 6), torch.bfloat16)
        grad = ops.linear_input_grad(y, values, meta, None, 13)
        assert (grad.shape, grad.dtype) == ((2, 3, 13), torch.bfloat16)
        assert ops.unpack(values, meta, None, 13).dtype == torch.bfloat16
        assert ops.unpack(values, meta, torch.empty(6, 1), 13).dtype == torch.float32
        weight = ops.unpack(values, meta, torch.empty(6, 1), 13, torch.float16)
        assert (weight.shape, weight.dtype) == ((6, 13), torch.float16)
        with pytest.raises(RuntimeError, match="x has 12 features, the layer takes 13"):
            ops.linear(torch.empty(3, 12), values, meta, None, None, 13)


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("op", ["linear", "linear_input_grad"])
def test_widths_that_disagree_are_refused(op, device):
    packed = pack(two_four(6, 12))
    x, values, meta = torch.zeros(3, 7, device=device), packed.values.to(device), packed.meta.to(device)
    bias = (None,) if op == "linear" else ()
    with pytest.raises(RuntimeError):
        getattr(ops, op)(x, values, meta, None, *bias, 12)
