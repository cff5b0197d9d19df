"""Permutation of input channels: what may move, that nothing changes when it does, and what it gains."""

import copy
import itertools

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from twofour.calibrate.statistics import Gram
from twofour.errors import InputError, TwoFourError
from twofour.pattern import keep_best
from twofour.prune import trace
from twofour.prune.permute import (
    Constraint,
    apply,
    find_foldable,
    kept_share,
    permute_,
    saliency_norms,
    search_permutation,
)

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


def found(model, inputs=TOKENS):
    return {(fold.kind, fold.name) for fold in find_foldable(model, inputs)}


def expected(residual, chain, heads, blocks=3):
    names = {("chain", chain.format(i)) for i in range(blocks)} | {
        ("heads", heads.format(i)) for i in range(blocks)
    }
    return names | ({("residual", "residual stream")} if residual else set())


# What may move


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


@pytest.mark.parametrize("name", DECODERS)
def test_finds_the_folds_of_transformers(name):
    make, folds = DECODERS[name]
    assert found(make()) == folds


def test_experts_in_one_tensor_follow_the_stream():
    folds = find_foldable(mixtral(), TOKENS)
    assert [(f.kind, f.name) for f in folds[:1]] == [("residual", "residual stream")]
    assert {f.kind for f in folds[1:]} == {"heads"}


def test_experts_as_modules():
    torch.manual_seed(0)
    model = scrambled(Experts())
    names = {("chain", f"experts.{i}.2") for i in range(3)}
    # lm_head reads the stream without a norm between; it makes another number of channels.
    assert found(model) == names | {("residual", "residual stream")}
    # An expert that no token reaches stands still, and so does the stream that it would read.
    model.used = 2
    assert found(model) == {("chain", "experts.0.2"), ("chain", "experts.1.2")}


def test_convolutions():
    torch.manual_seed(0)
    folds = find_foldable(scrambled(Chain()), IMAGES)
    assert [(f.name, f.producers) for f in folds] == [("3", ("0",)), ("9", ("3",))]
    assert {site.tensor for site in folds[0].sites} == {"weight", "bias", "running_mean", "running_var"}


def test_of_residual_blocks_only_the_inner_channels():
    assert found(resnet(), IMAGES) == {("chain", f"{i}.conv2") for i in (2, 3, 4)}


def test_a_second_reader_forbids_or_joins():
    class Twice(nn.Module):
        def __init__(self, aside):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)
            self.aside = aside

        def forward(self, x):
            y = self.a(x).relu()
            return self.b(y) + self.c(y), (y if self.aside else y.sum(-1))

    x = torch.randn(4, 16)
    (fold,) = find_foldable(Twice(False), x)
    assert [layer.name for layer in fold.consumers] == ["b", "c"]
    assert find_foldable(Twice(True), x) == []


def test_nothing_is_proved_where_nothing_can_be_seen():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model[2].weight.data.fill_(1.0)  # all columns equal: every order gives the same
    assert find_foldable(model, torch.randn(4, 16)) == []


def test_a_wrong_order_that_hardly_shows_in_the_outputs_is_seen_in_the_layer():
    """In 16 bits one layer of many moves the outputs by less than rounding; its own output it does not."""

    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            y = self.a(x)
            return x + 0.01 * self.b(y * torch.linspace(-2, 2, 32, dtype=x.dtype))  # fixed to the places

    assert find_foldable(Faint().bfloat16(), torch.randn(8, 32, dtype=torch.bfloat16)) == []


def test_finding_leaves_the_model_as_it_was():
    model = llama(attention_dropout=0.5).train()
    model.model.norm.eval()
    modes = [m.training for m in model.modules()]
    before = copy.deepcopy(model.state_dict())
    assert len(find_foldable(model, TOKENS)) == 7
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks for m in model.modules())


def test_blocks_that_are_alike_are_proved_together(monkeypatch):
    runs = []
    real = trace.run
    monkeypatch.setattr(trace, "run", lambda *args: runs.append(1) or real(*args))
    find_foldable(llama(num_hidden_layers=12), TOKENS)
    assert len(runs) < 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    assert found(llama().to(dtype)) == expected(True, *LLAMA)


def test_arguments_by_position_and_by_name():
    model = llama()
    for inputs in ((TOKENS,), {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}):
        assert found(model, inputs) == expected(True, *LLAMA)


# Moving


