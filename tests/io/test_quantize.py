"""Quantized checkpoints: made in memory and on disk, the same either way, whole or refused."""

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import twofour as package
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import sample_windows
from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.load import load_causal_lm
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint
from twofour.nn.lowrank import add_lowrank_
from twofour.nn.quantized import QuantizedLinear
from twofour.packed import unpack
from twofour.pattern import check_pattern
from twofour.quantize.schemes import SCHEMES

TOKENS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
TEXT = "the quick brown fox jumps over the lazy dog and says: 2 of 4 is enough. " * 40


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def calibration(text):
    return CalibrationOptions(text, samples=6, seqlen=32)


def with_outliers(directory):
    """Something to smooth: a large channel behind a norm, and one that down_proj reads."""
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][5] = 40.0
    for number in range(2):
        tensors[f"model.layers.{number}.mlp.up_proj.weight"][7] *= 40
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def logits(directory, **options):
    model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.parametrize("name", list(SCHEMES))
def test_command_check_load_and_save_again(name, pruned, tmp_path, twofour):
    out = tmp_path / "out"
    ran = twofour("quantize", pruned, out, "--scheme", name, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["scheme"] == name
    assert len(ran.json["layers"]) == 14
    assert ran.json["packed_bytes"] < 0.4 * ran.json["dense_bytes"]
    checked = twofour("check", out, "--json")
    assert checked.status == 0, checked.err
    layers = checked.json["layers"]
    assert len(layers) == 14
    assert not any(layer["over"] for layer in layers)
    bits = {"int8": 5, "fp8": 5, "int4": 3}[SCHEMES[name].codes]
    for layer in layers:
        rows, columns = layer["shape"]
        assert layer["dense_bytes"] == 2 * rows * columns
        scales = 2 * rows * SCHEMES[name].scale_width(columns)
        assert layer["stored_bytes"] - scales == pytest.approx(rows * columns * bits / 8, rel=0.02)

    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format_version"] == 3
    assert config["scheme"]["name"] == name
    wanted = logits(pruned)
    got = logits(out)
    assert float((got - wanted).norm() / wanted.norm()) < (0.3 if bits == 3 else 0.08)

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert sum(isinstance(m, QuantizedLinear) for m in model.modules()) == 14
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), got)
    assert check(tmp_path / "again").ok
    package.save(model, tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved"), got)
    record = json.loads((tmp_path / "saved" / "twofour.json").read_text())
    assert record["steps"][-1]["verb"] == "quantize"
    for dtype in (torch.bfloat16, torch.float16):
        narrow = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
        own = narrow.model.layers[0].mlp.down_proj
        assert own.weight_values.dtype == SCHEMES[name].stored
        assert own.weight_scale.dtype == dtype
        same = model.model.layers[0].mlp.down_proj
        assert torch.equal(own.packed.unpack(torch.float32), same.packed.unpack(torch.float32))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_text_in_memory_and_on_disk_give_the_same(name, pruned, text, tmp_path, monkeypatch):
    """int8 is smoothed in both; on disk that takes no more than a block in memory."""
    with_outliers(pruned)
    with monkeypatch.context() as patch:
        patch.setattr("twofour.io.prune_calibrated.load_causal_lm", None)  # must not be needed
        options = QuantizeOptions(name)
        quantize_checkpoint(pruned, tmp_path / "disk", options, calibration=calibration(text))
    assert not list(tmp_path.glob(".disk*"))
    model, tokenizer = load_causal_lm(pruned, "cpu")
    windows = sample_windows(tokenizer, read_documents(text), 6, 32)
    package.quantize_(model, name, windows)
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, logits(tmp_path / "disk"))
    masks = load_file(pruned / "model.safetensors")
    stored = load_file(tmp_path / "disk" / "model.safetensors")
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(stored[norm], masks[norm]) == (name == "int4")
    for key, weight in masks.items():
        base = key.removesuffix("weight")
        if f"{base}weight_values" in stored:
            codes = unpack(stored[f"{base}weight_values"], stored[f"{base}weight_meta"], weight.shape[1])
            assert check_pattern(codes).legal
            assert not bool(codes.float()[weight == 0].any())


