"""How a kernel is chosen, without a GPU: a pretended H200, tables in a temporary cache, a fake clock."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from twofour.bench import tune as tuner
from twofour.errors import InputError, TwoFourError
from twofour.kernels import ampere, cusparselt, dispatch, hopper, hopper_source, nvrtc, reference, tuning
from twofour.kernels.dispatch import Choice, Product, bucket_of, choose
from twofour.packed import pack
from twofour.pattern import keep_best

PRODUCT = Product(4096, 4096, 16, torch.bfloat16, 0, True)
MANY = Product(4096, 14336, 8192, torch.bfloat16, 0, True)  # where cuSPARSELt was measured fastest


@pytest.fixture(autouse=True)
def h200(monkeypatch, tmp_path):
    """An H200 as far as choosing is concerned."""
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path))
    monkeypatch.delenv("TWOFOUR_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(cusparselt, "version", lambda: (0, 8, 0))
    monkeypatch.setattr(cusparselt, "why_not", lambda device, dtype, n, k: None)
    for table in (tuning._own, tuning._shipped, tuning._versions):
        table.cache_clear()
    dispatch.forget()
    yield
    for table in (tuning._own, tuning._shipped, tuning._versions):
        table.cache_clear()
    dispatch.forget()


def test_buckets():
    assert [bucket_of(t) for t in (1, 8, 9, 64, 65, 1024, 1025, 8192, 100_000)] == [
        *(8, 8, 16, 64, 96, 1024, 1536, 8192, 8192)
    ]


def test_shipped_choice_for_a_known_shape():
    assert choose(PRODUCT).backend == "hopper"
    assert choose(PRODUCT).config["tokens"] == 16
    assert choose(replace(PRODUCT, bucket=8192)).config["kernel"] == "prefill"
    assert choose(MANY).backend == "cusparselt"


def test_every_shipped_choice_can_be_run():
    # Those of quantized weights are test_dispatch_codes.py's.
    table = {key: choices for key, choices in tuning._shipped(0).items() if len(key.split()) == 3}
    assert len(table) >= 80
    for product, choices in table.items():
        shape, dtype, bucket = product.split()
        assert dtype == "bfloat16"
        assert int(bucket) in dispatch.BUCKETS
        for choice in choices:
            if choice["backend"] == "hopper":
                config = hopper.from_dict(choice["config"])
                assert config.shared_bytes <= 227 << 10
                assert config.tokens >= int(bucket) or int(bucket) > 64
            elif choice["backend"] != "dense":
                assert cusparselt.Algorithm(**choice["config"]).id < 21, shape


def test_measured_here_goes_before_shipped_and_lasts():
    tuning.remember(PRODUCT.key, 0, [{"backend": "cusparselt", "config": {"id": 3}, "ms": 0.1}])
    assert choose(PRODUCT) == Choice("cusparselt", {"id": 3})
    tuning._own.cache_clear()  # as in a new process
    assert choose(PRODUCT) == Choice("cusparselt", {"id": 3})


def test_a_choice_that_cannot_run_is_passed_over():
    tuning.remember(PRODUCT.key, 0, [{"backend": "cusparselt", "config": {"id": 3}, "ms": 0.1}])
    assert choose(replace(PRODUCT, compressed=False)).backend == "hopper"


def test_neighbours_lend_their_choice():
    shipped = choose(replace(PRODUCT, bucket=32))
    assert choose(replace(PRODUCT, bucket=24)) == shipped
    assert choose(replace(PRODUCT, dtype=torch.float16)) == choose(PRODUCT)


def test_unknown_shapes_get_a_rule_of_thumb():
    odd = Product(3072, 640, 8, torch.bfloat16, 0, False)
    assert hopper.from_dict(choose(odd).config).tokens == 8
    assert choose(replace(odd, bucket=4096)).config["kernel"] == "prefill"
    assert choose(replace(odd, bucket=4096, compressed=True)).backend == "cusparselt"
    assert choose(replace(odd, k=644)).backend == "reference"
    assert choose(replace(odd, k=704)).backend == "ampere"


def test_algorithms_of_another_cusparselt_are_not_guessed(monkeypatch):
    monkeypatch.setattr(cusparselt, "version", lambda: (0, 9, 0))
    assert choose(MANY).backend == "hopper"
    assert choose(Product(3072, 640, 4096, torch.bfloat16, 0, True)).backend == "hopper"
    with dispatch.force("cusparselt"):
        assert choose(MANY).config == {}


def test_odd_numbers_of_tokens_get_no_plan(monkeypatch):
    """A server's prompts have hundreds of lengths; a plan for each would be made again and again."""
    assert choose(MANY).backend == "cusparselt"
    planned, launched = [], []
    plan = SimpleNamespace(run=lambda x, compressed, out: None)
    monkeypatch.setattr(cusparselt, "plan_for", lambda *key: planned.append(key[2]) or plan)
    launches = SimpleNamespace(run=lambda x, *_: launched.append(x.shape[0]))
    monkeypatch.setattr(dispatch, "_launches", lambda product, choice: launches)
    run = dispatch.runner(MANY)
    empty = torch.empty(0)
    for tokens in (8192, 8191, 4160, 8192, 4160, 4160):
        assert run(torch.empty(tokens, 1), empty, empty, None, empty).shape == (tokens, MANY.n)
    assert planned == [8192, 4160, 8192, 4160]  # asked for when the number changes; cusparselt.py keeps them
    assert launched == [8191]
    with dispatch.force("cusparselt"):
        dispatch.runner(MANY)(torch.empty(8184, 1), empty, empty, None, empty)
    assert planned[-1] == 8184


