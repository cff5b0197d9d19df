"""`twofour prune --permute`: channels of a checkpoint reordered block by block, also when it is cut short."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twofour.io.check import check
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 40
FOLDS = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def permuted(text, **options):
    return {"calibration": CalibrationOptions(text, samples=24, seqlen=32, permute=True, **options)}


def test_the_command_reorders_and_records(twofour, dense, text, tmp_path):
    arguments = ["--method", "wanda", "--calib", text, "--samples", 24, "--seqlen", 32]
    ran = twofour("prune", dense, tmp_path / "out", *arguments, "--permute", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["permute"] is True
    notes = {name: layer.get("permutation") for name, layer in ran.json["layers"].items()}
    assert sorted(name for name in notes if notes[name]) == sorted(FOLDS)
    for name in FOLDS:
        assert notes[name]["kept"] > notes[name]["kept_before"]
        assert notes[name]["output_change"] < 1e-5
    down = notes["model.layers.0.mlp.down_proj"]
    assert down["kind"] == "chain"
    assert set(down["producers"]) == {f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")}
    assert check(tmp_path / "out").ok
    assert twofour("pack", tmp_path / "out", tmp_path / "packed").status == 0
    plain = twofour("prune", dense, tmp_path / "plain", *arguments, "--json")
    assert "permute" not in plain.json["options"]
    assert not any("permutation" in layer for layer in plain.json["layers"].values())
    said = twofour("prune", dense, tmp_path / "said", *arguments, "--permute")
    assert "Channels reordered for 4 layers" in said.out


@pytest.mark.parametrize("method", ["sparsegpt", "best"])
def test_resume_gives_the_same_weights(dense, text, tmp_path, method):
    class Killed(BaseException):
        """Like Ctrl-C."""

    def stop(done, total, label):
        raise Killed

    # up stays dense, and moves all the same: it is in no list of pruned layers, and has to be kept too.
    options = {"exclude": ["*.up_proj"], **permuted(text, lowrank=4 if method == "sparsegpt" else 0)}
    prune_checkpoint(dense, tmp_path / "whole", method, **options)
    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "cut", method, **options, on_progress=stop)
    assert (tmp_path / ".cut.blocks" / "block-0000.safetensors").exists()
    prune_checkpoint(dense, tmp_path / "cut", method, **options, resume=True)
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [json.loads((tmp_path / d / "twofour.json").read_text())["steps"][-1] for d in ("whole", "cut")]
    permutations = [{name: x.get("permutation") for name, x in step["layers"].items()} for step in steps]
    assert permutations[0] == permutations[1]
    up = "model.layers.0.mlp.up_proj.weight"
    before = load_file(dense / "model.safetensors")
    assert not torch.equal(one[up], before[up])
    assert torch.equal(one[up].sum(1).sort().values, before[up].sum(1).sort().values)  # the same rows


def test_other_layers_follow_so_that_only_the_pruned_one_is_worse(dense, text, tmp_path):
    """With nothing lost there would be no difference at all: down with two of four columns zero already."""
    tensors = load_file(dense / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.weight"):
            tensor.view(*tensor.shape[:-1], -1, 4)[..., 2:] = 0
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    step = prune_checkpoint(dense, tmp_path / "out", "wanda", ["*.down_proj"], **permuted(text))
    notes = [layer["permutation"] for layer in step["layers"].values()]
    assert [note["kept_before"] for note in notes] == [1.0, 1.0]
    tokens = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        old, new = (
            AutoModelForCausalLM.from_pretrained(where)(tokens).logits for where in (dense, tmp_path / "out")
        )
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def test_what_it_needs(twofour, dense, text, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--permute")
    assert ran.status == 2
    assert "--calib" in ran.err
    ran = twofour("prune", dense, tmp_path / "out", "--method", "magnitude", "--calib", text, "--permute")
    assert ran.status == 2
    assert "magnitude does not look at any" in ran.err
    assert not list(tmp_path.glob("*out*"))
