"""Mixtures whose experts are one tensor in the model and one tensor an expert in the files: all the way."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import twofour
from twofour.calibrate.experts import OpenExperts
from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.streamed import open_streamed
from twofour.io.structure import checkpoint_layers
from twofour.nn import SparseLinear, packed_layers
from twofour.pattern import check_pattern

from .models_with_experts import gpt_oss, mixtral, olmoe, written

TEXT = "a story of two cats, who saw 17 birds and one (very) old dog in the garden; they all ran! "


@pytest.fixture(scope="module", params=[mixtral, olmoe])
def mixture(request, _dense, tmp_path_factory):
    return written(request.param(), tmp_path_factory.mktemp("mixture") / "dense", _dense)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT * 20)
    return file


def calibration(text, **more):
    return CalibrationOptions(text, samples=8, seqlen=32, **more)


def logits(model, tokens=None):
    tokens = torch.arange(3, 43).reshape(2, 20) if tokens is None else tokens
    with torch.no_grad():
        return model.eval()(tokens).logits


def loaded(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def experts_in(names):
    return [name for name in names if ".experts." in name]


def test_every_expert_is_a_layer_of_the_checkpoint(mixture):
    layers = checkpoint_layers(Checkpoint(mixture))
    assert len(experts_in(layers.by_tensor)) == 2 * 4 * 3 == len(layers.by_tensor) - 8  # and q, k, v, o
    assert not [x for x in layers.left if "expert" in x.name]
    down = [n for n in layers.by_tensor if ".experts.3." in n and ("w2" in n or "down" in n)]
    assert [layers.by_tensor[n].shape for n in down] == [(32, 48)] * 2
    only = checkpoint_layers(Checkpoint(mixture), include=["model.layers.1.mlp.experts.2.*"])
    assert len(only.by_tensor) == 3
    without = checkpoint_layers(Checkpoint(mixture), exclude=["*.experts.*"])
    assert len(without.by_tensor) == 8


def test_magnitude_streams_and_the_model_in_memory_gets_the_same(mixture, tmp_path):
    step = prune_checkpoint(mixture, tmp_path / "pruned")
    assert len(experts_in(step["layers"])) == 24
    assert set(Checkpoint(tmp_path / "pruned").tensors) == set(Checkpoint(mixture).tensors)
    report = check(tmp_path / "pruned")
    assert report.ok
    assert len(experts_in(layer.name for layer in report.layers)) == 24
    from_file, in_memory = loaded(tmp_path / "pruned"), twofour.prune_(loaded(mixture))
    for (name, a), b in zip(from_file.named_parameters(), in_memory.parameters(), strict=True):
        assert torch.equal(a, b), name
    stacked = in_memory.model.layers[1].mlp.experts
    for weight in (stacked.gate_up_proj, stacked.down_proj):
        assert weight.dim() == 3  # as it was
        assert check_pattern(weight.detach()).legal


def test_a_file_that_breaks_the_rule_is_found(mixture, tmp_path):
    prune_checkpoint(mixture, tmp_path / "pruned")
    tensors = load_file(tmp_path / "pruned" / "model.safetensors")
    name = experts_in(tensors)[7]
    tensors[name][3, 4:8] = 1.0
    save_file(tensors, tmp_path / "pruned" / "model.safetensors", metadata={"format": "pt"})
    report = check(tmp_path / "pruned")
    assert [name.removesuffix(".weight") in fault for fault in report.faults] == [True]
    with pytest.raises(InputError, match="keeps 4 of 4"):
        pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")


@pytest.mark.parametrize("method", ["sparsegpt", "best"])
def test_calibrated_from_streamed_files_as_from_the_whole_model(method, mixture, text, tmp_path, monkeypatch):
    assert open_streamed(Checkpoint(mixture), checkpoint_layers(Checkpoint(mixture)).by_tensor.values(), None)
    step = prune_checkpoint(mixture, tmp_path / "streamed", method, calibration=calibration(text))
    notes = {name: note for name, note in step["layers"].items() if ".experts." in name}
    assert len(notes) == 24
    for block in (0, 1):  # each token is sent to two of the experts
        tokens = [n["tokens"] for name, n in notes.items() if f"layers.{block}." in name]
        assert sum(tokens) == 3 * 2 * 8 * 32
        assert len(set(tokens)) > 1
    assert check(tmp_path / "streamed").ok
    monkeypatch.setattr("twofour.io.prune_calibrated.open_streamed", lambda *_: None)
    prune_checkpoint(mixture, tmp_path / "whole", method, calibration=calibration(text))
    ours, whole = (load_file(tmp_path / d / "model.safetensors") for d in ("streamed", "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_an_expert_that_no_token_reaches_is_in_the_record(_dense, text, tmp_path):
    model = olmoe(num_experts_per_tok=1)
    with torch.no_grad():
        for block in model.model.layers:  # logits a, -a, 0 and 0: one of the first two is the largest
            router = block.mlp.gate.weight
            router[1], router[2:] = -router[0], 0
    source = written(model, tmp_path / "dense", _dense)
    step = prune_checkpoint(source, tmp_path / "pruned", "sparsegpt", calibration=calibration(text))
    tokens = {name: note["tokens"] for name, note in step["layers"].items() if ".experts." in name}
    for name, count in tokens.items():
        assert (count == 0) == (".experts.2." in name or ".experts.3." in name)
    assert check(tmp_path / "pruned").ok


def test_calibration_is_worth_it_for_experts(mixture, text, tmp_path):
    """On the text that it was calibrated on, an expert's outputs are nearer to the dense ones."""
    lost = {}
    for method in ("wanda", "sparsegpt"):
        step = prune_checkpoint(mixture, tmp_path / method, method, calibration=calibration(text))
        lost[method] = [n["output_error"] for name, n in step["layers"].items() if ".0.mlp.experts." in name]
    assert sum(lost["sparsegpt"]) < 0.9 * sum(lost["wanda"])


