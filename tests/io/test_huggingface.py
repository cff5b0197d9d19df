"""from_pretrained and save_pretrained of packed checkpoints, and what happens without twofour."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    ResNetConfig,
    ResNetForImageClassification,
)

import twofour
from twofour.errors import InputError
from twofour.io.check import check
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.nn import SparseConv2d, SparseLinear, packed_layers

TOKENS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_packed_model_gives_the_logits_of_the_pruned_one(pruned, packed):
    model = AutoModelForCausalLM.from_pretrained(packed)
    assert len(packed_layers(model)) == 14
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(pruned)))


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_map_and_dtype(packed, pruned, dtype, device_map):
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=dtype, device_map=device_map)
    layer = model.model.layers[0].mlp.down_proj
    assert layer.weight_values.dtype == dtype
    assert layer.weight_meta.dtype == torch.uint8
    expected = logits(AutoModelForCausalLM.from_pretrained(pruned, dtype=dtype))
    torch.testing.assert_close(logits(model), expected)


def test_offloaded_to_disk(packed, pruned, tmp_path):
    split = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    split |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        packed, device_map=split, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(pruned)))


def test_sharded_files(pruned, tmp_path):
    from twofour.io import stream

    small = stream.SHARD_BYTES
    try:
        stream.rewrite.__kwdefaults__["shard_bytes"] = 60_000
        pack_checkpoint(pruned, tmp_path / "sharded")
    finally:
        stream.rewrite.__kwdefaults__["shard_bytes"] = small
    assert len(list((tmp_path / "sharded").glob("model-0*.safetensors"))) > 2
    assert check(tmp_path / "sharded").ok
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(pruned)))


def test_save_pretrained_round_trip(packed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(packed)
    model.save_pretrained(tmp_path / "again", max_shard_size="50KB")
    report = check(tmp_path / "again")
    assert report.ok, report.faults
    assert report.checksums == report.tensors
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(model))
    assert again.config.quantization_config.made == model.config.quantization_config.made


def test_body_without_head(packed, pruned):
    body = AutoModel.from_pretrained(packed)
    assert isinstance(body.layers[0].mlp.up_proj, SparseLinear)
    expected = AutoModel.from_pretrained(pruned)(TOKENS).last_hidden_state
    assert torch.equal(body(TOKENS).last_hidden_state, expected)


def test_body_saved_alone_loads_with_a_head(packed, tmp_path):
    AutoModel.from_pretrained(packed).save_pretrained(tmp_path / "body")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "body")
    assert len(packed_layers(whole)) == 14


def test_generate(packed, pruned):
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
    ours = AutoModelForCausalLM.from_pretrained(packed).generate(TOKENS, **options)
    assert torch.equal(ours, AutoModelForCausalLM.from_pretrained(pruned).generate(TOKENS, **options))


@pytest.mark.parametrize("saved_as", [GPT2LMHeadModel, GPT2Model])
def test_gpt2_with_conv1d_and_either_prefix(tmp_path, saved_as):
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "dense")
    if saved_as is GPT2Model:  # the hub's GPT-2: no prefix in the files, but the architecture has a head
        GPT2Model.from_pretrained(tmp_path / "dense").save_pretrained(tmp_path / "dense")
        text = json.loads((tmp_path / "dense" / "config.json").read_text())
        (tmp_path / "dense" / "config.json").write_text(
            json.dumps({**text, "architectures": ["GPT2LMHeadModel"]})
        )
    prune_checkpoint(tmp_path / "dense", tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    assert check(tmp_path / "packed").ok
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert len(packed_layers(model)) == 8
    pruned = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned")
    groups = pruned.transformer.h[0].mlp.c_fc.weight.t().reshape(256, -1, 4)
    assert int((groups != 0).sum(-1).max()) == 2
    torch.testing.assert_close(logits(model), logits(pruned))


def test_convolutions_of_a_transformers_model(tmp_path):
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 18], depths=[1, 1], layer_type="basic", num_labels=4
    )
    ResNetForImageClassification(config).eval().save_pretrained(tmp_path / "dense")
    prune_checkpoint(tmp_path / "dense", tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "packed").eval()
    assert any(isinstance(m, SparseConv2d) for m in model.modules())
    pruned = AutoModelForImageClassification.from_pretrained(tmp_path / "pruned").eval()
    image = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(image).logits, pruned(image).logits)
    assert check(tmp_path / "packed").ok


def test_model_packed_in_memory_saves_itself(dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense)
    twofour.pack_(twofour.prune_(model))
    expected = logits(model)
    twofour.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "by-transformers")
    for saved in ("saved", "by-transformers"):
        assert check(tmp_path / saved).ok
        assert torch.equal(logits(twofour.load(tmp_path / saved)), expected)
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / saved)), expected)


def test_deepcopy_and_compile_of_a_loaded_model(packed):
    import copy

    model = copy.deepcopy(twofour.load(packed, memory="small"))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(TOKENS).logits, model(TOKENS).logits)


# Without the import: an error that names twofour, never a model.
WITHOUT = """
import sys
from transformers import AutoModelForCausalLM
assert "twofour" not in sys.modules
AutoModelForCausalLM.from_pretrained(sys.argv[1])
print("LOADED")
"""


@pytest.mark.parametrize("written_by", ["twofour", "save_pretrained"])
def test_without_the_import_loading_fails_loudly(packed, tmp_path, written_by):
    if written_by == "save_pretrained":
        AutoModelForCausalLM.from_pretrained(packed).save_pretrained(tmp_path / "again")
        packed = tmp_path / "again"
    ran = subprocess.run([sys.executable, "-c", WITHOUT, packed], capture_output=True, text=True)
    assert ran.returncode != 0
    assert "LOADED" not in ran.stdout
    assert "twofour" in ran.stderr
    if written_by == "twofour":
        assert "`import twofour` before loading it" in ran.stderr.strip().splitlines()[-1]


IN_EITHER_ORDER = """
import sys
if sys.argv[2] == "before":
    import twofour, transformers
else:
    import transformers, transformers.quantizers.auto
    import twofour
print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).model.layers[0].mlp.up_proj).__name__)
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_import_in_either_order(packed, order):
    ran = subprocess.run(
        [sys.executable, "-c", IN_EITHER_ORDER, packed, order], capture_output=True, text=True
    )
    assert ran.stdout.strip() == "SparseLinear", ran.stderr


def test_no_pickle_is_written(packed, tmp_path):
    AutoModelForCausalLM.from_pretrained(packed).save_pretrained(tmp_path / "again")
    for directory in (packed, tmp_path / "again"):
        for file in directory.iterdir():
            assert file.suffix in (".json", ".safetensors", ".jinja"), file
            if file.suffix == ".safetensors":
                with safe_open(file, "pt") as opened:
                    assert list(opened.keys())


def test_one_save_at_a_time(packed, tmp_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(packed)
    write = model.save_pretrained

    def meanwhile(where):
        with pytest.raises(InputError, match="another run is writing"):
            twofour.save(model, tmp_path / "out")
        write(where)

    monkeypatch.setattr(model, "save_pretrained", meanwhile)
    twofour.save(model, tmp_path / "out")
    assert sorted(f.name for f in (tmp_path / "out").iterdir() if f.suffix != ".json") == [
        "model.safetensors"
    ]
    assert not (tmp_path / "out" / "run.json").exists()