def test_a_plan_that_the_library_refuses_is_our_kernels_work(monkeypatch):
    def refuse(*_):
        raise TwoFourError("cusparseLtMatmulPlanInit failed.")

    launched, empty = [], torch.empty(0)
    monkeypatch.setattr(cusparselt, "plan_for", refuse)
    launches = SimpleNamespace(run=lambda x, *_: launched.append(x.shape[0]))
    monkeypatch.setattr(dispatch, "_launches", lambda product, choice: launches)
    run = dispatch.runner(MANY)
    with pytest.warns(UserWarning, match="MatmulPlanInit"):
        run(torch.empty(8192, 1), empty, empty, None, empty)
    run(torch.empty(4160, 1), empty, empty, None, empty)
    assert launched == [8192, 4160]
    with dispatch.force("cusparselt"), pytest.raises(TwoFourError, match="MatmulPlanInit"):
        dispatch.runner(MANY)(torch.empty(8192, 1), empty, empty, None, empty)


def test_without_cusparselt_our_kernels_are_chosen_all_the_same(monkeypatch):
    def missing():
        raise TwoFourError("cuSPARSELt was not found.")

    monkeypatch.setattr(cusparselt, "version", missing)
    monkeypatch.setattr(cusparselt, "why_not", lambda *_: "cuSPARSELt was not found")
    assert choose(PRODUCT).backend == choose(MANY).backend == "hopper"
    assert "cslt-none" in tuning.own_path(0).name


def test_another_kernel_starts_a_new_table(tmp_path, monkeypatch):
    """Its configurations may be others: those of the old one must not be asked for."""
    before = tuning.own_path(0)
    (tmp_path / "cuda").mkdir()
    kernel = tmp_path / "cuda" / "kernel.cu"
    monkeypatch.setattr(tuning, "files", lambda package: tmp_path)
    seen = set()
    for text in ("one", "two", "one"):
        kernel.write_text(text)
        tuning._versions.cache_clear()
        seen.add(tuning.own_path(0))
    assert len(seen) == 2
    assert before not in seen


