"""Every verb that reads a model reads a quantized one, and says what it is."""

import json

import pytest

from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

FORMS = {"int4": "int4 in groups of 128", "int8": "int8", "fp8-weight": "fp8-weight"}
SMALL = ["--batches", "1", "--prompt", 8, "--generate", 2]


@pytest.fixture(params=FORMS)
def quantized(request, pruned, tmp_path):
    quantize_checkpoint(pruned, tmp_path / request.param, QuantizeOptions(request.param))
    return tmp_path / request.param


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 6)
    return tmp_path / "text.txt"


def test_check(twofour, quantized):
    ran = twofour("check", quantized)
    assert ran.status == 0, ran.err
    assert f"packed {FORMS[quantized.name]}," in " ".join(ran.out.split())
    scheme = twofour("check", quantized, "--json").json["scheme"]
    assert scheme == {"name": quantized.name, **({"group": 128} if quantized.name == "int4" else {})}


def test_eval_bench_and_report(twofour, quantized, dense, text):
    scored = twofour("eval", quantized, "--data", text, "--against", dense, "--json")
    assert scored.status == 0, scored.err
    assert 0 < scored.json["kl"] < 1
    ran = twofour("bench", quantized, "--against", dense, "--data", text, *SMALL, "--json", "--save")
    assert ran.status == 0, ran.err
    assert ran.json["scheme"]["name"] == quantized.name
    assert {row["contender"] for row in ran.json["end_to_end"]} >= {"dense", "twofour"}
    assert not [row for row in ran.json["end_to_end"] if "error" in row]
    assert ran.json["perplexity"]["sparse"] == pytest.approx(scored.json["perplexity"], rel=1e-4)
    sizes = ran.json["sizes"]
    assert sizes["sparse"]["memory_bytes"] < sizes["dense"]["memory_bytes"]

    page = quantized.parent / "page.md"
    assert twofour("report", quantized, "-o", page).status == 0
    shown = page.read_text()
    group = ", groups of 128" if quantized.name == "int4" else ""
    assert f"packed 2:4 {quantized.name}{group}" in shown
    assert f"--scheme {quantized.name}" in shown
    assert "--rounding nearest" in shown
    step = json.loads((quantized / "twofour.json").read_text())["steps"][-1]
    share = step["packed_bytes"] / step["dense_bytes"]
    assert f"({share:.1%})".replace("%", " %") in shown.replace("\u202f", " ").replace("\xa0", " ")


def test_bench_without_the_dense_model_multiplies_with_what_the_codes_stand_for(twofour, quantized):
    record = json.loads((quantized / "twofour.json").read_text())
    record["steps"][0]["source"] = "/nowhere/dense"
    (quantized / "twofour.json").write_text(json.dumps(record))
    ran = twofour("bench", quantized, *SMALL)
    assert ran.status == 0, ran.err
    shown = " ".join(ran.out.split())
    assert f"(packed {quantized.name})" in shown
    assert "its own weights with their zeros" in shown


def test_advise(twofour, quantized):
    ran = twofour("advise", quantized, "--gpu", "H200", "--json")
    assert ran.status == 0, ran.err
    forms = {form["name"]: form for form in ran.json["forms"]}
    assert (
        forms["2:4 int4"]["weight_bytes"] < forms["2:4 int8"]["weight_bytes"] < forms["2:4"]["weight_bytes"]
    )


def test_pruning_a_pruned_model_is_told(twofour, dense, pruned, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    arguments = ["--scheme", "int4", "--calib", text, "--samples", 2, "--seqlen", 16]
    ran = twofour("prune", pruned, tmp_path / "again", *arguments)
    assert ran.status == 0
    assert f"use twofour quantize {pruned} {tmp_path / 'again'} --scheme int4." in ran.err
    assert "pruned already" not in twofour("prune", dense, tmp_path / "once", *arguments).err
