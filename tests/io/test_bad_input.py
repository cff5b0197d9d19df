"""Damaged and impossible input: one clear sentence, exit status 2 (1 from check), and nothing lost."""

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import twofour as library
from twofour.io.check import check
from twofour.io.checkpoint import Checkpoint

from .models_with_experts import written

WEIGHTS = "model.safetensors"
LAYER = "model.layers.1.mlp.down_proj"


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat. " * 8)
    return tmp_path / "text.txt"


def digest(directory):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(directory.iterdir())}


def edit_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory, change):
    """Change tensors and store them without checksums, as a forger would."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def flip_a_bit(path, offset_from_end=1000):
    content = bytearray(path.read_bytes())
    content[-offset_from_end] ^= 1
    path.write_bytes(bytes(content))


def one_sentence(ran, *words):
    """An error on standard error that holds these words, and no traceback."""
    assert "Traceback" not in ran.err
    line = ran.err.strip().splitlines()[-1]
    for word in words:
        assert word in line, line
    return line


def test_missing_directory(twofour, tmp_path):
    for verb in (["prune", tmp_path / "no", tmp_path / "out"], ["pack", tmp_path / "no", tmp_path / "out"]):
        ran = twofour(*verb)
        assert ran.status == 2
        one_sentence(ran, "does not exist")
    assert twofour("check", tmp_path / "no").status == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("missing", ["config.json", WEIGHTS])
def test_missing_file(twofour, dense, tmp_path, missing):
    (dense / missing).unlink()
    before = digest(dense)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, missing)
    assert digest(dense) == before
    assert not list(tmp_path.glob("*out*"))


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


def test_packing_what_is_not_pruned_names_the_layer(twofour, dense, tmp_path):
    ran = twofour("pack", dense, tmp_path / "out", "--json")
    assert ran.status == 2
    assert "row 0, group 0" in ran.json["error"]["message"]
    assert ran.json["error"]["layer"].startswith("model.layers.0")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(twofour, dense, tmp_path, value):
    def poison(tensors):
        tensors[f"{LAYER}.weight"][2, 3] = value

    edit_tensors(dense, poison)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, LAYER, "NaN or infinite")
    assert not list(tmp_path.glob("*out*"))


def test_model_without_an_eligible_layer(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--exclude", "*proj")
    assert ran.status == 2
    one_sentence(ran, "no layer of this model can be made 2:4")


def test_pattern_that_matches_nothing(twofour, dense, tmp_path):
    ran = twofour("prune", dense, tmp_path / "out", "--include", "encoder.*")
    assert ran.status == 2
    one_sentence(ran, "'encoder.*'")


def test_unknown_architecture(twofour, dense, tmp_path):
    edit_config(dense, lambda c: c.update(model_type="hyena-9000", architectures=["HyenaNine"]))
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "hyena-9000")


def test_pickled_weights_are_not_read(twofour, dense, tmp_path):
    (dense / WEIGHTS).rename(dense / "pytorch_model.bin")
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "pickled weights, which twofour never reads")


def test_existing_output_is_not_overwritten(twofour, dense, pruned, tmp_path):
    before = digest(pruned)
    ran = twofour("prune", dense, pruned)
    assert ran.status == 2
    one_sentence(ran, "already exists")
    assert digest(pruned) == before


@pytest.mark.parametrize("where", ["file/out", "/proc/out"])
def test_unwritable_directory(twofour, dense, tmp_path, where):
    (tmp_path / "file").write_text("not a directory")
    before = digest(dense)
    ran = twofour("prune", dense, tmp_path / where)  # an absolute path stays as it is
    assert ran.status == 2
    one_sentence(ran, "cannot write")
    assert digest(dense) == before


def test_full_disk_found_out_before(twofour, dense, tmp_path, monkeypatch):
    monkeypatch.setattr("twofour.io.stream.free_bytes", lambda path: 1000)
    ran = twofour("prune", dense, tmp_path / "out")
    assert ran.status == 2
    one_sentence(ran, "the disk is too full")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a small disk needs root")
def test_full_disk_found_out_while_writing(dense, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    size = int(Checkpoint(dense).nbytes * 0.8)  # more than the 9/16 that are asked for beforehand
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this machine does not allow a mount")
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "twofour.cli.main", "prune", dense, disk / "out"],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 2, ran.stderr
        assert "the disk is full" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def test_write_error_leaves_nothing(dense, tmp_path):
    """A limit on file sizes: the same as a quota, and needs no root."""
    ran = subprocess.run(
        [sys.executable, "-m", "twofour.cli.main", "prune", dense, tmp_path / "out"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
    )
    assert ran.returncode in (1, 2), ran.stderr
    assert "files may not become so large here" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("*out*"))


def test_text_that_cannot_be_read(twofour, dense, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"tex": "b"}\n')
    (tmp_path / "worse.jsonl").write_text("{")
    expected = {
        "no.txt": "does not exist",
        "empty.txt": "no text",
        "binary.txt": "UTF-8",
        "bad.jsonl": "line 2",
        "worse.jsonl": "line 1",
    }
    for name, word in expected.items():
        ran = twofour("eval", dense, "--data", tmp_path / name)
        assert ran.status == 2
        one_sentence(ran, word)
