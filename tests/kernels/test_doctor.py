"""What doctor says of GPUs that are not here: every way is asked for a layer that it is for."""

import pytest
import torch

from tests.kernels.test_dispatch import h200  # noqa: F401
from twofour.kernels.doctor import examine


@pytest.mark.parametrize(
    ("capability", "missing"),
    [
        ((9, 0), set()),
        ((8, 0), {"hopper", "codes", "decode4"}),
        ((7, 5), {"hopper", "ampere", "codes", "decode4", "decode", "widen"}),
    ],
)
def test_what_runs_where(capability, missing, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = examine()
    assert found["gpus"][0]["sparse_tensor_cores"] == (capability >= (8, 0))
    backends = {backend["name"].split()[0]: backend for backend in found["backends"]}
    assert {name for name, backend in backends.items() if not backend["runs"]} == missing
    for name in missing & {"hopper", "codes", "decode4"}:
        assert "Hopper" in backends[name]["why"]
