"""The time of one product: right against measured rows, and sane everywhere else."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from twofour.advise.gpus import GPUS, find_gpu
from twofour.advise.model import shipped
from twofour.advise.products import intensity, product_time
from twofour.advise.schemes import ALTERNATIVES, DENSE, SCHEMES, SPARSE

ROOT = Path(__file__).resolve().parents[2]
H200 = find_gpu("H200")


def us(scheme, n, k, tokens, gpu=H200):
    return product_time(shipped().curve(scheme), gpu, scheme, n, k, tokens).us


def test_bytes_of_a_weight_are_those_of_the_packed_format():
    import torch

    from twofour.packed import packed_shapes

    for rows, columns in ((4096, 4096), (128, 172), (64, 36)):
        (_, kept), (_, meta) = packed_shapes(rows, columns)
        assert SPARSE.weight_bytes(rows, columns) == rows * (kept * torch.bfloat16.itemsize + meta)
        assert DENSE.weight_bytes(rows, columns) == rows * columns * 2


def test_bits_of_a_weight():
    bits = {scheme.name: 8 * scheme.weight_bytes(4096, 4096) / 4096**2 for scheme in SCHEMES}
    assert bits["dense"] == 16
    assert bits["2:4"] == 9
    assert bits["2:4 fp8"] == pytest.approx(5, abs=0.01)
    assert bits["dense int4"] == pytest.approx(4 + 16 / 128)
    assert bits["2:4 int4"] == pytest.approx(3 + 16 / 128)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_more_work_never_takes_less_time(scheme):
    for tokens in (1, 16, 256, 4096):
        assert us(scheme, 8192, 4096, tokens) > us(scheme, 4096, 4096, tokens)
        assert us(scheme, 4096, 8192, tokens) > us(scheme, 4096, 4096, tokens)
    times = [us(scheme, 4096, 4096, tokens) for tokens in (1, 64, 256, 1024, 4096, 16384)]
    assert times == sorted(times)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_no_product_beats_the_data_sheet(gpu):
    for scheme in (DENSE, SPARSE, *ALTERNATIVES):
        rate = gpu.rate(scheme.arithmetic)
        if rate is None:
            continue
        for n, k, tokens in ((1024, 4096, 1), (8192, 8192, 64), (57344, 8192, 16384)):
            took = us(scheme, n, k, tokens, gpu)
            by_bytes = scheme.weight_bytes(n, k) / gpu.bandwidth_gb_s / 1e3
            by_work = 2 * n * k * tokens / (rate * 1e6 * (2 if scheme.sparse else 1))
            assert took > max(by_bytes, by_work)


def test_which_side_of_the_roofline():
    def bound(n, k, tokens):
        return product_time(shipped().curve(DENSE), H200, DENSE, n, k, tokens).bound

    assert bound(28672, 4096, 1) == "bytes"
    assert bound(28672, 4096, 4096) == "arithmetic"
    assert bound(64, 64, 1) == "launch"


def test_intensity_of_one_token_is_one_operation_per_byte():
    assert intensity(DENSE, 4096, 4096, 1) == pytest.approx(1, rel=0.01)
    # Half of the operations over 9/16 of the bytes.
    assert intensity(SPARSE, 4096, 4096, 1) == pytest.approx(8 / 9, rel=0.01)


def test_decode_gains_by_bytes_and_prefill_by_arithmetic():
    for tokens, low, high in ((1, 1.6, 2.1), (8192, 1.2, 1.6)):
        assert low < us(DENSE, 57344, 8192, tokens) / us(SPARSE, 57344, 8192, tokens) < high


def test_a_type_that_the_gpu_lacks_is_no_time_at_all():
    with pytest.raises(ValueError, match="no fp8"):
        us(ALTERNATIVES[0], 4096, 4096, 1, find_gpu("A100"))


def test_the_shipped_figures_are_sane():
    for curve in shipped().curves.values():
        assert all(math.isfinite(value) and value > 0 for value in curve.to_dict().values())
        assert 0.4 < curve.bandwidth <= 1  # the least: PyTorch's int4
        assert 0 < curve.quantised <= 1


@pytest.mark.skipif(not (ROOT / "benchmarks" / "results").is_dir(), reason="without the measured rows")
def test_accuracy_over_all_committed_rows():
    """Median, worst and verdicts, on rows that were fitted to and on those held out."""
    script = ROOT / "benchmarks" / "advise_accuracy.py"
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, cwd=ROOT)
    told = json.loads(ran.stdout.splitlines()[-1])
    median, worst, right = told["goals"]
    parts = told["accuracy"]
    assert {(part["what"], part["rows"]) for part in parts} == {
        (what, rows) for what in ("products", "whole model") for rows in ("fitted", "held out")
    }
    assert all(part["median_error"] <= median for part in parts)
    assert all(part["worst_error"] <= worst for part in parts)
    for what in ("products", "whole model"):
        verdicts = [part for part in parts if part["what"] == what]
        assert sum(p["right"] * p["verdicts"] for p in verdicts) >= right * sum(
            p["verdicts"] for p in verdicts
        )
    schemes = {part["scheme"]: part for part in told["schemes"]}
    assert schemes.keys() == {"dense fp8", "dense int4", "2:4 fp8", "2:4 int8", "2:4 int4"}
    for what, (median, worst) in told["quantized_bounds"].items():
        parts = [part[what] for part in schemes.values() if part[what] is not None]
        assert max(part["median"] for part in parts) <= median
        assert max(part["worst"] for part in parts) <= worst
    assert {name for name, part in schemes.items() if part["whole_model"]} == {"2:4 fp8", "2:4 int4"}


def test_2_4_int4_is_decoded_to_16_bit_first_where_there_are_many_tokens():
    """Up to 256 tokens come in tiles of 64, after that the product is that of 16 bits."""
    int4 = next(scheme for scheme in ALTERNATIVES if scheme.name == "2:4 int4")
    for n, k in ((6144, 4096), (28672, 4096), (4096, 14336)):
        few, more, most, many = (
            shipped().product(H200, int4, n, k, tokens).us for tokens in (64, 65, 256, 257)
        )
        assert few < more < most
        wide = us(SPARSE, n, k, 257)
        assert wide < many < 2 * wide


def test_2_4_int4_of_large_weights_as_measured():
    """Rows of benchmarks/results/h200-int4-70b.json, to which nothing was fitted."""
    int4 = next(scheme for scheme in ALTERNATIVES if scheme.name == "2:4 int4")
    took = {
        (10240, 8192): (10.8, 10.7, 11.0, 12.4),
        (8192, 8192): (8.3, 7.9, 8.6, 10.2),
        (57344, 8192): (47.3, 46.9, 47.7, 52.1),
        (8192, 28672): (24.7, 24.8, 24.2, 27.4),
    }
    for (n, k), times in took.items():
        for tokens, time in zip((1, 8, 16, 32), times, strict=True):
            assert shipped().product(H200, int4, n, k, tokens).us == pytest.approx(time, rel=0.12)


def test_pytorchs_int4_takes_a_time_for_every_token():
    int4 = next(scheme for scheme in ALTERNATIVES if scheme.name == "dense int4")
    assert us(int4, 28672, 4096, 8) > 2 * us(int4, 28672, 4096, 1)
    assert us(int4, 28672, 4096, 512) == pytest.approx(2 * us(int4, 28672, 4096, 256), rel=0.02)


def test_a_scheme_without_a_curve_is_told_from_16_bit():
    from dataclasses import replace

    model = shipped()
    bare = replace(model, curves={name: model.curves[name] for name in ("dense", "2:4")})
    for scheme in SCHEMES:
        assert bare.curve(scheme) == model.curve(SPARSE if scheme.sparse else DENSE)
        assert (model.curve(scheme) == bare.curve(scheme)) == (scheme.name in ("dense", "2:4", "dense int8"))
