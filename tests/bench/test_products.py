"""The rows of products: their fields, how they follow from the times, and what a failure leaves."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from twofour.bench import products, timing
from twofour.bench.contenders import CONTENDERS, Contender, dense_bytes, packed_bytes
from twofour.bench.products import SHAPES, Ceilings, measure_ceilings, named_shapes, one_line, run_products
from twofour.errors import InputError
from twofour.pattern import check_pattern, keep_best

CEILINGS = Ceilings(copy_gb_s=100.0, matmul_tflops=1.0)
SHAPE = {"s": (96, 64)}


def rows_of(contenders=None, **options):
    options = {"tokens": [4], "dtype": torch.float32, "device": "cpu", "ceilings": CEILINGS, **options}
    return run_products(SHAPE, contenders=contenders, **options)


def without(*names):
    return {name: c for name, c in CONTENDERS.items() if name not in names}


def test_a_row_for_every_shape_tokens_and_contender():
    shapes = {"a": (32, 64), "b": (64, 32)}
    rows = run_products(shapes, [1, 8], torch.float32, "cpu", without("torch24"), ceilings=CEILINGS)
    assert [(r["shape"], r["tokens"], r["contender"]) for r in rows] == [
        (shape, tokens, contender)
        for shape in shapes
        for tokens in (1, 8)
        for contender in ("dense", "twofour")
    ]
    assert {tuple(r) for r in rows} == {tuple(rows[0])}, "every row has the same fields"
    assert all(r["rows"] == shapes[r["shape"]][0] and r["columns"] == shapes[r["shape"]][1] for r in rows)
    assert all("error" not in r and r["dtype"] == "float32" for r in rows)


def test_what_follows_from_the_times():
    dense, sparse = rows_of(without("torch24"), tokens=[16])
    for row, weight, work in ((dense, 96 * 64 * 4, 1.0), (sparse, 96 * (32 * 4 + 8), 0.5)):
        times = row["eager_ms"]
        assert times["p20"] <= times["p50"] <= times["p80"]
        seconds = times["p50"] / 1e3
        assert row["times_dense_eager"] == pytest.approx(dense["eager_ms"]["p50"] / times["p50"])
        assert row["weight_gb_s"] == pytest.approx(weight / seconds / 1e9)
        assert row["tflops"] == pytest.approx(2 * 16 * 96 * 64 / seconds / 1e12)
        floor = max((weight + 16 * (96 + 64) * 4) / 100e9, 2 * 16 * 96 * 64 * work / 1e12)
        assert row["roofline_share"] == pytest.approx(floor / seconds)
        assert row["graph_ms"] is None
        assert row["times_dense_graph"] is None
        assert row["host_us"] is None
    assert dense["times_dense_eager"] == 1.0


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("bias", [False, True])
def test_errors_are_small_and_beside_those_of_dense(dtype, limit, bias):
    dense, sparse = rows_of(without("torch24"), dtype=dtype, bias=bias, copies=3)
    assert 0 < dense["relative_error"] < limit
    assert 0 < dense["dense_relative_error"] == sparse["dense_relative_error"] < limit
    assert dense["relative_error"] != dense["dense_relative_error"], "of the weight before it was pruned"
    assert 0 < sparse["relative_error"] < limit
    assert sparse["copies"] == 3


def test_a_wrong_product_shows_in_its_error():
    def halved(weights, bias):
        return [lambda x, w=w: F.linear(x, w / 2) for w in weights]

    def mixed_up(weights, bias):
        return [lambda x: F.linear(x, weights[0]) for _ in weights]

    def nan(weights, bias):
        return [lambda x, w=w: F.linear(x, w) * torch.nan for w in weights]

    rows = rows_of({"halved": halved, "mixed_up": mixed_up, "nan": nan}, copies=2)
    assert rows[0]["relative_error"] == pytest.approx(0.5, rel=1e-4)
    assert rows[1]["relative_error"] > 0.5
    assert rows[2]["relative_error"] != rows[2]["relative_error"]


def test_contenders_can_be_added_and_get_2_of_4():
    seen = []

    def own(weights, bias):
        seen.extend(weights)
        return [lambda x, w=w: F.linear(x, w) for w in weights]

    eighth = Contender(own, lambda rows, columns, dtype: rows * columns / 8, work=0.25)
    rows = rows_of({"own": own, "eighth": eighth, **without("torch24")}, copies=2)
    assert [r["contender"] for r in rows] == ["dense", "own", "eighth", "twofour"], "dense comes first"
    assert all(r["times_dense_eager"] > 0 for r in rows)
    plain, small = rows[1], rows[2]
    assert plain["weight_gb_s"] * plain["eager_ms"]["p50"] * 1e6 == pytest.approx(96 * (32 * 4 + 8))
    assert small["weight_gb_s"] * small["eager_ms"]["p50"] * 1e6 == pytest.approx(96 * 64 / 8)
    assert len(seen) == 4
    for weight in seen:
        report = check_pattern(weight)
        assert report.full == report.groups, "nothing but the pattern is zero"
    assert not torch.equal(seen[0], seen[1])


def test_unpruned_contenders_get_what_the_others_weights_were():
    seen = {}

    def keeps(name):
        def make(weights, bias):
            seen[name] = weights
            return [lambda x, w=w: F.linear(x, w) for w in weights]

        return make

    rows = rows_of({"own": keeps("pruned"), "theirs": Contender(keeps("full"), unpruned=True)}, copies=3)
    assert all(row["relative_error"] < 1e-6 for row in rows), "each is compared with its own"
    for pruned, full in zip(seen["pruned"], seen["full"], strict=True):
        assert full.count_nonzero() == full.numel()
        assert torch.equal(full * keep_best(full.abs()), pruned)


@pytest.mark.parametrize(("sustained", "turns", "warm"), [(False, 10, 20.0), (True, 5, 400.0)])
def test_sustained_turns_are_fewer_and_longer(monkeypatch, sustained, turns, warm):
    """As on a GPU, with stand-ins for what only a GPU can time."""
    seen = []

    def graph_timer(calls, replay_ms=timing.REPLAY_MS, warm_ms=timing.WARM_MS):
        return lambda repeats: [seen.append((warm_ms, repeats)) or 1.0]

    monkeypatch.setattr(products, "graph_timer", graph_timer)
    monkeypatch.setattr(products, "eager_timer", lambda *_: lambda repeats: [1.0])
    monkeypatch.setattr(products, "host_microseconds", lambda call: 1.0)
    x, weight = torch.randn(4, 64), torch.randn(32, 64)
    row = {"shape": "s", "tokens": 4}
    check = products._Check(x, [weight], [weight], None, torch.Generator().manual_seed(0))
    known = {"own": Contender(lambda weights, bias: [])}
    made = {"own": [lambda x: F.linear(x, weight)]}
    cell = products._Cell({"own": row}, made, known, x, check)
    cell.gpu = True
    cell.measure(lambda what: None, sustained)
    assert seen == [(warm, 30 // turns)] * turns
    assert (row["turns"], row["sustained"]) == (turns, sustained)
    assert row["graph_ms"]["p50"] == 1.0


def test_failures_become_rows():
    def no_factory(weights, bias):
        raise RuntimeError("no such backend\nand a long story")

    def no_product(weights, bias):
        def product(x):
            raise NotImplementedError

        return [product for _ in weights]

    rows = rows_of({"no_factory": no_factory, "no_product": no_product, **CONTENDERS}, tokens=[1, 2])
    by_name = {(r["contender"], r["tokens"]): r for r in rows}
    assert len(rows) == 10
    for tokens in (1, 2):
        assert by_name["no_factory", tokens]["error"] == "RuntimeError: no such backend"
        assert by_name["no_product", tokens]["error"] == "NotImplementedError"
        assert "Only CUDA tensors" in by_name["torch24", tokens]["error"]
        assert by_name["no_product", tokens]["times_dense_eager"] is None
        assert by_name["no_product", tokens]["roofline_share"] is None
        assert "error" not in by_name["twofour", tokens]


def test_without_dense_there_are_no_ratios():
    (row,) = rows_of({"twofour": CONTENDERS["twofour"]})
    assert row["times_dense_eager"] is None
    assert row["eager_ms"]["p50"] > 0


def test_the_call_that_broke_a_capture_is_named():
    def broken_capture():
        try:
            raise ValueError("the cause")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as raised:
        broken_capture()
    assert one_line(raised.value) == "ValueError: the cause"


def test_shapes():
    assert named_shapes("70B")["70B.gate_up"] == (57344, 8192)
    assert list(SHAPES["8B"]) == ["qkv", "o", "gate_up", "down"]
    assert packed_bytes(4096, 4096, torch.bfloat16) / dense_bytes(4096, 4096, torch.bfloat16) == 9 / 16
    with pytest.raises(InputError, match="'9B'"):
        named_shapes("9B")


def test_ceilings_are_measured():
    found = measure_ceilings("cpu", torch.float32)
    assert found.copy_gb_s > 0
    assert found.matmul_tflops > 0


def test_percentiles():
    assert timing.percentiles([3.0]) == {"p20": 3.0, "p50": 3.0, "p80": 3.0}
    assert timing.percentiles([float(i) for i in range(11)]) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}


def test_copies_exceed_the_l2(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50e6))
    assert timing.copies_past_l2(20_000_000, "cuda") == 8
    assert timing.copies_past_l2(20_000_000, "cuda", times=1) == 3
    assert timing.copies_past_l2(1_000_000_000, "cuda") == 1
    assert timing.copies_past_l2(1, "cpu") == 1


def test_contenders_take_turns_and_the_middle_turn_counts():
    """With a clock of our own: the machine is twice as slow from the second half on."""
    order, seconds = [], {"a": 1.0, "b": 2.0, "late": 1.0}

    def timer(name):
        def turn(repeats):
            order.append(name)
            if name == "late" and order.count(name) == 3:
                raise RuntimeError("out of memory")
            return [seconds[name] * (2.0 if len(order) > 9 else 1.0)] * repeats

        return turn

    def broken():
        raise ValueError("cannot be captured")

    makers = {
        "a": lambda: timer("a"),
        "broken": broken,
        "b": lambda: timer("b"),
        "late": lambda: timer("late"),
    }
    results = timing.in_turns(makers, repeats=20, rounds=5)
    assert list(results) == ["a", "broken", "b", "late"]
    rounds = [order[:3], order[3:6], order[6:9], order[9:11], order[11:]]
    assert [sorted(turn) for turn in rounds] == [["a", "b", "late"]] * 3 + [["a", "b"]] * 2
    assert len({tuple(turn) for turn in rounds[:3]}) > 1, "nobody always comes after the same one"
    assert str(results["broken"]) == "cannot be captured"
    assert str(results["late"]) == "out of memory"
    assert results["a"] == {"p20": 1.0, "p50": 1.0, "p80": 2.0}
    assert results["b"] == {"p20": 2.0, "p50": 2.0, "p80": 4.0}


def test_a_cell_where_nobody_can_run_is_told():
    def broken():
        raise ValueError("out of memory")

    results = timing.in_turns({"a": broken, "b": broken}, repeats=20, rounds=5)
    assert [str(error) for error in results.values()] == ["out of memory"] * 2


def test_a_slow_call_gets_fewer_repeats():
    called = []
    assert len(timing.cpu_timer(lambda: called.append(0), seconds=0.0)(10)) == 1
    assert len(timing.time_cpu(lambda: called.append(0), repeats=10, seconds=0.0)) == 3
    assert len(called) == (1 + 1) + (1 + 5), "one to warm up each, then one or at least five"


def test_products_of_a_cell_are_timed_in_turns():
    calls = []

    def contender(name):
        def make(weights, bias):
            def product(x, weight):
                calls.append(name)
                return F.linear(x, weight)

            return [lambda x, w=w: product(x, w) for w in weights]

        return make

    rows = rows_of({"a": contender("a"), "b": contender("b")}, copies=1)
    assert all(row["turns"] == timing.ROUNDS for row in rows)
    changes = sum(one != other for one, other in itertools.pairwise(calls))
    assert changes >= timing.ROUNDS, "not all of one and then all of the other"


def test_graph_times_are_per_call(monkeypatch):
    """With a clock of our own: every captured call takes 0.05 ms."""

    class Stream:
        wait_stream = staticmethod(lambda other: None)
        __enter__ = __exit__ = lambda self, *_: None

    called, captured, warmed = [], [], []

    def replay(graph, repeats, warm_up=timing.WARM_UP):
        warmed.append(warm_up)
        return [0.05 * graph] * repeats

    def capture(calls, stream, rounds):
        captured.append(rounds * len(calls))
        return captured[-1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_capture", capture)
    monkeypatch.setattr(timing, "_replay", replay)
    times = timing.time_graph([lambda: called.append(0), lambda: called.append(1)])
    assert called == [0, 1] * timing.WARM_UP
    assert captured == [2, 40], "a replay must last 2 ms"
    assert warmed[-1] == 10, "and a turn must warm up for 20"
    assert times == pytest.approx({"p20": 0.05, "p50": 0.05, "p80": 0.05})
