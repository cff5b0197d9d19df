"""Bytes and names as people read them."""

import pytest

from twofour.words import alike, first_number, size


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (1234567, "1.23 MB"), (2e9, "2 GB"), (3e12, "3 TB"), (-20, "-20 B")],
)
def test_size(count, words):
    assert size(count) == words


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("model.layers.12.mlp.down_proj", "model.layers.*.mlp.down_proj", 12),
        ("h.0.mlp.experts.7", "h.*.mlp.experts.*", 0),
        ("3", "*", 3),
        ("3.1", "*.*", 3),
        ("conv1", "conv1", None),
        ("layer2.conv1", "layer2.conv1", None),
    ],
)
def test_layers_of_one_kind(name, kind, number):
    assert alike(name) == kind
    assert first_number(name) == number
