"""The real small models of ../shared, from the dense checkpoint to generated text, through the command."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofour.nn import packed_layers


@pytest.mark.parametrize(("name", "layers", "share"), [("stories260K", 35, 0.54), ("stories15M", 42, 0.57)])
def test_dense_to_packed_to_text(twofour, shared_model, tmp_path, name, layers, share):
    dense, pruned, packed = shared_model(name), tmp_path / "pruned", tmp_path / "packed"
    assert twofour("prune", dense, pruned).status == 0
    ran = twofour("pack", pruned, packed, "--json")
    assert ran.json["packed_bytes"] <= share * ran.json["dense_bytes"]
    assert twofour("check", packed).status == 0
    model = AutoModelForCausalLM.from_pretrained(packed)
    masked = AutoModelForCausalLM.from_pretrained(pruned)
    assert len(packed_layers(model)) == layers
    assert model.dtype == masked.dtype == AutoModelForCausalLM.from_pretrained(dense).dtype
    inputs = AutoTokenizer.from_pretrained(packed)("Once upon a time, there was a", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, masked(**inputs).logits)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(tokens, masked.generate(**inputs, max_new_tokens=12, do_sample=False))


def test_perplexity_of_a_real_model_is_what_it_should_be(twofour, shared_model, tmp_path):
    """stories15M on its own kind of text: 3.5 to 4 dense, ruined by magnitude pruning (to about 78)."""
    stories = shared_model("stories15M").parents[1] / "data" / "tinystories-valid.jsonl"
    dense = twofour(
        "eval", shared_model("stories15M"), "--data", stories, "--max-tokens", 4000, "--json"
    ).json
    assert 2.5 < dense["perplexity"] < 5
    assert (dense["tokens"], dense["context"], dense["stride"], dense["bos"]) == (4000, 256, 128, True)
    twofour("prune", shared_model("stories15M"), tmp_path / "pruned")
    arguments = ["--data", stories, "--max-tokens", 4000, "--against", shared_model("stories15M"), "--json"]
    pruned = twofour("eval", tmp_path / "pruned", *arguments).json
    assert 40 < pruned["perplexity"] < 150
    assert 0.1 < pruned["agreement"] < 0.5
    assert pruned["kl"] > 1


def test_demo_on_a_model_given(twofour, shared_model, tmp_path):
    stories = shared_model("stories260K").parents[1] / "data" / "tinystories-valid.jsonl"
    arguments = ["demo", "--model", shared_model("stories260K"), "--data", stories, "--tokens", 600]
    ran = twofour(*arguments, "--out", tmp_path / "demo", "--json")
    assert ran.status == 0, ran.err
    found = ran.json
    assert found["dense_eval"]["perplexity"] < found["packed_eval"]["perplexity"]
    assert found["packed_bytes"] < found["dense_bytes"]
    assert found["dense_text"] != found["packed_text"]
    stamp = (tmp_path / "demo" / "packed" / "model.safetensors").stat().st_mtime_ns
    again = twofour(*arguments, "--out", tmp_path / "demo")
    assert again.status == 0
    assert (tmp_path / "demo" / "packed" / "model.safetensors").stat().st_mtime_ns == stamp
    assert "perplexity" in again.out
    assert (
        json.loads((tmp_path / "demo" / "demo.json").read_text())["found"]["packed_text"]
        == found["packed_text"]
    )
