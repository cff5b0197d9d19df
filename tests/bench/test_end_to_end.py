"""A whole model, dense and packed, on a CPU and tiny."""

import pytest
import torch

from twofour.bench.end_to_end import (
    CASES,
    GROUPED,
    Case,
    Stages,
    build_model,
    decode_step,
    prefill_step,
    run_end_to_end,
)
from twofour.bench.steps import FEW_CASES
from twofour.errors import InputError
from twofour.nn import SparseLinear
from twofour.nn.convert import packed_layers

TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TINY_CASES = (Case("prefill", 2, 16), Case("decode", 3, 16, graph=True, attention="grouped"))
CPU = torch.device("cpu")


@pytest.fixture
def model():
    return build_model(2, CPU, torch.float32, TINY)


@pytest.fixture(scope="module")
def rows():
    return run_end_to_end(2, "cpu", shape=TINY, cases=TINY_CASES, dtype=torch.float32)


def test_a_row_for_every_contender_and_case(rows):
    assert [(r["contender"], r["what"], r["batch"]) for r in rows] == [
        ("dense", "prefill", 2),
        ("dense", "decode", 3),
        ("dense_fused", "prefill", 2),
        ("dense_fused", "decode", 3),
        ("twofour", "prefill", 2),
        ("twofour", "decode", 3),
        ("fused", "prefill", 2),
        ("fused", "decode", 3),
    ]
    for row in rows:
        assert "error" not in row
        assert row["mode"] == "cpu"
        assert row["ms"]["p20"] <= row["ms"]["p50"] <= row["ms"]["p80"]
        assert row["peak_bytes"] is None


def test_ratios_and_rates_follow_from_the_medians(rows):
    for dense, fused, row in zip(rows[:2] * 4, rows[2:4] * 4, rows, strict=True):
        assert row["times_dense"] == pytest.approx(dense["ms"]["p50"] / row["ms"]["p50"])
        if row["contender"] != "dense":  # not known yet when dense is measured
            assert row["times_dense_fused"] == pytest.approx(fused["ms"]["p50"] / row["ms"]["p50"])
    prefill, decode = rows[4:6]
    assert prefill["tokens_per_s"] == pytest.approx(2 * 16 / prefill["ms"]["p50"] * 1e3)
    assert decode["tokens_per_s"] == pytest.approx(3 / decode["ms"]["p50"] * 1e3)


def test_what_packing_did(rows):
    packed, fused = rows[5], rows[7]
    assert (packed["packed_layers"], fused["packed_layers"]) == (14, 8)
    for row in (packed, fused):
        assert row["resident_share"] == 0.5 + 1 / 32  # float32: two of four values, and a byte for eight
        assert row["logits_max_relative_error"] < 1e-5
        assert row["logits_same_best"] == 1.0
    assert not any("resident_share" in row for row in rows[:4])


def test_in_bfloat16_nine_sixteenths_are_resident():
    model = build_model(1, CPU, torch.bfloat16, TINY)
    facts = Stages(model, 0).advance("twofour")
    assert facts["resident_share"] == 9 / 16
    assert facts["logits_relative_error"] < 1e-2
    layers = packed_layers(model)
    assert len(layers) == facts["packed_layers"] == 7
    assert all(isinstance(m, SparseLinear) and m.dense_weight is None for m in layers.values())


def test_a_dense_copy_counts_as_resident(model, monkeypatch):
    from twofour.io import pack

    pack_ = pack.pack_
    monkeypatch.setattr(pack, "pack_", lambda model, include, memory: pack_(model, include, memory="fast"))
    assert Stages(model, 0).advance("twofour")["resident_share"] == 1.5 + 1 / 32


def test_a_step_of_decode_can_be_repeated(model):
    step = decode_step(model, Case("decode", 3, 16))
    with torch.no_grad():
        first, second = step(), step()
    assert first.shape == (3, 1, 96)
    assert torch.equal(first, second)


def test_attention_without_a_mask_is_the_same(model):
    case = Case("decode", 2, 16)
    with torch.no_grad():
        masked = decode_step(model, case)()
        model.set_attn_implementation(GROUPED)
        grouped = decode_step(model, case)()
    assert torch.allclose(masked, grouped, atol=1e-5)


def test_decode_sees_the_whole_cache(model):
    with torch.no_grad():
        near, far = (decode_step(model, Case("decode", 1, places))() for places in (8, 32))
    assert not torch.allclose(near, far, atol=1e-3)