@pytest.mark.parametrize("name", DECODERS)
def test_apply_changes_the_weights_but_not_the_outputs(name):
    model = DECODERS[name][0]()
    with torch.no_grad():
        before = model(TOKENS)[0]
        for i, fold in enumerate(find_foldable(model, TOKENS)):
            weights = [model.get_parameter(f"{layer.name}.weight").clone() for layer in fold.consumers]
            apply(fold, fold.constraint.random(torch.Generator().manual_seed(i)))
            for layer, old in zip(fold.consumers, weights, strict=True):
                assert not torch.equal(model.get_parameter(f"{layer.name}.weight"), old)
        after = model(TOKENS)[0]
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


def test_apply_takes_the_order_as_search_gives_it_and_can_be_undone():
    model = llama()
    fold = next(f for f in find_foldable(model, TOKENS) if f.kind == "chain")
    down = model.model.layers[0].mlp.down_proj.weight
    old = down.detach().clone()
    order = fold.constraint.random(torch.Generator().manual_seed(0))
    apply(fold, order)
    assert torch.equal(down, old[:, order])
    apply(fold, order.argsort())
    assert torch.equal(down, old)


def test_heads_that_share_keys_move_alike():
    model = llama(num_key_value_heads=2)
    fold = next(f for f in find_foldable(model, TOKENS) if f.kind == "heads")
    assert fold.constraint == Constraint(16, 8)
    order = fold.constraint.random(torch.Generator().manual_seed(0))
    old = model.model.layers[0].self_attn.o_proj.weight.detach().clone()
    apply(fold, order)
    inside = order.reshape(2, 8) % 8
    columns = torch.cat([inside[head // 2] + 8 * head for head in range(4)])
    assert torch.equal(model.model.layers[0].self_attn.o_proj.weight, old[:, columns])


# The search


def best_of_all(scores):
    """Every way to put the columns into fours."""

    def ways(columns):
        if not columns:
            yield ()
            return
        first, *rest = columns
        for three in itertools.combinations(rest, 3):
            left = [c for c in rest if c not in three]
            yield from ((first, *three, *others) for others in ways(left))

    return max(kept_share([scores], torch.tensor(w)) for w in ways(list(range(scores.shape[1]))))


@pytest.mark.parametrize("seed", range(2))
def test_search_finds_the_best_of_two_groups_and_nearly_that_of_three(seed):
    random = torch.Generator().manual_seed(seed)
    for columns, least in ((8, 1.0), (12, 0.99)):
        scores = torch.rand(6, columns, generator=random) * torch.rand(columns, generator=random)
        order = search_permutation([scores], seed=seed)
        assert sorted(order.tolist()) == list(range(columns))
        assert kept_share([scores], order) >= least * best_of_all(scores) - 1e-6


def uneven(rows, columns, seed=0):
    random = torch.Generator().manual_seed(seed)
    size = torch.randn(columns, generator=random).exp().sort().values  # neighbours are alike: the worst order
    return (torch.randn(rows, columns, generator=random) * size).square()


def test_search_is_deterministic_and_each_round_gains():
    scores = uneven(64, 128)
    shares = [kept_share([scores], search_permutation([scores], rounds=n)) for n in (0, 1, 5, 40)]
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.001 > kept_share([scores]) + 0.01
    assert torch.equal(search_permutation([scores], seed=3), search_permutation([scores], seed=3))
    assert not torch.equal(search_permutation([scores], seed=3), search_permutation([scores], seed=4))


def test_search_does_not_lose_what_is_there():
    scores = torch.tensor([[9.0, 0, 8, 0], [0, 9, 0, 8]]).repeat(1, 4)  # kept entirely, and dealing breaks it
    assert kept_share([scores], search_permutation([scores])) == 1.0


def test_search_stays_in_its_blocks():
    scores = uneven(32, 64)
    order = search_permutation([scores], Constraint(64, 16))
    assert torch.equal(order.reshape(4, 16).sort(1).values, torch.arange(64).reshape(4, 16))
    free = search_permutation([scores])
    assert kept_share([scores]) < kept_share([scores], order) < kept_share([scores], free)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 6, 7, 26, 27])
def test_search_with_a_short_last_group(columns):
    scores = uneven(16, columns)
    order = search_permutation([scores])
    assert sorted(order.tolist()) == list(range(columns))
    assert kept_share([scores], order) >= kept_share([scores])


def test_search_over_several_consumers_and_a_sample_of_rows(monkeypatch):
    parts = [uneven(600, 64, seed=i) for i in range(3)]
    together = search_permutation([torch.cat(parts)])
    assert torch.equal(search_permutation(parts), together)
    monkeypatch.setattr("twofour.prune.permute.MOST_ROWS", 500)
    sampled = search_permutation(parts)
    assert kept_share(parts, sampled) > kept_share(parts) + 0.8 * (
        kept_share(parts, together) - kept_share(parts)
    )


def test_chunks_do_not_change_the_search(monkeypatch):
    scores = uneven(40, 64)
    order = search_permutation([scores])
    monkeypatch.setitem(__import__("twofour.prune.permute", fromlist=["CHUNK"]).CHUNK, "cpu", 1)
    assert torch.equal(search_permutation([scores]), order)


def test_search_refuses_scores_that_cannot_be_compared():
    for bad in (-1.0, torch.nan, torch.inf):
        with pytest.raises(InputError, match="finite and not below 0"):
            search_permutation([torch.tensor([[1.0, 2.0, 3.0, bad]])])
    with pytest.raises(InputError, match="12 channels do not fall into blocks of 8"):
        search_permutation([torch.ones(1, 12)], Constraint(12, 8))


# All of it


@pytest.mark.parametrize("make", [llama, gpt2, opt, mixtral])
def test_permute_keeps_the_model_and_more_of_the_scores(make):
    model = make()
    with torch.no_grad():
        before = model(TOKENS).logits
        notes = permute_(model, TOKENS)
        torch.testing.assert_close(model(TOKENS).logits, before, rtol=1e-3, atol=1e-3)
    assert all(note["kept"] >= note["kept_before"] - 1e-6 for note in notes)
    chains = [note for note in notes if note["kind"] == "chain"]
    assert all(note["kept"] > note["kept_before"] + 0.01 for note in chains)


def test_permute_only_the_kinds_wanted():
    assert {note["kind"] for note in permute_(llama(), TOKENS, kinds=["chain", "heads"])} == {
        "chain",
        "heads",
    }
    (note,) = permute_(llama(), TOKENS, kinds=["residual"])
    assert len(note["consumers"]) == 3 * 5


def test_permute_counts_channels_by_their_norms():
    # Each group of four has the same norm, so that whole groups matter and others do not: the worst order.
    norms = {
        f"model.layers.{i}.mlp.down_proj": torch.arange(20.0).exp().repeat_interleave(4) for i in range(3)
    }
    by_norm, by_size = llama(), llama()
    notes = permute_(by_norm, TOKENS, norms, kinds=["chain"])
    permute_(by_size, TOKENS, kinds=["chain"])
    assert [note["fold"] for note in notes] == sorted(norms)
    assert all(note["kept_before"] < 0.93 < 0.97 < note["kept"] for note in notes)
    down = [m.model.layers[0].mlp.down_proj.weight for m in (by_norm, by_size)]
    assert not torch.equal(*down)


def test_saliency_norms_are_what_is_left_when_the_others_repair():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=random) @ torch.randn(6, 6, generator=random)
    x[:, 4] = 0
    inputs = Gram(6)
    inputs.add(x)
    found = saliency_norms(inputs, damping=1e-6)
    for j in (0, 1, 2, 3, 5):  # the distance of a channel to the space of all others
        others = x[:, [i for i in range(6) if i not in (j, 4)]]
        rest = x[:, j] - others @ torch.linalg.lstsq(others, x[:, j]).solution
        assert float(found[j]) == pytest.approx(float(rest.square().mean().sqrt()), rel=0.02)
    assert found[4] == 0