@pytest.mark.parametrize(
    "said",
    [
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Sat Aug  1 12:00:00 UTC 2026",
    ],
)
def test_the_version_of_the_driver_is_in_the_name_of_the_table(said, monkeypatch):
    monkeypatch.setattr(tuning.Path, "read_text", lambda path: said)
    assert tuning._driver() == "driver580.159.04"


def test_positions_that_were_just_put_into_rows_are_not_asked_for_early(monkeypatch):
    asked = {}
    monkeypatch.setattr(ampere, "Launches", lambda *given: asked.update({given[-1]: given}))
    for fresh, ordered in ((False, False), (True, False), (False, True)):
        product = replace(PRODUCT, fresh=fresh, ordered=ordered)
        dispatch.runner(product, Choice("ampere", asdict(ampere.guess(4096, 4096, 16, 132))))
        assert list(asked) == [not (fresh or ordered)]
        asked.clear()


def test_override(monkeypatch):
    monkeypatch.setenv("TWOFOUR_BACKEND", "reference")
    assert choose(PRODUCT).backend == "reference"
    with dispatch.force("cusparselt"):
        assert choose(PRODUCT).backend == "cusparselt"
    monkeypatch.setenv("TWOFOUR_BACKEND", "abacus")
    with pytest.raises(InputError, match="no backend 'abacus'"):
        choose(PRODUCT)
    monkeypatch.setenv("TWOFOUR_BACKEND", "hopper")
    with pytest.raises(InputError, match="multiple of 128 columns"):
        choose(replace(PRODUCT, k=100))


def test_damaged_table_is_no_table():
    path = tuning.own_path(0)
    path.parent.mkdir(parents=True)
    path.write_text("{ not json")
    assert choose(PRODUCT).backend == "hopper"
    tuning.remember("1x1 bfloat16 8", 0, [])
    assert json.loads(path.read_text()) == {"1x1 bfloat16 8": []}


WRITER = """
import sys, torch
torch.cuda.get_device_name = lambda device=None: "NVIDIA H200"
from twofour.kernels import cusparselt, tuning
cusparselt.version = lambda: (0, 8, 0)
for i in range(20):
    tuning.remember(f"{sys.argv[1]}x{i} bfloat16 8", 0, [{"backend": "reference", "config": {}}])
"""


def test_two_processes_leave_a_whole_table():
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(n)]) for n in (1, 2)]
    assert [w.wait() for w in writers] == [0, 0]
    table = json.loads(tuning.own_path(0).read_text())  # whole, whoever came last
    assert sum(key.startswith("1x") for key in table) + sum(key.startswith("2x") for key in table) >= 20
    assert not list(tuning.own_path(0).parent.glob("*.partial"))


def test_tuning_takes_the_fastest_that_is_right(monkeypatch):
    """Candidates on a CPU with a fake clock: the fastest one is wrong, so the second fastest is kept."""

    def run_of(product, choice):
        def run(x, values, meta, bias, compressed):
            y = reference.linear(x, values, meta, None, bias, product.k)
            return y * 1.1 if choice.config["id"] == 0 else y

        run.clock = (1.0, 3.0, 2.0)[choice.config["id"]]
        return run

    def fake_clock(calls, *_, **__):
        return lambda repeats: [getattr(calls[0].func, "clock", 9.0)] * repeats

    monkeypatch.setattr(
        dispatch, "candidates", lambda product: [Choice("cusparselt", {"id": i}) for i in range(3)]
    )
    monkeypatch.setattr(dispatch, "runner", run_of)
    monkeypatch.setattr(tuner, "graph_timer", fake_clock)
    monkeypatch.setattr(hopper_source, "compile_all", lambda *_, **__: None)
    monkeypatch.setattr(cusparselt, "compress", lambda weight: weight)
    (row,) = tuner.tune([(64, 128)], [8], torch.float32, torch.device("cpu"))
    assert row["best"] == {"cusparselt": {"ms": 2.0, "id": 2}}
    assert row["dense_ms"] == 9.0
    assert row["times_dense"] == 4.5
    assert [r["config"] for r in row["refused"]] == [{"id": 0}]
    product = Product(64, 128, 8, torch.float32, 0, True)
    assert choose(product) == Choice("cusparselt", {"id": 2})