def test_a_run_cut_short_goes_on(mixture, text, tmp_path):
    whole = prune_checkpoint(mixture, tmp_path / "whole", "sparsegpt", calibration=calibration(text))

    class CutShort(BaseException):
        pass

    def cut(done, total, what):
        if what == "block 1":
            raise CutShort

    arguments = (mixture, tmp_path / "out", "sparsegpt")
    with pytest.raises(CutShort):
        prune_checkpoint(*arguments, calibration=calibration(text), on_progress=cut)
    (tmp_path / ".out.blocks" / "block-0001.safetensors").unlink(missing_ok=True)
    assert (tmp_path / ".out.blocks" / "block-0000.safetensors").exists()
    step = prune_checkpoint(*arguments, calibration=calibration(text), resume=True)
    assert step["layers"].keys() == whole["layers"].keys()
    ours, other = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "whole"))
    assert all(torch.equal(ours[name], other[name]) for name in other)


def test_packed_all_the_way(mixture, tmp_path):
    prune_checkpoint(mixture, tmp_path / "pruned")
    pruned, packed = tmp_path / "pruned", tmp_path / "packed"
    step = pack_checkpoint(pruned, packed)
    assert step["packed_bytes"] < 0.6 * step["dense_bytes"]
    report = check(packed)
    assert report.ok
    assert len(experts_in(layer.name for layer in report.layers)) == 24
    model = loaded(packed)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, OpenExperts)
    assert all(isinstance(linear, SparseLinear) for expert in experts for linear in expert.values())
    want = logits(loaded(pruned))
    torch.testing.assert_close(logits(model), want)
    # Saved again by transformers, under the names of the model, and by us from memory.
    model.save_pretrained(tmp_path / "again")
    in_memory = twofour.pack_(loaded(pruned))
    twofour.save(in_memory, tmp_path / "saved")
    for directory in (tmp_path / "again", tmp_path / "saved"):
        assert check(directory).ok
        torch.testing.assert_close(logits(loaded(directory)), want)
    torch.testing.assert_close(logits(twofour.load(packed, memory="small")), want)


def test_loaded_in_another_dtype(mixture, tmp_path):
    from transformers import AutoModelForCausalLM

    prune_checkpoint(mixture, tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.uint8}
    want = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.bfloat16))
    torch.testing.assert_close(logits(model), want)


def test_packed_into_a_model_that_is_given(tmp_path):
    twofour.save(twofour.pack_(twofour.prune_(olmoe())), tmp_path / "saved")
    model = twofour.load(tmp_path / "saved", olmoe())
    assert len(experts_in(packed_layers(model))) == 24
    torch.testing.assert_close(logits(model), logits(loaded(tmp_path / "saved")))


def test_the_body_alone_is_loaded(mixture, tmp_path):
    from transformers import AutoModel

    prune_checkpoint(mixture, tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    tokens = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        ours = AutoModel.from_pretrained(tmp_path / "packed")(tokens).last_hidden_state
        want = AutoModel.from_pretrained(tmp_path / "pruned")(tokens).last_hidden_state
    torch.testing.assert_close(ours, want)


def test_some_experts_may_stay_dense(mixture, tmp_path):
    prune_checkpoint(mixture, tmp_path / "pruned", exclude=["model.layers.0.mlp.*", "*.experts.1.*"])
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    model = loaded(tmp_path / "packed")
    names = experts_in(packed_layers(model))
    assert len(names) == 3 * 3
    assert all(name.startswith("model.layers.1.") for name in names)
    torch.testing.assert_close(logits(model), logits(loaded(tmp_path / "pruned")))
    model.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(loaded(tmp_path / "again")), logits(model))