def test_compensation_helps_the_whole_model(pruned, text, tmp_path):
    errors = {}
    enough = CalibrationOptions(text, samples=24, seqlen=32)  # with six it is luck which ones: 0.3 to 0.9
    for rounding, given in (("nearest", None), ("compensated", enough)):
        out = tmp_path / rounding
        quantize_checkpoint(pruned, out, QuantizeOptions("int4", 32, rounding), calibration=given)
        model, tokenizer = load_causal_lm(out, "cpu")
        before, _ = load_causal_lm(pruned, "cpu")
        ids = torch.tensor([tokenizer(TEXT[:60])["input_ids"]])
        with torch.no_grad():
            wanted = before(ids).logits
            errors[rounding] = float((model(ids).logits - wanted).norm() / wanted.norm())
    assert errors["compensated"] < 0.7 * errors["nearest"]


def test_prune_with_a_scheme_makes_a_packed_model_of_a_dense_one(dense, text, tmp_path, twofour):
    how = ("--scheme", "int4", "--group", 64, "--calib", text, "--samples", 8, "--seqlen", 32)
    ran = twofour("prune", dense, tmp_path / "out", *how, "--tune", "--json")
    assert ran.status == 0, ran.err
    assert ran.json["verb"] == "prune"
    options = ran.json["options"]
    assert (options["scheme"], options["group"], options["method"], options["tune"]) == (
        *("int4", 64, "joint", True),
    )
    assert len(ran.json["blocks"]) == 2
    assert len(ran.json["layers"]) == 14
    assert twofour("check", tmp_path / "out").status == 0
    assert logits(tmp_path / "out").isfinite().all()
    record = json.loads((tmp_path / "out" / "twofour.json").read_text())
    assert [step["verb"] for step in record["steps"]] == ["prune"]
    assert record["steps"][0]["source"] == str(dense)  # where `recover` looks for the teacher
    ran = twofour("prune", dense, tmp_path / "told", *how)
    assert "Pruned 14 layers to 2:4 int4 in groups of 64, rounded on the way" in ran.out


