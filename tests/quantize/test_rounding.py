"""Rounding: no way of it touches the pattern, each is as good as it says, results do not depend on luck."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.prune.hessian import relative_output_error
from twofour.prune.sparsegpt import SparseGPT
from twofour.quantize.rounding import quantize_matrix, search_scale
from twofour.quantize.schemes import SCHEMES, scheme_named

from ..prune.layer_problem import problem

KINDS = [SCHEMES["int8"], SCHEMES["fp8"], SCHEMES["int4"], scheme_named("int4", 32)]


def pruned(seed=0, rows=8, columns=64):
    dense, inputs = problem(seed, rows, columns)
    return dense, SparseGPT().prune(dense, inputs=inputs), inputs


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 6),
    columns=st.integers(1, 150),
    kind=st.sampled_from(KINDS),
    rounding=st.sampled_from(["nearest", "compensated", "joint"]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    shifted=st.booleans(),
)
def test_no_path_breaks_the_pattern(seed, rows, columns, kind, rounding, size, shifted):
    dense, weight, inputs = pruned(seed, rows, columns)
    weight, dense = weight * size, dense * size
    if seed % 3 == 0:
        weight[0] = dense[0] = 0  # a row of zeros
    if seed % 5 == 0:
        inputs.mean[:, columns // 2] = inputs.mean[columns // 2] = 0  # a channel that never fires
    target = weight + 0.1 * size * dense.roll(1, 0) if shifted and rounding != "nearest" else None
    given_to = dense if rounding == "joint" else weight
    rounded = quantize_matrix(given_to, kind, rounding, inputs, target=target)
    assert check_pattern(rounded.codes).legal
    if rounding != "joint":
        assert not bool(rounded.codes[weight == 0].any())
    packed = rounded.packed()
    packed.validate()
    assert packed.values.dtype == kind.stored
    assert torch.equal(packed.unpack(torch.float32), rounded.weight())
    assert bool(rounded.weight().isfinite().all())
    assert bool((rounded.scale > 0).all() if kind.codes != "int4" else (rounded.scale != 0).all())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_compensation_is_several_times_better_than_nearest(kind):
    for seed in range(3):
        _, weight, inputs = pruned(seed, 16, 96)
        plain, by_channel, compensated = (
            relative_output_error(weight, quantize_matrix(weight, kind, how, x).weight(), inputs)
            for how, x in (("nearest", None), ("nearest", inputs), ("compensated", inputs))
        )
        assert compensated < 0.5 * plain
        assert by_channel < 1.05 * plain


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_joint_sweep_is_no_worse_than_two_steps(kind):
    for seed in range(3):
        dense, weight, inputs = pruned(seed, 16, 96)
        two = quantize_matrix(weight, kind, "compensated", inputs).weight()
        one = quantize_matrix(dense, kind, "joint", inputs).weight()
        assert relative_output_error(dense, one, inputs) <= relative_output_error(dense, two, inputs)


def test_compensation_is_near_the_best_codes_of_all():
    """Against all 16⁴ choices of four kept int4 codes, with the scale that was chosen."""
    dense, inputs = problem(3, 1, 8)
    weight = SparseGPT().prune(dense, inputs=inputs)
    rounded = quantize_matrix(weight, SCHEMES["int4"], "compensated", inputs)
    kept = weight[0].nonzero().squeeze(1)
    grid = torch.cartesian_prod(*[torch.arange(-8.0, 8.0)] * len(kept))
    every = torch.zeros(len(grid), 8)
    every[:, kept] = grid * rounded.scale[0, 0]
    gram = inputs.mean + 0.01 * inputs.mean.diagonal().mean() * torch.eye(8)
    errors = ((weight - every) @ gram * (weight - every)).sum(1)
    got = weight - rounded.weight()
    assert float((got @ gram * got).sum()) <= 1.25 * float(errors.min())


def test_scales_are_searched_by_error():
    """One large weight in a group of small ones is cut, if that is better for all."""
    weight = torch.full((1, 128), 0.3)
    weight[0, 5] = 4.0
    weight[0, 1::2] = 0
    weight[0, 5] = 4.0
    kind = SCHEMES["int4"]
    counted = torch.ones(128)
    counted[5] = 0.0  # a channel that hardly counts
    wide = search_scale(weight, kind, torch.float32)
    narrow = search_scale(weight, kind, torch.float32, counted)
    assert abs(float(narrow)) < abs(float(wide))
    for scale, importance in ((wide, torch.ones(128)), (narrow, counted)):
        largest = weight.abs().max() / kind.largest

        def error(s, importance=importance):
            return float(((kind.to_codes(weight / s) * s - weight).square() * importance).sum())

        tried = [kind.rounded_scale(largest * f, torch.float32) for f in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]
        assert error(scale) <= min(map(error, tried))


def test_a_scale_of_4_bits_has_the_sign_that_serves_the_largest_weight():
    """-8 is a code and 8 is none, so the largest weight is exact under one sign and cut under the other."""
    kind = SCHEMES["int4"]
    weight = torch.zeros(2, 128)
    weight[:, 0:64:4], weight[:, 1:64:4] = 3.0, -2.0
    weight[:, 64] = torch.tensor([8.0, -8.0])
    rounded = quantize_matrix(weight, kind)
    assert rounded.scale.flatten().tolist() == [-1.0, 1.0]
    assert torch.equal(rounded.weight(), weight)
    assert torch.equal(rounded.packed().unpack(torch.float32), weight)


def test_fp8_scales_are_searched_where_no_weight_is_cut():
    """From the largest weight at 448 up to twice that scale: each row has its best place between two powers
    of two, and to cut a weight is never better."""
    kind, weight = SCHEMES["fp8"], problem(0, 64, 96)[0]

    def error(scale):
        return (kind.to_codes(weight / scale) * scale - weight).square().sum(1, keepdim=True)

    found = search_scale(weight, kind, torch.float32)
    assert float((weight / found).abs().max()) < 448 * (1 + 2**-8)  # as exact as scales are
    start = weight.abs().amax(1, keepdim=True) / 448
    tried = [error(kind.rounded_scale(start * 2 ** (step / 7), torch.float32)) for step in range(7)]
    best = torch.stack(tried).amin(0)
    assert float(error(found).sum()) < 1.01 * float(best.sum())
    assert float(error(found).sum()) < 0.9 * float(tried[0].sum())


@pytest.mark.parametrize("rounding", ["nearest", "compensated", "joint"])
def test_the_same_every_time(rounding):
    dense, weight, inputs = pruned(4, 8, 70)
    given_to = dense if rounding == "joint" else weight
    first, second = (quantize_matrix(given_to, KINDS[2], rounding, inputs) for _ in range(2))
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)


def test_what_is_refused():
    dense, weight, inputs = pruned()
    with pytest.raises(InputError, match="keeps 4 of 4"):
        quantize_matrix(dense, KINDS[0], layer="up")
    with pytest.raises(InputError, match="inputs"):
        quantize_matrix(weight, KINDS[0], "compensated")
    with pytest.raises(InputError, match="no rounding"):
        quantize_matrix(weight, KINDS[0], "stochastic", inputs)
    weight[0, 0] = torch.nan
    for how in ("nearest", "joint"):
        with pytest.raises(InputError, match="NaN"):
            quantize_matrix(weight, KINDS[0], how, inputs)
