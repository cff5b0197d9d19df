"""One model, dense against 2:4: what is compared with what, and that every figure is what it says."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForMaskedLM

from tests.io import models_with_experts
from twofour.bench.generations import PROMPTS
from twofour.bench.model import (
    CPU_CONTENDERS,
    MAGNITUDE,
    NO_GPU,
    ZEROS,
    Dense,
    _load_dense,
    form_of,
    requests_of,
    run_model,
    unpack_,
)
from twofour.bench.perplexity import evaluate
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.nn import packed_layers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="rows of a CPU are checked here")

TEXT = "the quick brown fox jumps over the lazy dog. " * 6
SMALL = {"batches": (1, 2), "prompt": 8, "generate": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def story(_packed, text):
    told = []
    found = run_model(_packed / "packed", data=text, on_progress=lambda *step: told.append(step), **SMALL)
    return found | {"progress": told}


def without_source(directory):
    """As if the dense model had been deleted."""
    record = json.loads((directory / "twofour.json").read_text())
    record["steps"][0]["source"] = "/nowhere/dense"
    (directory / "twofour.json").write_text(json.dumps(record))


def test_a_row_for_every_form_and_case(story):
    cases = [(what, batch, n) for batch in (1, 2) for what, n in (("prefill", 8), ("decode", 12))]
    assert [(r["contender"], r["what"], r["batch"], r["tokens"]) for r in story["end_to_end"]] == [
        (contender, *case) for contender in CPU_CONTENDERS for case in cases
    ]
    assert not any("error" in row for row in story["end_to_end"])
    assert {(row["mode"], row["attention"], row["layers"]) for row in story["end_to_end"]} == {
        ("cpu", "sdpa", 2)
    }
    assert story["notes"] == [NO_GPU]
    assert story["progress"][0][0] == 0
    assert story["progress"][-1] == (12, 12, "done")
    json.dumps(story)  # nothing in it that JSON does not know


def test_a_request_is_its_prefill_and_its_steps(story):
    ms = {(r["contender"], r["batch"], r["what"]): r["ms"]["p50"] for r in story["end_to_end"]}
    assert len(story["requests"]) == 2 * len(CPU_CONTENDERS)
    for request in story["requests"]:
        who, batch = request["contender"], request["batch"]
        assert request["ms"] == pytest.approx(ms[who, batch, "prefill"] + 4 * ms[who, batch, "decode"])
        assert request["tokens_per_s"] == pytest.approx(batch * 4 / request["ms"] * 1e3)
        dense = ms["dense", batch, "prefill"] + 4 * ms["dense", batch, "decode"]
        assert request["times_dense"] == pytest.approx(dense / request["ms"])


def test_a_graph_counts_for_a_request_where_there_is_one():
    row = {"batch": 1, "contender": "dense", "ms": {"p50": 10.0}}
    rows = [row | {"what": "prefill"}, row | {"what": "decode", "ms": {"p50": 3.0}}]
    rows.append(row | {"what": "decode", "ms": {"p50": 1.0}})
    rows.append(row | {"what": "decode", "ms": None, "contender": "fast"})
    (request,) = requests_of(rows, 5)
    assert request["ms"] == 10 + 5 * 1.0


def test_sizes(story, _packed, _dense):
    dense, sparse = story["sizes"]["dense"], story["sizes"]["sparse"]
    assert dense["disk_bytes"] == sum(t.nbytes for t in load_file(_dense / "model.safetensors").values())
    packed = load_file(_packed / "packed" / "model.safetensors")
    assert sparse["disk_bytes"] == sum(tensor.nbytes for tensor in packed.values())
    assert sparse["disk_bytes"] < dense["disk_bytes"]
    assert sparse["memory_bytes"] < dense["memory_bytes"]
    rows = {row["contender"]: row for row in story["end_to_end"]}
    assert rows["dense"]["model_bytes"] == dense["memory_bytes"]
    assert rows["twofour"]["model_bytes"] == sparse["memory_bytes"]
    # Two of four values and a nibble for every four; widths of 172 fill half a byte more.
    assert 0.53 < rows["twofour"]["resident_share"] < 0.54
    assert rows["fast"]["resident_share"] == 1 + rows["twofour"]["resident_share"]
    assert (rows["twofour"]["packed_layers"], rows["fast"]["packed_layers"]) == (14, 8)


def test_perplexity_and_agreement_are_those_of_eval(story, _packed, _dense, text):
    dense, tokenizer = load_causal_lm(_dense, "cpu")
    sparse = load_causal_lm(_packed / "packed", "cpu")[0]
    expected = evaluate(sparse, tokenizer, [TEXT], against=dense)
    found = story["perplexity"]
    assert found["data"] == str(text)
    assert found["sparse"] == pytest.approx(expected.perplexity)
    assert found["dense"] == pytest.approx(evaluate(dense, tokenizer, [TEXT]).perplexity)
    assert (found["tokens"], found["context"], found["stride"]) == (expected.tokens, 64, 32)
    assert story["agreement"]["share"] == pytest.approx(expected.agreement)
    assert story["agreement"]["kl"] == pytest.approx(expected.kl)
    assert story["agreement"]["over"] == "the text"


def test_what_both_write(story, _packed, _dense):
    tokenizer = AutoTokenizer.from_pretrained(_dense)
    assert [written["prompt"] for written in story["generations"]] == list(PROMPTS)
    for who, path in (("dense", _dense), ("sparse", _packed / "pruned")):
        model = AutoModelForCausalLM.from_pretrained(path)
        for written in story["generations"]:
            tokens = tokenizer(written["prompt"], return_tensors="pt")["input_ids"]
            for _ in range(4):  # greedy, by hand
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
            assert written[who] == tokenizer.decode(tokens[0, -4:], skip_special_tokens=True)
    assert all(0 <= written["same_tokens"] <= 4 for written in story["generations"])


def test_the_record_names_the_dense_model(story, _dense):
    assert story["form"] == "packed"
    assert story["dense"] == {"model": str(_dense), "found": "record"}


def test_a_pruned_model_is_packed_in_memory(pruned, dense):
    found = run_model(pruned, dense, batches=(1,), prompt=4, generate=2)
    assert (found["form"], found["dense"]) == ("pruned", {"model": str(dense), "found": "given"})
    assert found["sizes"]["sparse"]["disk_bytes"] is None  # it has no packed form on the disk
    assert {r["packed_layers"] for r in found["end_to_end"] if r["contender"] == "twofour"} == {14}
    # Without a text: over what the dense model wrote.
    assert found["perplexity"] is None
    assert found["agreement"]["over"].startswith("prompts")
    assert 0 < found["agreement"]["share"] < 1


def test_only_what_the_record_lists_is_packed(dense, tmp_path):
    prune_checkpoint(dense, tmp_path / "half", exclude=["*.0.*"])
    found = run_model(tmp_path / "half", batches=(1,), prompt=4, generate=2)
    assert {r["packed_layers"] for r in found["end_to_end"] if r["contender"] == "twofour"} == {7}


def test_without_the_dense_model_its_zeros_are_timed_and_its_predictions_unknown(packed, _dense, text):
    without_source(packed)
    found = run_model(packed, data=text, batches=(1,), prompt=4, generate=2)
    assert found["dense"] == {"model": None, "found": "unpacked"}
    assert ZEROS in found["notes"]
    assert all(row["ms"] and row["times_dense"] for row in found["end_to_end"])
    assert found["perplexity"]["sparse"] > 1
    assert found["perplexity"]["dense"] is None
    assert found["agreement"] is None
    assert all(w["dense"] is None and w["sparse"] is not None for w in found["generations"])
    assert (
        found["sizes"]["dense"]["disk_bytes"] == Checkpoint(_dense).nbytes
    )  # worked out from the packed ones


def test_a_dense_model_is_pruned_for_its_times_only(dense, text):
    found = run_model(dense, data=text, batches=(1,), prompt=4, generate=2)
    assert (found["form"], found["dense"]["found"]) == ("dense", "itself")
    assert MAGNITUDE in found["notes"]
    assert {r["packed_layers"] for r in found["end_to_end"] if r["contender"] == "twofour"} == {14}
    assert found["perplexity"]["sparse"] is None
    assert found["perplexity"]["dense"] > 1
    assert found["agreement"] is None
    assert all(w["sparse"] is None and w["dense"] is not None for w in found["generations"])


def test_forms_are_told_by_record_or_weights(dense, pruned, packed):
    assert [form_of(Checkpoint(d)) for d in (dense, pruned, packed)] == ["dense", "pruned", "packed"]
    (pruned / "twofour.json").unlink()  # from elsewhere
    assert form_of(Checkpoint(pruned)) == "pruned"


@pytest.mark.parametrize("lowrank", [0, 4])
def test_unpacked_it_computes_the_same(dense, tmp_path, text, lowrank):
    calibration = CalibrationOptions(text, samples=4, seqlen=32, lowrank=lowrank)
    prune_checkpoint(dense, tmp_path / "pruned", "wanda", calibration=calibration)
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    model = load_causal_lm(tmp_path / "packed", "cpu")[0]
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        unpack_(model)
        assert not packed_layers(model)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_request_longer_than_the_model_takes_is_cut(packed):
    found = run_model(packed, batches=(1,), prompt=100, generate=8)
    assert {(r["what"], r["tokens"]) for r in found["end_to_end"]} == {("prefill", 64), ("decode", 64)}
    assert any("takes 64 tokens" in note for note in found["notes"])


def test_against_must_be_dense_and_of_the_same_tokenizer(packed, dense, tmp_path):
    with pytest.raises(InputError, match="is packed: --against takes a dense model"):
        run_model(packed, packed)
    with pytest.raises(InputError, match="nothing to compare with --against"):
        run_model(dense, dense)
    other = tmp_path / "other"
    shutil.copytree(dense, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="different tokenizers"):
        run_model(packed, other)


def test_no_tokenizer(packed):
    for file in packed.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        run_model(packed)


def test_a_damaged_tokenizer(packed):
    (packed / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="has no tokenizer that transformers can read"):
        run_model(packed)


def test_not_a_causal_model(tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InputError, match="BertForMaskedLM, not a causal language model"):
        run_model(tmp_path / "bert")


def test_a_form_that_fails_does_not_end_the_run(packed, monkeypatch):
    from twofour.bench import end_to_end

    def refuse(model, example=None):
        raise RuntimeError("cannot be fused")

    monkeypatch.setattr(end_to_end, "fuse_", refuse)
    found = run_model(packed, batches=(1,), prompt=4, generate=2)
    assert {r.get("error") for r in found["end_to_end"] if r["contender"] == "fast"} == {
        "RuntimeError: cannot be fused"
    }
    assert all(r["ms"] for r in found["end_to_end"] if r["contender"] != "fast")
    assert {r["contender"] for r in found["requests"]} == {"dense", "twofour"}


def test_a_dense_mixture_runs_as_transformers_has_it(_dense, tmp_path):
    source = models_with_experts.written(models_with_experts.mixtral(), tmp_path / "dense", _dense)
    prune_checkpoint(source, tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    tokens = torch.arange(3, 43).reshape(2, 20)
    checkpoint = Checkpoint(tmp_path / "packed")
    with torch.no_grad():
        for dense, like in ((Dense(source, "given"), source), (Dense(None, "unpacked"), tmp_path / "pruned")):
            model, _ = _load_dense(checkpoint, "packed", dense)
            assert model.model.layers[1].mlp.experts.down_proj.dim() == 3
            want = AutoModelForCausalLM.from_pretrained(like)(tokens).logits
            torch.testing.assert_close(model(tokens).logits, want)
    found = run_model(tmp_path / "packed", **SMALL)
    assert not any("error" in row for row in found["end_to_end"])
