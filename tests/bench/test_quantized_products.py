"""Rows of quantized products, and the random codes that they are made with."""

import pytest
import torch

from twofour.bench import quantized_contenders
from twofour.bench.contenders import Contender, dense_bytes
from twofour.bench.products import Ceilings, run_products
from twofour.bench.quantized_contenders import quantized_bytes
from twofour.bench.random_codes import Halves, exact_rows, in_other_order, random_codes
from twofour.packed import unpack
from twofour.pattern import check_pattern
from twofour.quantize.schemes import SCHEMES, scheme_named

CEILINGS = Ceilings(copy_gb_s=100.0, matmul_tflops=1.0)
CPU = torch.device("cpu")
ALL = [*SCHEMES.values(), scheme_named("int4", 32)]
IDS = [f"{scheme.name}{scheme.group or ''}" for scheme in ALL]


def codes_of(scheme, rows=64, columns=512, dtype=torch.bfloat16, seed=0):
    return random_codes(rows, columns, scheme, dtype, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
@pytest.mark.parametrize("columns", [512, 100, 172])
def test_random_codes_are_a_legal_matrix_of_the_scheme(scheme, columns):
    packed = codes_of(scheme, columns=columns)
    packed.validate()
    assert packed.values.dtype == scheme.stored
    assert packed.scale.shape == (64, scheme.scale_width(columns))
    assert packed.nbytes == quantized_bytes(scheme)(64, columns, torch.bfloat16)
    codes = unpack(packed.values, packed.meta, columns).float()
    assert check_pattern(codes).first is None
    assert float(codes.abs().max()) <= max(map(abs, scheme.range))
    kept = codes[:, 0::4].count_nonzero(), codes[:, 3::4].count_nonzero()
    assert all(0.3 < int(count) / codes[:, 0::4].numel() < 0.6 for count in kept), "all positions alike"


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
def test_products_with_them_keep_the_size_of_their_input(scheme):
    weight = codes_of(scheme).unpack(torch.float32)
    assert 0.7 < float((torch.randn(256, 512) @ weight.t()).std()) < 1.5


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
def test_rows_in_another_order_and_exactly(scheme):
    packed = codes_of(scheme)
    other = in_other_order(packed, torch.Generator().manual_seed(1))
    one, two = (p.unpack(torch.float64) for p in (packed, other))
    assert not torch.equal(one, two)
    assert torch.equal(one.sum(1).sort().values, two.sum(1).sort().values)
    chosen = torch.tensor([3, 1, 60])
    assert torch.equal(exact_rows(packed, chosen), one[chosen])


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
@pytest.mark.parametrize("columns", [512, 100, 172])
def test_the_rest_of_a_pruned_matrix_fills_its_gaps(scheme, columns):
    kept = codes_of(scheme, columns=columns)
    whole = Halves.around(kept, scheme, torch.Generator().manual_seed(1))
    whole.rest.validate()
    assert not ((unpack_codes(kept) != 0) & (unpack_codes(whole.rest) != 0)).any()
    codes = whole.codes()
    assert codes.shape == (64, columns)
    assert torch.equal(codes.float(), unpack_codes(kept) + unpack_codes(whole.rest))
    few = {"int8": 0.03, "fp8": 0.001, "int4": 0.25}[scheme.codes]  # that are zero by chance
    assert float((codes.float() == 0).float().mean()) < few
    exact = whole.kept.unpack(torch.float64) + whole.rest.unpack(torch.float64)
    assert torch.equal(whole.exact_rows(torch.tensor([5, 2])), exact[[5, 2]])
    assert torch.equal(whole.unpack().double(), (kept.unpack() + whole.rest.unpack()).double())


def unpack_codes(packed):
    return unpack(packed.values, packed.meta, packed.columns).float()


def rows_of(scheme, contenders=None, **options):
    options = {"dtype": torch.bfloat16, "device": "cpu", "ceilings": CEILINGS, "copies": 2, **options}
    return run_products(
        {"s": (96, 256)}, options.pop("tokens", [4]), contenders=contenders, scheme=scheme, **options
    )


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
def test_rows_on_a_cpu(scheme):
    dense, ours = rows_of(scheme, bias=True)
    assert (dense["contender"], ours["contender"]) == ("dense", "twofour")
    for row in (dense, ours):
        assert "error" not in row
        assert (row["scheme"], row["group"], row["dtype"]) == (scheme.name, scheme.group, "bfloat16")
        assert row["times_dense_eager"] > 0
        assert row["times_dense_same_eager"] is None  # only a GPU has such products
        assert row["dense_relative_error"] < 0.005
    rounding = {"int8": 0.01, "fp8": 0.05}[scheme.codes] if scheme.rounds_activations else 0.005
    assert 0 < ours["relative_error"] < rounding
    weight = quantized_bytes(scheme)(96, 256, torch.bfloat16)
    assert ours["weight_gb_s"] * ours["eager_ms"]["p50"] * 1e6 == pytest.approx(weight)


def test_ratios_to_dense_of_the_same_bits_and_contenders_for_few_tokens():
    from torch.nn import functional as F

    def plain(weights, bias):
        return [lambda x, w=w: F.linear(x, w.unpack()) for w in weights]

    def unscaled(weights, bias):
        return [lambda x, w=w: F.linear(x, unpack(w.values, w.meta, w.columns).to(x.dtype)) for w in weights]

    contenders = {
        "dense fp8": Contender(plain, dense_bytes, 0.5),
        "dense": Contender(plain, dense_bytes, 1.0),
        "peer": Contender(unscaled, scaled=False),
        "few": Contender(plain, most_tokens=4),
    }
    told = []
    rows = rows_of(SCHEMES["int8"], contenders, tokens=[4, 5], on_progress=lambda *now: told.append(now))
    assert [(r["tokens"], r["contender"]) for r in rows] == [
        *((4, who) for who in ("dense", "dense fp8", "peer", "few")),
        *((5, who) for who in ("dense", "dense fp8", "peer")),
    ]
    assert told[-1] == (7, 7, "done")
    for row in rows:
        same = rows[1 if row["tokens"] == 4 else 5]
        ratio = same["eager_ms"]["p50"] / row["eager_ms"]["p50"]
        assert row["times_dense_same_eager"] == pytest.approx(ratio)
        assert "error" not in row
        assert (row["relative_error"] is None) == (row["contender"] == "peer")


@pytest.mark.parametrize("scheme", ALL, ids=IDS)
def test_contenders_of_a_gpu(scheme):
    found = quantized_contenders.quantized_contenders(scheme, torch.device("cuda"))
    assert quantized_contenders.SAME_PRECISION[scheme.codes] in found
    assert {"ampere", "hopper"} < set(found)
    assert ("twofour fp8" in found) == (scheme.name == "int8")
    share = found["twofour"].weight_bytes(4096, 4096, torch.bfloat16) / dense_bytes(
        4096, 4096, torch.bfloat16
    )
    bits = {"int8": 5, "fp8": 5, "int4": 3}[scheme.codes] + 16 / (scheme.group or 4096)
    assert share == pytest.approx(bits / 16)


def test_dense_int4_is_handed_over_as_the_operator_wants_it(monkeypatch):
    """A stand-in for the operators of a GPU that does with their arguments what is documented of them."""
    scheme = scheme_named("int4", 64)
    weight = Halves.around(codes_of(scheme, 16, 256), scheme, torch.Generator().manual_seed(1))

    class Aten:
        @staticmethod
        def _convert_weight_to_int4pack(pairs, inner_tiles):
            assert pairs.dtype == torch.uint8
            assert inner_tiles == 8
            return torch.stack([pairs >> 4, pairs & 15], -1).flatten(1)  # the left one is the high nibble

        @staticmethod
        def _weight_int4pack_mm(x, tiles, group, scales_and_zeros):
            scale, zero = scales_and_zeros.repeat_interleave(group, 0).unbind(-1)  # [k, n] each
            return x @ ((tiles.float().t() - 8) * scale + zero).to(x.dtype)

    monkeypatch.setattr(torch, "ops", type("Ops", (), {"aten": Aten}))
    (product,) = quantized_contenders._dense_int4([weight], None, scheme)
    monkeypatch.undo()
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    torch.testing.assert_close(product(x), x @ weight.unpack().t())