def test_dense_is_used_only_where_it_was_measured_to_be_fastest():
    shape = (4096, 4096)
    assert not dispatch.worth_keeping_dense(*shape, torch.bfloat16, 0)
    dense = {"backend": "dense", "config": {}, "ms": 0.1}
    tuning.remember(
        replace(PRODUCT, bucket=256).key, 0, [dense, {"backend": "hopper", "config": {}, "ms": 0.2}]
    )
    dispatch.forget()
    assert dispatch.worth_keeping_dense(*shape, torch.bfloat16, 0)
    assert dispatch.dense_is_fastest(*shape, 250, torch.bfloat16, 0)
    assert not dispatch.dense_is_fastest(*shape, 16, torch.bfloat16, 0)
    assert choose(replace(PRODUCT, bucket=256)).backend == "hopper"  # for a layer that has no dense weight
    # No sparse kernel takes 36 columns, so a layer that may keep its dense weight does.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cusparselt, "why_not", lambda *_: "too narrow")
        assert dispatch.worth_keeping_dense(48, 36, torch.bfloat16, 0)


def test_a_gated_product_takes_the_choice_of_the_plain_one_if_it_can_gate():
    gated = Product(14336, 4096, 16, torch.bfloat16, 0, False, "silu")
    assert gated.key == "28672x4096 bfloat16 16"
    assert dispatch.choose_gated(gated) == choose(replace(gated, n=28672, activation=None))
    assert dispatch.choose_gated(replace(gated, n=14337)) is None
    assert dispatch.choose_gated(replace(gated, k=100)) is None
    with dispatch.force("reference"):
        assert dispatch.choose_gated(gated) is None


@pytest.fixture
def on_the_cpu(monkeypatch):
    """CPU tensors through the calls for a GPU: what is around the kernels does not depend on the device."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    with dispatch.force("reference"):
        yield


@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh"])
def test_inputs_of_any_shape_and_layout_reach_the_kernel_as_it_wants_them(on_the_cpu, activation):
    weight = torch.randn(24, 32)
    weight = weight.where(keep_best(weight.abs()), 0)
    packed, bias = pack(weight), torch.randn(24)
    wide = torch.randn(3, 5, 64)
    odd = torch.randn(33)[1:].reshape(1, 32)  # at no multiple of 16 bytes
    for x in (wide[..., ::2], wide[0, 0, :32], wide[:, :0, :32], wide[..., :32].transpose(0, 1), odd):
        wanted = torch.nn.functional.linear(x, weight, bias)
        arguments = (x, packed.values, packed.meta, None, bias, 32)
        if activation is None:
            got = dispatch.linear(*arguments)
        else:
            got = dispatch.gated_linear(*arguments, activation)
            wanted = reference.ACTIVATIONS[activation](wanted[..., :12]) * wanted[..., 12:]
        torch.testing.assert_close(got, wanted)
    for x in (torch.randn(4, 16), torch.randn(2, 2, 16), torch.randn(64)):  # some could be seen as 32 wide
        with pytest.raises(InputError, match="has 32 columns"):
            dispatch.linear(x, packed.values, packed.meta, None, bias, 32)


def test_threads_that_write_the_same_file_of_the_cache_never_show_half_of_it(tmp_path):
    path, content = tmp_path / "cache" / "kernel.cubin", bytes(range(256)) * 4096
    done, seen = threading.Event(), set()

    def read():
        while not done.is_set():
            if path.exists():
                seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: nvrtc.write_whole(path, content), range(60)))
    done.set()
    reader.join()
    assert seen <= {content}
    assert [file.name for file in path.parent.iterdir()] == [path.name]
