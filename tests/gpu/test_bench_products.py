"""Products timed in turns on a GPU: every contender has its graph, and a failure does not stop the others."""

import pytest
import torch
from torch.nn import functional as F

from twofour.bench.contenders import CONTENDERS
from twofour.bench.products import GRAPH_ROUNDS, Ceilings, run_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def breaks_its_capture(weights, bias):
    def product(x, weight):
        y = F.linear(x, weight)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not in a graph")
        return y

    return [lambda x, w=w: product(x, w) for w in weights]


def test_rows_of_all_contenders_that_can():
    contenders = {
        "dense": CONTENDERS["dense"],
        "breaks": breaks_its_capture,
        "twofour": CONTENDERS["twofour"],
        "again": CONTENDERS["dense"],
    }
    ceilings = Ceilings(copy_gb_s=1000.0, matmul_tflops=100.0)
    rows = run_products({"s": (2048, 2048)}, [1, 512], contenders=contenders, ceilings=ceilings)
    assert [row["contender"] for row in rows] == list(contenders) * 2
    for row in rows:
        assert row["eager_ms"]["p50"] > 0
        assert row["host_us"] > 0
        assert row["turns"] == GRAPH_ROUNDS
        if row["contender"] == "breaks":
            assert row["error"] == "RuntimeError: not in a graph"
            assert row["graph_ms"] is None
            continue
        assert "error" not in row
        assert 0 < row["graph_ms"]["p20"] <= row["graph_ms"]["p50"] <= row["graph_ms"]["p80"]
        if row["contender"] == "again":
            assert row["times_dense_graph"] == pytest.approx(1.0, abs=0.1)
