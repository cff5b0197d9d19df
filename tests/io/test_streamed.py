"""A model whose blocks are read in their turn gives what one that is loaded whole gives."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from twofour.calibrate.blocks import find_blocks, run_blocks
from twofour.calibrate.experts import OpenExperts
from twofour.io.checkpoint import Checkpoint
from twofour.io.load import load_causal_lm
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.streamed import open_streamed
from twofour.io.structure import checkpoint_layers

WINDOWS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(0))
LLAMA = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)).bfloat16(),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=64, n_layer=3, n_head=4)),
}


def saved(model, dense, directory, **more):
    """As a checkpoint in several files, with the tokenizer of another one."""
    model.save_pretrained(directory, max_shard_size="100KB", **more)
    for file in dense.glob("tokenizer*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return Checkpoint(directory)


def layers_of(checkpoint):
    return list(checkpoint_layers(checkpoint).by_tensor.values())


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_see_the_same_inputs(name, dtype, _dense, tmp_path):
    torch.manual_seed(0)
    checkpoint = saved(MODELS[name](), _dense, tmp_path / "model")
    assert len(checkpoint.files) > 2
    layers = layers_of(checkpoint)
    whole, _ = load_causal_lm(checkpoint.directory, "cpu", dtype or "auto")
    streamed, tokenizer, weights = open_streamed(checkpoint, layers, dtype)
    assert tokenizer.bos_token_id == 1
    seen = []
    for model, who in ((whole, None), (streamed, weights)):
        grams = {}

        def change(block, grams=grams):
            grams.update({layer.name: gram.mean for layer, gram in block.grams.items()})

        run_blocks(model, layers, WINDOWS, change, weights=who)
        seen.append(grams)
    assert len(seen[0]) == len(layers)
    assert all(torch.equal(gram, seen[1][layer]) for layer, gram in seen[0].items())


def test_one_block_is_in_memory_at_a_time(_dense, tmp_path):
    checkpoint = saved(MODELS["llama"](), _dense, tmp_path / "model")
    layers = layers_of(checkpoint)
    model, _, weights = open_streamed(checkpoint, layers, None)
    blocks = find_blocks(model, layers)[1]

    def there():
        return [i for i, block in enumerate(blocks) if not any(p.is_meta for p in block.parameters())]

    seen = []
    run_blocks(model, layers, WINDOWS, lambda block: seen.append((block.number, there())), weights=weights)
    assert seen == [(0, [0]), (1, [1]), (2, [2])]
    assert there() == []
    assert model.lm_head.weight.is_meta  # it never runs
    assert not model.model.embed_tokens.weight.is_meta


@pytest.mark.parametrize("method", ["sparsegpt", "best"])
def test_pruned_weights_are_the_same(method, dense, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 40)
    calibration = CalibrationOptions(tmp_path / "text.txt", samples=16, seqlen=32)
    with monkeypatch.context() as patch:
        patch.setattr("twofour.io.prune_calibrated.load_causal_lm", None)  # must not be needed
        prune_checkpoint(dense, tmp_path / "streamed", method, calibration=calibration)
    monkeypatch.setattr("twofour.io.prune_calibrated.open_streamed", lambda *_: None)
    prune_checkpoint(dense, tmp_path / "whole", method, calibration=calibration)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("streamed", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_experts_are_apart_if_the_files_have_them_so(_dense, tmp_path):
    """transformers writes every expert's weights for itself, unless it is told not to."""
    config = MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2)
    apart = saved(MixtralForCausalLM(config), _dense, tmp_path / "apart")
    model = open_streamed(apart, layers_of(apart), None)[0]
    assert isinstance(model.model.layers[0].mlp.experts, OpenExperts)
    together = saved(MixtralForCausalLM(config), _dense, tmp_path / "together", save_original_format=False)
    model = open_streamed(together, layers_of(together), None)[0]
    assert model.model.layers[0].mlp.experts.down_proj.shape == (4, 64, 128)


def test_a_model_that_is_put_together_while_it_loads_is_loaded_whole(_dense, tmp_path):
    """Here the files hold the weight of one layer under a name that the model does not have."""
    saved(LlamaForCausalLM(LlamaConfig(**LLAMA)), _dense, tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        tensors = {n.replace("layers.1.self_attn.q_proj", "elsewhere"): t for n, t in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layers.1.self_attn.q_proj", "elsewhere"))
    checkpoint = Checkpoint(tmp_path / "model")
    assert "model.elsewhere.weight" in checkpoint.tensors
    assert open_streamed(checkpoint, layers_of(checkpoint), None) is None


def test_a_correction_beside_the_weights_is_loaded_whole(dense, tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 40)
    calibration = CalibrationOptions(tmp_path / "text.txt", samples=16, seqlen=32, lowrank=4)
    prune_checkpoint(dense, tmp_path / "out", "wanda", calibration=calibration)
    checkpoint = Checkpoint(tmp_path / "out")
    assert open_streamed(checkpoint, layers_of(checkpoint), None) is None
