"""How a kernel for quantized weights is chosen, without a GPU: as in test_dispatch.py."""

from dataclasses import asdict, replace

import pytest
import torch

from tests.kernels.test_dispatch import h200, on_the_cpu  # noqa: F401
from twofour.bench import tune as tuner
from twofour.bench.random_codes import random_codes
from twofour.bench.tuned_weights import CodesToTune
from twofour.errors import InputError
from twofour.kernels import (
    dispatch,
    dispatch_codes,
    hopper,
    hopper_choices,
    hopper_launch,
    quantized_decode,
    reference,
    tuning,
)
from twofour.kernels.dispatch import Choice
from twofour.kernels.dispatch_codes import BUCKETS, Product, bucket_of, choose
from twofour.packed import FOUR_BIT
from twofour.quantize.schemes import SCHEMES, scheme_named

FP8 = Product(3072, 4096, 16, torch.bfloat16, 0, torch.float8_e4m3fn, 1, True)
INT8 = replace(FP8, stored=torch.int8)
INT4 = replace(FP8, stored=FOUR_BIT, scales=32, rounds=False, streamed=True)
WEIGHT_ONLY = replace(FP8, rounds=False)


def many(product, bucket=2048, **changes):
    return replace(product, bucket=bucket, **changes)


def test_names_in_the_tables_tell_apart_what_runs_differently():
    assert FP8.key == "3072x4096 fp8 bfloat16 16"
    assert INT8.key == "3072x4096 int8 bfloat16 16"
    assert INT4.key == "3072x4096 int4128 bfloat16 16"
    assert replace(INT4, scales=128).key == "3072x4096 int432 bfloat16 16"
    assert WEIGHT_ONLY.key == "3072x4096 fp8-weight bfloat16 16"
    assert replace(FP8, n=1536, activation="silu").key == FP8.key
    # Nor do they meet those of 16 bits.
    assert dispatch.Product(3072, 4096, 16, torch.bfloat16, 0, True).key not in (FP8.key, INT8.key, INT4.key)


@pytest.mark.parametrize(
    ("product", "few", "more"),
    [
        (FP8, "codes", "codes"),
        (INT8, "codes", "codes"),
        (INT4, "decode4", "widen"),
        (replace(INT4, streamed=False), "decode", "widen"),  # as a file has it
        (replace(INT4, scales=64, streamed=False), "decode", "widen"),  # a scale for 64 columns
        (WEIGHT_ONLY, "decode", "widen"),
        (replace(FP8, k=704), "decode", "widen"),  # no multiple of 128
        (replace(INT8, n=3001), "codes", "codes"),
        (replace(WEIGHT_ONLY, n=3001), "decode", "widen"),
        (replace(FP8, k=100), "reference", "reference"),
        (replace(INT4, k=100, scales=1, streamed=False), "reference", "reference"),
        (replace(FP8, dtype=torch.float32), "reference", "reference"),
    ],
)
def test_without_tables(product, few, more):
    most = 256 if product.streamed else 64
    for bucket in BUCKETS:
        assert choose(many(product, bucket)).backend == (few if bucket <= most else more), bucket


def test_several_tiles_take_the_choice_of_one():
    of_one_tile = replace(INT4, bucket=64)
    config = hopper.as_dict(hopper_choices.configs4(64)[-1])
    assert choose(of_one_tile).config != config
    tuning.remember(of_one_tile.key, 0, [{"backend": "decode4", "config": config, "ms": 0.1}])
    for bucket in (64, 96, 128, 192, 256):
        assert choose(replace(INT4, bucket=bucket)) == Choice("decode4", config)
    assert choose(replace(INT4, bucket=512)).backend == "widen"
    tuning.remember(replace(INT4, bucket=96).key, 0, [{"backend": "widen", "config": {}, "ms": 0.1}])
    assert choose(replace(INT4, bucket=96)).backend == "widen"  # where that was measured
    assert choose(replace(INT4, bucket=128)).backend == "decode4"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0)])
