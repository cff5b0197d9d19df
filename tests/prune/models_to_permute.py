"""Models whose channels can be permuted, and what should be found in each."""

import torch
import transformers
from torch import nn
from torch.nn import functional as F

TOKENS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(1))


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))


SHARED = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def scrambled(model):
    """Norms, biases and statistics with random values: at 0 and 1 a permutation of them would not be seen."""
    random = torch.Generator().manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.data.copy_(torch.rand(tensor.shape, generator=random) + 0.5)
        elif tensor.dim() > 1 and tensor.is_floating_point():
            tensor.data.mul_(4)  # attention that is not uniform
    return model.eval()


def llama(**options):
    options = {**SHARED, "intermediate_size": 80, "num_key_value_heads": 2, **options}
    torch.manual_seed(0)
    return scrambled(transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)))


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=32)
    return scrambled(transformers.GPT2LMHeadModel(config))


def opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(**SHARED, ffn_dim=80, max_position_embeddings=32, word_embed_proj_dim=32)
    return scrambled(transformers.OPTForCausalLM(config))


def neox():
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(**SHARED, intermediate_size=80, max_position_embeddings=32)
    return scrambled(transformers.GPTNeoXForCausalLM(config))


def phi3():
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SHARED, intermediate_size=80, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0
    )
    return scrambled(transformers.Phi3ForCausalLM(config))


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SHARED, intermediate_size=80, max_position_embeddings=32)
    return scrambled(transformers.BertModel(config))


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        **SHARED, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32
    )
    return scrambled(transformers.MixtralForCausalLM(config))


class Experts(nn.Module):
    """A mixture with its experts as modules, each token to the best one of them."""

    def __init__(self, experts=3, size=32, inner=48, used=3):
        super().__init__()
        self.embed = nn.Embedding(96, size)
        self.norm = nn.LayerNorm(size)
        self.gate = nn.Linear(size, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(size, inner), nn.GELU(), nn.Linear(inner, size)) for _ in range(experts)
        )
        self.lm_head = nn.Linear(size, 96)
        self.used = used

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        normed = self.norm(x)
        best = self.gate(normed)[:, : self.used].argmax(1)
        y = x.clone()
        for i, expert in enumerate(self.experts):
            if (best == i).any():
                y[best == i] += expert(normed[best == i])
        return self.lm_head(y)


class Chain(nn.Sequential):
    """Convolutions, BatchNorm with and without weights, a depthwise one, channels not a multiple of 4."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 26, 3, bias=False),
            nn.BatchNorm2d(26, affine=False),
            nn.ReLU(),
            nn.Conv2d(26, 26, 3, groups=26),
            nn.BatchNorm2d(26),
            nn.ReLU(),
            nn.Conv2d(26, 48, 1),
        )


class Block(nn.Module):
    def __init__(self, channels=16, inner=24):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)


def resnet():
    torch.manual_seed(0)
    return scrambled(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), Block(), Block(), Block()))


def expected(residual, chain, heads, blocks=3):
    names = {("chain", chain.format(i)) for i in range(blocks)} | {
        ("heads", heads.format(i)) for i in range(blocks)
    }
    return names | ({("residual", "residual stream")} if residual else set())


LLAMA = ("model.layers.{}.mlp.down_proj", "model.layers.{}.self_attn.o_proj")


DECODERS = {
    "llama": (llama, expected(True, *LLAMA)),
    "all heads alike": (lambda: llama(num_key_value_heads=4), expected(True, *LLAMA)),
    "one KV head": (lambda: llama(num_key_value_heads=1), expected(True, *LLAMA)),
    "biases, tied": (
        lambda: llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        expected(True, *LLAMA),
    ),
    "as wide inside": (lambda: llama(intermediate_size=32, head_dim=16), expected(True, *LLAMA)),
    "gpt2": (gpt2, expected(True, "transformer.h.{}.mlp.c_proj", "transformer.h.{}.attn.c_proj")),
    "opt": (opt, expected(True, "model.decoder.layers.{}.fc2", "model.decoder.layers.{}.self_attn.out_proj")),
    "neox": (
        neox,
        expected(True, "gpt_neox.layers.{}.mlp.dense_4h_to_h", "gpt_neox.layers.{}.attention.dense"),
    ),
    "phi3": (phi3, expected(True, *LLAMA)),
    "bert": (
        bert,
        expected(False, "encoder.layer.{}.output.dense", "encoder.layer.{}.attention.output.dense"),
    ),
}
