"""`check` finds what is missing, left over, out of shape or no number, and takes what is only unusual."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import twofour as library
from twofour.io.check import check

from .models_with_experts import mixtral, olmoe, written
from .test_bad_input import LAYER, edit_config, edit_tensors

NORM = "model.norm.weight"


def fault_of(directory):
    """The only one: no fault is told twice, or brings others along."""
    found = check(directory).faults
    assert len(found) == 1, found
    return found[0]


def spoil(weight):
    """NaN in the place of a weight that was kept."""
    flat = weight.view(-1)
    flat[flat.nonzero()[0]] = float("nan")


@pytest.mark.parametrize("form", ["pruned", "packed"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(NORM), "the files lack it"),
        (lambda t: t.update({"foo.bar": torch.ones(3)}), "foo.bar: the files hold it"),
        (lambda t: t.update({NORM: torch.ones(60)}), "[60]"),
        (lambda t: t[NORM].fill_(float("nan")), "64 of 64 numbers are NaN or infinite"),
        (lambda t: t[NORM][3:4].fill_(float("inf")), "1 of 64 numbers are NaN or infinite"),
        (lambda t: t["model.embed_tokens.weight"][5, :2].fill_(float("nan")), "embed_tokens.weight: 2 of"),
    ],
)
def test_tensors_that_are_not_packed(request, form, change, words):
    directory = request.getfixturevalue(form)
    edit_tensors(directory, change)
    assert words in fault_of(directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{LAYER}.weight"), "the files lack it"),
        (lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].to(torch.int8)}), "torch.int8"),
        (lambda t: spoil(t[f"{LAYER}.weight"]), "1 of 11008 numbers are NaN"),
        (lambda t: t.update({f"{LAYER}.weight": torch.zeros(64, 168)}), "[64, 168]"),
    ],
)
def test_pruned_weight(twofour, pruned, change, words):
    edit_tensors(pruned, change)
    fault = fault_of(pruned)
    assert LAYER in fault
    assert words in fault
    assert twofour("check", pruned).status == 1


def test_scheme_that_the_config_leaves_out(twofour, pruned, tmp_path):
    assert twofour("quantize", pruned, tmp_path / "out", "--scheme", "int4").status == 0
    edit_config(tmp_path / "out", lambda c: c["quantization_config"].update(scheme=None))
    found = check(tmp_path / "out")
    assert len(found.faults) == len({f.partition(":")[0] for f in found.faults}) == 14
    assert all("names no scheme" in fault for fault in found.faults)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 66}, "hidden size (66)"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"model_type": "foo"}, "'foo'"),
        ({"model_type": None}, "model_type"),
        ({"architectures": "Llama"}, "not a list of names"),
    ],
)
def test_config_of_a_packed_model_that_fits_nothing(packed, change, words):
    edit_config(packed, lambda c: c.update(change))
    assert words in fault_of(packed)


def test_config_of_more_layers_than_there_are(pruned, packed):
    for directory in (pruned, packed):
        edit_config(directory, lambda c: c.update(num_hidden_layers=3))
        found = check(directory).faults
        assert len(found) == 9
        assert all(fault.startswith("model.layers.2.") for fault in found)


def test_recorded_layer_is_missed_where_transformers_cannot_tell(tmp_path):
    """A model of one's own: no architecture, so the record is what tells."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    library.save(library.pack_(library.prune_(model)), tmp_path / "saved")
    assert check(tmp_path / "saved").ok
    record = json.loads((tmp_path / "saved" / "twofour.json").read_text())
    layers = {name: {"shape": [32, 32]} for name in ("0", "1", "2")}
    record["steps"].insert(0, {"verb": "prune", "options": {}, "layers": layers})
    (tmp_path / "saved" / "twofour.json").write_text(json.dumps(record))
    assert fault_of(tmp_path / "saved") == "2: the record says that it was pruned, and the files lack it."


def test_index_that_leaves_a_tensor_out(dense, twofour, tmp_path):
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    twofour("prune", tmp_path / "sharded", tmp_path / "pruned")
    tensors = load_file(tmp_path / "pruned" / "model.safetensors")
    sharded = tmp_path / "sharded"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        own = {name: tensors[name] for name, where in index["weight_map"].items() if where == file}
        save_file(own, sharded / file, metadata={"format": "pt"})
    assert check(sharded).ok
    del index["weight_map"][NORM]
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert fault_of(sharded).startswith(f"{NORM}: model.safetensors.index.json leaves it out")


@pytest.mark.parametrize("sums", ["{", "3", "[]"])
def test_checksums_that_are_none(pruned, sums):
    tensors = load_file(pruned / "model.safetensors")
    save_file(tensors, pruned / "model.safetensors", metadata={"format": "pt", "twofour_sha256": sums})
    assert fault_of(pruned) == "model.safetensors: the stored checksums cannot be read."


def test_tied_head_may_be_in_the_files_or_not(twofour, dense, tmp_path):
    config = AutoConfig.from_pretrained(dense)
    config.tie_word_embeddings = True
    tied = written(AutoModelForCausalLM.from_config(config), tmp_path / "tied", dense)
    twofour("prune", tied, tmp_path / "pruned")
    assert check(tmp_path / "pruned").ok
    edit_tensors(
        tmp_path / "pruned", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert check(tmp_path / "pruned").ok
    twofour("pack", tmp_path / "pruned", tmp_path / "packed")
    assert check(tmp_path / "packed").ok


def test_buffers_that_transformers_has_left_out_since(pruned, packed):
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    for directory in (pruned, packed):
        edit_tensors(directory, lambda t: t.update(old))
        assert check(directory).ok


def test_files_of_a_gpt2_as_they_were_published(twofour, dense, tmp_path):
    """Without the prefix of the body, and with masks among the tensors."""
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=128)
    model = written(GPT2LMHeadModel(config), tmp_path / "gpt2", dense)
    twofour("prune", model, tmp_path / "pruned")

    def publish(tensors):
        here = dict(tensors)
        tensors.clear()
        tensors.update({name.removeprefix("transformer."): tensor for name, tensor in here.items()})
        tensors["h.0.attn.bias"] = torch.ones(64, 64).tril()[None, None]

    edit_tensors(tmp_path / "pruned", publish)
    assert check(tmp_path / "pruned").ok


def test_mask_may_be_infinite(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    model.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
    library.save(library.pack_(library.prune_(model)), tmp_path / "saved")
    assert check(tmp_path / "saved").ok
    edit_tensors(tmp_path / "saved", lambda t: t["mask"][0, :1].fill_(float("inf")))
    assert fault_of(tmp_path / "saved") == "mask: 7 of 16 numbers are NaN or infinite."


@pytest.mark.parametrize("make", [mixtral, olmoe])
def test_experts(twofour, make, dense, tmp_path):
    """In the files one by one, under names that the model has not, and stacked where it is loaded."""
    model = written(make(), tmp_path / "model", dense)
    twofour("prune", model, tmp_path / "pruned")
    twofour("pack", tmp_path / "pruned", tmp_path / "packed")
    assert check(tmp_path / "pruned").ok
    assert check(tmp_path / "packed").ok
    gone = []

    def lose(tensors):
        gone.append(next(name for name in tensors if ".experts.1." in name and name.endswith(".weight")))
        del tensors[gone[0]]

    edit_tensors(tmp_path / "pruned", lose)
    assert ".experts" in fault_of(tmp_path / "pruned")