def test_no_expert_packed_leaves_them_together(mixture):
    model = twofour.prune_(loaded(mixture), exclude=["*.experts.*"])
    want = logits(model)
    twofour.pack_(model, exclude=["*.experts.*"])
    assert model.model.layers[0].mlp.experts.down_proj.dim() == 3
    torch.testing.assert_close(logits(model), want)
    with pytest.raises(InputError, match="2:4 allows 2"):
        twofour.pack_(loaded(mixture))


def test_a_packed_expert_that_is_missing_is_not_made_up(mixture, tmp_path):
    prune_checkpoint(mixture, tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    gone = next(name for name in tensors if ".experts.2." in name and name.endswith("_values"))
    del tensors[gone]
    save_file(tensors, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="the checkpoint has no"):
        loaded(tmp_path / "packed")
    assert not check(tmp_path / "packed").ok


def test_a_loader_without_twofour_is_stopped(mixture, tmp_path):
    """The sentence first; and where that was dropped, the empty tensor."""
    prune_checkpoint(mixture, tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    for key in ("quantization_config", "transformers_weights"):
        del config[key]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises((RuntimeError, ValueError)):
        loaded(tmp_path / "packed")


def test_corrections_beside_experts(mixture, text, tmp_path):
    prune_checkpoint(mixture, tmp_path / "pruned", "sparsegpt", calibration=calibration(text, lowrank=4))
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    assert check(tmp_path / "packed").ok
    corrected = load_causal_lm(tmp_path / "pruned", "cpu")[0]
    torch.testing.assert_close(logits(loaded(tmp_path / "packed")), logits(corrected))
    assert not torch.allclose(logits(loaded(tmp_path / "pruned")), logits(corrected))


def test_eval_of_the_command(mixture, text, tmp_path, twofour):
    assert twofour("prune", mixture, tmp_path / "pruned").status == 0
    assert twofour("pack", tmp_path / "pruned", tmp_path / "packed").status == 0
    perplexities = [
        twofour("eval", tmp_path / form, "--data", text, "--json").json["perplexity"]
        for form in ("pruned", "packed")
    ]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)


def test_perplexity_is_the_same_whether_experts_are_apart(mixture, text):
    from twofour.bench.perplexity import evaluate

    found = [
        evaluate(*load_causal_lm(mixture, "cpu", open_experts=apart), [text.read_text()]).perplexity
        for apart in (True, False)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_quantized_experts(mixture, tmp_path):
    from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

    prune_checkpoint(mixture, tmp_path / "pruned")
    quantize_checkpoint(tmp_path / "pruned", tmp_path / "int8", QuantizeOptions("int8-weight"))
    assert check(tmp_path / "int8").ok
    ours, dense = logits(loaded(tmp_path / "int8")), logits(loaded(tmp_path / "pruned"))
    assert 0 < (ours - dense).norm() / dense.norm() < 0.05


def test_scales_of_experts_learn(mixture, text, tmp_path):
    """Also where files have other names for experts than the model. One that no token reaches stays."""
    from twofour.io.quantize import QuantizeOptions, quantize_checkpoint
    from twofour.io.recover import recover_checkpoint
    from twofour.recover import Recover

    prune_checkpoint(mixture, tmp_path / "pruned")
    quantize_checkpoint(tmp_path / "pruned", tmp_path / "int8", QuantizeOptions("int8-weight"))
    options = Recover(tokens=40 * 4 * 16, batch=4, seqlen=16, lr=2e-2)
    step = recover_checkpoint(tmp_path / "int8", tmp_path / "out", [text], mixture, options)
    assert step["held_out_loss"]["after"] < step["held_out_loss"]["before"]
    assert check(tmp_path / "out").ok
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("int8", "out"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith(("weight_scale", "norm.weight")) for name in changed)
    experts = experts_in(name for name in before if name.endswith("weight_scale"))
    assert len(experts) == 2 * 4 * 3
    assert len(experts_in(changed)) > len(experts) / 2


@pytest.mark.parametrize("with_text", [False, True])
def test_quantized_in_memory(with_text, tmp_path):
    model = twofour.prune_(mixtral())
    want = logits(model)
    windows = torch.randint(3, 120, (4, 32), generator=torch.Generator().manual_seed(0))
    twofour.quantize_(model, "int8-weight", windows if with_text else None)
    layers = packed_layers(model)
    assert len(experts_in(layers)) == 24
    assert {layer.scheme.name for layer in layers.values()} == {"int8-weight"}
    assert 0 < (logits(model) - want).norm() / want.norm() < 0.05
    twofour.save(model, tmp_path / "saved")
    assert check(tmp_path / "saved").ok
    torch.testing.assert_close(logits(loaded(tmp_path / "saved")), logits(model))


def test_a_teacher_with_experts_in_memory_and_in_files(mixture, text, tmp_path):
    """Layers that all tokens pass are fitted to it; experts keep to their own weights."""
    from twofour.io.quantize import QuantizeOptions, quantize_checkpoint

    dense, model = mixtral(), twofour.prune_(mixtral())
    windows = torch.randint(3, 120, (4, 32), generator=torch.Generator().manual_seed(0))
    plain = twofour.quantize_(copy.deepcopy(model), "int8-weight", windows)
    taught = twofour.quantize_(model, "int8-weight", windows, teacher=dense)
    assert dense.model.layers[0].mlp.experts.down_proj.dim() == 3
    one, other = (
        packed_layers(each)["model.layers.0.self_attn.q_proj"].unpacked() for each in (plain, taught)
    )
    assert torch.equal(one == 0, other == 0)
    assert not torch.equal(one, other)
    with torch.no_grad():
        wanted = dense(windows).logits
        errors = [float((each(windows).logits - wanted).norm()) for each in (plain, taught)]
    assert errors[1] < errors[0]

    prune_checkpoint(mixture, tmp_path / "pruned")
    options = QuantizeOptions("int4", 32, tune=True, teacher=mixture)
    quantize_checkpoint(
        *(tmp_path / "pruned", tmp_path / "int4", options),
        calibration=CalibrationOptions(text, samples=4, seqlen=32),
    )
    assert check(tmp_path / "int4").ok


def test_quantizing_no_expert_leaves_them_together_and_so_does_an_error():
    model = twofour.prune_(mixtral(), exclude=["*.experts.*"])
    with pytest.raises(InputError, match="experts.0.w1.* 2:4"):
        twofour.quantize_(model, "int8")
    assert model.model.layers[0].mlp.experts.down_proj.dim() == 3
    assert not packed_layers(model)
    twofour.quantize_(model, "int8", exclude=["*.experts.*"])
    assert model.model.layers[0].mlp.experts.down_proj.dim() == 3
    assert len(packed_layers(model)) == 8


@pytest.mark.parametrize("make", [mixtral, olmoe])
def test_recovered_and_weighed_as_other_layers_are(make, _dense, text, tmp_path):
    from twofour.advise.sensitivity import sensitivity
    from twofour.io.recover import recover_checkpoint
    from twofour.recover import Recover

    source = written(make(), tmp_path / "dense", _dense)
    losses = sensitivity(source, CalibrationOptions(text, samples=4, seqlen=32), "sparsegpt").layers
    assert len(experts_in(losses)) == 24
    prune_checkpoint(source, tmp_path / "pruned")
    options = Recover(recipe="masked", tokens=512, batch=2, seqlen=32)
    recover_checkpoint(tmp_path / "pruned", tmp_path / "recovered", [text], options=options)
    assert check(tmp_path / "recovered").ok
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("pruned", "recovered"))
    changed = [name for name in experts_in(before) if not torch.equal(before[name], after[name])]
    assert len(changed) == 24
    assert all(not after[name][before[name] == 0].any() for name in changed)


def test_files_with_all_experts_in_one_tensor_leave_them_dense_and_say_so(_dense, tmp_path):
    written(olmoe(), tmp_path / "source", _dense)
    loaded(tmp_path / "source").save_pretrained(tmp_path / "dense", save_original_format=False)
    assert Checkpoint(tmp_path / "dense").tensors["model.layers.0.mlp.experts.down_proj"].shape == (4, 32, 48)
    step = prune_checkpoint(tmp_path / "dense", tmp_path / "pruned")
    assert len(step["layers"]) == 8
    assert "all experts in one tensor" in step["left"]["model.layers.0.mlp.experts"]
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    torch.testing.assert_close(logits(loaded(tmp_path / "packed")), logits(loaded(tmp_path / "pruned")))


def test_experts_that_are_stored_transposed_stay_dense_and_it_is_said(_dense, tmp_path):
    source = written(gpt_oss(), tmp_path / "dense", _dense)
    step = prune_checkpoint(source, tmp_path / "pruned")
    assert len(step["layers"]) == 8
    assert "stored as [in, out]" in step["left"]["model.layers.0.mlp.experts"]
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    assert check(tmp_path / "packed").ok
    torch.testing.assert_close(logits(loaded(tmp_path / "packed")), logits(loaded(tmp_path / "pruned")))
    shutil.rmtree(tmp_path / "packed")
