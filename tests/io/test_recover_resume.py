"""`twofour recover`, cut short, killed, out of space, and gone on with."""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.prune import prune_checkpoint
from twofour.io.recover import recover_checkpoint
from twofour.recover import Recover
from twofour.recover.options import RECIPES, SCALES

from .recovering import SHORT, flags, quantized, require_same

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


class Killed(BaseException):
    """Like Ctrl-C."""


def gpt2(directory, dense):
    """With dropout, whose random numbers must be the same after a resume; and with Conv1D layers."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 128}
    GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2)).save_pretrained(directory / "gpt2")
    AutoTokenizer.from_pretrained(dense).save_pretrained(directory / "gpt2")
    prune_checkpoint(directory / "gpt2", directory / "gpt2-24")
    return directory / "gpt2", directory / "gpt2-24"


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [*((recipe, None) for recipe in RECIPES), ("distill", "int8"), ("adaptive", "int4"), (SCALES, None)],
)
def test_a_resumed_run_gives_the_same_bits(dense, text, tmp_path, recipe, scheme):
    teacher, source = gpt2(tmp_path, dense)
    if recipe == SCALES:
        source = quantized(source, tmp_path / "gpt2-int8", "int8")
    options = Recover(**SHORT, recipe=recipe, patience=50, scheme=scheme)
    recover_checkpoint(source, tmp_path / "whole", [text], teacher, options)
    for stop in (1, 6, 9):  # before the first state; before and after adaptive's masks freeze

        def cut(done, total, label, stop=stop):
            if done >= stop:
                raise Killed

        with pytest.raises(Killed):
            recover_checkpoint(
                source, tmp_path / "cut", [text], teacher, options, resume=True, on_progress=cut
            )
        assert not (tmp_path / "cut").exists()
    seen = []
    recover_checkpoint(
        *(source, tmp_path / "cut", [text], teacher, options),
        resume=True,
        on_progress=lambda done, total, label: seen.append(done),
    )
    assert min(seen) > 8
    require_same(tmp_path / "whole", tmp_path / "cut")
    assert check(tmp_path / "cut").ok
    logs = []
    for name in ("whole", "cut"):
        entries = [json.loads(line) for line in (tmp_path / name / "recover.jsonl").read_text().splitlines()]
        logs.append(
            [{k: v for k, v in e.items() if k not in ("seconds", "tokens_per_second")} for e in entries]
        )
    assert logs[0] == logs[1]


def test_killed_at_any_moment_and_resumed(dense, pruned, text, tmp_path):
    """Twice by SIGKILL, whatever it is doing then, in a process of its own."""
    command = [sys.executable, "-m", "twofour", "recover", str(pruned), str(tmp_path / "cut")]
    command += ["--data", str(text), "--data", "self", "--teacher", str(dense), "--resume"]
    long = {"tokens": 150 * 4 * 16, "save_every": 1, "eval_every": 10}
    command += flags(**long)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    work = tmp_path / ".cut.recover"
    last = -1
    for _ in range(2):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            stamp = (
                (work / "state.safetensors").stat().st_mtime_ns
                if (work / "state.safetensors").exists()
                else -1
            )
            if stamp > last:
                time.sleep(0.05)  # a few steps on, and far from the end on any machine
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        last = (work / "state.safetensors").stat().st_mtime_ns
    assert not (tmp_path / "cut").exists()
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    whole = [*command[:5], str(tmp_path / "whole"), *command[6 : -len(flags(**long)) - 1], *flags(**long)]
    ran = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    require_same(tmp_path / "whole", tmp_path / "cut")
    assert check(tmp_path / "cut").ok


def test_resuming_with_other_settings_is_refused(pruned, text, tmp_path):
    def cut(done, total, label):
        if done >= 4:
            raise Killed

    with pytest.raises(Killed):
        recover_checkpoint(pruned, tmp_path / "out", [text], options=Recover(**SHORT), on_progress=cut)
    other = Recover(**{**SHORT, "lr": 1e-3})
    with pytest.raises(
        InputError, match=r"other settings: lr was 0\.003, is 0\.001.*without|leave out --resume"
    ):
        recover_checkpoint(pruned, tmp_path / "out", [text], options=other, resume=True)
    assert (tmp_path / ".out.recover" / "state.safetensors").exists()
    parts = Recover(**SHORT, accumulate=2, checkpointing=True)  # the same result in another way
    recover_checkpoint(pruned, tmp_path / "out", [text], options=parts, resume=True)
    assert check(tmp_path / "out").ok


def test_a_run_that_is_not_known_is_not_gone_on_with(pruned, text, tmp_path):
    def cut(done, total, label):
        if done >= 4:
            raise Killed

    arguments = (pruned, tmp_path / "out", [text])
    with pytest.raises(Killed):
        recover_checkpoint(*arguments, options=Recover(**SHORT), on_progress=cut)
    work = tmp_path / ".out.recover"
    for wrong in ("[1]", "{"):
        (work / "run.json").write_text(wrong)
        with pytest.raises(InputError, match=r"run\.json cannot be read"):
            recover_checkpoint(*arguments, options=Recover(**SHORT), resume=True)
    with pytest.raises(InputError, match="does not exist"):  # also when it would start anew
        recover_checkpoint(pruned, tmp_path / "out", [text, "typo.txt"], options=Recover(**SHORT))
    assert (work / "state.safetensors").exists()
    recover_checkpoint(*arguments, options=Recover(**SHORT))
    assert check(tmp_path / "out").ok


@pytest.mark.parametrize("finished", [False, True])
def test_a_full_disk_in_the_middle(finished, pruned, text, tmp_path, monkeypatch):
    from twofour.recover import state

    def save(tensors, path, metadata):
        if not finished or path.name.startswith("best"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata=metadata)

    def cut(done, total, label):
        if done >= 4:
            raise Killed

    if finished:
        with pytest.raises(Killed):
            recover_checkpoint(pruned, tmp_path / "out", [text], options=Recover(**SHORT), on_progress=cut)
    monkeypatch.setattr(state, "save_file", save)
    with pytest.raises(
        InputError, match="disk is full.*" + ("--resume" if finished else "Nothing of it was left")
    ):
        recover_checkpoint(pruned, tmp_path / "out", [text], options=Recover(**SHORT), resume=True)
    assert (tmp_path / ".out.recover").exists() == finished


def test_what_was_trained_survives_a_failure_to_write(pruned, text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("twofour.io.stream.free_bytes", lambda path: 1000)
        with pytest.raises(InputError, match="disk is too full.*--resume"):
            recover_checkpoint(pruned, tmp_path / "out", [text], options=Recover(**SHORT))
    assert not (tmp_path / "out").exists()
    seen = []
    recover_checkpoint(
        *(pruned, tmp_path / "out", [text]),
        options=Recover(**SHORT),
        resume=True,
        on_progress=lambda *told: seen.append(told),
    )
    assert not seen  # nothing was trained again
    assert check(tmp_path / "out").ok
    assert not list(tmp_path.glob(".out*"))


def test_the_teacher_writes_once(twofour, dense, pruned, tmp_path):
    def cut(done, total, label):
        if "loss" in label and done >= 4:
            raise Killed

    options = Recover(**SHORT)
    with pytest.raises(Killed):
        recover_checkpoint(pruned, tmp_path / "out", ["self"], dense, options, on_progress=cut)
    [written] = (tmp_path / ".out.recover").glob("written-*")
    stamp = written.stat().st_mtime_ns
    stamps = []
    recover_checkpoint(
        *(pruned, tmp_path / "out", ["self"], dense, options),
        resume=True,
        on_progress=lambda *told: stamps.append(written.stat().st_mtime_ns),
    )
    assert set(stamps) == {stamp}
    assert check(tmp_path / "out").ok
