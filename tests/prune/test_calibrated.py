"""The methods that look at a layer's inputs: against slow loops, closed forms, an oracle and each other."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twofour.calibrate.statistics import Gram
from twofour.pattern import keep_best
from twofour.prune.admm import ADMM, _in_order, _in_quarters, _two_largest
from twofour.prune.hessian import relative_output_error
from twofour.prune.magnitude import Magnitude
from twofour.prune.ria import RIA
from twofour.prune.sparsegpt import SparseGPT
from twofour.prune.wanda import Wanda

from .layer_problem import METHODS, SEEDS, UPDATING, gram_of, identity, problem


def damped(inputs, damping=0.01):
    """The Hessian in float64, every step spelled out."""
    gram = inputs.mean.double()
    return gram + damping * gram.diagonal().mean() * torch.eye(gram.shape[0], dtype=torch.float64)


def least_squares(dense, kept, hessian):
    """The best row with nonzeros only where `kept`, by the normal equations."""
    new = torch.zeros_like(dense)
    new[kept] = torch.linalg.solve(hessian[kept][:, kept], (hessian @ dense)[kept])
    return new


def exact_obs(matrix, inputs, damping=0.01):
    """The oracle (OBC): per row, remove the cheapest weight of all, update the rest exactly, downdate H⁻¹."""
    hessian = damped(inputs, damping)
    new = matrix.double().clone()
    for row in new:
        inverse = torch.linalg.inv(hessian)
        zeros = [0] * (len(row) // 4)
        gone = torch.zeros(len(row), dtype=torch.bool)
        closed = torch.zeros(len(row), dtype=torch.bool)
        while not closed.all():
            cost = row.square() / inverse.diagonal()
            j = int(cost.masked_fill(closed | gone, torch.inf).argmin())
            row -= row[j] / inverse[j, j] * inverse[:, j]
            inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
            gone[j] = True
            row[gone] = 0.0
            inverse[j, j] = 1.0  # its row and column are zero now; any diagonal keeps the division defined
            zeros[j // 4] += 1
            if zeros[j // 4] == 2:
                closed[j // 4 * 4 : j // 4 * 4 + 4] = True
    return new.float()


def mean_error(prune):
    errors = []
    for seed in SEEDS:
        matrix, inputs = problem(seed)
        errors.append(relative_output_error(matrix, prune(matrix, inputs), inputs))
    return sum(errors) / len(errors)


# Quality


def test_output_errors_are_in_the_known_order():
    error = {method.name: mean_error(lambda w, g, m=method: m.prune(w, inputs=g)) for method in METHODS[:3]}
    error["published"] = mean_error(lambda w, g: SparseGPT(pairs=False).prune(w, inputs=g))
    error["admm"] = mean_error(lambda w, g: ADMM().prune(w, inputs=g))
    error["magnitude"] = mean_error(lambda w, g: Magnitude().prune(w))
    error["oracle"] = mean_error(exact_obs)
    assert error["sparsegpt"] < 0.6 * error["wanda"]
    assert error["wanda"] < 0.7 * error["magnitude"]
    assert error["ria"] < 0.9 * error["magnitude"]
    assert error["sparsegpt"] < 1.02 * error["published"]
    assert error["admm"] < error["sparsegpt"]
    # The oracle chooses freely where to go next and freezes nothing; a sweep cannot come much nearer.
    assert error["oracle"] < error["sparsegpt"] < 3 * error["oracle"]
    assert error["admm"] < 1.5 * error["oracle"]


def test_the_joint_choice_is_better_than_the_published_one_on_one_group():
    """With one group there is no later one to interfere: the best of all six least-squares fits, exactly."""
    for seed in SEEDS:
        matrix, inputs = problem(seed, columns=4)
        pruned = SparseGPT().prune(matrix, inputs=inputs)
        hessian = damped(inputs)
        for dense, new in zip(matrix.double(), pruned.double(), strict=True):
            fits = [
                least_squares(dense, torch.tensor(kept), hessian)
                for kept in itertools.combinations(range(4), 2)
            ]
            best = min(fits, key=lambda fit: float((dense - fit) @ hessian @ (dense - fit)))
            torch.testing.assert_close(new, best, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
def test_admm_refit_lowers_the_error_on_the_same_weights(seed):
    matrix, inputs = problem(seed)
    for iterations in (1, 3, 30):
        without = ADMM(iterations=iterations, refit=0).prune(matrix, inputs=inputs)
        refitted = ADMM(iterations=iterations).prune(matrix, inputs=inputs)
        assert torch.equal(without != 0, refitted != 0)
        better, worse = (relative_output_error(matrix, w, inputs) for w in (refitted, without))
        assert better <= worse * (1 + 1e-4)
        if iterations == 1:
            assert better < 0.8 * worse


@pytest.mark.parametrize("method", [ADMM(iterations=1, refit=24), ADMM(iterations=600, refit=0)], ids=repr)
def test_admm_and_its_refit_each_reach_least_squares(method):
    """Damping is a share of the scaled Hessian's diagonal, so the closed form is in scaled weights.

    A row keeps 16 weights: conjugate gradients need about as many steps, steepest descent far more.
    """
    matrix, inputs = problem()
    norms = inputs.channel_norms.double()
    hessian = inputs.mean.double() / norms / norms[:, None] + 0.01 * torch.eye(32, dtype=torch.float64)
    pruned = method.prune(matrix, inputs=inputs)
    for dense, new in zip(matrix.double(), pruned.double(), strict=True):
        expected = least_squares(dense * norms, new != 0, hessian) / norms
        torch.testing.assert_close(new, expected, rtol=1e-3, atol=1e-3)


def test_admm_with_one_iteration_is_wanda():
    matrix, inputs = problem()
    once = ADMM(iterations=1, refit=0).prune(matrix, inputs=inputs)
    torch.testing.assert_close(once, Wanda().prune(matrix, inputs=inputs))


def plain_admm(dense, hessian, rho, steps):
    """ADMM as the module's first three lines have it, the mask free in all steps."""
    inverse = torch.linalg.inv(hessian + rho * torch.eye(len(hessian), dtype=torch.float64))
    weight, disagreement = dense, torch.zeros_like(dense)
    for step in range(steps):
        wish = weight + disagreement
        pruned = wish.where(keep_best(wish.abs()), 0.0)
        disagreement = wish - pruned
        if step + 1 < steps:
            weight = (dense @ hessian + rho * (pruned - disagreement)) @ inverse
    return pruned


