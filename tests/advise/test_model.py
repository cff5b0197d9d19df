"""Figures from a user's own rows: recovered from rows that the model itself made, and bad files refused."""

import itertools
import json

import pytest

from twofour.advise.advice import advise
from twofour.advise.fit import minimise
from twofour.advise.gpus import find_gpu
from twofour.advise.model import DEFAULTS, from_dict, read_rows, refine, shipped, to_dict
from twofour.advise.products import product_time
from twofour.advise.schemes import DENSE, SCHEMES, SPARSE
from twofour.errors import InputError

SHAPES = ((4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = (1, 16, 64, 512, 4096)


def document(gpu_name, slower, gpu=None):
    """Rows as `bench` writes them, of a GPU whose products all take `slower` times as long as predicted."""
    gpu, rows = gpu or find_gpu(gpu_name), []
    for n, k in SHAPES:
        for tokens in TOKENS:
            for contender, scheme in (("dense", DENSE), ("twofour", SPARSE)):
                us = slower * product_time(shipped().curve(scheme), gpu, scheme, n, k, tokens).us
                row = {"rows": n, "columns": k, "tokens": tokens, "contender": contender}
                rows.append(row | {"graph_ms": {"p50": us / 1e3}})
            rows.append(row | {"contender": "torch24", "graph_ms": {"p50": 99.0}})
            rows.append(row | {"contender": "dense", "graph_ms": None, "error": "failed"})
    return {"verb": "bench", "about": {"gpu": gpu_name}, "products": rows}


@pytest.fixture
def write(tmp_path):
    def to_file(content):
        path = tmp_path / "rows.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return to_file


def test_minimise_finds_the_bottom_of_a_valley():
    import numpy as np

    def rosenbrock(point):
        return np.array([1 - point[0], 10 * (point[1] - point[0] ** 2)])

    assert minimise(rosenbrock, [-1.2, 1.0], rounds=200) == pytest.approx([1, 1], abs=1e-3)


def test_shipped_figures_are_what_the_file_says():
    content = json.loads(DEFAULTS.read_text())
    assert to_dict(from_dict(content)) == content
    assert "H200" in content["fitted_to"]
    assert content["curves"].keys() == shipped().measured
    assert {scheme.name for scheme in SCHEMES} - shipped().measured == {"dense int8"}


def test_a_slower_gpu_is_found_to_be_slower(write):
    path = write(document("NVIDIA A100-SXM4-80GB", slower=1.4))
    rows = read_rows(path)
    assert {name: len(timed) for name, timed in rows.by_scheme.items()} == {"dense": 15, "2:4": 15}
    gpu, model = refine(rows, shipped())
    assert gpu.name == "A100 80GB SXM"
    for scheme in (DENSE, SPARSE):
        for row in rows.by_scheme[scheme.name]:
            told = product_time(model.curve(scheme), gpu, scheme, row.rows, row.columns, row.tokens).us
            assert told == pytest.approx(row.us, rel=0.12)


def quantized_document(gpu_name, slower, quantized=("fp8", "int4")):
    """Rows as `bench --scheme …` writes them, those of the codes `slower` times as long as predicted."""
    gpu, rows = find_gpu(gpu_name), []
    by_name = {scheme.name: scheme for scheme in SCHEMES}
    for codes in quantized:
        contenders = {"dense": "dense", f"dense {codes}": f"dense {codes}", "twofour": f"2:4 {codes}"}
        for (n, k), tokens in itertools.product(SHAPES, TOKENS[:4]):
            for contender, name in contenders.items():
                us = product_time(shipped().curve(by_name[name]), gpu, by_name[name], n, k, tokens).us
                ms = us / 1e3 * (1 if contender == "dense" else slower)
                row = {"rows": n, "columns": k, "tokens": tokens, "scheme": codes, "contender": contender}
                rows.append(row | {"graph_ms": {"p50": ms}})
            rows.append(row | {"contender": "hopper", "graph_ms": {"p50": 99.0}})
    return {"verb": "bench", "about": {"gpu": gpu_name}, "products": rows}


def test_rows_of_schemes_change_these_schemes_alone(write):
    rows = read_rows(write(quantized_document("NVIDIA H100 80GB HBM3", slower=1.5)))
    assert {name: len(timed) for name, timed in rows.by_scheme.items()} == {
        "dense": 12,  # twice in the file, once for each scheme
        **dict.fromkeys(("dense fp8", "2:4 fp8", "dense int4", "2:4 int4"), 12),
    }
    gpu, model = refine(rows, shipped())
    assert model.measured == rows.by_scheme.keys()
    for name in ("2:4", "2:4 int8"):
        assert model.curves[name] == shipped().curves[name]
    for scheme in SCHEMES:
        before, after = (
            [m.product(gpu, scheme, n, k, tokens).us for (n, k), tokens in itertools.product(SHAPES, (1, 64))]
            for m in (shipped(), model)
        )
        factor = 1.5 if scheme.name in rows.by_scheme and scheme != DENSE else 1
        # Dense int8 follows dense, whose rows say that it is as it was.
        assert after == pytest.approx([factor * us for us in before], rel=0.12 if factor > 1 else 0.03)


def test_stars_of_own_rows(write):
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 32}
    on_h100 = advise(config, measured=write(quantized_document("NVIDIA H100 PCIe", 1.0, ("fp8",))))
    assert {form.name for form in on_h100.forms if form.measured} == {"dense", "dense fp8", "2:4 fp8"}
    assert any("(dense, dense fp8, 2:4 fp8)" in note for note in on_h100.notes)
    # On the H200 what the file lacks is still measured.
    on_h200 = advise(config, measured=write(quantized_document("NVIDIA H200", 1.0, ("fp8",))))
    assert {form.name for form in on_h200.forms if not form.measured} == {"dense int8"}


def test_a_few_rows_of_a_scheme_are_not_fitted_to(write):
    content = document("NVIDIA H200", slower=1.0)
    row = content["products"][0] | {"scheme": "int4", "contender": "twofour"}
    content["products"] += [row | {"tokens": tokens, "graph_ms": {"p50": 5.0}} for tokens in (1, 2, 4)]
    _, model = refine(read_rows(write(content)), shipped())
    assert model.curves["2:4 int4"] == shipped().curves["2:4 int4"]


def test_rows_beyond_a_schemes_own_kernel_are_not_fitted_to(write):
    """With more than 256 tokens 2:4 int4 is another kernel, whose curve is that of 16 bit."""
    content = quantized_document("NVIDIA H200", 1.0, ("int4",))
    expected = refine(read_rows(write(content)), shipped())[1]
    row = next(row for row in content["products"] if row["contender"] == "twofour")
    content["products"] += [row | {"tokens": t, "graph_ms": {"p50": 99.0}} for t in (257, 2048, 8192)]
    assert refine(read_rows(write(content)), shipped())[1] == expected


def test_a_gpu_without_a_data_sheet_is_described_by_its_rows(write):
    from twofour.advise.gpus import Gpu

    made = Gpu("NVIDIA X1", 1000, None, 132, None, 200, None, None)
    content = document("NVIDIA X1", 1.0, made)
    with pytest.raises(InputError, match="X1"):
        refine(read_rows(write(content)), shipped())
    content["ceilings"] = {"copy_gb_s": 850.0, "matmul_tflops": 140.0}
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 32}
    advice = advise(config, measured=write(content))
    assert advice.gpu.name == "NVIDIA X1"
    assert advice.gpu.from_measurement
    assert advice.form("2:4").fits is None
    assert advice.form("2:4").measured
    assert any("30 products measured on NVIDIA X1" in note for note in advice.notes)


def test_rows_of_another_gpu_than_the_one_named(write):
    with pytest.raises(InputError, match="not of 'L4'"):
        advise({}, "L4", measured=write(document("NVIDIA H200", 1.0)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "does not hold rows"),
        ("[]", "does not hold rows"),
        ({"about": {"gpu": None}, "products": []}, "0 dense and 0 2:4"),
        ({"about": {"gpu": "NVIDIA H200"}, "products": [{"contender": "dense", "graph_ms": {}}]}, "rows"),
    ],
)
def test_files_that_are_no_rows(write, content, words):
    with pytest.raises(InputError, match=words):
        read_rows(write(content))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_rows(tmp_path / "no.json")
