"""Layers with a low-rank correction are packed in memory as `twofour pack` packs them on disk."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import twofour
from twofour.errors import InputError
from twofour.io.load import load_causal_lm
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.nn import SparseLinear
from twofour.nn.lowrank import LowRankDense, LowRankLinear, add_lowrank_

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))


def small_model():
    """A plain layer, and two with a correction: a Linear and a transposed one."""
    torch.manual_seed(0)
    model = twofour.prune_(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.ReLU(), Conv1D(24, 32)))
    add_lowrank_(model[1], torch.randn(32, 3), torch.randn(3, 48))
    add_lowrank_(model[3], torch.randn(24, 2), torch.randn(2, 32))
    return model


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_the_correction_goes_along(memory, tmp_path):
    model = small_model()
    expected = model(X)
    left = model[1].lowrank_left
    twofour.pack_(model, memory=memory)
    assert [type(model[i]) for i in (0, 1, 3)] == [SparseLinear, LowRankLinear, LowRankLinear]
    assert model[1].lowrank_left is left  # an optimizer that trains it still does
    torch.testing.assert_close(model(X), expected, rtol=1e-4, atol=1e-4)
    twofour.save(model, tmp_path / "packed")
    assert twofour.check(tmp_path / "packed").ok
    fresh = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.ReLU(), Conv1D(24, 32))
    loaded = twofour.load(tmp_path / "packed", model=fresh)
    torch.testing.assert_close(loaded(X), expected, rtol=1e-4, atol=1e-4)


def test_a_model_that_cannot_be_packed_keeps_its_corrections():
    model = small_model()
    kinds = [type(module) for module in model]
    with pytest.raises(InputError, match=r"^1: it has a low-rank correction, which only a packed layer"):
        twofour.pack_(model, exclude=["1"])
    with torch.no_grad():
        model[0].weight.fill_(1)
    expected, state = model(X), list(model.state_dict())
    with pytest.raises(InputError, match="^0: "):
        twofour.pack_(model)
    assert [type(module) for module in model] == kinds
    assert type(model[1]) is LowRankDense
    assert list(model.state_dict()) == state
    assert torch.equal(model(X), expected)


def test_in_memory_and_on_disk_give_the_same(dense, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (tmp_path / "text.txt").write_text("pack my box with five dozen jugs. " * 40)
    calibration = CalibrationOptions(tmp_path / "text.txt", samples=8, seqlen=32, lowrank=4)
    prune_checkpoint(dense, tmp_path / "pruned", "wanda", calibration=calibration)
    pack_checkpoint(tmp_path / "pruned", tmp_path / "on disk")
    model = load_causal_lm(tmp_path / "pruned", "cpu", torch.float32)[0]
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        twofour.pack_(model)
        twofour.save(model, tmp_path / "in memory")
        for name in ("on disk", "in memory"):
            packed = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
            torch.testing.assert_close(packed(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("on disk", "in memory"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_totals_count_the_corrections(dense, tmp_path):
    from safetensors.torch import load_file

    (tmp_path / "text.txt").write_text("pack my box with five dozen jugs. " * 40)
    calibration = CalibrationOptions(tmp_path / "text.txt", samples=8, seqlen=32, lowrank=4)
    prune_checkpoint(dense, tmp_path / "pruned", "wanda", calibration=calibration)
    step = pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    names = ("weight_values", "weight_meta", "lowrank_left", "lowrank_right")
    by_hand = {n: sum(stored[f"{n}.{what}"].nbytes for what in names) for n in step["layers"]}
    assert {name: note["packed_bytes"] for name, note in step["layers"].items()} == by_hand
    assert step["packed_bytes"] == sum(by_hand.values())
    note = step["layers"]["model.layers.0.mlp.up_proj"]
    assert note["lowrank_bytes"] == 4 * 4 * (172 + 64)
    report = twofour.check(tmp_path / "packed")
    assert {layer.name: layer.stored_bytes for layer in report.layers} == by_hand
    pruned = {layer.name: layer for layer in twofour.check(tmp_path / "pruned").layers}
    layer = pruned["model.layers.0.mlp.up_proj"]
    assert layer.dense_bytes == 4 * 172 * 64
    assert layer.stored_bytes == layer.dense_bytes + note["lowrank_bytes"]