def test_decode_of_a_model_that_names_its_heads_otherwise():
    """GPT-2 has no key heads of its own and no head_dim, and learned positions that end."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=16)
    model = GPT2LMHeadModel(config).eval()
    step = decode_step(model, Case("decode", 2, 16, attention=None))
    with torch.no_grad():
        assert step().shape == (2, 1, 96)
        assert torch.equal(step(), step())


@pytest.mark.parametrize("window", [8, 32])
def test_decode_in_a_sliding_window(window):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**TINY, num_hidden_layers=2, sliding_window=window)).eval()
    step = decode_step(model, Case("decode", 2, 16))
    with torch.no_grad():
        first = step()
        again = [step() for _ in range(20)]
    assert all(bool(logits.isfinite().all()) for logits in again)
    if window > 16:  # a full window rolls, and another token falls out of it every time
        assert torch.equal(first, again[-1])
    else:
        assert torch.equal(again[-2], again[-1])  # all that is left in it is the token that comes again


def test_activations_keep_their_size():
    model = build_model(8, CPU, torch.bfloat16, TINY)
    with torch.no_grad():
        logits = prefill_step(model, Case("prefill", 2, 32))()
    assert logits.shape == (2, 1, 96)
    assert 0.1 < float(logits.float().std()) < 10


def test_the_seed_of_the_process_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_model(1, CPU, torch.float32, TINY)
    assert torch.equal(torch.rand(1), expected)


def test_failures_become_rows():
    cases = (Case("decode", 0, 8), Case("prefill", 1, 8))
    failed, fine = run_end_to_end(1, "cpu", ["dense"], shape=TINY, cases=cases, dtype=torch.float32)
    assert failed["error"]
    assert failed["ms"] is None
    assert failed["times_dense"] is None
    assert "error" not in fine


def test_a_contender_that_cannot_be_made_does_not_end_the_run():
    """PyTorch's own form needs a GPU, and what comes after it is measured all the same."""
    contenders = ["torch24", "twofour"]
    options = {"shape": TINY, "cases": TINY_CASES[:1], "dtype": torch.float32}
    failed, fine = run_end_to_end(1, "cpu", contenders, **options)
    assert failed["error"]
    assert failed["ms"] is None
    assert fine["ms"]
    assert fine["logits_max_relative_error"] < 1e-5


def test_packed_alone_has_no_ratio():
    (row,) = run_end_to_end(1, "cpu", ["twofour"], shape=TINY, cases=TINY_CASES[:1], dtype=torch.float32)
    assert row["times_dense"] is None
    assert row["resident_share"] < 0.6


def test_unknown_contender():
    with pytest.raises(InputError, match="'magic'"):
        run_end_to_end(1, "cpu", ["magic"], shape=TINY)


def test_the_cases_that_are_measured():
    assert {(c.what, c.batch) for c in CASES if c.graph} == {("decode", 1), ("decode", 16), ("decode", 64)}
    assert [(c.batch, c.tokens) for c in CASES if c.what == "prefill"] == [(1, 2048), (4, 2048)]


def test_schemes_in_the_place_of_the_weights(model):
    stages = Stages(model, 0)
    shares = {"int8": 0.5 * 5 / 16, "fp8": 0.5 * 5 / 16, "int4": 0.5 * 3 / 16}
    for name, share in shares.items():
        facts = stages.advance(name)
        assert facts["packed_layers"] == 8, "q, k and v are one, and gate and up"
        assert facts["resident_share"] == pytest.approx(share, rel=0.15)  # and the scales, of 4 bytes each
        assert all(m.scheme.name == name for m in packed_layers(model).values())
        with torch.no_grad():
            logits = prefill_step(model, Case("prefill", 2, 16))()
        assert bool(logits.isfinite().all())
        assert 0.1 < float(logits.std()) < 10
    assert stages.advance("int8")["packed_layers"] == 8, "from one to the other and back"


def test_rows_of_schemes_come_after_the_others():
    contenders = ["int4", "fp8", "dense", "dense_fused"]
    options = {"shape": TINY, "cases": TINY_CASES[:1], "dtype": torch.float32}
    rows = run_end_to_end(1, "cpu", contenders, **options)
    assert [row["contender"] for row in rows] == ["dense", "dense_fused", "fp8", "int4"]
    for row in rows[2:]:
        assert "error" not in row
        assert row["times_dense"] > 0
        assert row["times_dense_fused"] > 0
        assert "logits_relative_error" not in row


def test_the_cases_of_schemes():
    assert [(c.what, c.batch, c.attention) for c in FEW_CASES] == [
        ("prefill", 1, "sdpa"),
        ("prefill", 4, "sdpa"),
        *(("decode", batch, "grouped") for batch in (1, 16, 64)),
    ]