@pytest.mark.parametrize("every_tap", [False, True])
def test_permute_convolutions(every_tap):
    torch.manual_seed(0)
    model = scrambled(Chain())
    before = model(IMAGES).detach()
    columns = {"3": 9 * 32, "9": 28} if every_tap else {"3": 32, "9": 26}
    notes = permute_(model, IMAGES, {name: torch.rand(n) for name, n in columns.items()})
    torch.testing.assert_close(model(IMAGES), before, rtol=1e-3, atol=1e-4 * float(before.abs().max()))
    assert all(note["kept"] > note["kept_before"] for note in notes)
    mask = keep_best(F.pad(model[9].weight.detach().abs().reshape(48, 26), (0, 2)))
    assert mask[:, 24:26].all()  # a short group keeps both


def test_permute_refuses_norms_of_another_model():
    with pytest.raises(InputError, match=r"layers.0.mlp.down_proj: 3 channel norms were given"):
        permute_(llama(), TOKENS, {"model.layers.0.mlp.down_proj": torch.ones(3)})


def test_permute_puts_back_what_changed_the_outputs(monkeypatch):
    model = llama()
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr("twofour.prune.permute.outputs_differ", lambda *_: True)
    with pytest.raises(TwoFourError, match="put back"):
        permute_(model, TOKENS)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
