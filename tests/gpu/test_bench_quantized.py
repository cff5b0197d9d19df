"""Benchmark and tuning of quantized products on a GPU: rows of all contenders, and choices that are used."""

import pytest
import torch

from twofour.bench.products import Ceilings, run_products
from twofour.bench.quantized_contenders import SAME_PRECISION
from twofour.bench.tune import tune
from twofour.kernels import dispatch, dispatch_codes, tuning
from twofour.quantize.schemes import SCHEMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]
CUDA = torch.device("cuda", 0)
ROUNDING = {"int8": 0.02, "fp8": 0.06}


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_rows_of_all_contenders(name):
    scheme = SCHEMES[name]
    ceilings = Ceilings(copy_gb_s=1000.0, matmul_tflops=100.0)
    rows = run_products({"s": (2048, 2048)}, [1, 64, 1024], scheme=scheme, ceilings=ceilings, copies=4)
    by_place = {(row["tokens"], row["contender"]): row for row in rows}
    same = SAME_PRECISION[scheme.codes]
    for (tokens, who), row in by_place.items():
        if who == "cusparselt":  # the peer takes multiples of 16 tokens
            assert tokens == 1 or "error" not in row, row
            assert row["relative_error"] is None
            continue
        assert "error" not in row, row
        assert row["graph_ms"]["p50"] > 0
        assert row["times_dense_graph"] > 0
        # fp8 in the place of int8 rounds the codes of the weight as well.
        allowed = 0.06 if "fp8" in who else ROUNDING.get(name, 0.01)
        assert row["relative_error"] < allowed, row
        if (tokens, same) in by_place:
            assert row["times_dense_same_graph"] > 0
    assert by_place[64, same]["times_dense_same_graph"] == 1.0


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_tuned_choices_are_used(name, monkeypatch, tmp_path):
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    monkeypatch.delenv("TWOFOUR_BACKEND", raising=False)
    tuning._own.cache_clear()
    try:
        scheme = SCHEMES[name]
        rows = tune([(1024, 2048)], [8, 512], torch.bfloat16, CUDA, scheme=scheme)
        assert [row["tokens"] for row in rows] == [8, 512]
        for row in rows:
            assert row["refused"] == []
            assert row["dense_ms"] > 0
            fastest = next(iter(row["best"]))
            of = (scheme.stored, scheme.scale_width(2048), scheme.rounds_activations, None, name == "int4")
            product = dispatch_codes.Product(1024, 2048, row["tokens"], torch.bfloat16, 0, *of)
            chosen = dispatch_codes.choose(product)
            assert chosen.backend == fastest
            assert {"ms": row["best"][fastest]["ms"], **chosen.config} == row["best"][fastest]
    finally:
        tuning._own.cache_clear()
        dispatch.forget()
