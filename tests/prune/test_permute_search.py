"""The search for an order of channels: against all orders, in its blocks, and the same every time."""

import itertools

import pytest
import torch

from twofour.errors import InputError
from twofour.prune.permute import Constraint, kept_share, search_permutation


def best_of_all(scores):
    """Every way to put the columns into fours."""

    def ways(columns):
        if not columns:
            yield ()
            return
        first, *rest = columns
        for three in itertools.combinations(rest, 3):
            left = [c for c in rest if c not in three]
            yield from ((first, *three, *others) for others in ways(left))

    return max(kept_share([scores], torch.tensor(w)) for w in ways(list(range(scores.shape[1]))))


@pytest.mark.parametrize("seed", range(2))
def test_search_finds_the_best_of_two_groups_and_nearly_that_of_three(seed):
    random = torch.Generator().manual_seed(seed)
    for columns, least in ((8, 1.0), (12, 0.99)):
        scores = torch.rand(6, columns, generator=random) * torch.rand(columns, generator=random)
        order = search_permutation([scores], seed=seed)
        assert sorted(order.tolist()) == list(range(columns))
        assert kept_share([scores], order) >= least * best_of_all(scores) - 1e-6


def uneven(rows, columns, seed=0):
    random = torch.Generator().manual_seed(seed)
    size = torch.randn(columns, generator=random).exp().sort().values  # neighbours are alike: the worst order
    return (torch.randn(rows, columns, generator=random) * size).square()


def test_search_is_deterministic_and_each_round_gains():
    scores = uneven(64, 128)
    shares = [kept_share([scores], search_permutation([scores], rounds=n)) for n in (0, 1, 5, 40)]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.001 > kept_share([scores]) + 0.01
    assert torch.equal(search_permutation([scores], seed=3), search_permutation([scores], seed=3))
    assert not torch.equal(search_permutation([scores], seed=3), search_permutation([scores], seed=4))


def test_search_does_not_lose_what_is_there():
    scores = torch.tensor([[9.0, 0, 8, 0], [0, 9, 0, 8]]).repeat(1, 4)  # kept entirely, and dealing breaks it
    assert kept_share([scores], search_permutation([scores])) == 1.0


def test_search_stays_in_its_blocks():
    scores = uneven(32, 64)
    order = search_permutation([scores], Constraint(64, 16))
    assert torch.equal(order.reshape(4, 16).sort(1).values, torch.arange(64).reshape(4, 16))
    free = search_permutation([scores])
    assert kept_share([scores]) < kept_share([scores], order) < kept_share([scores], free)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 6, 7, 26, 27])
def test_search_with_a_short_last_group(columns):
    scores = uneven(16, columns)
    order = search_permutation([scores])
    assert sorted(order.tolist()) == list(range(columns))
    assert kept_share([scores], order) >= kept_share([scores])


def test_search_over_several_consumers_and_a_sample_of_rows(monkeypatch):
    parts = [uneven(600, 64, seed=i) for i in range(3)]
    together = search_permutation([torch.cat(parts)])
    assert torch.equal(search_permutation(parts), together)
    monkeypatch.setattr("twofour.prune.permute.MOST_ROWS", 500)
    sampled = search_permutation(parts)
    assert kept_share(parts, sampled) > kept_share(parts) + 0.8 * (
        kept_share(parts, together) - kept_share(parts)
    )


def test_chunks_do_not_change_the_search(monkeypatch):
    scores = uneven(40, 64)
    order = search_permutation([scores])
    monkeypatch.setitem(__import__("twofour.prune.permute", fromlist=["CHUNK"]).CHUNK, "cpu", 1)
    assert torch.equal(search_permutation([scores]), order)


def test_search_refuses_scores_that_cannot_be_compared():
    for bad in (-1.0, torch.nan, torch.inf):
        with pytest.raises(InputError, match="finite and not below 0"):
            search_permutation([torch.tensor([[1.0, 2.0, 3.0, bad]])])
    with pytest.raises(InputError, match="12 channels do not fall into blocks of 8"):
        search_permutation([torch.ones(1, 12)], Constraint(12, 8))
