"""Streaming, resuming and the promise that a checkpoint is there whole or not at all."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twofour.errors import InputError
from twofour.io import stream
from twofour.io.checkpoint import Checkpoint
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.pattern import check_pattern, keep_best


@pytest.fixture
def small_shards(monkeypatch):
    """Shards so small that the test model has several."""
    monkeypatch.setitem(stream.rewrite.__kwdefaults__, "shard_bytes", 60_000)


def tensors(directory):
    return {name: t for f in sorted(directory.glob("*.safetensors")) for name, t in load_file(f).items()}


class Killed(BaseException):
    """Like Ctrl-C: not an error of the work."""


def stop_after(count):
    calls = 0

    def on_progress(done, total, label):
        nonlocal calls
        calls += 1
        if calls == count:
            raise Killed

    return on_progress


def test_pruned_weights_are_the_magnitude_choice_and_the_rest_is_untouched(dense, pruned):
    before, after = tensors(dense), tensors(pruned)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if name.endswith("proj.weight"):
            assert torch.equal(after[name], torch.where(keep_best(weight.abs()), weight, 0))
            assert check_pattern(after[name]).legal
        else:
            assert torch.equal(after[name], weight)


def test_small_files_of_the_source_are_kept(dense, packed):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (packed / name).read_bytes() == (dense / name).read_bytes()


def test_record_tells_how_it_was_made(packed):
    steps = json.loads((packed / "twofour.json").read_text())["steps"]
    assert [s["verb"] for s in steps] == ["prune", "pack"]
    assert steps[0]["options"] == {"method": "magnitude"}
    assert len(steps[0]["layers"]) == len(steps[1]["layers"]) == 14
    assert 0.2 < steps[0]["layers"]["model.layers.0.mlp.up_proj"]["relative_error"] < 0.6
    assert "head" in steps[0]["left"]["lm_head"]
    config = json.loads((packed / "config.json").read_text())
    assert config["quantization_config"]["made"] == ["prune method=magnitude", "pack"]


def test_packed_bytes(packed):
    step = json.loads((packed / "twofour.json").read_text())["steps"][1]
    assert step["dense_bytes"] == 2 * 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 172)
    assert step["packed_bytes"] < 0.54 * step["dense_bytes"]  # float32: 17/32, and odd widths round up


@pytest.mark.parametrize("run", [prune_checkpoint, pack_checkpoint])
def test_resume_gives_the_same_bytes(small_shards, dense, pruned, tmp_path, run):
    source = dense if run is prune_checkpoint else pruned
    run(source, tmp_path / "whole")
    with pytest.raises(Killed):
        run(source, tmp_path / "cut", on_progress=stop_after(12))
    assert not (tmp_path / "cut").exists()
    partial = tmp_path / ".cut.partial"
    finished = sorted(f.name for f in partial.glob("*.safetensors"))
    assert 0 < len(finished) < len(list((tmp_path / "whole").glob("*.safetensors")))
    stamps = {f: (partial / f).stat().st_mtime_ns for f in finished}
    run(source, tmp_path / "cut", resume=True)
    assert not partial.exists()
    whole, cut = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer.json"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    for name, stamp in stamps.items():
        assert (tmp_path / "cut" / name).stat().st_mtime_ns == stamp, "was written again"
    one, other = (
        json.loads((tmp_path / d / "twofour.json").read_text())["steps"][-1] for d in ("whole", "cut")
    )
    assert one["layers"] == other["layers"]


def test_killed_while_it_notes_what_is_finished_and_cut_short_again(small_shards, dense, tmp_path):
    prune_checkpoint(dense, tmp_path / "whole")
    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "cut", on_progress=stop_after(12))
    partial = tmp_path / ".cut.partial"
    noted = (partial / "progress.jsonl").read_text()
    (partial / "progress.jsonl").write_text(noted[:-20])  # in the middle of the last note
    first = min(partial.glob("*.safetensors"))
    stamp = first.stat().st_mtime_ns
    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "cut", on_progress=stop_after(14), resume=True)
    assert first.stat().st_mtime_ns == stamp
    prune_checkpoint(dense, tmp_path / "cut", resume=True)
    assert (tmp_path / "cut" / first.name).stat().st_mtime_ns == stamp, "was written again"
    whole, cut = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_without_resume_it_starts_anew(small_shards, dense, tmp_path):
    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "out", on_progress=stop_after(12))
    (tmp_path / ".out.partial" / "leftover").write_text("from the run before")
    prune_checkpoint(dense, tmp_path / "out")
    assert not (tmp_path / "out" / "leftover").exists()


def test_partial_result_of_other_options_is_not_taken_over(small_shards, dense, tmp_path):
    with pytest.raises(Killed):
        prune_checkpoint(dense, tmp_path / "out", on_progress=stop_after(12))
    with pytest.raises(InputError, match="other settings.*leave out --resume"):
        prune_checkpoint(dense, tmp_path / "out", exclude=["*.o_proj"], resume=True)
    assert len(list((tmp_path / ".out.partial").glob("*.safetensors"))) > 0
    prune_checkpoint(dense, tmp_path / "out", exclude=["*.o_proj"])
    kept = tensors(tmp_path / "out")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(kept, tensors(dense)["model.layers.0.self_attn.o_proj.weight"])


KILLED = """
import sys, time
from twofour.io import stream
from twofour.io.prune import prune_checkpoint
stream.rewrite.__kwdefaults__["shard_bytes"] = 60_000
def slowly(done, total, label):
    print(label, flush=True)
    time.sleep(0.2)
prune_checkpoint(sys.argv[1], sys.argv[2], on_progress=slowly)
"""


def test_killed_process_leaves_nothing_that_loads_and_resumes(small_shards, dense, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, dense, out], stdout=subprocess.PIPE, text=True)
    for _ in range(12):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    with pytest.raises((OSError, ValueError), match=r"config\.json"):
        AutoModelForCausalLM.from_pretrained(tmp_path / ".out.partial")
    prune_checkpoint(dense, out, resume=True)
    prune_checkpoint(dense, tmp_path / "whole")
    assert tensors(out).keys() == tensors(tmp_path / "whole").keys()
    assert all(torch.equal(t, tensors(tmp_path / "whole")[n]) for n, t in tensors(out).items())


def test_progress_reaches_the_end(dense, tmp_path):
    seen = []
    prune_checkpoint(
        dense, tmp_path / "out", on_progress=lambda done, total, label: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (Checkpoint(dense).nbytes, Checkpoint(dense).nbytes)


def test_reading_does_not_keep_the_file_mapped(tmp_path):
    """Resident memory stays at one tensor while a file of many is read."""
    from safetensors.torch import save_file

    tensor_bytes = 8 << 20
    save_file(
        {f"t{i}": torch.full((tensor_bytes // 4,), float(i)) for i in range(24)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)

    def resident():
        with open("/proc/self/status") as status:
            fields = dict(line.split(":") for line in status)
        return int(fields["VmRSS"].split()[0]) * 1024

    checkpoint.read("t0").sum()
    before = resident()
    most = 0
    for i in range(24):
        assert float(checkpoint.read(f"t{i}")[0]) == i
        most = max(most, resident() - before)
    assert most < 4 * tensor_bytes, f"{most >> 20} MB"
