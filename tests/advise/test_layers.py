"""Layers without weights: by arithmetic as by transformers, and from headers where nobody knows the type."""

import json

import pytest
import torch
from safetensors.torch import save_file

from twofour.advise.advice import advise
from twofour.advise.layers import FAMILIES, _by_arithmetic, _by_transformers, _too_small, fuse, read_network
from twofour.errors import InputError
from twofour.select import SMALLEST_SIDE

from .configs import LLAMA_3_8B, LLAMA_3_70B

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_arithmetic_finds_what_transformers_builds(family, tied):
    config = SMALL | {"model_type": family, "architectures": [f"{CLASSES[family]}ForCausalLM"]}
    config["tie_word_embeddings"] = tied
    quick, built = _by_arithmetic("", config), _by_transformers("", config)
    products = {group for group in built.groups if group.is_product}
    assert set(quick.groups) == products
    # Biases and the norms of single heads are left out: a thousandth of the weights.
    assert quick.parameters == pytest.approx(built.parameters, rel=0.01)
    assert built.untimed == 0


def test_small_sides_are_those_of_select():
    assert _too_small(SMALLEST_SIDE, 64) is None
    assert str(SMALLEST_SIDE) in _too_small(SMALLEST_SIDE - 1, 64)


def test_llama_3_sizes():
    for config, billions in ((LLAMA_3_8B, 8.03), (LLAMA_3_70B, 70.55)):
        network = read_network(config)
        assert network.parameters / 1e9 == pytest.approx(billions, abs=0.01)
        assert network.source == "config.json"
    gate = next(group for group in network.groups if group.name.endswith("gate_proj"))
    assert (gate.name, gate.count, gate.rows) == ("model.layers.*.mlp.gate_proj", 80, 28672)
    # 80 layers, keys and values of 8 heads of 128, two bytes each.
    assert network.decoder.cache_bytes(1, 1) == 80 * 2 * 8 * 128 * 2


def test_fusing_takes_layers_with_the_same_input_together():
    fused = {
        group.name.rpartition(".layers.*.")[2]: group for group in read_network(LLAMA_3_8B).products(True)
    }
    assert list(fused) == [
        "self_attn.q_proj+k_proj+v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj+up_proj",
        "mlp.down_proj",
        "lm_head",
    ]
    assert fused["self_attn.q_proj+k_proj+v_proj"].rows == 6144
    assert fused["mlp.gate_proj+up_proj"].rows == 28672
    plain = read_network(LLAMA_3_8B).products(False)
    assert sum(group.weights for group in fused.values()) == sum(group.weights for group in plain)
    assert fuse(fuse(plain)) == fuse(plain)


def test_a_config_alone_in_a_directory_or_as_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_8B))
    assert read_network(tmp_path).groups == read_network(path).groups == read_network(LLAMA_3_8B).groups


def test_another_head_is_left_to_transformers():
    network = read_network(
        SMALL | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}
    )
    assert network.source == "transformers"
    assert "score" in {group.name for group in network.groups}
    assert "lm_head" not in {group.name for group in network.groups}


def test_a_type_with_transposed_weights():
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
    }
    network = read_network(config | {"vocab_size": 128})
    groups = {group.name: group for group in network.groups}
    assert groups["transformer.h.*.mlp.c_fc"].rows == 256
    assert groups["transformer.h.*.mlp.c_fc"].count == 2
    assert groups["lm_head"].is_head
    assert "shares its weight" in groups["lm_head"].reason
    assert network.decoder.kv_heads == 4


def test_experts_are_layers_without_a_time():
    config = SMALL | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
    }
    network = read_network(config)
    assert network.untimed == 2 * 4 * 3 * 64 * 172 + 2 * 4 * 64  # and the routers
    assert not network.timed
    experts = {group.name: group for group in network.groups if group.kind == "expert"}
    shapes = {
        name.rpartition(".")[2]: (g.count, g.rows, g.columns, g.eligible) for name, g in experts.items()
    }
    assert shapes == {"w1": (8, 172, 64, True), "w3": (8, 172, 64, True), "w2": (8, 64, 172, True)}
    assert "model.layers.*.mlp.experts.*.w1" in experts
    assert not any("experts" in group.name for group in network.products(fused=True))
    advice = advise(config, "H200")
    assert "Cannot tell the speed" in advice.verdict
    # They are most of the model, and packed they take 9/16.
    assert advice.form("2:4").weight_bytes < 0.65 * advice.form("dense").weight_bytes


def test_experts_in_headers_have_no_time_and_shared_ones_do(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "homemade", "hidden_size": 64}))
    names = ("mlp.experts.0.up", "mlp.experts.1.up", "mlp.shared_experts.up", "attn.q")
    save_file({f"blocks.0.{n}.weight": torch.zeros(64, 64) for n in names}, tmp_path / "model.safetensors")
    network = read_network(tmp_path)
    assert {(group.name, group.count, group.kind) for group in network.groups} == {
        ("blocks.*.mlp.experts.*.up", 2, "expert"),
        ("blocks.*.mlp.shared_experts.up", 1, "linear"),
        ("blocks.*.attn.q", 1, "linear"),
    }
    assert network.untimed == 2 * 64 * 64


def test_a_type_nobody_knows_is_read_from_its_headers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "homemade", "hidden_size": 64}))
    tensors = {
        "blocks.0.mix.weight": torch.zeros(64, 64),
        "blocks.1.mix.weight": torch.zeros(64, 64),
        "blocks.0.norm.weight": torch.zeros(64),
        "blocks.0.tiny.weight": torch.zeros(8, 64),
        "embed.weight": torch.zeros(100, 64),
        "lm_head.weight": torch.zeros(100, 64),
        "blocks.0.router.weight": torch.zeros(16, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    network = read_network(tmp_path)
    assert network.source == "safetensors headers"
    groups = {group.name: group for group in network.groups}
    assert groups["blocks.*.mix"].count == 2
    assert groups["blocks.*.mix"].eligible
    assert "too small" in groups["blocks.*.tiny"].reason
    assert not groups["embed"].is_product
    assert groups["lm_head"].is_head
    assert groups["blocks.*.router"].reason == "an expert router"
    assert network.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert network.decoder is None


def test_bad_input(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_network(tmp_path / "no")
    with pytest.raises(InputError, match="is missing"):
        read_network(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        read_network(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="not a JSON object"):
        read_network(tmp_path)
    for other in ("config.json", "tokenizer.json"):
        (tmp_path / other).write_text(json.dumps({"version": "1.0"}))
        with pytest.raises(InputError, match="is no config of a model"):
            read_network(tmp_path / other)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "homemade"}))
    with pytest.raises(InputError, match="homemade"):
        read_network(tmp_path)
