"""`twofour sensitivity` and `prune --budget`, as a user runs them."""

import json

import pytest

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 40


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


SHORT = ("--samples", 8, "--seqlen", 32)


def test_for_people(twofour, dense, text):
    ran = twofour("sensitivity", dense, "--calib", text, *SHORT)
    assert ran.status == 0, ran.err
    assert "model.layers.0.mlp.down_proj" in ran.out
    assert "Estimated on 8 windows of 32 tokens" in ran.out
    ran = twofour("sensitivity", "--help")
    assert "Example: twofour sensitivity" in ran.out


def test_the_document_is_what_the_report_reads(twofour, dense, text, tmp_path):
    from twofour.report.documents import Document, read_document

    ran = twofour("sensitivity", dense, "--calib", text, *SHORT, "--exclude", "*.0.*", "--json")
    assert ran.status == 0, ran.err
    assert len(ran.json["layers"]) == 7
    for layer in ran.json["layers"].values():
        assert layer["divergence"] > 0
        assert layer["loss_increase"] == layer["first_order"] + layer["divergence"]
    assert 0 <= ran.json["first_order_kept"] <= 1
    assert ran.json["method"] == "sparsegpt"
    (tmp_path / "sensitivity.json").write_text(ran.out)
    document = read_document(tmp_path / "sensitivity.json")
    assert isinstance(document, Document)
    assert document.verb == "sensitivity"
    ran = twofour("report", dense, "--with", tmp_path / "sensitivity.json", "-o", tmp_path / "page.md")
    assert ran.status == 0, ran.err
    assert "Loss added by each layer" in (tmp_path / "page.md").read_text()


def test_mistakes(twofour, dense, packed, text, tmp_path):
    for arguments, said in (
        (["sensitivity", dense], "--calib"),
        (["sensitivity", dense, "--calib", tmp_path / "no.txt"], "does not exist"),
        (["sensitivity", packed, "--calib", text], "packed already"),
        (["sensitivity", dense, "--calib", text, "--method", "astrology"], "astrology"),
        (["prune", dense, tmp_path / "out", "--budget", "speed=1.05x"], "--calib"),
        (["prune", dense, tmp_path / "out", "--calib", text, "--budget", "1.3"], "ppl=1.05x or speed=1.3x"),
        (["prune", dense, tmp_path / "out", "--calib", text, "--budget", "speed=9x"], "even all layers"),
        (["prune", dense, dense, "--calib", text, "--budget", "speed=1.05x"], "exist"),
    ):
        ran = twofour(*arguments)
        assert ran.status == 2, (arguments, ran.err)
        assert said in ran.err, arguments
        assert "Traceback" not in ran.err
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "best"])
def test_a_budget_gives_a_sound_checkpoint_that_packs(twofour, dense, text, tmp_path, method):
    asked = ["--budget", "speed=1.08x", "--gpu", "H200", "--batch", 2, "--seq", 128, "--generate", 16]
    out = tmp_path / "out"
    ran = twofour("prune", dense, out, "--method", method, "--calib", text, *SHORT, *asked, "--json")
    assert ran.status == 0, ran.err
    told = ran.json["budget"]
    assert (told["gpu"], told["batch"], told["seq"], told["generate"]) == ("H200", 2, 128, 16)
    assert told["speed"] >= 1.08
    assert 0 < len(told["dense"]) < 14
    assert set(told["dense"]) | set(ran.json["layers"]) == set(told["sensitivity"])
    assert not set(told["dense"]) & set(ran.json["layers"])
    for name in told["dense"]:
        assert ran.json["left"][name] == "linear: kept dense by the budget speed=1.08x"
    recorded = json.loads((out / "twofour.json").read_text())["steps"][-1]
    assert recorded["budget"] == told
    assert recorded["options"]["budget"] == "speed=1.08x"
    assert twofour("check", out).status == 0
    ran = twofour("pack", out, tmp_path / "packed", "--json")
    assert ran.status == 0, ran.err
    assert set(ran.json["layers"]) == set(recorded["layers"])
    ran = twofour("check", tmp_path / "packed", "--json")
    assert ran.json["ok"] is True
    ran = twofour("eval", tmp_path / "packed", "--data", text, "--max-tokens", 100)
    assert ran.status == 0, ran.err


def test_a_loss_budget_for_people(twofour, dense, text, tmp_path):
    asked = ["--method", "wanda", "--calib", text, *SHORT, "--budget", "ppl=3x", "--gpu", "H200"]
    ran = twofour("prune", dense, tmp_path / "out", *asked)
    assert ran.status == 0, ran.err
    assert "Budget ppl=3x: " in ran.out
    assert "layers stay dense. Told for the H200: " in ran.out


def test_keep_dense_is_exclude(twofour, dense, tmp_path):
    pattern = "*.down_proj"
    for flag in ("--keep-dense", "--exclude"):
        ran = twofour("prune", dense, tmp_path / flag, flag, pattern, flag, "*.0.*.q_proj", "--json")
        assert ran.status == 0, ran.err
        assert len(ran.json["layers"]) == 11
        assert ran.json["left"]["model.layers.1.mlp.down_proj"] == f"Linear: excluded by {pattern}"
