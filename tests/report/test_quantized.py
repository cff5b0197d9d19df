"""The page of a model of 8 or 4 bits: times of its own scheme, and what rounding took."""

import json

import pytest

from twofour.quantize.schemes import scheme_named
from twofour.report.figures import number as shown
from twofour.report.page import report
from twofour.report.times import moved_bytes

from .html_reader import Reader
from .models_to_report import end_to_end, layer_names, products, quantized_model, recorded_model, write

LAYERS = {"layers.0.proj": (640, 640), "layers.1.proj": (640, 640)}


def told(directories, tmp_path):
    found = report(directories, tmp_path / "page.html")
    return found, Reader((tmp_path / "page.html").read_text(encoding="utf-8")).text


def in_scheme(scheme, group, times, same):
    """A document of bench with more rows, of that scheme: so many times as fast as dense, and as dense of as
    many bits."""
    document = products()
    rows = []
    for row in document["products"]:
        if row["contender"] == "dense":
            ms = row["graph_ms"]["p50"]
            rows += [
                row | {"scheme": scheme, "group": group, "contender": who, "graph_ms": {"p50": ms / faster}}
                for who, faster in (("dense", 1), ("twofour", times), ("dense other", times / same))
            ]
    return document | {"products": document["products"] + rows}


def test_tune_gives_times_of_the_models_own_scheme(tmp_path):
    directory = quantized_model(tmp_path / "m", LAYERS, "int4", 128, calib="c4.jsonl")
    row = {"n": 640, "k": 640, "tokens": 8, "dense_ms": 0.03, "best": {}}
    rows = [
        row | {"times_dense": 4.0, "scheme": "int4", "group": 128},
        row | {"times_dense": 2.5, "scheme": "int4", "group": 64},
        row | {"times_dense": 3.0, "scheme": "fp8", "group": None},
        row | {"times_dense": 1.5, "scheme": None, "group": None},
    ]
    write(directory / "reports" / "tune.json", {"verb": "tune", "rows": rows})
    found, text = told([directory], tmp_path)
    assert "run 4.00× dense at 8 tokens" in found["verdicts"]["m"]
    assert "60.0 µs dense and 15.0 µs in 2:4 int4 (4.00×) at 8 tokens" in text
    assert [gap for gap in found["missing"] if gap["command"].startswith("twofour tune")] == []
    plain = recorded_model(tmp_path / "plain", LAYERS)
    write(plain / "reports" / "tune.json", {"verb": "tune", "rows": rows})
    assert "run 1.50× dense at 8 tokens" in told([plain], tmp_path)[0]["verdicts"]["plain"]


@pytest.mark.parametrize(
    ("scheme", "group", "roof"),
    [("fp8", None, "2,920"), ("fp8-weight", None, "1,460"), ("int4", 128, "1,460")],
)
def test_bench_gives_the_roofline_and_dense_of_as_many_bits(scheme, group, roof, tmp_path):
    directory = quantized_model(tmp_path / "m", layer_names(), scheme, group, calib="c4.jsonl")
    write(directory / "reports" / "bench.json", in_scheme(scheme, group, times=4.0, same=1.6))
    found, text = told([directory], tmp_path)
    assert "its 2:4 layers together run 4.00× dense at 1 token and 4.00× at 2,048" in found["verdicts"]["m"]
    assert f"2:4 {scheme} roof {roof} TFLOP/s" in text
    assert "dense of as many bits / it" in text
    assert "4.00× 1.60× m/reports/bench.json" in text
    assert "Dense has 16 bits." in text


def test_what_is_missing_is_asked_for_in_the_models_scheme(tmp_path):
    directory = quantized_model(tmp_path / "m", layer_names(), "int4", 128)
    write(directory / "reports" / "bench.json", products())  # in 16 bits: not of this model
    found, _ = told([directory], tmp_path)
    assert f"twofour tune {directory} --save" in {gap["command"] for gap in found["missing"]}
    assert "its speed" in found["verdicts"]["m"]
    (directory / "reports" / "bench.json").unlink()
    found, _ = told([directory], tmp_path)
    wanted = f"twofour bench --shapes 8B --scheme int4 --json > {directory}/reports/bench.json"
    assert wanted in {gap["command"] for gap in found["missing"]}


