"""Low-rank compensation: the optimum by another road, every kind of degenerate input, and the module."""

import copy
import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError
from twofour.nn import SparseConv2d, SparseLinear
from twofour.nn.lowrank import (
    LowRankDense,
    LowRankLinear,
    add_lowrank_,
    empty_lowrank_,
    lowrank_cost,
    lowrank_layers,
)
from twofour.prune.hessian import relative_output_error
from twofour.prune.lowrank import compensate
from twofour.prune.magnitude import Magnitude
from twofour.select import Layer, as_layer

SHAPES = [(24, 32), (32, 24), (1, 16), (16, 1), (20, 20)]


def problem(rows=24, columns=32, seed=0, tokens=256, dtype=torch.float32):
    """A weight, the same pruned, and inputs with strong correlations."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=random) @ torch.randn(columns, columns, generator=random)
    x = x * torch.randn(columns, generator=random).exp()
    inputs = Gram(columns)
    inputs.add(x)
    before = torch.randn(rows, columns, generator=random).to(dtype)
    return before, Magnitude().prune(before), inputs


def error(before, after, inputs):
    lost = before.double() - after.double()
    return float((lost @ inputs.mean.double() * lost).sum())


def least_error(before, after, inputs, rank):
    """Eckart and Young: what the singular values beyond the first r leave of D·G^½."""
    values, vectors = torch.linalg.eigh(inputs.mean.double())
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    singular = torch.linalg.svdvals((before.double() - after.double()) @ root)
    return float(singular[rank:].square().sum())


@pytest.mark.parametrize(("shape", "rank"), itertools.product(SHAPES, (1, 3, 8)))
def test_no_other_pair_leaves_less(shape, rank):
    before, after, inputs = problem(*shape)
    left, right = compensate(before, after, inputs, rank)
    r = min(rank, *shape)
    assert left.shape == (shape[0], r)
    assert right.shape == (r, shape[1])
    none = error(before, after, inputs)
    got = error(before, after.double() + left.double() @ right.double(), inputs)
    assert got == pytest.approx(least_error(before, after, inputs, rank), rel=1e-4, abs=1e-9 * none)


def test_inputs_count():
    """Fitting the weight alone (a plain SVD) leaves more error on the inputs."""
    before, after, inputs = problem()
    u, s, v = torch.linalg.svd(before - after)
    plain = after + (u[:, :4] * s[:4]) @ v[:4]
    left, right = compensate(before, after, inputs, 4)
    assert relative_output_error(before, after + left @ right, inputs) < 0.5 * relative_output_error(
        before, plain, inputs
    )


@pytest.mark.parametrize("shape", [(24, 32), (48, 32)])
@pytest.mark.parametrize("what", ["dead channels", "few tokens", "equal channels", "no token"])
def test_singular_inputs(shape, what):
    rows, columns = shape
    before, after, inputs = problem(rows, columns)
    if what == "dead channels":
        inputs.mean[:, ::3] = inputs.mean[::3] = 0
    elif what == "few tokens":
        inputs = problem(rows, columns, tokens=5)[2]
    elif what == "equal channels":
        inputs.mean.fill_(1.0)
    else:
        inputs = Gram(columns)
    left, right = compensate(before, after, inputs, 6)
    assert left.isfinite().all()
    assert right.isfinite().all()
    if what == "no token":  # nothing known: the weights themselves
        inputs.mean.fill_diagonal_(1.0)
    none = error(before, after, inputs)
    got = error(before, after.double() + left.double() @ right.double(), inputs)
    assert got == pytest.approx(least_error(before, after, inputs, 6), rel=1e-4, abs=1e-6 * none)


@pytest.mark.parametrize("shape", SHAPES)
def test_full_rank_gives_everything_back(shape):
    before, after, inputs = problem(*shape)
    left, right = compensate(before, after, inputs, 100)
    torch.testing.assert_close(after + left @ right, before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(24, 32), (32, 24)])
def test_nothing_lost_nothing_added(shape):
    before, _, inputs = problem(*shape)
    left, right = compensate(before, before, inputs, 4)
    assert not (left @ right).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    before, after, inputs = problem(dtype=dtype)
    left, right = compensate(before * 1e-3, after * 1e-3, inputs, 8)  # weights of models are this small
    assert left.dtype == right.dtype == dtype
    wide = compensate(before.double() * 1e-3, after.double() * 1e-3, inputs, 8)
    exact = wide[0] @ wide[1]
    # Largest against largest: entries near zero have no relative precision.
    assert (left.double() @ right.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_refuses_what_does_not_fit():
    before, after, inputs = problem()
    with pytest.raises(InputError, match=r"q: the rank of a compensation must be at least 1, got 0"):
        compensate(before, after, inputs, 0, "q")
    with pytest.raises(InputError, match=r"was \[24, 32\] and is \[24, 31\]"):
        compensate(before, after[:, 1:], inputs, 2)
    with pytest.raises(InputError, match=r"inputs were measured as \[8, 8\]"):
        compensate(before, after, Gram(8), 2)
    with pytest.raises(InputError, match="q: 1 of 768 weights are NaN"):
        compensate(
            before.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(torch.nan)),
            after,
            inputs,
            2,
            "q",
        )


# The module


def compensated(rows=24, columns=32, rank=4, packed=True):
    before, after, inputs = problem(rows, columns)
    linear = nn.Linear(columns, rows)
    linear.weight.data.copy_(after)
    left, right = compensate(before, after, inputs, rank)
    layer = SparseLinear.from_dense(linear, "q") if packed else linear
    return add_lowrank_(layer, left, right, "q"), (after + left @ right, linear.bias)


@pytest.mark.parametrize("packed", [True, False])
def test_module_is_the_pruned_weight_plus_the_product(packed):
    layer, (weight, bias) = compensated(packed=packed)
    assert type(layer) is (LowRankLinear if packed else LowRankDense)
    x = torch.randn(3, 5, 32)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-5)
    assert layer.rank == 4
    assert "rank=4" in repr(layer)


def test_state_dict_keeps_the_layers_own_names(tmp_path):
    layer, _ = compensated()
    state = layer.state_dict()
    assert set(state) == {"weight_values", "weight_meta", "bias", "lowrank_left", "lowrank_right"}
    save_file(state, tmp_path / "model.safetensors")
    other = empty_lowrank_(SparseLinear(32, 24), 4)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    x = torch.randn(2, 32)
    assert torch.equal(other(x), layer(x))
    assert isinstance(layer, SparseLinear)  # so that packed_layers, check and save see it


def test_module_moves_copies_and_trains():
    layer, _ = compensated()
    x = torch.randn(2, 32)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    half = copy.deepcopy(layer).bfloat16()
    assert half.lowrank_left.dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), layer(x), rtol=0.05, atol=0.3)
    layer(x).sum().backward()
    assert layer.lowrank_left.grad is not None
    assert layer.weight_values.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    empty = empty_lowrank_(SparseLinear(32, 24, device="meta"), 4)
    assert empty.lowrank_left.device.type == "meta"


def test_module_compiles_and_exports():
    layer, _ = compensated()
    x = torch.randn(2, 32)
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(x), layer(x))


def test_transformers_conv1d():
    from transformers.pytorch_utils import Conv1D

    layer = Conv1D(24, 32)
    left, right = torch.randn(24, 2), torch.randn(2, 32)
    x = torch.randn(3, 32)
    expected = layer(x) + x @ right.T @ left.T
    torch.testing.assert_close(add_lowrank_(layer, left, right)(x), expected, rtol=1e-4, atol=1e-4)
    assert set(layer.state_dict()) == {"weight", "bias", "lowrank_left", "lowrank_right"}
    copy.deepcopy(layer)


def test_layers_of_a_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    add_lowrank_(model[2], torch.zeros(8, 2), torch.zeros(2, 8))
    assert list(lowrank_layers(model)) == ["2"]
    assert isinstance(as_layer("2", model[2]), str)  # not pruned again as if it were plain


def test_module_refuses_what_does_not_fit():
    good = torch.zeros(4, 1), torch.zeros(1, 8)
    with pytest.raises(InputError, match=r"q: a compensation for \[4, 8\] does not fit a layer of \[8, 8\]"):
        add_lowrank_(nn.Linear(8, 8), *good, "q")
    with pytest.raises(InputError, match=r"not \[4, 2\] and \[1, 8\]"):
        add_lowrank_(nn.Linear(8, 4), torch.zeros(4, 2), good[1])
    with pytest.raises(InputError, match="already"):
        add_lowrank_(add_lowrank_(nn.Linear(8, 4), *good), *good)
    for module in (nn.Conv2d(8, 4, 1), nn.LayerNorm(8), SparseConv2d(nn.Conv2d(8, 4, 1))):
        with pytest.raises(InputError, match=f"a {type(module).__name__} cannot have"):
            add_lowrank_(module, *good)


def test_cost_counts_bytes_and_operations():
    layer, _ = compensated(32, 64, 4)
    cost = lowrank_cost(Layer("q", "linear", (32, 64)), 4, torch.float32)
    assert cost.bytes == layer.lowrank_left.nbytes + layer.lowrank_right.nbytes
    assert cost.bytes_share == cost.bytes / layer.packed.nbytes
    assert cost.flops_per_token == 2 * 4 * (32 + 64)
    assert cost.flops_share == cost.flops_per_token / (32 * 64)
