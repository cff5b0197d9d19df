"""Smoothing of checkpoints: block by block as in memory, when it is on, and what it is worth."""

import pytest
import torch
from safetensors.torch import load_file

from tests.io.test_quantize import TEXT, calibration, logits, with_outliers
from twofour.calibrate.blocks import run_blocks
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint
from twofour.io.streamed import open_streamed
from twofour.io.structure import checkpoint_layers
from twofour.quantize import smooth_
from twofour.quantize.smooth import Smoothing


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("scheme", "with_text", "without"),
    [
        ("int8", ("compensated", True), ("nearest", False)),
        ("int8-weight", ("compensated", False), ("nearest", False)),
        ("fp8", ("compensated", False), ("nearest", False)),
        ("int4", ("compensated", False), ("nearest", False)),
    ],
)
def test_defaults_of_rounding_and_smoothing(scheme, with_text, without):
    assert QuantizeOptions(scheme).settled(has_text=True)[1:] == with_text
    assert QuantizeOptions(scheme).settled(has_text=False)[1:] == without
    assert QuantizeOptions(scheme, smooth=False).settled(has_text=True)[1:] == ("compensated", False)
    assert QuantizeOptions(scheme, rounding="compensated").settled(has_text=True)[1] == "compensated"


def test_smoothing_on_disk_gives_the_factors_of_a_whole_model(pruned, text):
    with_outliers(pruned)
    whole, tokenizer = load_causal_lm(pruned, "cpu")
    windows = sample_windows(tokenizer, read_documents(text), 6, 32)
    names = smooth_(whole, windows)
    checkpoint = Checkpoint(pruned)
    layers = list(checkpoint_layers(checkpoint).by_tensor.values())
    streamed, _, weights = open_streamed(checkpoint, layers, None)
    smoothing = Smoothing(streamed)

    def compare(block):
        for name, parameter in block.module.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(f"{block.name}.{name}")), name

    run_blocks(streamed, layers, windows, compare, prepare=smoothing, weights=weights)
    assert smoothing.makers == names
    assert "model.layers.0.input_layernorm" in names
    assert "model.layers.1.mlp.up_proj" in names


SMOOTHED = [
    ("int8", (), True),
    ("int8", ("--no-smooth",), False),
    ("fp8", (), False),
    ("fp8", ("--smooth",), True),
    ("int4", ("--no-smooth",), None),
]


@pytest.mark.parametrize(("scheme", "flags", "recorded"), SMOOTHED)
def test_what_is_smoothed_by_default(scheme, flags, recorded, pruned, text, tmp_path, twofour):
    with_outliers(pruned)
    how = ("--scheme", scheme, "--calib", text, "--samples", 4, "--seqlen", 32, "--rounding", "nearest")
    ran = twofour("quantize", pruned, tmp_path / "out", *how, *flags, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"].get("smooth") is recorded
    before, stored = (load_file(x / "model.safetensors") for x in (pruned, tmp_path / "out"))
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(before[norm], stored[norm]) is not bool(recorded)


def test_pruning_with_a_scheme_smooths_as_well(dense, text, tmp_path, twofour):
    with_outliers(dense)
    how = ("--scheme", "int8", "--calib", text, "--samples", 4, "--seqlen", 32)
    ran = twofour("prune", dense, tmp_path / "out", *how, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["smooth"] is True
    before, stored = (load_file(x / "model.safetensors") for x in (dense, tmp_path / "out"))
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(before[norm], stored[norm])
    assert twofour("check", tmp_path / "out").status == 0


def test_smoothing_helps_where_channels_are_large(pruned, text, tmp_path):
    with_outliers(pruned)
    wanted = logits(pruned)
    errors = {}
    for smooth in (False, None):
        options = QuantizeOptions("int8", smooth=smooth)
        quantize_checkpoint(pruned, tmp_path / str(smooth), options, calibration=calibration(text))
        errors[smooth] = float((logits(tmp_path / str(smooth)) - wanted).norm())
    assert errors[None] < 0.8 * errors[False]
