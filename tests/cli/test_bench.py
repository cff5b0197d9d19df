"""`twofour bench DIR`, and documents that --save keeps for the report."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from twofour.bench import end_to_end, products
from twofour.bench.timing import about
from twofour.report.page import report

QUICK = ("--batches", "1", "--prompt", "4", "--generate", "2")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 4)
    return path


def test_json_is_one_document_and_save_keeps_it(twofour, packed, text):
    ran = twofour("bench", packed, "--data", text, *QUICK, "--json", "--save")
    assert ran.status == 0, ran.err
    assert ran.json["verb"] == "bench"
    assert ran.json["model"] == str(packed)
    assert ran.json["about"].keys() == about("cpu").keys()
    assert json.loads((packed / "reports" / "bench-1.json").read_text()) == ran.json
    assert f"Kept: {packed / 'reports' / 'bench-1.json'}" in ran.err


def test_for_people(twofour, packed, _dense, text):
    ran = twofour("bench", packed, "--data", text, "--max-tokens", "50", *QUICK)
    assert ran.status == 0, ran.err
    assert f"Dense is {_dense}, which its record names." in ran.out
    assert "prefill 1×4, " in ran.out
    assert "decode 1×6, " in ran.out
    assert "A request of 4 tokens and 2 more: " in ran.out
    assert "Perplexity on 50 tokens of " in ran.out
    assert "The same most likely token as dense at " in ran.out
    assert "“The capital of France is” …" in ran.out
    if not torch.cuda.is_available():
        assert "a CPU has no Sparse Tensor Cores" in ran.err
        assert "orientation only" in ran.err


@pytest.mark.parametrize("with_text", [True, False])
def test_a_model_that_gives_nan_has_times_and_no_more(twofour, dense, packed, text, tmp_path, with_text):
    weights = load_file(dense / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    broken = shutil.copytree(dense, tmp_path / "broken")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    data = ("--data", text) if with_text else ()
    ran = twofour("bench", packed, "--against", broken, *data, *QUICK, "--json")
    assert ran.status == 1
    assert len(json.loads(ran.out, parse_constant=pytest.fail)["end_to_end"]) > 3
    culprit = broken if with_text else packed
    assert ran.err.endswith(
        f"error: {culprit} gives NaN: its times are all there is to know. See: twofour check {culprit}\n"
    )
    if with_text:
        ran = twofour("bench", broken, *data, *QUICK)
        assert ran.status == 1
        assert "prefill 1×4, " in ran.out
        assert f"error: {broken} gives NaN" in ran.err


def test_the_report_reads_it(twofour, packed, text, tmp_path):
    assert twofour("bench", packed, "--data", text, *QUICK, "--save").status == 0
    found = report([packed], tmp_path / "page.md")
    assert found["refused"] == []
    assert not any("perplexity" in gap["what"] or "memory" in gap["what"] for gap in found["missing"])
    page = (tmp_path / "page.md").read_text()
    assert "packed itself, 2 layers" in page
    assert "bench-1.json, end\\_to\\_end\\[0\\]" in page
    assert "random weights" not in page
    for prompt in ("Once upon a time", "The capital of France is"):
        assert prompt in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{packed}", "--shapes", "tiny"), "give a model directory, or --shapes"),
        (("{packed}", "--end-to-end"), "give a model directory, or --shapes"),
        (("{packed}", "--tokens", "4"), "--batches, --prompt and --generate instead"),
        (("{packed}", "--batches", "1,x"), "--batches '1,x' is not a list of positive numbers"),
        (("{packed}", "--batches", "0"), "--batches '0' is not a list of positive numbers"),
        (("{packed}", "--data", "nowhere.txt"), "nowhere.txt"),
        (("{packed}", "--against", "nowhere"), "nowhere does not exist"),
        (("nowhere",), "nowhere does not exist"),
        (("--save",), "--save is for a model: give its directory"),
        (("--shapes", "tiny", "--against", "x"), "--against is for a model"),
    ],
)
def test_wrong_command_lines(twofour, packed, arguments, words):
    ran = twofour("bench", *(argument.format(packed=packed) for argument in arguments))
    assert ran.status == 2
    assert words in ran.err


def test_eval_saves_and_names_what_it_was_compared_with(twofour, packed, pruned, text, tmp_path):
    ran = twofour("eval", packed, "--data", text, "--against", pruned, "--json", "--save")
    assert ran.status == 0, ran.err
    assert ran.json["against"] == str(pruned)
    assert ran.json["against_perplexity"] == pytest.approx(ran.json["perplexity"], rel=1e-3)
    assert json.loads((packed / "reports" / "eval-1.json").read_text()) == ran.json
    # That is the dense figure of the page, over the same text: nothing is missing.
    found = report([packed], tmp_path / "page.html")
    assert not any("perplexity" in gap["what"] for gap in found["missing"])
    assert "dense (1.00×)" in found["verdicts"]["packed"]


def test_advise_saves(twofour, packed):
    ran = twofour("advise", packed / "config.json", "--gpu", "H200", "--json", "--save")
    assert ran.status == 0, ran.err
    assert json.loads((packed / "reports" / "advise-1.json").read_text()) == ran.json


def test_tune_saves_beside_a_model_only(twofour):
    ran = twofour("tune", "--shapes", "8B", "--save")
    assert ran.status == 2
    assert "give its directory" in ran.err


def test_a_place_that_cannot_be_written(twofour, packed, text):
    (packed / "reports").write_text("a file")
    ran = twofour("eval", packed, "--data", text, "--save")
    assert ran.status == 2
    assert "cannot write" in ran.err


def stop_at_the_second(monkeypatch, owner, name):
    """Ctrl-C while the second thing is measured."""
    measure, begun = getattr(owner, name), []

    def stopped(*arguments):
        begun.append(arguments)
        if len(begun) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(owner, name, stopped)


@pytest.mark.parametrize("as_json", [True, False])
def test_products_that_were_measured_before_ctrl_c_are_kept(twofour, monkeypatch, as_json):
    stop_at_the_second(monkeypatch, products._Cell, "measure")
    ran = twofour("bench", "--shapes", "tiny", "--tokens", "1,16", *(["--json"] if as_json else []))
    assert ran.status == 130
    assert "Stopped: " in ran.err
    if as_json:
        assert ran.json["stopped"] is True
        assert {row["tokens"] for row in ran.json["products"]} == {1}
        assert all(row["eager_ms"] or "error" in row for row in ran.json["products"])
    else:
        assert "dense" in ran.out
        assert "twofour" in ran.out


def test_forms_that_were_measured_before_ctrl_c_are_kept(twofour, monkeypatch):
    stop_at_the_second(monkeypatch, end_to_end, "_measure")
    ran = twofour("bench", "--end-to-end", "--layers", "1", "--json")
    assert ran.status == 130
    assert [row["contender"] for row in ran.json["end_to_end"]] == ["dense"]


def test_ctrl_c_before_the_first_row_leaves_no_rows(twofour, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(products._Cell, "measure", stopped)
    ran = twofour("bench", "--shapes", "tiny", "--tokens", "1", "--json")
    assert ran.status == 130
    assert ran.json == {"error": {"message": "stopped.", "layer": None}}
