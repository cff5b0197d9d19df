"""How far a block goes from its old weights to the tuned ones."""

import math

import pytest
import torch

from twofour.prune.way_back import go_back_, lowest_point


@pytest.mark.parametrize(
    ("errors", "share"),
    [
        ((4.0, 1.0, 0.0), 1.0),  # (2 - 2t)²: lowest at the end
        ((1.0, 0.0, 1.0), 0.5),
        ((0.0625, 0.0625, 0.5625), 0.25),  # (t - ¼)²
        ((1.0, 1.5, 3.0), 0.0),  # rises from the start
        ((3.0, 2.5, 1.0), 1.0),  # bends down: the end or the start
        ((1.0, 2.5, 3.0), 0.0),
        ((1.0, 2.0, math.inf), 0.0),
        ((1.0, 2.0, math.nan), 0.0),
    ],
)
def test_the_lowest_point_of_a_parabola(errors, share):
    assert lowest_point(*errors) == pytest.approx(share)


@pytest.mark.parametrize(
    ("lowest", "stops_at"),
    [(0.3, 0.3), (0.5, 0.5), (1.0, 1.0), (1.7, 1.0), (0.95, 1.0), (-0.5, 0.0)],
)
def test_it_stops_where_the_error_is_lowest(lowest, stops_at):
    """The error is the squared distance to a point of the line, the distance from start to end is 2."""
    start, end = [torch.tensor([1.0, 0.0]), torch.zeros(3)], [torch.tensor([1.0, 2.0]), torch.zeros(3)]
    parameters = [tensor.clone() for tensor in end]
    aim = torch.tensor([1.0, 2 * lowest])

    def error():
        return float((parameters[0] - aim).square().sum())

    found = go_back_(parameters, start, float((start[0] - aim).square().sum()), error)
    torch.testing.assert_close(parameters[0], torch.lerp(start[0], end[0], stops_at))
    assert found == error()
    assert not torch.signbit(parameters[1]).any()  # what was removed stays at +0


@pytest.mark.parametrize("far", [math.inf, math.nan])
def test_an_end_that_is_not_finite_is_never_kept(far):
    start = [torch.tensor([1.0, -2.0])]
    parameters = [torch.tensor([1.0, far])]
    assert go_back_(parameters, start, 5.0, lambda: float(parameters[0].sum().abs())) == 5.0
    assert torch.equal(parameters[0], start[0])
