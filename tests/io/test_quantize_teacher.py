"""Codes that come near to the dense model: they do, other models are refused, the command names it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.io.test_quantize import TEXT
from twofour.errors import InputError
from twofour.io.load import load_causal_lm
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.quantize import QuantizeOptions
from twofour.nn.quantized import QuantizedLinear
from twofour.pattern import check_pattern


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(("name", "smooth"), [("int4", None), ("int8", True), ("fp8", None)])
@pytest.mark.parametrize("streams", [True, False])
def test_a_teacher_brings_the_model_nearer_to_the_dense_one(
    name, smooth, streams, dense, pruned, text, tmp_path, twofour, monkeypatch
):
    if not streams:
        monkeypatch.setattr("twofour.io.prune_calibrated.open_streamed", lambda *_: None)
    how = ("--scheme", name, "--calib", text, "--samples", 24, "--seqlen", 32)
    how += ("--smooth",) if smooth else ()
    before, tokenizer = load_causal_lm(dense, "cpu")
    ids = torch.tensor([tokenizer(TEXT[:60])["input_ids"]])
    errors = {}
    for taught in (False, True):
        out = tmp_path / f"out-{taught}"
        ran = twofour("quantize", pruned, out, *how, *(("--teacher", dense) if taught else ()), "--json")
        assert ran.status == 0, ran.err
        assert ran.json["options"].get("teacher") == (str(dense) if taught else None)
        assert twofour("check", out).status == 0
        model, _ = load_causal_lm(out, "cpu")
        for layer in (module for module in model.modules() if isinstance(module, QuantizedLinear)):
            assert check_pattern(layer.packed.unpack()).legal
        with torch.no_grad():
            wanted = before(ids).logits
            errors[taught] = float((model(ids).logits - wanted).norm() / wanted.norm())
    assert errors[True] < 0.8 * errors[False]


def test_teachers_that_are_refused(dense, pruned, packed, text, tmp_path, twofour):
    def told(*arguments, source=pruned):
        ran = twofour("quantize", source, tmp_path / "out", "--scheme", "int4", *arguments)
        assert ran.status == 2
        assert not (tmp_path / "out").exists()
        return re.sub(r"\s+", " ", ran.err)

    calib = ("--calib", text, "--samples", 6, "--seqlen", 32)
    assert "following a teacher looks at the inputs" in told("--teacher", dense)
    assert "does not look at a teacher" in told("--teacher", dense, *calib, "--rounding", "nearest")
    assert "is packed" in told("--teacher", packed, *calib)
    assert "no-such" in told("--teacher", tmp_path / "no-such", *calib)
    other = Path(shutil.copytree(dense, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:, :32].contiguous()
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    message = told("--teacher", other, *calib)
    assert "model.layers.1.mlp.up_proj" in message
    assert "has one of [172, 32]: it is another model" in message
    reordered = tmp_path / "reordered"
    options = CalibrationOptions(text, samples=6, seqlen=32, permute=True)
    prune_checkpoint(dense, reordered, "admm", calibration=options)
    assert "--permute" in told("--teacher", dense, *calib, source=reordered)
    tuned = tmp_path / "tuned"
    prune_checkpoint(dense, tuned, "best", calibration=CalibrationOptions(text, samples=8, seqlen=16))
    assert "would undo it" in told("--teacher", dense, *calib, source=tuned)
    ran = twofour(
        *("quantize", tuned, tmp_path / "out", "--scheme", "int4", "--teacher", dense, *calib, "--tune")
    )
    assert ran.status == 0, ran.err
    with pytest.raises(InputError, match="which is its teacher"):
        QuantizeOptions("int4", rounding="joint", teacher=dense).settled(True)


def test_the_dense_model_is_named_where_it_would_help(dense, text, tmp_path, twofour):
    pruned = tmp_path / "own"
    assert twofour("prune", dense, pruned, "--method", "magnitude").status == 0
    how = ("--scheme", "int4", "--calib", text, "--samples", 4, "--seqlen", 32)
    words = f"--teacher {dense} --tune"
    assert words in twofour("quantize", pruned, tmp_path / "a", *how).err
    assert words not in twofour("quantize", pruned, tmp_path / "b", *how, "--teacher", dense).err
    assert words not in twofour("quantize", pruned, tmp_path / "c", "--scheme", "int4").err
    record = json.loads((pruned / "twofour.json").read_text())
    record["steps"][-1]["options"]["method"] = "best"  # which has tuned its blocks towards it already
    (pruned / "twofour.json").write_text(json.dumps(record))
    assert words not in twofour("quantize", pruned, tmp_path / "e", *how).err
    record["steps"][-1]["options"]["method"] = "magnitude"
    record["steps"].append({"verb": "recover", "options": {}})
    (pruned / "twofour.json").write_text(json.dumps(record))
    assert words not in twofour("quantize", pruned, tmp_path / "d", *how).err


def test_windows_that_pruning_was_tuned_on_are_not_taken_unless_asked_for(dense, text, tmp_path, twofour):
    """By default others are; who asks for the same is told."""
    pruned = tmp_path / "own"
    calib = ("--calib", text, "--samples", 8, "--seqlen", 16)
    assert twofour("prune", dense, pruned, *calib).status == 0
    how, words = ("--scheme", "int4", *calib), "Pruning was tuned on these windows"
    ran = twofour("quantize", pruned, tmp_path / "a", *how)
    assert ran.status == 0, ran.err
    assert words not in ran.err
    taken, asked = (
        json.loads((d / "twofour.json").read_text())["steps"][-1]["options"] for d in (pruned, tmp_path / "a")
    )
    assert (taken["method"], taken["seed"], asked["seed"]) == ("best", 0, 1)
    assert words in twofour("quantize", pruned, tmp_path / "b", *how, "--seed", 0).err
    other = tmp_path / "other.txt"
    other.write_text(text.read_text())
    assert (
        words
        not in twofour(
            "quantize", pruned, tmp_path / "c", "--calib", other, *how[4:], "--scheme", "int4", "--seed", 0
        ).err
    )
