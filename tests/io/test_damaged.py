"""Damaged checkpoints: one clear sentence, exit status 2 (1 from check), and nothing made of them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import twofour as library
from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.checkpoint import Checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

from .damage import LAYER, WEIGHTS, edit_config, edit_tensors, flip_a_bit, one_sentence
from .models_with_experts import written


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat. " * 8)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("keep", [4, 100, -1000])
def test_truncated_file(twofour, pruned, packed, tmp_path, keep):
    for directory in (pruned, packed):
        path = directory / WEIGHTS
        path.write_bytes(path.read_bytes()[:keep])
    ran = twofour("pack", pruned, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, WEIGHTS, "not a whole safetensors file")
    ran = twofour("check", packed)
    assert ran.status == 1
    assert WEIGHTS in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_bit_flipped_file_is_found_by_check(twofour, packed):
    assert twofour("check", packed).status == 0
    flip_a_bit(packed / WEIGHTS)
    ran = twofour("check", packed, "--json")
    assert ran.status == 1
    assert any("checksum" in fault for fault in ran.json["faults"])


def test_every_single_bit_flip_in_the_tensors_is_found(packed):
    original = (packed / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(original[:8], "little")
    for offset in torch.linspace(start, len(original) - 1, 12).long().tolist():
        content = bytearray(original)
        content[offset] ^= 0x10
        (packed / WEIGHTS).write_bytes(bytes(content))
        assert not check(packed).ok, offset


@pytest.mark.parametrize("nibble", [0x0, 0x5, 0x1, 0xF])
def test_forged_metadata_nibble(twofour, packed, nibble):
    def forge(tensors):
        tensors[f"{LAYER}.weight_meta"][3, 2] = 0x40 | nibble

    edit_tensors(packed, forge)
    ran = twofour("check", packed, "--json")
    assert ran.status == 1
    assert any(LAYER in f and "row 3, group 4" in f for f in ran.json["faults"])
    with pytest.raises(library.InputError, match=f"{LAYER}.*row 3, group 4"):
        AutoModelForCausalLM.from_pretrained(packed)


def test_missing_shard(twofour, dense, tmp_path):
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    shards[1].unlink()
    ran = twofour("prune", tmp_path / "sharded", tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, shards[1].name, "missing")
    assert twofour("check", tmp_path / "sharded").status == 1


def test_index_that_lies(twofour, dense, tmp_path):
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.ghost.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    ran = twofour("prune", tmp_path / "sharded", tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "model.ghost.weight")


@pytest.mark.parametrize("entry", [5, ["model.safetensors"], None])
def test_index_whose_entries_are_no_names_of_files(twofour, dense, tmp_path, entry):
    AutoModelForCausalLM.from_pretrained(dense).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = entry
    index.write_text(json.dumps(content))
    ran = twofour("prune", tmp_path / "sharded", tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, index.name, "model.norm.weight")
    assert twofour("check", tmp_path / "sharded").status == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"steps": 3}, "its steps are not a list"),
        ({"steps": [1]}, "a step is not an object with a verb"),
        ({"steps": [{"options": {}}]}, "a step is not an object with a verb"),
        ({"steps": [{"verb": "prune", "options": {}}]}, "lacks the options or the layers"),
        ({"steps": [{"verb": "prune", "options": {}, "layers": []}]}, "the layers of prune"),
        ({"steps": [{"verb": "prune", "options": {}, "layers": {"a": 1}}]}, "what prune says about a"),
        ({"steps": [{"verb": "pack", "options": "none"}]}, "the options of pack"),
    ],
)
def test_record_that_somebody_damaged(twofour, pruned, tmp_path, record, message):
    (pruned / "twofour.json").write_text(json.dumps(record))
    for verb in (
        ["pack", pruned, tmp_path / "out"],
        ["quantize", pruned, tmp_path / "out", "--scheme", "int8"],
    ):
        ran = twofour(*verb)
        assert ran.status == 2
        one_sentence(ran, "twofour.json", message)
    assert twofour("report", pruned).status == 2
    ran = twofour("check", pruned)
    assert ran.status == 1
    assert message in ran.err


@pytest.mark.parametrize("version", [4, 99, "1", None])
def test_future_format_version(twofour, packed, version):
    edit_config(packed, lambda c: c["quantization_config"].update(format_version=version))
    ran = twofour("check", packed)
    assert ran.status == 2
    one_sentence(ran, "format version", "Upgrade twofour")
    with pytest.raises(ValueError, match="format version"):
        AutoModelForCausalLM.from_pretrained(packed)


def test_config_that_disagrees_with_its_tensors(twofour, dense, packed, tmp_path):
    edit_config(dense, lambda c: c.update(intermediate_size=176))
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "the config says [176, 64] but the file holds [172, 64]")
    edit_config(packed, lambda c: c["quantization_config"]["modules"].update({LAYER: [64, 168]}))
    assert twofour("check", packed).status == 1
    with pytest.raises(library.InputError, match=LAYER):
        AutoModelForCausalLM.from_pretrained(packed)


def test_config_that_lists_too_much_or_too_little(twofour, packed):
    edit_config(packed, lambda c: c["quantization_config"]["modules"].update({"model.ghost": [64, 64]}))
    ran = twofour("check", packed, "--json")
    assert any("model.ghost" in f for f in ran.json["faults"])
    with pytest.raises(library.InputError, match=r"model\.ghost"):
        AutoModelForCausalLM.from_pretrained(packed)
    edit_config(packed, lambda c: c["quantization_config"]["modules"].pop("model.ghost"))
    edit_config(packed, lambda c: c["quantization_config"]["modules"].pop(LAYER))
    ran = twofour("check", packed, "--json")
    assert any(LAYER in f and "does not list" in f for f in ran.json["faults"])


@pytest.mark.parametrize("what", ["weight_values", "weight_meta"])
def test_missing_packed_tensor_is_never_filled_at_random(packed, what):
    edit_tensors(packed, lambda t: t.pop(f"{LAYER}.{what}"))
    assert not check(packed).ok
    with pytest.raises(library.InputError, match=f"no {LAYER}.{what}"):
        AutoModelForCausalLM.from_pretrained(packed)


@pytest.mark.parametrize("form", ["pruned", "packed"])
def test_missing_weight_is_never_filled_at_random(request, twofour, form, text):
    directory = request.getfixturevalue(form)
    edit_tensors(directory, lambda t: t.pop("model.norm.weight"))
    ran = twofour("eval", directory, "--data", text)
    assert ran.status == 2
    one_sentence(ran, "lack model.norm.weight")
    if form == "packed":
        with pytest.raises(library.InputError, match=r"lack model\.norm\.weight"):
            library.load(directory)


@pytest.mark.parametrize("form", ["pruned", "packed"])
def test_weight_of_another_shape_is_never_loaded(request, twofour, form, text):
    directory = request.getfixturevalue(form)
    edit_tensors(directory, lambda t: t.update({"model.norm.weight": torch.ones(60)}))
    ran = twofour("eval", directory, "--data", text)
    assert ran.status == 2
    one_sentence(ran, "model.norm.weight", "[60]", "[64]")
    if form == "packed":
        with pytest.raises(library.InputError, match=r"model\.norm\.weight.*\[60\]"):
            library.load(directory)


def test_tied_weights_are_not_missing(twofour, tmp_path, dense, text):
    """The head is in no file: it is the embedding."""
    config = AutoModelForCausalLM.from_pretrained(dense).config
    config.tie_word_embeddings = True
    model = written(AutoModelForCausalLM.from_config(config), tmp_path / "tied", dense)
    assert "lm_head.weight" not in Checkpoint(model).tensors
    assert twofour("prune", model, tmp_path / "pruned").status == 0
    assert twofour("pack", tmp_path / "pruned", tmp_path / "packed").status == 0
    for directory in (tmp_path / "pruned", tmp_path / "packed"):
        assert twofour("eval", directory, "--data", text).status == 0
    loaded = library.load(tmp_path / "packed", AutoModelForCausalLM.from_pretrained(model))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokens = torch.arange(20)[None]
    assert torch.equal(loaded(tokens).logits, library.load(tmp_path / "packed")(tokens).logits)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 65},
        {"hidden_size": "64"},
        {"hidden_size": -64},
        {"num_attention_heads": 0},
        {"quantization_config": [1]},
        {"architectures": [7]},
    ],
)
def test_config_with_a_value_that_fits_nothing(twofour, pruned, packed, tmp_path, text, change):
    edit_config(pruned, lambda c: c.update(change))
    edit_config(packed, lambda c: c.update(change))
    quantize = ["quantize", pruned, tmp_path / "out", "--scheme", "int8"]
    for verb in (["check", pruned], quantize, ["prune", pruned, tmp_path / "out"]):
        ran = twofour(*verb)
        assert ran.status == 2
        one_sentence(ran, "config.json")
    if change != {"architectures": [7]}:  # which AutoModelForCausalLM does not look at
        ran = twofour("eval", pruned, "--data", text)
        assert ran.status == 2
        one_sentence(ran, "config.json")
    with pytest.raises(library.InputError, match=r"config\.json|not a packed"):
        library.load(packed)


def test_architecture_that_transformers_does_not_know(twofour, pruned, packed, tmp_path):
    for directory in (pruned, packed):
        edit_config(directory, lambda c: c.update(architectures=["NopeForCausalLM"]))
    ran = twofour("pack", pruned, tmp_path / "out")
    assert ran.status == 2
    assert len(one_sentence(ran, "'NopeForCausalLM', which transformers does not know")) < 400
    with pytest.raises(library.InputError, match="'NopeForCausalLM', which transformers does not know"):
        library.load(packed)


@pytest.mark.parametrize("verb", ["prune", "quantize", "quantize --calib", "recover", "pack"])
def test_what_does_not_match_its_checksum_gets_no_new_one(verb, dense, pruned, text, tmp_path, twofour):
    source = pruned if verb != "prune" else dense
    if verb == "prune":
        prune_checkpoint(dense, tmp_path / "copy", exclude=["*.down_proj"])
        source = tmp_path / "copy"
    file = source / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    given = {
        "quantize": ["--scheme", "int8"],
        "quantize --calib": ["--scheme", "int8", "--calib", text, "--samples", 4, "--seqlen", 32],
        "recover": ["--data", text, "--recipe", "masked", "--tokens", 512, "--seqlen", 32],
    }
    ran = twofour(verb.split()[0], source, tmp_path / "out", *given.get(verb, []))
    assert ran.status == 2
    assert "do not match their checksum" in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_a_weight_that_is_stored_as_whole_numbers(pruned, tmp_path, twofour):
    weights = load_file(pruned / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].sign().to(torch.int8)
    save_file(weights, pruned / "model.safetensors", metadata={"format": "pt"})
    for verb, *given in (["pack"], ["prune"], ["quantize", "--scheme", "int4"]):
        ran = twofour(verb, pruned, tmp_path / "out", *given)
        assert ran.status == 2
        assert "model.layers.1.mlp.up_proj: its weight is stored as I8" in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_a_pruned_layer_that_is_not_there(pruned, text, tmp_path, twofour):
    weights = load_file(pruned / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, pruned / "model.safetensors", metadata={"format": "pt"})
    for verb, *given in (["pack"], ["quantize", "--scheme", "int4"], ["recover", "--data", text]):
        ran = twofour(verb, pruned, tmp_path / "out", *given)
        assert ran.status == 2
        assert "files lack" in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_check_finds_damaged_codes(pruned, tmp_path):
    good = tmp_path / "good"
    quantize_checkpoint(pruned, good, QuantizeOptions("int4"))
    key = "model.layers.0.mlp.up_proj"

    def damaged(change):
        out = tmp_path / "bad"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(good, out)
        tensors = load_file(out / "model.safetensors")
        change(tensors)
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        return check(out).faults

    assert damaged(lambda t: None) == []
    assert "no weight_scale" in damaged(lambda t: t.pop(f"{key}.weight_scale"))[0]
    for wrong in (0.0, torch.nan, torch.inf):
        assert (
            "weight_scale holds zero" in damaged(lambda t, w=wrong: t[f"{key}.weight_scale"][3].fill_(w))[0]
        )
    assert damaged(lambda t: t[f"{key}.weight_scale"].neg_()) == []  # another matrix, and a legal one
    assert "nibble" in damaged(lambda t: t[f"{key}.weight_meta"].zero_())[0]
    wide = damaged(lambda t: t.update({f"{key}.weight_values": t[f"{key}.weight_values"].view(torch.int8)}))
    assert "int4 needs torch.uint8" in wide[0]
    out = tmp_path / "bad"
    tensors = load_file(good / "model.safetensors")
    del tensors[f"{key}.weight_scale"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="weight_scale"):
        AutoModelForCausalLM.from_pretrained(out)
    config = json.loads((good / "config.json").read_text())
    config["quantization_config"]["scheme"] = {"name": "nf4"}
    (good / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="no scheme 'nf4'"):
        AutoModelForCausalLM.from_pretrained(good)