@pytest.mark.parametrize("columns", [32, 30])
def test_admm_in_quarters_is_the_plain_one(columns):
    """30 columns: the last group is short. Masks that rounding decides may differ, in a few rows at most."""
    matrix, inputs = problem(columns=columns)
    norms = inputs.channel_norms.double()
    hessian = inputs.mean.double() / norms / norms[:, None] + 0.01 * torch.eye(columns, dtype=torch.float64)
    rho = float(torch.linalg.cholesky(hessian).diagonal().log().mean().mul(2).exp())
    expected = plain_admm(matrix.double() * norms, hessian, rho, 4) / norms
    pruned = ADMM(iterations=4, refit=0).prune(matrix, inputs=inputs)
    # Rows that got worse than Wanda's went back there.
    wanda = Wanda().prune(matrix, inputs=inputs)
    went_back = torch.isclose(pruned, wanda, rtol=1e-4, atol=1e-6).all(1)
    same = torch.isclose(pruned, expected.float(), rtol=1e-3, atol=1e-5).all(1)
    assert (same | went_back).float().mean() > 0.9
    assert same.float().mean() > 0.5


@pytest.mark.parametrize("columns", [3, 4, 32])
def test_admm_leaves_what_it_was_given_as_it_was(columns):
    """Four columns in quarters are in the same order: what would be a copy is the same memory."""
    matrix, inputs = problem(columns=columns)
    given_matrix, given_gram = matrix.clone(), inputs.mean.clone()
    ADMM().prune(matrix, inputs=inputs)
    assert torch.equal(matrix, given_matrix)
    assert torch.equal(inputs.mean, given_gram)


@given(rows=st.integers(1, 3), columns=st.integers(1, 13), data=st.data())
def test_the_two_largest_are_those_of_the_rule(rows, columns, data):
    """Small whole numbers: ties of all kinds, zeros among them. The rule's version is compared with."""
    entries = st.lists(st.integers(-3, 3), min_size=rows * columns, max_size=rows * columns)
    matrix = torch.tensor(data.draw(entries), dtype=torch.float32).reshape(rows, columns)
    mask = _in_order(_two_largest(_in_quarters(matrix)))[:, :columns]
    assert torch.equal(mask, keep_best(matrix.abs()))


# The weight update


@pytest.mark.parametrize("pairs", [True, False])
def test_the_obs_update_is_least_squares(pairs):
    """Only the first group loses weights, all others hold two zeros already: the rest must make up for it.

    The columns of those zeros carry no input. All kept weights are free for the joint removal; the published
    sweep freezes what is left of the weight it removes.
    """
    matrix, correlated = problem()
    dead = (torch.arange(32) % 4 >= 2) & (torch.arange(32) >= 4)
    inputs = Gram(32)
    inputs.mean = correlated.mean.masked_fill(dead, 0.0).masked_fill(dead[:, None], 0.0)
    pruned = SparseGPT(pairs=pairs).prune(matrix, inputs=inputs)
    # Damping is a share of the mean over channels that fire.
    gram = inputs.mean.double()
    shift = 0.01 * gram.diagonal()[~dead].mean()
    hessian = gram + shift * torch.eye(32, dtype=torch.float64)
    for dense, new in zip(matrix.double().masked_fill(dead, 0.0), pruned.double(), strict=True):
        assert (new[:4] != 0).sum() == 2
        assert (new[~dead][4:] != 0).all()
        kept = ~dead & (new != 0)
        if pairs:
            expected = least_squares(dense, kept, hessian)
        else:
            expected = dense.clone()
            for j in range(4):
                if new[j] == 0:  # removed in turn, everything further right moves
                    free = ~dead & (torch.arange(32) >= j)
                    inverse = torch.linalg.inv(hessian[free][:, free])
                    expected[free] -= expected[j] / inverse[0, 0] * inverse[0]
            expected[~kept] = 0.0
        torch.testing.assert_close(new, expected, rtol=1e-3, atol=1e-3)


