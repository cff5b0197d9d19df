"""Pruning a model in memory: in place, all layers or none, along the right dimension."""

import copy

import pytest
import torch
from torch import nn

from twofour.errors import InputError
from twofour.prune import method_named, prune_, prune_weight
from twofour.prune.magnitude import Magnitude
from twofour.select import Layer


def two_largest(values):
    """A list with all but its two largest magnitudes set to zero, the left one first among equals."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    return [v if i in order[:2] else 0.0 for i, v in enumerate(values)]


def pruned_row(row):
    return [v for start in range(0, len(row), 4) for v in two_largest(row[start : start + 4])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [32, 30, 17])
def test_magnitude_keeps_the_two_largest(dtype, columns):
    matrix = torch.randn(8, columns).to(dtype)
    before = matrix.clone()
    pruned = Magnitude().prune(matrix)
    assert pruned.dtype == dtype
    assert pruned.double().tolist() == [pruned_row(row) for row in matrix.double().tolist()]
    assert torch.equal(matrix, before)


def test_magnitude_leaves_no_negative_zero_and_ties_go_left():
    pruned = Magnitude().prune(torch.tensor([[-1.0, -2.0, -3.0, -4.0, 5.0, -5.0, 5.0, -5.0]]))
    assert pruned.tolist() == [[0.0, 0.0, -3.0, -4.0, 5.0, -5.0, 0.0, 0.0]]
    assert torch.signbit(pruned).tolist() == [[False, False, True, True, False, True, False, False]]


def test_magnitude_of_the_lowest_integer():
    """Two's complement has no +128: its absolute value must not count as the smallest."""
    pruned = Magnitude().prune(torch.tensor([[-128, 1, 2, 3]], dtype=torch.int8))
    assert pruned.tolist() == [[-128, 0, 0, 3]]


def test_a_linear_is_pruned_in_place():
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 18))
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    assert prune_(model) is model
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert parameter.requires_grad
        if name.endswith("weight"):
            assert parameter.tolist() == [pruned_row(row) for row in before[name].tolist()]
        else:
            assert torch.equal(parameter, before[name])


def test_pruning_twice_changes_nothing_more():
    model = prune_(nn.Linear(32, 32))
    once = model.weight.detach().clone()
    assert torch.equal(prune_(model).weight, once)


def test_conv1d_is_pruned_along_its_inputs():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(24, 32))  # weight [32 inputs, 24 outputs]
    columns = model[0].weight.detach().t().tolist()
    prune_(model)
    assert model[0].weight.t().tolist() == [pruned_row(column) for column in columns]


@pytest.mark.parametrize("channels", [16, 18])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_conv2d_is_pruned_along_its_channels(channels, layout):
    model = nn.Sequential(nn.Conv2d(channels, 16, (3, 2))).to(memory_format=layout)
    before = model[0].weight.detach().clone()
    prune_(model)
    weight = model[0].weight
    for o in range(16):
        for r in range(3):
            for s in range(2):
                assert weight[o, :, r, s].tolist() == pruned_row(before[o, :, r, s].tolist())
    assert weight.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_weight_leaves_the_whole_model_as_it_was(bad):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[3, 4] = bad
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"^1: 1 of 1024 weights .* flat index 100") as caught:
        prune_(model)
    assert caught.value.layer == "1"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    prune_(model, exclude=["1"])  # what the hint says
    assert not torch.equal(model[0].weight, before["0.weight"])


def test_include_exclude_and_heads():
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("a", "b", "lm_head")})
    dense = {name: module.weight.detach().clone() for name, module in model.items()}
    prune_(model, exclude=["b"])
    assert [name for name in model if not torch.equal(model[name].weight, dense[name])] == ["a"]
    prune_(model, include=["lm_head"])
    assert [name for name in model if not torch.equal(model[name].weight, dense[name])] == ["a", "lm_head"]
    with pytest.raises(InputError, match="'nothing'"):
        prune_(model, include=["nothing"])


def test_a_model_with_nothing_to_prune_and_an_unknown_method():
    with pytest.raises(InputError, match="no layer of this model can be made 2:4"):
        prune_(nn.Sequential(nn.LayerNorm(32)))
    with pytest.raises(InputError, match=r"no pruning method 'guess'\. .*magnitude"):
        prune_(nn.Linear(32, 32), "guess")
    assert method_named("magnitude") == Magnitude()


def test_prune_weight_reports_what_was_lost():
    layer = Layer("fc", "linear", (1, 4))
    new, lost = prune_weight(layer, torch.tensor([[3.0, 4.0, 1.0, 2.0]]), Magnitude())
    assert new.tolist() == [[3.0, 4.0, 0.0, 0.0]]
    assert lost["relative_error"] == pytest.approx((5 / 30) ** 0.5)
    _, lost = prune_weight(layer, torch.zeros(1, 4), Magnitude())
    assert lost["relative_error"] == 0.0