def test_the_joint_sweep_is_no_worse_than_two_steps(dense, text, tmp_path):
    prune_checkpoint(dense, tmp_path / "pruned", "sparsegpt", calibration=calibration(text))
    sources = {"joint": dense, "compensated": tmp_path / "pruned"}
    errors = {}
    for rounding, source in sources.items():
        options = QuantizeOptions("int4", 32, rounding)
        quantize_checkpoint(source, tmp_path / rounding, options, calibration=calibration(text))
        model, tokenizer = load_causal_lm(tmp_path / rounding, "cpu")
        before, _ = load_causal_lm(dense, "cpu")
        ids = torch.tensor([tokenizer(TEXT[:60])["input_ids"]])
        with torch.no_grad():
            wanted = before(ids).logits
            errors[rounding] = float((model(ids).logits - wanted).norm() / wanted.norm())
    assert errors["joint"] <= 1.02 * errors["compensated"]


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_tuning_never_adds_error_and_keeps_masks(name, pruned, text, tmp_path, twofour):
    how = ("--scheme", name, "--calib", text, "--samples", 24, "--seqlen", 32, "--seed", 0, "--tune")
    ran = twofour("quantize", pruned, tmp_path / "out", *how, "--json")
    assert ran.status == 0, ran.err
    blocks = ran.json["blocks"].values()
    assert all(block["error_after"] <= block["error_before"] for block in blocks)
    assert twofour("check", tmp_path / "out").status == 0
    before, stored = (load_file(x / "model.safetensors") for x in (pruned, tmp_path / "out"))
    for key, weight in before.items():
        base = key.removesuffix("weight")
        if f"{base}weight_values" in stored:
            codes = unpack(stored[f"{base}weight_values"], stored[f"{base}weight_meta"], weight.shape[1])
            assert not bool(codes.float()[weight == 0].any())
    model, tokenizer = load_causal_lm(pruned, "cpu")
    windows = sample_windows(tokenizer, read_documents(text), 24, 32)
    package.quantize_(model, name, windows, tune=True)
    with torch.no_grad():
        # In memory norms keep their float32; in the files they have the dtype that they had.
        torch.testing.assert_close(model(TOKENS).logits, logits(tmp_path / "out"), rtol=0.05, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize(
    ("smooth", "tune", "exclude", "taught"),
    [
        (False, False, (), False),
        (None, False, (), False),
        (True, True, (), False),
        (True, False, ("*.up_proj",), False),  # its rows are divided all the same
        (False, True, (), True),
    ],
)
def test_resume_gives_the_same_bits(smooth, tune, exclude, taught, dense, pruned, text, tmp_path):
    options = QuantizeOptions("int8", smooth=smooth, tune=tune, teacher=dense if taught else None)
    with_outliers(pruned)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    quantize_checkpoint(pruned, whole, options, exclude=exclude, calibration=calibration(text))

    def stop_after_one(done, total, label):
        if label == "block 0":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(
            *(pruned, cut, options, (), exclude),
            calibration=calibration(text),
            on_progress=stop_after_one,
        )
    assert not cut.exists()
    assert (tmp_path / ".cut.blocks" / "block-0000.safetensors").exists()
    quantize_checkpoint(pruned, cut, options, exclude=exclude, calibration=calibration(text), resume=True)
    first, second = (load_file(x / "model.safetensors") for x in (whole, cut))
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(first[key].view(torch.uint8), second[key].view(torch.uint8)), key
    if smooth is not False:
        old = load_file(pruned / "model.safetensors")
        wanted, got = logits(pruned), logits(whole)
        changed = ["model.layers.0.input_layernorm.weight"]
        changed += [f"model.layers.{number}.mlp.up_proj.weight" for number in range(2) if exclude]
        assert not any(torch.equal(first[key], old[key]) for key in changed)
        assert float((got - wanted).norm() / wanted.norm()) < 0.08


def test_any_module_saves_and_loads(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))

    model = package.quantize_(package.prune_(make()), "int4", group=32)
    package.save(model, tmp_path / "out")
    assert check(tmp_path / "out").ok
    loaded = package.load(tmp_path / "out", model=make())
    x = torch.randn(3, 64)
    assert torch.equal(loaded(x), model(x))
    assert loaded[0].scheme == model[0].scheme


