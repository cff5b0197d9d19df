"""`twofour bench --scheme` and `twofour tune --scheme`, as far as they go without a GPU."""

import json

import pytest
import torch


def test_products_and_a_model_of_random_codes(twofour):
    arguments = (
        "--shapes",
        "tiny",
        "--tokens",
        "4",
        "--scheme",
        "fp8, int4",
        "--end-to-end",
        "--layers",
        "1",
    )
    ran = twofour("bench", *arguments, "--json")
    assert ran.status == 0, ran.err
    rows = ran.json["products"]
    assert list(dict.fromkeys(row["scheme"] for row in rows)) == ["fp8", "int4"]
    if torch.cuda.is_available():
        return
    assert len(rows) == 2 * 3 * 2  # schemes, shapes, contenders
    assert {row["contender"] for row in ran.json["end_to_end"]} == {"dense", "dense_fused", "fp8", "int4"}
    assert json.dumps(ran.json, allow_nan=False)


def test_for_people(twofour):
    ran = twofour("bench", "--shapes", "tiny", "--tokens", "4", "--scheme", "int8")
    assert ran.status == 0, ran.err
    assert "× dense, same bits" in ran.out
    assert "int8 tiny.square 128×128" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bench", "--scheme", "int5"), "there is no scheme 'int5'"),
        (("bench", "{packed}", "--scheme", "int8"), "--scheme for random weights"),
        (("bench", "{packed}", "--sustained"), "give a model directory, or --shapes"),
        (("tune", "--shapes", "8B", "--scheme", "int5"), "there is no scheme 'int5'"),
        (("tune", "--shapes", "8B", "--group", "64"), "--group is for a scheme"),
        (("tune", "--shapes", "8B", "--scheme", "fp8", "--group", "64"), "no groups"),
        (("tune", "--shapes", "8B", "--scheme", "int4", "--group", "48"), "48 columns cannot share"),
    ],
)
def test_wrong_command_lines(twofour, packed, arguments, words):
    ran = twofour(*(argument.format(packed=packed) for argument in arguments))
    assert ran.status == 2
    assert words in ran.err


def test_sustained_turns_are_for_products_on_a_gpu(twofour, monkeypatch):
    if not torch.cuda.is_available():
        ran = twofour("bench", "--shapes", "tiny", "--sustained")
        assert ran.status == 2
        assert "GPU at its power limit" in ran.err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    ran = twofour("bench", "--end-to-end", "--sustained")
    assert ran.status == 2
    assert "--sustained is for products" in ran.err
