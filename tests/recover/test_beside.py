"""The teacher beside the student, where there are no streams: what begins is done at once."""

import pytest
import torch

from twofour.recover.beside import Beside


@pytest.mark.parametrize("wanted", [True, False])
def test_on_a_cpu_it_is_a_call(wanted):
    beside, done = Beside(torch.device("cpu"), wanted), []

    def work():
        done.append("work")
        return torch.arange(3)

    for turn in (1, 2):
        found = beside.begin(work)
        assert len(done) == turn
        with beside.joined():
            assert found.tolist() == [0, 1, 2]
            assert len(done) == turn


def test_errors_pass():
    beside = Beside(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError):
        beside.begin(lambda: torch.tensor(1 / 0))
    with pytest.raises(ZeroDivisionError), beside.joined():
        1 / 0  # noqa: B018