WRONG = [
    (("--scheme", "int3"), "there is no scheme 'int3'"),
    (("--scheme", "int8", "--group", "64"), "no groups"),
    (("--scheme", "int4", "--group", "48"), "48 columns cannot share"),
    (("--scheme", "int4", "--rounding", "compensated"), "looks at the inputs"),
    (("--scheme", "int8", "--smooth"), "smoothing looks at the inputs"),
    (("--scheme", "int4", "--rounding", "up"), "rounding"),
    (("--scheme", "int4", "--rounding", "joint"), "twofour prune MODEL OUT --scheme"),
    (("--scheme", "int4", "--tune"), "tuning looks at the inputs"),
    ((), "--scheme"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_wrong_command_lines(arguments, words, pruned, tmp_path, twofour):
    ran = twofour("quantize", pruned, tmp_path / "out", *arguments)
    assert ran.status == 2
    assert words in re.sub(r"\s+", " ", ran.err)
    assert not (tmp_path / "out").exists()


WRONG_PRUNE = [
    (("--scheme", "int4"), "--scheme prunes and rounds on text"),
    (("--group", "64"), "--group and --tune go with --scheme"),
    (("--scheme", "int8", "--calib", "TEXT", "--method", "wanda"), "--method wanda does not go with"),
    (("--scheme", "int8", "--calib", "TEXT", "--lowrank", "4"), "--lowrank does not go with"),
    (("--scheme", "int5", "--calib", "TEXT"), "there is no scheme 'int5'"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG_PRUNE)
def test_wrong_ways_to_prune_with_a_scheme(arguments, words, dense, text, tmp_path, twofour):
    given = [text if argument == "TEXT" else argument for argument in arguments]
    ran = twofour("prune", dense, tmp_path / "out", *given)
    assert ran.status == 2
    assert words in re.sub(r"\s+", " ", ran.err)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_quantized(dense, packed, pruned, text, tmp_path, twofour):
    ran = twofour("quantize", dense, tmp_path / "out", "--scheme", "int8")
    assert ran.status == 2
    assert "2:4 allows 2" in ran.err
    ran = twofour("quantize", packed, tmp_path / "out", "--scheme", "int8")
    assert ran.status == 2
    assert "packed already" in ran.err
    ran = twofour("quantize", pruned, tmp_path / "out", "--scheme", "int4", "--smooth", "--calib", text)
    assert ran.status == 2
    assert "nothing to smooth" in ran.err
    model = package.prune_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    package.quantize_(model, "int8", include=["0"])
    package.pack_(model)
    with pytest.raises(InputError, match="different schemes"):
        package.save(model, tmp_path / "mixed")
    untouched = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    package.prune_(untouched, include=["0"])
    with pytest.raises(InputError, match="1: row 0"):
        package.quantize_(untouched, "int8")
    assert type(untouched[0]) is nn.Linear


@pytest.mark.parametrize(
    "windows",
    [
        torch.zeros(0, 8, dtype=torch.long),
        torch.zeros(8, dtype=torch.long),
        torch.zeros(2, 8),
        torch.full((2, 8), 10**6),
        torch.full((2, 8), -1),
        [[1, 2], [3, 4]],
    ],
)
def test_windows_that_are_none(windows, pruned):
    model = load_causal_lm(pruned, "cpu")[0]
    for change in (package.prune_, partial(package.quantize_, scheme="int4")):
        with pytest.raises(InputError, match=r"^(the )?windows"):
            change(model, windows=windows)


def test_low_rank_corrections_are_refused():
    model = package.prune_(nn.Sequential(nn.Linear(64, 64)))
    add_lowrank_(model[0], torch.ones(64, 1), torch.ones(1, 64))
    with pytest.raises(InputError, match="low-rank"):
        package.quantize_(model, "int8")


def test_what_people_read(pruned, text, tmp_path, twofour):
    ran = twofour(
        *("quantize", pruned, tmp_path / "out", "--scheme", "int4", "--calib", text),
        *("--samples", 4, "--seqlen", 32),
    )
    assert ran.status == 0, ran.err
    assert "Quantized 14 layers to 2:4 int4 in groups of 128, rounding compensated" in ran.out
    assert "Squared error of the layers' outputs" in ran.out
    assert "twofour check" in ran.out


def replaced(path):
    """Another file in its place, as large as it was."""
    tensors = {k: v.flip(0) if v.dim() == 2 and "mlp" in k else v for k, v in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("what", ["source", "text", "teacher"])
def test_resume_is_refused_where_a_file_has_become_another(what, dense, pruned, text, tmp_path):
    options = QuantizeOptions("int4", teacher=dense)

    def stop_after_one(done, total, label):
        if label == "block 0":
            raise KeyboardInterrupt

    arguments = (pruned, tmp_path / "cut", options)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(*arguments, calibration=calibration(text), on_progress=stop_after_one)
    if what == "text":
        text.write_text(TEXT.swapcase())
    else:
        replaced({"source": pruned, "teacher": dense}[what] / "model.safetensors")
    with pytest.raises(InputError, match="files have changed since the run to resume"):
        quantize_checkpoint(*arguments, calibration=calibration(text), resume=True)
    assert (tmp_path / ".cut.blocks" / "block-0000.safetensors").exists()


@pytest.mark.parametrize("rounding", ["nearest", "joint"])
def test_one_of_several_processes_is_refused(rounding, dense, pruned, text, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    verb = "prune --scheme" if rounding == "joint" else "quantize"
    given = calibration(text) if rounding == "joint" else None
    source = dense if rounding == "joint" else pruned
    with pytest.raises(InputError, match=f"^{verb} runs in one process"):
        quantize_checkpoint(
            source, tmp_path / "out", QuantizeOptions("int8", None, rounding), calibration=given
        )
    assert not (tmp_path / "out").exists()