def test_what_rounding_took_from_each_layer(tmp_path):
    four = quantized_model(tmp_path / "four", layer_names(), "int4", 128, calib="c4.jsonl", teacher="./dense")
    eight = quantized_model(tmp_path / "eight", layer_names(), "fp8")
    found, text = told([four, eight, recorded_model(tmp_path / "plain", layer_names())], tmp_path)
    assert "rounding-errors" in found["sections"]
    for number, name in enumerate(layer_names()):
        lost = f"{0.03 + 0.001 * number:.4f}"
        assert f"{name} {lost} {lost}" in text  # of the two that are quantized
        assert f"{name} {shown(0.0007 + 0.0001 * number)}" in text
    assert "Outputs of four follow ./dense" in text
    gaps = [gap for gap in found["missing"] if "rounded without text" in gap["what"]]
    wanted = ("eight", "twofour quantize MODEL OUT --scheme fp8 --calib TEXT")
    assert [(gap["model"], gap["command"]) for gap in gaps] == [wanted]
    assert "Training has moved" not in text


def test_scales_that_were_trained_since_are_said(tmp_path):
    directory = quantized_model(tmp_path / "m", layer_names(), "int4", 128, calib="c4.jsonl")
    record = json.loads((directory / "twofour.json").read_text())
    record["steps"].append({"verb": "recover", "options": {"recipe": "scales"}})
    write(directory / "twofour.json", record)
    assert "Training has moved the scales of m since." in told([directory], tmp_path)[1]


def test_a_model_in_16_bit_has_no_such_section(tmp_path):
    found, _ = told([recorded_model(tmp_path / "m", layer_names())], tmp_path)
    assert "rounding-errors" not in found["sections"]


def test_a_joint_sweep_has_one_error_for_both(tmp_path):
    directory = recorded_model(tmp_path / "m", layer_names())
    record = json.loads((directory / "twofour.json").read_text())
    record["steps"][0]["options"] |= {"method": "joint", "scheme": "int4"}
    write(directory / "twofour.json", record)
    found, text = told([directory], tmp_path)
    assert "m: pruned and rounded in one sweep, so these are errors of both." in text
    assert "rounding-errors" not in found["sections"]


def test_bytes_of_packed_weights():
    """256 × 1024 weights, one token in and out in 16 bits: 5 bits a weight, 3, and what scales take."""
    weights, token = 256 * 1024, 2 * (256 + 1024)
    scales = {"int8": 2 * 256, "fp8": 2 * 256, "int4": 2 * 256 * 1024 / 128}
    for name, bits in (("int8", 5), ("fp8", 5), ("int4", 3)):
        moved = moved_bytes(256, 1024, 1, 2, packed=True, scheme=scheme_named(name))
        assert moved == weights * bits / 8 + scales[name] + token
    assert moved_bytes(256, 1024, 1, 2, packed=True) == weights * 9 / 8 + token
    assert moved_bytes(256, 1024, 1, 4, packed=False) == weights * 4 + 2 * token


def test_models_of_other_schemes_each_have_their_own_figure(tmp_path):
    """Though their layers and the document of times are the same."""
    directories = [
        quantized_model(tmp_path / name, layer_names(), name, group, calib="c4.jsonl")
        for name, group in (("int4", 128), ("fp8", None))
    ]
    both = products()
    for name, group, faster in (("int4", 128, 4.0), ("fp8", None, 2.5)):
        both["products"] = both["products"] + in_scheme(name, group, faster, 1.5)["products"]
    document = write(tmp_path / "rows.json", both)
    found = report(directories, tmp_path / "page.html", documents=[document])
    assert "4.00× dense at 1 token" in found["verdicts"]["int4"]
    assert "2.50× dense at 1 token" in found["verdicts"]["fp8"]
    text = Reader((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "Layers of int4" in text
    assert "Layers of fp8" in text


def test_a_whole_model_in_8_and_4_bits_is_drawn(tmp_path):
    directory = quantized_model(tmp_path / "m", layer_names(), "fp8")
    document = end_to_end()
    rows = [row for row in document["end_to_end"] if "error" not in row]
    for row, contender in zip(rows, ("dense", "fp8", "int4"), strict=True):
        row["contender"] = contender
    write(directory / "reports" / "end-to-end.json", document | {"end_to_end": rows})
    report([directory], tmp_path / "page.html")
    drawn = (tmp_path / "page.html").read_text().partition("Every row")[0]
    assert "6.40 ms · 1.25×" in drawn
    assert "5.00 ms · 1.60×" in drawn