def test_published_sparsegpt_against_a_column_loop():
    matrix, inputs = problem(rows=16, columns=48)
    factor = torch.linalg.cholesky(torch.linalg.inv(damped(inputs)), upper=True)
    weight = matrix.double().clone()
    for j in range(48):
        if j % 4 == 0:
            keep = keep_best((weight[:, j : j + 4] / factor.diagonal()[j : j + 4]).square())
        error = weight[:, j].masked_fill(keep[:, j % 4], 0.0) / factor[j, j]
        weight[:, j:] -= error[:, None] * factor[j, j:]
        weight[~keep[:, j % 4], j] = 0.0
    pruned = SparseGPT(pairs=False).prune(matrix, inputs=inputs)
    torch.testing.assert_close(pruned, weight.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pairs", [True, False])
def test_the_block_size_changes_nothing(pairs):
    matrix, inputs = problem(columns=44)
    whole = SparseGPT(block=128, pairs=pairs).prune(matrix, inputs=inputs)
    for block in (4, 12, 16):
        split = SparseGPT(block=block, pairs=pairs).prune(matrix, inputs=inputs)
        torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [32, 30])
@pytest.mark.parametrize("method", [*METHODS[:1], *UPDATING], ids=repr)
def test_uncorrelated_equal_inputs_make_every_method_magnitude(method, columns):
    matrix, _ = problem(columns=columns)
    new, expected = method.prune(matrix, inputs=identity(columns)), Magnitude().prune(matrix)
    if isinstance(method, ADMM):  # scales the weights back and forth
        assert torch.equal(new != 0, expected != 0)
        torch.testing.assert_close(new, expected)
    else:
        assert torch.equal(new, expected)


@pytest.mark.parametrize("pairs", [True, False])
def test_equal_weights_the_left_ones_stay(pairs):
    rows = list(itertools.product([1.0, -1.0, 2.0], repeat=4))
    matrix = torch.tensor(rows)
    pruned = SparseGPT(pairs=pairs).prune(matrix, inputs=identity(4))
    assert torch.equal(pruned, Magnitude().prune(matrix))


# Scores


def kept_by_loop(matrix, score):
    """All but the two highest scores of each four set to zero, score(i, j) in plain Python."""
    new = matrix.clone()
    for i, start in itertools.product(range(matrix.shape[0]), range(0, matrix.shape[1], 4)):
        group = range(start, min(start + 4, matrix.shape[1]))
        for j in sorted(group, key=lambda j: -score(i, j))[2:]:
            new[i, j] = 0.0
    return new


@pytest.mark.parametrize("columns", [32, 30])
def test_wanda_and_ria_against_loops(columns):
    matrix, inputs = problem(columns=columns)
    w = matrix.abs().double().tolist()
    norms = [float(inputs.mean[j, j]) ** 0.5 for j in range(columns)]
    by_wanda = kept_by_loop(matrix, lambda i, j: w[i][j] * norms[j])
    assert torch.equal(Wanda().prune(matrix, inputs=inputs), by_wanda)
    for power in (0.5, 1.0):

        def ria(i, j, power=power):
            return (w[i][j] / sum(row[j] for row in w) + w[i][j] / sum(w[i])) * norms[j] ** power

        assert torch.equal(RIA(power).prune(matrix, inputs=inputs), kept_by_loop(matrix, ria))


def test_relative_output_error_is_the_error_of_the_outputs():
    matrix, _ = problem()
    x = torch.randn(100, 32, generator=torch.Generator().manual_seed(1))
    pruned = Magnitude().prune(matrix)
    expected = float((x @ (matrix - pruned).T).square().sum() / (x @ matrix.T).square().sum())
    assert relative_output_error(matrix, pruned, gram_of(x)) == pytest.approx(expected, rel=1e-4)
    assert relative_output_error(matrix, matrix, gram_of(x)) == 0.0


@pytest.mark.parametrize("iterations", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("damping", [0.01, 1.0])
def test_no_row_of_admm_ends_worse_than_it_started(iterations, damping):
    """At few iterations the weights and the mask have not agreed yet; at high damping they agree on less."""
    for seed in SEEDS:
        matrix, inputs = problem(seed, tokens=20)
        start = Wanda().prune(matrix, inputs=inputs)
        for refit in (0, 10):
            pruned = ADMM(iterations, damping, refit=refit).prune(matrix, inputs=inputs)
            for dense, wanda, new in zip(matrix, start, pruned, strict=True):
                was, now = (relative_output_error(dense[None], row[None], inputs) for row in (wanda, new))
                assert now <= was * (1 + 1e-4) + 1e-7
