"""`twofour recover`: directory to directory, and what it refuses."""

import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from twofour.io.check import check
from twofour.io.prune import prune_checkpoint
from twofour.io.recover import recover_checkpoint
from twofour.quantize import SCHEMES
from twofour.recover import Recover
from twofour.recover.options import RECIPES, SCALES

from .recovering import SHORT, flags, quantized, tensors

TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 30


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_gives_a_sound_checkpoint(twofour, dense, pruned, text, tmp_path, recipe):
    out = tmp_path / "out"
    arguments = ["--data", text, "--teacher", dense, "--recipe", recipe, "--seed", 3, *flags()]
    ran = twofour("recover", pruned, out, *arguments, "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["recipe"] == recipe
    assert ran.json["steps"] == 12
    assert ran.json["tokens"] == 12 * 4 * 16
    assert ran.json["held_out_perplexity"]["after"] < ran.json["held_out_perplexity"]["before"]
    assert check(out).ok
    assert len(check(out).layers) == 14
    before, after = tensors(pruned), tensors(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {name for name in before if name.endswith("proj.weight")}
    assert changed == layers if recipe == "lora" else changed == set(before)
    if recipe != "adaptive":
        assert all(not after[name][before[name] == 0].any() for name in layers)
    log = [json.loads(line) for line in (out / "recover.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log if entry["what"] == "evaluation"] == [0, 3, 6, 9, 12]
    assert all(
        entry["loss"] > 0 and entry["tokens_per_second"] > 0 for entry in log if entry["what"] == "train"
    )
    assert [step["verb"] for step in json.loads((out / "twofour.json").read_text())["steps"]] == [
        "prune",
        "recover",
    ]
    assert not list(tmp_path.glob(".out*"))
    assert twofour("pack", out, tmp_path / "packed").status == 0
    assert twofour("check", tmp_path / "packed").status == 0


@pytest.mark.parametrize(("scheme", "dtype"), [("int4", torch.bfloat16), ("int8", torch.float16)], ids=str)
def test_what_was_trained_for_a_scheme_is_what_quantize_makes_of_it(
    twofour, dense, text, tmp_path, scheme, dtype
):
    """Codes and scales of the files are those that the training had, of masters it never wrote."""
    from transformers import AutoModelForCausalLM

    from twofour.quantize import scheme_named
    from twofour.recover.rounded import RoundedLayers
    from twofour.select import select

    stored = {name: tensor.to(dtype) for name, tensor in tensors(dense).items()}
    save_file(stored, dense / "model.safetensors", metadata={"format": "pt"})
    prune_checkpoint(dense, tmp_path / "pruned")
    group = ["--group", 32] if scheme == "int4" else []
    arguments = ["--data", text, "--teacher", dense, "--scheme", scheme, *group, *flags()]
    ran = twofour("recover", tmp_path / "pruned", tmp_path / "out", *arguments)
    assert ran.status == 0, ran.err
    assert f"rounded to {scheme}" in ran.out
    assert f"quantize {tmp_path}/out" in "".join(ran.out.split("\n"))
    assert check(tmp_path / "out").ok
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {dtype}
    way = ["--scheme", scheme, *group, "--rounding", "nearest"]
    ran = twofour("quantize", tmp_path / "out", tmp_path / "quantized", *way)
    assert ran.status == 0, ran.err
    assert check(tmp_path / "quantized").ok
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    layers = select(trained).layers
    RoundedLayers(trained, layers, scheme_named(scheme, 32 if scheme == "int4" else None))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype=torch.float32)
    for layer in layers:
        ours = trained.get_submodule(layer.name).derived_weight()
        assert torch.equal(loaded.get_submodule(layer.name).unpacked(), ours), layer.name
    tokens = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, trained(tokens).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_model_learns_by_its_scales(twofour, pruned, text, tmp_path, scheme):
    source, out = quantized(pruned, tmp_path / "codes", scheme), tmp_path / "out"
    ran = twofour("recover", source, out, "--data", text, *flags(tokens=40 * 4 * 16, lr=1e-2), "--json")
    assert ran.status == 0, ran.err
    assert ran.json["options"]["recipe"] == SCALES
    assert ran.json["options"]["teacher"].endswith("/dense")  # found in the record, as for other models
    assert ran.json["held_out_perplexity"]["after"] < ran.json["held_out_perplexity"]["before"]
    assert ran.json["frozen"] == []
    assert check(out).ok
    assert check(out).scheme == check(source).scheme
    before, after = tensors(source), tensors(out)
    assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
    changed = {
        name
        for name in before
        if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    }
    vectors = {name for name in before if name.endswith(("weight_scale", "norm.weight"))}
    assert changed == vectors
    assert len(vectors) == 14 + 5
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert [made.split()[0] for made in config["made"]] == ["prune", "quantize", "recover"]
    said = twofour("eval", out, "--data", text, "--json").json["perplexity"]
    assert said < twofour("eval", source, "--data", text, "--json").json["perplexity"]
    ran = twofour("recover", source, tmp_path / "again", "--data", text, *flags())
    assert f"twofour check {tmp_path}/again" in "".join(ran.out.split("\n"))


def test_what_a_quantized_model_is_not_recovered_by(twofour, pruned, text, tmp_path):
    source, out = quantized(pruned, tmp_path / "codes", "int4"), tmp_path / "out"
    for recipe in RECIPES:
        assert "--recipe scales" in refused(
            twofour, source, out, "--data", text, "--recipe", recipe, *flags()
        )
    assert "Leave out --scheme" in refused(twofour, source, out, "--data", text, "--scheme", "int4", *flags())
    assert "Quantize it first" in refused(twofour, pruned, out, "--data", text, "--recipe", SCALES, *flags())
    assert not list(tmp_path.glob("*out*"))


def test_for_people(twofour, dense, pruned, text, tmp_path):
    ran = twofour("recover", pruned, tmp_path / "out", "--data", text, "--teacher", dense, *flags())
    assert ran.status == 0, ran.err
    assert "Recovered by distill over 768 tokens" in ran.out
    assert "Held-out perplexity: " in ran.out


def test_the_stored_dtype_is_kept(dense, text, tmp_path):
    stored = {name: tensor.bfloat16() for name, tensor in tensors(dense).items()}
    save_file(stored, dense / "model.safetensors", metadata={"format": "pt"})
    prune_checkpoint(dense, tmp_path / "pruned")
    recover_checkpoint(tmp_path / "pruned", tmp_path / "out", [text], options=Recover(**SHORT, dtype="bf16"))
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert check(tmp_path / "out").ok


def test_layers_that_were_left_dense_are_trained_dense(dense, text, tmp_path):
    prune_checkpoint(dense, tmp_path / "pruned", exclude=["*.0.*"])
    recover_checkpoint(tmp_path / "pruned", tmp_path / "out", [text], options=Recover(**SHORT))
    assert len(check(tmp_path / "out").layers) == 7
    assert check(tmp_path / "out").ok
    weight = tensors(tmp_path / "out")["model.layers.0.mlp.up_proj.weight"]
    assert bool((weight != 0).all())


def test_the_teacher_is_found_in_the_record(twofour, dense, pruned, text, tmp_path):
    record = json.loads((pruned / "twofour.json").read_text())
    record["steps"][0]["source"] = str(dense)
    (pruned / "twofour.json").write_text(json.dumps(record))
    ran = twofour("recover", pruned, tmp_path / "out", "--data", text, *flags(), "--json")
    assert ran.json["options"]["recipe"] == "distill"
    assert f"Teacher: {dense}" in ran.err
    shutil.rmtree(dense)
    ran = twofour("recover", pruned, tmp_path / "other", "--data", text, *flags(), "--json")
    assert ran.json["options"]["recipe"] == "masked"


def test_a_model_that_gives_nan_is_refused(twofour, pruned, text, tmp_path):
    weights = load_file(pruned / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, pruned / "model.safetensors", metadata={"format": "pt"})
    ran = twofour("recover", pruned, tmp_path / "out", "--data", text, *flags())
    assert ran.status == 2
    assert "gives NaN" in ran.err
    assert not list(tmp_path.glob("*out*"))


# What goes wrong


def test_a_diverging_loss_leaves_the_best(twofour, dense, pruned, text, tmp_path):
    """The rate rises all the time: at first it helps."""
    arguments = ["--data", text, "--teacher", dense, "--warmup", 1, "--clip", 1e9]
    arguments += flags(lr=5, eval_every=1, tokens=4 * 16 * 100, save_every=20)
    ran = twofour("recover", pruned, tmp_path / "out", *arguments)
    assert ran.status == 1
    assert "diverged" in ran.err
    assert "were kept" in ran.err
    assert check(tmp_path / "out").ok
    step = json.loads((tmp_path / "out" / "twofour.json").read_text())["steps"][-1]
    assert step["stopped"] == "diverged"
    assert 0 < step["best_step"] < step["steps"] < 100
    assert step["held_out_loss"]["after"] < step["held_out_loss"]["before"]
    assert not list(tmp_path.glob(".out*"))


def test_diverging_from_the_start_leaves_nothing(twofour, pruned, text, tmp_path):
    rest = flags(lr=1e30, eval_every=20, save_every=20, tokens=4 * 16 * 40)
    ran = twofour("recover", pruned, tmp_path / "out", "--data", text, *rest, "--warmup", 0, "--clip", 1e9)
    assert ran.status == 1
    assert "nothing better than the start" in ran.err
    assert not list(tmp_path.glob("*out*"))


def test_out_of_memory_names_the_settings(pruned, text, tmp_path):
    command = [sys.executable, "-m", "twofour", "recover", str(pruned), str(tmp_path / "out")]
    command += ["--data", str(text), *flags(batch=1 << 17, tokens=1 << 21)]

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, preexec_fn=limit
    )
    assert ran.returncode == 1, ran.stderr
    assert "out of memory with 131072 windows of 16 tokens" in ran.stderr
    assert "--accumulate" in ran.stderr
    assert "--batch" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.glob("*out*"))


def refused(twofour, *arguments):
    ran = twofour("recover", *arguments)
    assert ran.status == 2, ran.err
    assert "Traceback" not in ran.err
    return ran.err


def test_bad_input(twofour, dense, pruned, packed, text, tmp_path):
    out = tmp_path / "out"
    assert "model.layers.0.self_attn.q_proj" in refused(twofour, dense, out, "--data", text, *flags())
    assert "then pack" in refused(twofour, packed, out, "--data", text)
    assert "--data" in refused(twofour, pruned, out)
    assert "--teacher" in refused(twofour, pruned, out, "--data", "self", "--recipe", "masked", *flags())
    assert "does not exist" in refused(twofour, pruned, out, "--data", tmp_path / "no.txt", *flags())
    assert "64 tokens at most" in refused(twofour, pruned, out, "--data", text, "--seqlen", 65)
    assert "for several processes" in refused(twofour, pruned, out, "--data", text, "--fsdp", *flags())
    (tmp_path / "empty.txt").write_text("")
    assert "holds no text" in refused(twofour, pruned, out, "--data", tmp_path / "empty.txt", *flags())
    assert "already exists" in refused(twofour, pruned, dense, "--data", text)
    assert not list(tmp_path.glob("*out*"))


def test_a_teacher_that_does_not_fit(twofour, dense, pruned, text, tmp_path):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(dense, vocab_size=132)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "larger")
    AutoTokenizer.from_pretrained(dense).save_pretrained(tmp_path / "larger")
    out = tmp_path / "out"
    err = refused(twofour, pruned, out, "--data", text, "--teacher", tmp_path / "larger", *flags())
    assert "vocabulary of 132 tokens" in err
    swapped = (
        (dense / "tokenizer.json").read_text().replace('"a": 68', '"a": 69').replace('"b": 69', '"b": 68')
    )
    assert swapped != (dense / "tokenizer.json").read_text()
    (dense / "tokenizer.json").write_text(swapped)
    err = refused(twofour, pruned, out, "--data", text, "--teacher", dense, *flags())
    assert "tokenizer of the teacher" in err
    assert not list(tmp_path.glob("*out*"))


def test_corrections_beside_the_weights_are_not_trained_away(twofour, dense, text, tmp_path):
    rest = ["--method", "sparsegpt", "--calib", text, "--samples", 8, "--seqlen", 16, "--lowrank", 4]
    assert twofour("prune", dense, tmp_path / "pruned", *rest).status == 0
    assert "--lowrank" in refused(twofour, tmp_path / "pruned", tmp_path / "out", "--data", text, *flags())