def test_other_gpus(capability, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for product in (FP8, INT8, replace(INT4, streamed=False), WEIGHT_ONLY):
        assert choose(product).backend == "decode"
        assert choose(many(product)).backend == "widen"
        assert capability >= (9, 0) or choose(product).config["split"] == 1


def test_an_old_gpu_has_the_reference(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert choose(FP8).backend == choose(many(INT4)).backend == "reference"


def test_what_was_measured_goes_first():
    config = asdict(quantized_decode.configs(16, "fp8", None)[0])
    own = {"backend": "decode", "config": config, "ms": 0.1}
    tuning.remember(FP8.key, 0, [{"backend": "nonsense", "config": {}, "ms": 0.0}, own])
    assert choose(FP8) == Choice("decode", config)  # what cannot run is passed over
    assert choose(replace(FP8, dtype=torch.float16)).backend == "decode"  # as in bfloat16
    assert choose(replace(FP8, bucket=8)).backend == "decode"  # a few tokens more
    assert choose(replace(FP8, bucket=24)).backend == "codes"
    assert choose(INT8).backend == "codes"
    assert choose(WEIGHT_ONLY) != Choice("decode", config)
    with dispatch.force("hopper"):  # not the measured one, then, but a guess
        assert choose(FP8) == Choice("codes", choose(replace(FP8, n=3080)).config)


def test_one_token_is_a_number_of_its_own():
    assert [bucket_of(tokens) for tokens in (1, 2, 8, 9)] == [1, 8, 8, 16]
    config = asdict(quantized_decode.configs(1, "fp8", None)[0])
    one, few = replace(FP8, bucket=1), replace(FP8, bucket=8)
    assert choose(one) == choose(few)  # as long as only that was measured
    tuning.remember(one.key, 0, [{"backend": "decode", "config": config, "ms": 0.1}])
    assert choose(one) == Choice("decode", config)
    assert choose(few).backend == "codes"


def test_every_shipped_choice_can_be_run():
    table = {key: choices for key, choices in tuning._shipped(0).items() if len(key.split()) == 4}
    assert len(table) >= 120
    for key, choice in ((key, choice) for key, choices in table.items() for choice in choices):
        _, kind, dtype, bucket = key.split()
        assert dtype == "bfloat16"
        if choice["backend"] == "codes":
            assert kind in ("fp8", "int8")
            assert hopper.from_dict(choice["config"]) in hopper_choices.configs8(int(bucket))
        elif choice["backend"] == "decode4":
            assert kind == "int4128"
            assert hopper.from_dict(choice["config"]) in hopper_choices.configs4(int(bucket))
        else:
            codes, group = ("int4", 128) if kind == "int4128" else (kind.removesuffix("-weight"), None)
            wanted = quantized_decode.configs(int(bucket), codes, group, clusters=True)
            assert quantized_decode.Config(**choice["config"]) in wanted


def test_a_gated_product_prefers_a_kernel_that_gates():
    """Also where another configuration was measured to be faster for the product alone."""
    measured = replace(INT4, n=28672, k=4096, scales=32, bucket=8)
    fastest = next(config for config in hopper_choices.configs4(8) if not config.gates)
    tuning.remember(measured.key, 0, [{"backend": "decode4", "config": hopper.as_dict(fastest), "ms": 0.01}])
    assert choose(measured).config == hopper.as_dict(fastest)
    gated = choose(replace(measured, n=14336, activation="silu"))
    assert gated.backend == "decode4"
    assert hopper.from_dict(gated.config).gates
    unknown = choose(replace(INT4, n=1024, activation="silu"))
    assert unknown.backend == "decode4"
    assert hopper.from_dict(unknown.config).gates


@pytest.mark.parametrize("n", [1536, 1001])
@pytest.mark.parametrize("bucket", [8, 16, 48, 128, 2048])
def test_a_gate_that_no_kernel_ends_in_is_a_second_step(n, bucket, monkeypatch):
    """Of products of codes not every configuration ends in an activation; the others must not be asked to."""
    asked = []

    class Launches:
        def __init__(self, n, k, dtype, config, device, activation, codes):
            assert activation is None or (config.gates and n % 8 == 0)
            asked.append(n)

    monkeypatch.setattr(hopper_launch, "Launches", Launches)
    product = replace(FP8, n=n, bucket=bucket, activation="silu")
    for choice in dispatch_codes.candidates(product):
        if choice.backend == "codes":
            dispatch_codes.runner(product, choice)
    dispatch_codes.runner(product)
    assert 2 * n in asked or n % 8 == 0


def test_forced():
    with dispatch.force("ampere"):
        assert choose(many(FP8)).backend == choose(many(INT4)).backend == "decode"
    with dispatch.force("hopper"):
        assert choose(FP8).backend == "codes"
        assert choose(INT4).backend == "decode4"
        assert choose(many(INT4)).backend == choose(replace(INT4, streamed=False)).backend == "widen"
    with dispatch.force("reference"):
        assert choose(FP8).backend == choose(many(INT4)).backend == "reference"
    with dispatch.force("ampere"), pytest.raises(InputError, match="ampere cannot run 3072x100 fp8 bf"):
        choose(replace(FP8, k=100))
    with dispatch.force("cusparselt"), pytest.raises(InputError, match="cusparselt cannot run"):
        choose(FP8)


def test_a_weight_in_threads_order_goes_by_no_other_kernel_unless_forced():
    """Not even if a table says so, as older tables do: it would have to be put in order at each call."""
    config = asdict(quantized_decode.configs(1, "int4", 128)[0])
    one = replace(INT4, bucket=1)
    tuning.remember(one.key, 0, [{"backend": "decode", "config": config, "ms": 0.01}])
    assert choose(one).backend == "decode4"
    assert choose(replace(one, streamed=False)).backend == "decode"
    assert {c.backend for c in dispatch_codes.candidates(one)} == {"decode4"}


def test_a_configuration_that_no_longer_fits_is_passed_over():
    large = hopper.Decode4(16, 4, 1, 512, 8)
    assert large.resident == 0
    tuning.remember(INT4.key, 0, [{"backend": "decode4", "config": hopper.as_dict(large), "ms": 0.01}])
    assert hopper.from_dict(choose(INT4).config) in hopper_choices.configs4(16)


def test_which_weights_lie_in_threads_order():
    def wanted(n=3072, k=4096, dtype=torch.bfloat16, device="cuda:0", stored=FOUR_BIT, scales=32):
        return dispatch_codes.wants_stream(n, k, dtype, torch.device(device), stored, scales)

    assert wanted()
    assert wanted(dtype=torch.float16)
    assert not wanted(n=3080)  # rows that are not whole pieces
    assert not wanted(scales=64)  # a scale for 64 columns
    assert not wanted(k=4000)
    assert not wanted(dtype=torch.float32)
    assert not wanted(stored=torch.int8)
    assert not wanted(device="cpu")
    with dispatch.force("hopper"):
        assert wanted()
    with dispatch.force("ampere"):
        assert not wanted()


def test_the_environment_forces_too(monkeypatch):
    monkeypatch.setenv("TWOFOUR_BACKEND", "reference")
    assert choose(FP8).backend == "reference"
    monkeypatch.setenv("TWOFOUR_BACKEND", "abacus")
    with pytest.raises(InputError, match="no backend 'abacus'"):
        choose(FP8)


@pytest.mark.parametrize(
    "product", [FP8, INT8, INT4, WEIGHT_ONLY, *(replace(INT4, scales=s, streamed=False) for s in (32, 64))]
)
def test_candidates_are_what_could_be_fastest(product):
    for bucket in BUCKETS:
        found = dispatch_codes.candidates(many(product, bucket))
        backends = {choice.backend for choice in found}
        assert ("decode" in backends) == (bucket <= 256 and not product.streamed)
        assert ("decode4" in backends) == (bucket <= 256 and product.streamed)
        assert ("codes" in backends) == product.rounds
        assert ("widen" in backends) == (not product.rounds and bucket > 64)
        assert choose(many(product, bucket)).backend in backends
        for choice in found:
            if choice.backend == "decode":
                assert quantized_decode.Config(**choice.config).tokens >= min(bucket, 64)
            elif choice.backend == "codes":
                config = hopper.from_dict(choice.config)
                assert config.kernel in ("decode8", "prefill8")
                scales = 4 * config.tokens * config.warpgroups if config.kernel == "prefill8" else 0
                assert config.shared_bytes + scales + 512 <= 227 << 10  # with the barriers
                assert config.stages >= 2


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("name", SCHEMES)
def test_inputs_of_any_shape_and_layout_reach_the_kernel_as_it_wants_them(on_the_cpu, name, activation):  # noqa: F811
    scheme = SCHEMES[name]
    packed = random_codes(24, 32, scheme, torch.float32, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    bias = torch.randn(24)
    wide = torch.randn(3, 5, 64)
    odd = torch.randn(33)[1:].reshape(1, 32)  # at no multiple of 16 bytes
    for x in (wide[..., ::2], wide[0, 0, :32], wide[:, :0, :32], wide[..., :32].transpose(0, 1), odd):
        arguments = (packed.values, packed.meta, packed.scale, bias, 32)
        got = dispatch_codes.linear(x, *arguments, scheme.rounds_activations, activation)
        wanted = torch.nn.functional.linear(x, packed.unpack(), bias)
        if activation is not None:
            wanted = reference.gate(wanted, activation)
        assert got.shape == wanted.shape
        if wanted.numel():
            # Rounding a token to 8 bits is off by that much.
            allowed = {"int8": 0.03, "fp8": 0.1}[name] if scheme.rounds_activations else 1e-5
            assert float((got - wanted).norm() / wanted.norm()) < allowed
    with pytest.raises(InputError, match="has 32 columns"):
        dispatch_codes.linear(wide[..., :16], *arguments, scheme.rounds_activations, activation)


# ------------------------------------------------------------------------------------------------------------
# Tuning, on a CPU and with a fake clock.


def outputs(scheme, weights):
    """What a candidate may give for x: as the scheme says, without rounding, wrong, and not quite right."""
    packed = weights.packed[0]

    def rounded(x, *tensors):
        return reference.quantized_linear(x, *tensors, weights.k)

    def plain(x, *tensors):
        return reference.linear(x, *tensors, weights.k)

    def blurred(x, *tensors):
        exact = x.double() @ packed.unpack(torch.float64).t()
        return exact + 1.6 * (plain(x, *tensors).double() - exact)

    return {
        "rounded": rounded,
        "plain": plain,
        "blurred": blurred,
        "nan": lambda x, *t: plain(x, *t) * torch.nan,
    }


def tuned(monkeypatch, scheme, entries, bucket=128):
    """The rows for candidates (backend, what it gives, milliseconds), numbered by their place."""
    made = []
    make = CodesToTune.make

    def making(self):
        make(self)
        made.append(self)

    def run_of(product, choice):
        _, gives, ms = entries[choice.config["number"]]

        def run(*arguments):
            return outputs(scheme, made[-1])[gives](*arguments)

        run.clock = ms
        return run

    choices = [Choice(backend, {"number": i}) for i, (backend, _, _) in enumerate(entries)]
    monkeypatch.setattr(CodesToTune, "make", making)
    monkeypatch.setattr(dispatch_codes, "candidates", lambda product: choices)
    monkeypatch.setattr(dispatch_codes, "runner", run_of)

    def clock(calls, *_, **__):
        return lambda repeats: [getattr(calls[0].func, "clock", 9.0)] * repeats

    monkeypatch.setattr(tuner, "graph_timer", clock)
    return tuner.tune([(64, 256)], [bucket], torch.bfloat16, torch.device("cpu"), scheme=scheme)


def test_tuning_8_bits_takes_the_fastest_that_is_right(monkeypatch):
    entries = [
        ("codes", "plain", 1.0),  # tokens that were not rounded are another product
        ("decode", "rounded", 1.5),
        ("decode", "blurred", 1.6),
        ("codes", "nan", 1.7),
        ("codes", "rounded", 3.0),
        ("decode", "plain", 4.0),
    ]
    (row,) = tuned(monkeypatch, SCHEMES["fp8"], entries)
    assert [r["config"]["number"] for r in row["refused"]] == [0, 1, 2, 3]
    assert row["best"] == {"codes": {"ms": 3.0, "number": 4}, "decode": {"ms": 4.0, "number": 5}}
    assert (row["scheme"], row["group"], row["times_dense"]) == ("fp8", None, 3.0)
    product = replace(FP8, n=64, k=256, bucket=128)
    assert row["key"] == product.key
    assert choose(product) == Choice("codes", {"number": 4})
    tuning._own.cache_clear()  # as in a new process
    assert choose(product) == Choice("codes", {"number": 4})


def test_tuning_4_bits_lets_widening_round_once_more(monkeypatch):
    scheme = scheme_named("int4", 64)
    entries = [("decode", "blurred", 1.0), ("widen", "blurred", 2.0), ("decode", "plain", 2.5)]
    (row,) = tuned(monkeypatch, scheme, entries)
    assert [r["config"]["number"] for r in row["refused"]] == [0]
    assert list(row["best"]) == ["widen", "decode"]
    assert (row["scheme"], row["group"]) == ("int4", 64)
    assert choose(replace(INT4, n=64, k=256, scales=4, bucket=128)) == Choice("widen", {"number": 1})


def test_where_nothing_runs_nothing_is_remembered(monkeypatch):
    assert tuned(monkeypatch, SCHEMES["int8"], [("decode", "nan", 1.0)]) == []
    assert not tuning.known("64x256 int8 bfloat16 128", 0)
