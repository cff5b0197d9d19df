"""Calibrated pruning of a checkpoint, through the command and cut short."""

import json

import pytest
import torch
from safetensors.torch import load_file

from twofour.io.check import check
from twofour.io.prune import prune_checkpoint

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 40
METHODS = ["wanda", "ria", "sparsegpt", "admm"]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def options(text):
    return {"calib": text, "samples": 6, "seqlen": 32}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_sound_checkpoint(twofour, dense, text, tmp_path, method):
    arguments = ["--method", method, "--calib", text, "--samples", 6, "--seqlen", 32, "--json"]
    ran = twofour("prune", dense, tmp_path / "out", *arguments)
    assert ran.status == 0, ran.err
    assert len(ran.json["layers"]) == 14
    assert ran.json["options"]["method"] == method
    assert all(0 < layer["output_error"] < 1 for layer in ran.json["layers"].values())
    assert check(tmp_path / "out").ok
    assert twofour("pack", tmp_path / "out", tmp_path / "packed").status == 0
    assert not (tmp_path / ".out.blocks").exists()
    before = load_file(dense / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(after[n], before[n]) for n in before if not n.endswith("proj.weight"))


def test_better_methods_lose_less_of_the_first_layers_output(dense, text, tmp_path):
    """On the first block all methods see the same inputs."""
    lost = {}
    for method in METHODS:
        step = prune_checkpoint(dense, tmp_path / method, method, **options(text))
        lost[method] = step["layers"]["model.layers.0.self_attn.q_proj"]["output_error"]
    assert lost["admm"] < lost["wanda"]
    assert lost["sparsegpt"] < lost["wanda"]


def test_without_text_it_says_what_to_give(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--method", "wanda")
    assert ran.status == 2
    assert "--calib" in ran.err
    assert not list(tmp_path.glob("*out*"))


class Killed(BaseException):
    """Like Ctrl-C."""


def test_resume_gives_the_same_weights(dense, text, tmp_path):
    prune_checkpoint(dense, tmp_path / "whole", "sparsegpt", **options(text))

    def stop(done, total, label):
        raise Killed

    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "cut", "sparsegpt", **options(text), on_progress=stop)
    work = tmp_path / ".cut.blocks"
    assert [f.name for f in work.glob("block-*")] == ["block-0000.safetensors"]
    stamp = (work / "block-0000.safetensors").stat().st_mtime_ns
    seen = []

    def watch(done, total, label):
        seen.append((work / "block-0000.safetensors").stat().st_mtime_ns)

    prune_checkpoint(dense, tmp_path / "cut", "sparsegpt", **options(text), resume=True, on_progress=watch)
    assert set(seen) == {stamp}, "the first block was pruned again"
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [json.loads((tmp_path / d / "twofour.json").read_text())["steps"][-1] for d in ("whole", "cut")]
    assert steps[0]["layers"] == steps[1]["layers"]


def test_work_of_other_options_is_not_taken_over(dense, text, tmp_path):
    def stop(done, total, label):
        raise Killed

    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text), on_progress=stop)
    prune_checkpoint(dense, tmp_path / "out", "sparsegpt", **options(text), resume=True)
    prune_checkpoint(dense, tmp_path / "fresh", "sparsegpt", **options(text))
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "fresh"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_error_leaves_nothing(dense, text, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    from safetensors.torch import save_file

    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp"):
        prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text))
    assert not list(tmp_path.glob("*out*"))


def test_blocks_survive_a_failure_to_write(dense, text, tmp_path, monkeypatch):
    """A full disk at the end must not cost the hours before it."""
    with monkeypatch.context() as patch:
        patch.setattr("twofour.io.stream.free_bytes", lambda path: 1000)
        with pytest.raises(ValueError, match="disk is too full"):
            prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text))
    assert len(list((tmp_path / ".out.blocks").glob("block-*"))) == 2
    assert not (tmp_path / "out").exists()
    prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text), resume=True)
    assert check(tmp_path / "out").ok
    assert not (tmp_path / ".out.blocks").exists()
