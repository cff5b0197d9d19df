"""What is rounded in place of a layer's weights: it repairs what can be repaired, on the same mask."""

import torch

from twofour.pattern import check_pattern
from twofour.prune.magnitude import Magnitude
from twofour.quantize.target import Drift, fitted_target

from ..prune.layer_problem import gram_of


def drift_of(before, now, held_out=None):
    """D of tokens, and G and D of those of them that are held out."""
    mean = (before - now).t() @ now / len(now)
    if held_out is None:
        return Drift(mean)
    rest = [tensor[held_out] for tensor in (before, now)]
    return Drift(mean, (gram_of(rest[1]), drift_of(*rest).mean))


def test_a_fitted_target_repairs_what_the_inputs_brought():
    random = torch.Generator().manual_seed(0)
    before = torch.randn(4000, 16, generator=random)
    now = before @ (torch.eye(16) + 0.2 * torch.randn(16, 16, generator=random))
    gram = gram_of(now)
    weight = torch.randn(6, 16, generator=random)
    wanted = before @ weight.t()
    for held_out in (None, slice(3000, 4000)):
        target = fitted_target(weight, gram, drift_of(before, now, held_out))
        error, left = ((now @ w.t() - wanted).norm() / wanted.norm() for w in (weight, target))
        assert left < 0.15 * error


def test_a_target_is_not_shifted_by_what_does_not_carry_over():
    """Errors that have nothing to do with the inputs can be learnt by heart from few tokens, not repaired."""
    random = torch.Generator().manual_seed(0)
    now = torch.randn(4 * 24, 16, generator=random)
    before = now + 0.3 * torch.randn(4 * 24, 16, generator=random)
    weight, gram = torch.randn(6, 16, generator=random), gram_of(now)
    by_heart = fitted_target(weight, gram, drift_of(before, now))
    careful = fitted_target(weight, gram, drift_of(before, now, slice(72, 96)))
    assert (careful - weight).norm() < 0.3 * (by_heart - weight).norm()
    assert torch.equal(fitted_target(weight, gram, drift_of(now, now, slice(72, 96))), weight)


def test_a_teachers_outputs_are_met_as_well_as_the_mask_allows():
    """On the kept weights of each row it ends at least squares, by another road; the others stay zero."""
    random = torch.Generator().manual_seed(1)
    mix = torch.randn(16, 16, generator=random) / 4
    theirs = torch.randn(4000, 16, generator=random)
    now = (theirs + 0.3 * torch.randn(4000, 16, generator=random)) @ (torch.eye(16) + mix)
    dense = torch.randn(6, 16, generator=random)
    pruned = Magnitude().prune(dense)
    target = fitted_target(pruned, gram_of(now), drift_of(theirs, now), dense)
    assert check_pattern(target).legal
    assert not target[pruned == 0].any()
    wanted = theirs @ dense.t()
    for row, found in enumerate(target):
        kept = now[:, pruned[row] != 0]
        best = torch.linalg.lstsq(kept, wanted[:, row, None]).solution
        error, least = ((x - wanted[:, row]).norm() for x in (now @ found, (kept @ best)[:, 0]))
        assert error < 1.01 * least
        assert (now @ pruned[row] - wanted[:, row]).norm() > 1.1 * least


def test_channels_that_never_fire_change_nothing():
    random = torch.Generator().manual_seed(2)
    now = torch.randn(200, 8, generator=random)
    now[:, 3] = 0
    weight, teacher = torch.randn(2, 5, 8, generator=random)
    for drift in (drift_of(now, now), drift_of(now, now, slice(150, 200))):
        target = fitted_target(weight, gram_of(now), drift, teacher)
        assert target.isfinite().all()
        assert torch.equal(target[:, 3], weight[:, 3])
