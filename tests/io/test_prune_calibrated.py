"""Calibrated pruning of a checkpoint, through the command and cut short."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 40
METHODS = ["wanda", "ria", "sparsegpt", "admm", "best"]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def options(text):
    return {"calibration": CalibrationOptions(text, samples=24, seqlen=32)}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_sound_checkpoint(twofour, dense, text, tmp_path, method):
    arguments = ["--method", method, "--calib", text, "--samples", 24, "--seqlen", 32, "--json"]
    ran = twofour("prune", dense, tmp_path / "out", *arguments)
    assert ran.status == 0, ran.err
    assert len(ran.json["layers"]) == 14
    assert ran.json["options"]["method"] == method
    recorded = {"calib": str(text), "samples": 24, "seqlen": 32, "seed": 0}
    assert ran.json["options"].items() >= recorded.items()
    assert "lowrank" not in ran.json["options"]
    assert all(0 < layer["output_error"] < 1 for layer in ran.json["layers"].values())
    assert check(tmp_path / "out").ok
    assert twofour("pack", tmp_path / "out", tmp_path / "packed").status == 0
    assert not (tmp_path / ".out.blocks").exists()
    before = load_file(dense / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    same = {n for n in before if torch.equal(after[n], before[n])}
    assert {n for n in before if n.startswith(("model.embed", "model.norm", "lm_head"))} <= same
    norms = {n for n in before if n.startswith("model.layers") and not n.endswith("proj.weight")}
    blocks = ran.json.get("blocks", {})
    changed = {name for block in blocks.values() for name in block["changed"]}
    assert norms - same == changed
    assert all(layer["seconds"] > 0 for layer in ran.json["layers"].values())
    if method == "best":
        assert list(blocks) == ["model.layers.0", "model.layers.1"]
        assert changed
        for block in blocks.values():
            assert (block["error_after"] < block["error_before"]) == block["kept"] == bool(block["changed"])


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


def test_the_default_is_best_with_text_and_magnitude_without(twofour, dense, text, tmp_path):
    arguments = ["--calib", text, "--samples", 24, "--seqlen", 32]
    ran = twofour("prune", dense, tmp_path / "best", *arguments)
    assert ran.status == 0, ran.err
    assert "by best" in ran.out
    assert "held-out text" in ran.out
    assert twofour("prune", dense, tmp_path / "plain", "--json").json["options"]["method"] == "magnitude"
    ran = twofour("prune", dense, tmp_path / "none", "--method", "best")
    assert ran.status == 2
    assert "--calib" in ran.err


def test_nan_activations_name_the_layer(dense, text, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.1.post_attention_layernorm.weight"][0] = torch.inf
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.gate_proj: the inputs .* NaN"):
        prune_checkpoint(dense, tmp_path / "out", **options(text))


def test_a_window_longer_than_the_text_is_refused(twofour, dense, text, tmp_path):
    text.write_text("short")
    ran = twofour("prune", dense, tmp_path / "out", "--calib", text, "--seqlen", 32)
    assert ran.status == 2
    assert "less than one window" in ran.err


class Killed(BaseException):
    """Like Ctrl-C."""


def without_seconds(notes):
    return {name: {k: v for k, v in note.items() if k != "seconds"} for name, note in notes.items()}


@pytest.mark.parametrize("method", ["sparsegpt", "best"])
def test_resume_gives_the_same_weights(dense, text, tmp_path, method):
    prune_checkpoint(dense, tmp_path / "whole", method, **options(text))

    def stop(done, total, label):
        raise Killed

    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "cut", method, **options(text), on_progress=stop)
    work = tmp_path / ".cut.blocks"
    assert [f.name for f in work.glob("block-*")] == ["block-0000.safetensors"]
    stamp = (work / "block-0000.safetensors").stat().st_mtime_ns
    seen = []

    def watch(done, total, label):
        seen.append((work / "block-0000.safetensors").stat().st_mtime_ns)

    prune_checkpoint(dense, tmp_path / "cut", method, **options(text), resume=True, on_progress=watch)
    assert set(seen) == {stamp}, "the first block was pruned again"
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [json.loads((tmp_path / d / "twofour.json").read_text())["steps"][-1] for d in ("whole", "cut")]
    for part in ("layers", "blocks") if method == "best" else ("layers",):
        assert without_seconds(steps[0][part]) == without_seconds(steps[1][part])


def stopped(dense, text, out, method="wanda"):
    """A run that was cut short after its first block."""

    def stop(done, total, label):
        raise Killed

    with pytest.raises(Killed):
        prune_checkpoint(dense, out, method, **options(text), on_progress=stop)
    return out.parent / f".{out.name}.blocks"


def test_other_options_do_not_go_on_with_finished_blocks(dense, text, tmp_path):
    work = stopped(dense, text, tmp_path / "out")
    calibrated = {"calibration": CalibrationOptions(text, samples=7, seqlen=32)}
    for other, named in (("sparsegpt", options(text)), ("wanda", calibrated)):
        with pytest.raises(InputError, match=r"other settings: (method|samples) was .*leave out --resume"):
            prune_checkpoint(dense, tmp_path / "out", other, **named, resume=True)
    assert (work / "block-0000.safetensors").exists()
    prune_checkpoint(dense, tmp_path / "out", "sparsegpt", **options(text))
    prune_checkpoint(dense, tmp_path / "fresh", "sparsegpt", **options(text))
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "fresh"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not work.exists()


def test_finished_blocks_survive_what_goes_wrong(dense, text, tmp_path, monkeypatch):
    work = stopped(dense, text, tmp_path / "out")
    first = work / "block-0000.safetensors"
    again = partial(prune_checkpoint, dense, tmp_path / "out", "wanda", resume=True)
    with pytest.raises(InputError, match="does not exist"):
        again(**options(tmp_path / "typo.txt"))
    assert first.exists()
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        patch.setattr("twofour.io.finished.save_file", full)
        with pytest.raises(InputError, match="disk is full.*--resume"):
            again(**options(text))
    assert first.exists()
    first.write_bytes(first.read_bytes()[:100])  # as a disk may leave it
    again(**options(text))
    assert check(tmp_path / "out").ok


def test_two_runs_do_not_write_the_same(dense, text, tmp_path):
    def other(done, total, label):
        with pytest.raises(InputError, match="another run is writing"):
            prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text))

    prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text), on_progress=other)
    assert check(tmp_path / "out").ok


def test_an_error_leaves_no_checkpoint(dense, text, tmp_path):
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp"):
        prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text))
    assert [path.name for path in tmp_path.glob("*out*")] == [".out.blocks"]
    assert [path.name for path in (tmp_path / ".out.blocks").glob("block-*")] == ["block-0000.safetensors"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"samples": 0}, "--samples"),
        ({"samples": -3}, "--samples"),
        ({"seqlen": 0}, "--seqlen"),
        ({"seqlen": 1}, "--seqlen"),
        ({"seqlen": 4096}, "--seqlen 64"),
        ({"seed": -(10**20)}, "seed"),
    ],
)
def test_windows_that_cannot_be(given, said, dense, text, tmp_path):
    with pytest.raises(InputError, match=said):
        prune_checkpoint(dense, tmp_path / "out", calibration=CalibrationOptions(text, **given))
    assert not list(tmp_path.glob("*out*"))


def test_blocks_survive_a_failure_to_write(dense, text, tmp_path, monkeypatch):
    """A full disk at the end must not cost the hours before it."""
    with monkeypatch.context() as patch:
        patch.setattr("twofour.io.stream.free_bytes", lambda path: 1000)
        with pytest.raises(ValueError, match="disk is too full.*--resume"):
            prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text))
    assert len(list((tmp_path / ".out.blocks").glob("block-*"))) == 2
    assert not (tmp_path / "out").exists()
    prune_checkpoint(dense, tmp_path / "out", "wanda", **options(text), resume=True)
    assert check(tmp_path / "out").ok
    assert not (tmp_path / ".out.blocks").exists()


def test_the_model_can_write_the_text_itself(twofour, dense, tmp_path):
    arguments = ["--method", "admm", "--calib", "self", "--samples", 8, "--seqlen", 16]
    assert twofour("prune", dense, tmp_path / "out", *arguments).status == 0
    assert check(tmp_path / "out").ok
    again = twofour("prune", dense, tmp_path / "again", *arguments)
    assert again.status == 0
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("method", ["magnitude", "sparsegpt", "best"])
def test_two_processes_give_what_one_gives(dense, text, tmp_path, method):
    """The windows are shared out and the Gram matrices added up, under torchrun and gloo."""
    command = ["twofour", "prune", str(dense)]
    rest = ["--method", method, "--calib", str(text), "--samples", "24", "--seqlen", "32"]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for out, start in (("one", []), ("two", launch)):
        arguments = [sys.executable, "-m", *start, *command, str(tmp_path / out), *rest]
        ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, ran.stderr
        assert check(tmp_path / out).ok
        assert ran.stdout.count("Pruned") == 1  # by the first process only
    assert not list(tmp_path.glob(".*.blocks"))
    before = load_file(dense / "model.safetensors")
    one, two = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "two"))
    for name in one:
        lost = [float((weights[name].float() - before[name].float()).norm()) for weights in (one, two)]
        if one[name].dim() > 1 or method != "best":
            assert lost[1] == pytest.approx(lost[0], rel=0.02, abs=1e-6), name
        else:  # which windows are held out depends on the processes, and on them how far norms move
            torch.testing.assert_close(one[name], two[name], rtol=0.0, atol=0.03)
    if method == "sparsegpt":  # the first block saw the same, up to the order of sums
        first = [name for name in one if "layers.0." in name and name.endswith("proj.weight")]
        for name in first:
            same = (one[name] != 0) == (two[name] != 0)
            assert float(same.float().mean()) > 0.999, name
            rows = same.all(1)  # the others made up for another weight
            assert float(rows.float().mean()) > 0.9, name
            torch.testing.assert_close(one[name][rows], two[name][rows], rtol=0.05, atol=2e-3)


def test_a_low_rank_correction_goes_along_to_the_packed_model(twofour, dense, text, tmp_path):
    from transformers import AutoModelForCausalLM

    from twofour.io.load import load_causal_lm

    rest = ["--method", "sparsegpt", "--calib", text, "--samples", 24, "--seqlen", 32]
    ran = twofour("prune", dense, tmp_path / "out", *rest, "--lowrank", 4, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["lowrank"] == 4
    assert all(x["lowrank_output_error"] < x["output_error"] for x in ran.json["layers"].values())
    assert all(x["lowrank_bytes"] > 0 for x in ran.json["layers"].values())
    packed = tmp_path / "packed"
    assert twofour("pack", tmp_path / "out", packed).status == 0
    assert twofour("check", packed).status == 0
    tokens = torch.randint(3, 30, (2, 12))
    with torch.no_grad():
        pruned = load_causal_lm(tmp_path / "out", "cpu", torch.float32)[0](tokens).logits
        model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
        torch.testing.assert_close(model(tokens).logits, pruned, atol=1e-4, rtol=1e-4)
        model.save_pretrained(tmp_path / "again")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        torch.testing.assert_close(again(tokens).logits, pruned, atol=1e-4, rtol=1e-4)
    ran = twofour("pack", tmp_path / "out", tmp_path / "less", "--exclude", "model.layers.0.mlp.up_proj")
    assert ran.status == 2
    assert "low-rank correction" in ran.err


def test_a_low_rank_correction_without_inputs_is_refused(twofour, dense, text, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--lowrank", 4)
    assert ran.status == 2
    assert "--calib" in ran.err
    ran = twofour("prune", dense, tmp_path / "out", "--lowrank", 4, "--method", "magnitude", "--calib", text)
    assert ran.status == 2
    assert "magnitude does not look at any" in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_a_model_that_has_become_another_does_not_go_on_with_finished_blocks(dense, text, tmp_path):
    work = stopped(dense, text, tmp_path / "cut", "sparsegpt")
    tensors = load_file(dense / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].neg_()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"files have changed since the run to resume: .*model\.safetensors"):
        prune_checkpoint(dense, tmp_path / "cut", "sparsegpt", **options(text), resume=True)
    assert (work / "block-0000.safetensors").exists()
