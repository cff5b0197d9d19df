"""Impossible input: one clear sentence, exit status 2, and nothing lost."""

import os
import resource
import shutil
import subprocess
import sys

import pytest

from twofour.io.checkpoint import Checkpoint

from .damage import LAYER, WEIGHTS, digest, edit_config, edit_tensors, one_sentence


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat. " * 8)
    return tmp_path / "text.txt"


def test_missing_directory(twofour, tmp_path):
    for verb in (["prune", tmp_path / "no", tmp_path / "out"], ["pack", tmp_path / "no", tmp_path / "out"]):
        ran = twofour(*verb)
        assert ran.status == 2
        one_sentence(ran, "does not exist")
    assert twofour("check", tmp_path / "no").status == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["config.json", WEIGHTS])
def test_missing_file(twofour, dense, tmp_path, missing):
    (dense / missing).unlink()
    before = digest(dense)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, missing)
    assert digest(dense) == before
    assert not list(tmp_path.glob("*out*"))


def test_packing_what_is_not_pruned_names_the_layer(twofour, dense, tmp_path):
    ran = twofour("pack", dense, tmp_path / "out", "--json")
    assert ran.status == 2
    assert "row 0, group 0" in ran.json["error"]["message"]
    assert ran.json["error"]["layer"].startswith("model.layers.0")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(twofour, dense, tmp_path, value):
    def poison(tensors):
        tensors[f"{LAYER}.weight"][2, 3] = value

    edit_tensors(dense, poison)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, LAYER, "NaN or infinite")
    assert not list(tmp_path.glob("*out*"))


def test_model_without_an_eligible_layer(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--exclude", "*proj")
    assert ran.status == 2
    one_sentence(ran, "no layer of this model can be made 2:4")


def test_pattern_that_matches_nothing(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--include", "encoder.*")
    assert ran.status == 2
    one_sentence(ran, "'encoder.*'")


def test_unknown_architecture(twofour, dense, tmp_path):
    edit_config(dense, lambda c: c.update(model_type="hyena-9000", architectures=["HyenaNine"]))
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "hyena-9000")


def test_pickled_weights_are_not_read(twofour, dense, tmp_path):
    (dense / WEIGHTS).rename(dense / "pytorch_model.bin")
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "pickled weights, which twofour never reads")


def test_existing_output_is_not_overwritten(twofour, dense, pruned, tmp_path):
    before = digest(pruned)
    ran = twofour("prune", dense, pruned)
    assert ran.status == 2
    one_sentence(ran, "already exists")
    assert digest(pruned) == before


@pytest.mark.parametrize("where", ["file/out", "/proc/out"])
def test_unwritable_directory(twofour, dense, tmp_path, where):
    (tmp_path / "file").write_text("not a directory")
    before = digest(dense)
    ran = twofour("prune", dense, tmp_path / where)  # an absolute path stays as it is
    assert ran.status == 2
    one_sentence(ran, "cannot write")
    assert digest(dense) == before


def test_full_disk_found_out_before(twofour, dense, tmp_path, monkeypatch):
    monkeypatch.setattr("twofour.io.stream.free_bytes", lambda path: 1000)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "the disk is too full")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a small disk needs root")
def test_full_disk_found_out_while_writing(dense, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = int(Checkpoint(dense).nbytes * 0.8)  # more than the 9/16 that are asked for beforehand
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not allow a mount")
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "twofour", "prune", dense, disk / "out"],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 2, ran.stderr
        assert "the disk is full" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_write_error_leaves_nothing(dense, tmp_path):
    """A limit on file sizes: the same as a quota, and needs no root."""
    ran = subprocess.run(
        [sys.executable, "-m", "twofour", "prune", dense, tmp_path / "out"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert ran.returncode in (1, 2), ran.stderr
    assert "files may not become so large here" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("*out*"))


def test_text_that_cannot_be_read(twofour, dense, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"tex": "b"}\n')
    (tmp_path / "worse.jsonl").write_text("{")
    expected = {
        "no.txt": "does not exist",
        "empty.txt": "no text",
        "binary.txt": "UTF-8",
        "bad.jsonl": "line 2",
        "worse.jsonl": "line 1",
    }
    for name, word in expected.items():
        ran = twofour("eval", dense, "--data", tmp_path / name)
        assert ran.status == 2
        one_sentence(ran, word)
