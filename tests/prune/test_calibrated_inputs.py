"""The methods that look at a layer's inputs, where inputs, weights or options are not nice."""

import pytest
import torch

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError, TwoFourError
from twofour.pattern import check_pattern
from twofour.prune.admm import ADMM
from twofour.prune.hessian import damped_cholesky, relative_output_error
from twofour.prune.magnitude import Magnitude
from twofour.prune.ria import RIA
from twofour.prune.sparsegpt import SparseGPT

from .layer_problem import METHODS, UPDATING, gram_of, identity, problem


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [32, 30, 31, 33, 3, 2, 1])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_gives_2_of_4(method, columns, dtype):
    matrix, inputs = problem(columns=columns)
    matrix = matrix.to(dtype)
    before = matrix.clone()
    pruned = method.prune(matrix, inputs=inputs)
    assert pruned.dtype == dtype
    assert pruned.shape == matrix.shape
    assert torch.equal(matrix, before)
    kept = (pruned != 0).sum(1)
    assert (kept == columns // 4 * 2 + min(columns % 4, 2)).all()
    assert check_pattern(pruned).legal
    assert not torch.signbit(pruned[pruned == 0]).any()


@pytest.mark.parametrize("method", UPDATING, ids=repr)
def test_bfloat16_weights_lose_rounding_only(method):
    matrix, inputs = problem()
    half = matrix.bfloat16()
    exact = method.prune(half.float(), inputs=inputs)
    assert torch.equal(method.prune(half, inputs=inputs), exact.bfloat16())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_channels_that_never_fire(method):
    matrix, _ = problem()
    random = torch.Generator().manual_seed(1)
    x = torch.randn(256, 32, generator=random) @ torch.randn(32, 32, generator=random)
    x[:, [0, 5, 6, 8, 9, 10, 12, 13, 14, 15]] = 0.0  # one, two, three and four of a group
    inputs = gram_of(x)
    matrix[:, 0] = 100.0
    pruned = method.prune(matrix, inputs=inputs)
    assert pruned.isfinite().all()
    assert check_pattern(pruned).legal
    for alive in ([4, 7], [11]):
        assert (pruned[:, alive] != 0).all()
    assert (pruned[:, 0] == 0).all()
    if method in UPDATING:
        assert (pruned[:, [5, 6, 8, 9, 10, 12, 13, 14, 15]] == 0).all()
    assert relative_output_error(matrix, pruned, inputs) < 0.3


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_layer_that_no_token_reached_counts_all_channels_the_same(method):
    matrix, _ = problem()
    unseen = Gram(32)
    expected = method.prune(matrix, inputs=identity(32))
    pruned = method.prune(matrix, inputs=unseen)
    assert torch.equal(pruned != 0, expected != 0)
    torch.testing.assert_close(pruned, expected)
    assert not unseen.mean.any()
    assert relative_output_error(matrix, expected, unseen) == 0.0


@pytest.mark.parametrize("damping", [0.01, 0.0])
@pytest.mark.parametrize("pairs", [True, False])
def test_duplicated_inputs(pairs, damping):
    """Of every two equal channels one can do the work of both: next to nothing is lost."""
    matrix, _ = problem()
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).repeat_interleave(2, dim=1)
    inputs = gram_of(x)
    admm = ADMM(damping=damping).prune(matrix, inputs=inputs)
    sparsegpt = SparseGPT(damping=damping, pairs=pairs).prune(matrix, inputs=inputs)
    magnitude = relative_output_error(matrix, Magnitude().prune(matrix), inputs)
    for pruned in (admm, sparsegpt):
        assert pruned.isfinite().all()
        assert relative_output_error(matrix, pruned, inputs) < 0.5 * magnitude
    if pairs:  # the pair cost sees that removing both of a kind is dear; single costs cannot
        assert relative_output_error(matrix, sparsegpt, inputs) < 1e-3


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_fewer_tokens_than_channels_zero_rows_and_scale(method):
    matrix, inputs = problem(tokens=5)
    matrix[2] = 0.0
    matrix[:, 3] = 0.0
    pruned = method.prune(matrix, inputs=inputs)
    assert pruned.isfinite().all()
    assert (pruned[2] == 0).all()
    assert check_pattern(pruned).legal
    larger = Gram(32)
    larger.mean = inputs.mean * 2**20  # the unit of the inputs must not matter
    torch.testing.assert_close(method.prune(matrix, inputs=larger), pruned, rtol=1e-3, atol=1e-3)


# Errors


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_errors_name_the_method_or_the_layer(method):
    matrix, inputs = problem()
    assert method.needs_inputs
    with pytest.raises(InputError, match=rf"^mlp\.up: {method.name} .*Give calibration text"):
        method.prune(matrix, "mlp.up")
    with pytest.raises(InputError, match=r"^mlp\.up: .*\[8, 32\].*\[16, 16\]"):
        method.prune(matrix, "mlp.up", Gram(16))
    with pytest.raises(InputError, match=r"^mlp\.up: .*int8"):
        method.prune(matrix.to(torch.int8), "mlp.up", inputs)
    inputs.mean[3, 3] = torch.inf
    with pytest.raises(InputError, match=r"^mlp\.up: the inputs .* NaN or infinite"):
        method.prune(matrix, "mlp.up", inputs)
    matrix[1, 1] = torch.nan
    with pytest.raises(InputError, match=r"^mlp\.up: 1 of 256 weights"):
        method.prune(matrix, "mlp.up", inputs)


@pytest.mark.parametrize("method", UPDATING, ids=repr)
def test_a_matrix_that_is_no_gram_matrix(method):
    impossible = Gram(32)
    impossible.mean = torch.full((32, 32), -5.0).fill_diagonal_(1.0)  # correlations beyond ±1
    with pytest.raises(TwoFourError, match=r"^mlp\.up: .*Cholesky.*damping 10\b"):
        method.prune(problem()[0], "mlp.up", impossible)


def test_damping_is_raised_only_as_far_as_needed():
    gram = torch.ones(4, 4)
    assert damped_cholesky(gram, 0.01, None)[1] == pytest.approx(0.01)
    _, added = damped_cholesky(gram, 0.0, None)
    assert added == pytest.approx(1e-4)
    bent = torch.full((4, 4), 1.05).fill_diagonal_(1.0)  # smallest eigenvalue -0.05
    factor, added = damped_cholesky(bent, 0.01, None)
    assert added == pytest.approx(0.1)
    torch.testing.assert_close(factor @ factor.T, bent + 0.1 * torch.eye(4))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: SparseGPT(block=6), "block"),
        (lambda: SparseGPT(block=0), "block"),
        (lambda: SparseGPT(damping=-1.0), "damping"),
        (lambda: ADMM(damping=float("nan")), "damping"),
        (lambda: ADMM(iterations=0), "iterations"),
        (lambda: ADMM(refit=-1), "refit"),
        (lambda: RIA(power=-0.5), "power"),
    ],
)
def test_options_that_make_no_sense(make, option):
    with pytest.raises(InputError, match=option):
        make()
