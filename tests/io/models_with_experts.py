"""Small mixtures of experts with random weights, as transformers writes them: one tensor an expert."""

import shutil
from pathlib import Path

import torch
from torch import nn

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def mixtral() -> nn.Module:
    """Files and model have different names for what holds the experts, and for gate and up (w1 and w3)."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def olmoe(**more: int) -> nn.Module:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    return OlmoeForCausalLM(OlmoeConfig(**{**SIZES, **more}, num_experts=4))


def gpt_oss() -> nn.Module:
    """Experts stored as [in, out], which are left alone."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    return GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, head_dim=8))


def written(model: nn.Module, directory: Path, tokenizer_of: Path) -> Path:
    """A checkpoint of it, with a tokenizer."""
    model.save_pretrained(directory)
    for file in tokenizer_of.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory
