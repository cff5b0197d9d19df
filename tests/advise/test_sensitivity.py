"""The estimate of each layer's loss against the loss itself, on models small enough to look."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twofour.advise.loss_parts import Mean, _gradient, _probe, kept_share, loss_parts
from twofour.advise.sensitivity import Measured, loss_with, measure, prune_alone, weigh
from twofour.errors import InputError, TwoFourError
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.prune import method_named
from twofour.select import select

TEXT = "the cat sat on a mat and the dog ran to it while a bird sang of rain "


def llama(vocabulary=40, **other):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    figures = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, num_key_value_heads=1, **figures, **other)
    ).eval()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=64)).eval()
    for parameter in model.parameters():  # biases, too: they are zero at first, and must not count
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


class Experts(nn.Module):
    """Tokens go to one of three experts by their number; nothing goes to the third."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, hidden_states):
        out = hidden_states.clone()
        to = (hidden_states[..., 0] > 0).long()
        for number, expert in enumerate(self.experts):
            chosen = to == number
            if chosen.any():
                out[chosen] = out[chosen] + expert(hidden_states[chosen])
        return out


class OfExperts(nn.Module):
    """The least that looks like a causal language model."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(32, 40)

    def forward(self, tokens, use_cache=False):
        states = self.embed(tokens)
        for block in self.blocks:
            states = block(states)
        return SimpleNamespace(logits=self.head(states))


def of_experts():
    torch.manual_seed(0)
    return OfExperts().eval()


@torch.no_grad()
def predictions(model, windows, changes=()):
    """Log probabilities with some weights in place of the model's own."""
    before = [(model.get_parameter(f"{layer.name}.weight"), weight) for layer, weight in changes]
    before = [(parameter, parameter.data, weight) for parameter, weight in before]
    for parameter, _, weight in before:
        parameter.data = weight
    found = model(windows, use_cache=False).logits.log_softmax(-1)
    for parameter, data, _ in before:
        parameter.data = data
    return found


def loss(predicted, windows):
    """Nats a token, in the precision that the predictions have."""
    return float(F.nll_loss(predicted[:, :-1].flatten(0, 1), windows[:, 1:].flatten()))


def changed_a_little(model, windows, much=0.02):
    """Weights on the way to what Wanda makes of them; all in doubles, as differences are small."""
    pruned = prune_alone(model, select(model).layers, windows, method_named("wanda"))
    model.double()
    weights = {layer: model.get_parameter(f"{layer.name}.weight").detach() for layer in pruned}
    return pruned, {layer: weights[layer].lerp(new.weight.double(), much) for layer, new in pruned.items()}


@pytest.fixture
def windows():
    return torch.randint(0, 40, (12, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", [llama, gpt2, of_experts])
def test_small_changes_cost_what_the_parts_say(make, windows):
    """The first is exact but for third order, the second unbiased: within its own error for every layer."""
    model = make()
    pruned, changed = changed_a_little(model, windows)
    parts = loss_parts(model, changed, windows, probes=12)
    assert list(parts) == list(pruned)
    dense = predictions(model, windows)
    for layer, own in parts.items():
        weight = model.get_parameter(f"{layer.name}.weight").detach()
        there = predictions(model, windows, [(layer, changed[layer])])
        back = predictions(model, windows, [(layer, 2 * weight - changed[layer])])
        slope = (loss(there, windows) - loss(back, windows)) / 2
        assert own.first_order.value == pytest.approx(slope, rel=1e-3, abs=1e-8), layer.name
        true = float(F.kl_div(there, dense, reduction="sum", log_target=True)) / windows.numel()
        assert abs(own.divergence.value - true) <= 4 * own.divergence.error, layer.name
        if pruned[layer].tokens:
            assert own.divergence.error < 0.3 * own.divergence.value


def test_the_sum_is_the_true_change_where_the_model_is_not_at_its_best(windows):
    """A sure model on words that it does not expect: the divergence alone has even the sign wrong."""
    model = llama(initializer_range=0.15)
    pruned, changed = changed_a_little(model, windows, much=0.01)
    model_loss = loss(predictions(model, windows), windows)
    parts = loss_parts(model, changed, windows)
    told = weigh(parts, pruned, kept=1.0)
    wrong = 0
    for layer, own in told.items():
        true = loss(predictions(model, windows, [(layer, changed[layer])]), windows) - model_loss
        assert own.loss_increase == own.first_order + own.divergence
        assert abs(own.loss_increase - true) < 0.1 * abs(true) + 2e-5, layer.name
        wrong += own.divergence > 0 > true
    assert wrong >= 3


def test_the_gradient_at_the_logits_is_that_of_the_loss(windows):
    logits = torch.randn(2, 16, 40, dtype=torch.double).requires_grad_()
    F.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:2, 1:].flatten(), reduction="sum").backward()
    assert torch.allclose(_gradient(logits.detach(), windows[:2]), logits.grad, atol=1e-6)


def test_noise_is_not_kept():
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(400, generator=random).tolist()
    sizes = torch.rand(400, generator=random).add(0.1).tolist()
    true = torch.randn(400, generator=random).tolist()

    def share(signal):
        """And how far off the truth all and the share of it are, in errors."""
        seen = [Mean(size * (signal * t + n), size) for t, n, size in zip(true, noise, sizes, strict=True)]
        kept = kept_share(seen)
        off = [
            sum(
                (part * mean.value / mean.error - signal * t) ** 2 for mean, t in zip(seen, true, strict=True)
            )
            for part in (1.0, kept)
        ]
        return kept, off

    for signal, low, high in ((0.0, 0.0, 0.15), (1.0, 0.35, 0.65), (10.0, 0.97, 1.0)):
        kept, (everything, part) = share(signal)
        assert low <= kept <= high
        assert part < everything
    assert kept_share([]) == 0
    assert kept_share([Mean(0.0, 0.0)]) == 0  # an expert that no token reached
    assert kept_share([Mean.of([0.3])]) == 0  # one window: nobody knows how noisy it is


def told_for(model, pruned, windows, **how):
    parts = loss_parts(model, {layer: new.weight for layer, new in pruned.items()}, windows, **how)
    return weigh(parts, pruned, kept_share(own.first_order for own in parts.values()))


def test_an_expert_that_no_token_reached_adds_nothing(windows):
    model = of_experts()
    pruned = prune_alone(model, select(model).layers, windows, method_named("wanda"))
    by_name = {layer.name: told for layer, told in told_for(model, pruned, windows).items()}
    unseen, seen = by_name["blocks.0.experts.2"], by_name["blocks.0.experts.1"]
    assert (unseen.loss_increase, unseen.tokens) == (0.0, 0)
    assert seen.divergence > 0
    assert seen.tokens > 0


@pytest.fixture(scope="module")
def trained():
    """A model, and windows of text that it is as good at as can be: it has written them itself."""
    model = llama(initializer_range=0.15)
    first = torch.randint(0, 40, (128, 1), generator=torch.Generator().manual_seed(1))
    length = {"min_new_tokens": 31, "max_new_tokens": 31, "pad_token_id": 0}
    text = model.generate(
        first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, eos_token_id=None, **length
    )
    return model, text[:48], text[48:]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "magnitude"])
def test_layers_rank_as_their_true_loss(trained, method):
    model, windows, others = trained
    layers = select(model).layers
    pruned = prune_alone(model, layers, windows, method_named(method))
    found = told_for(model, pruned, others[:48])
    dense = loss_with(model, {}, others)
    true = [loss_with(model, {layer: pruned[layer]}, others) - dense for layer in layers]
    ranks = torch.stack(
        [
            torch.tensor(values).argsort().argsort().double()
            for values in (true, [found[layer].loss_increase for layer in layers])
        ]
    )
    assert torch.corrcoef(ranks)[0, 1] >= 0.8
    total = sum(told.loss_increase for told in found.values())
    assert 0.7 < total / sum(true) < 1.4


def test_the_model_is_as_before_and_the_same_seed_gives_the_same(trained):
    model, windows, others = trained
    before = {name: value.clone() for name, value in model.state_dict().items()}
    next(model.parameters()).requires_grad_(False)
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    model.train()
    pruned = prune_alone(model, select(model).layers, windows[:8], method_named("wanda"))
    found = [told_for(model, pruned, others[:8], seed=seed) for seed in (0, 0, 1)]
    loss_with(model, pruned, others[:4])
    assert found[0] == found[1] != found[2]
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())
    model.eval().requires_grad_()


def test_probes_have_the_covariance_of_the_gradient():
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0]).expand(40000, 4)
    v = _probe(logits, torch.Generator().manual_seed(0))
    p = logits[0].softmax(-1)
    assert torch.allclose(v.T @ v / len(v), p.diag() - p.outer(p), atol=0.01)
    assert v.mean(0).abs().max() < 0.01


def test_nan_in_a_weight_names_the_layer(trained):
    model, windows, _ = trained
    layers = select(model).layers
    weight = model.get_parameter(f"{layers[3].name}.weight")
    kept = weight.data
    weight.data = kept.clone().fill_(torch.nan)
    try:
        with pytest.raises(InputError, match="NaN") as error:
            prune_alone(model, layers, windows, method_named("magnitude"))
    finally:
        weight.data = kept
    assert error.value.layer == layers[3].name


def test_nan_in_the_logits_is_said():
    model = llama()
    pruned = prune_alone(model, select(model).layers, torch.zeros(1, 8), method_named("magnitude"))
    model.lm_head.weight.data[5] = torch.inf
    with pytest.raises(TwoFourError, match="NaN or infinite logits"):
        told_for(model, pruned, torch.ones(2, 8, dtype=torch.long))


def test_a_checkpoint_and_losses_of_layers_together(dense, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 20)
    measured = measure(dense, CalibrationOptions(text, samples=6, seqlen=32), "wanda", exclude=["*.0.*"])
    found = measured.sensitivity
    assert (found.samples, found.scored, found.seqlen, len(found.layers)) == (6, 6, 32, 7)
    assert measured.loss_increase([]) == 0
    names = list(found.layers)[:2]
    alone = [measured.loss_increase([name]) for name in names]
    assert all(alone)
    assert measured.loss_increase(names) not in (0, *alone)


def test_windows_that_the_model_does_not_take_are_refused(dense, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    with pytest.raises(InputError, match="longer than the 64 that the model takes"):
        measure(dense, CalibrationOptions(text, samples=4, seqlen=65), "wanda")


def test_own_text_has_no_first_order_part(dense):
    found = measure(dense, CalibrationOptions("self", samples=4, seqlen=16), "magnitude").sensitivity
    assert found.first_order_kept == 0
    for layer in found.layers.values():
        assert layer.first_order == 0
        assert layer.loss_increase == layer.divergence > 0


def test_a_model_in_memory(trained):
    model, windows, others = trained
    about = {"name": "a small Llama", "calib": "written before"}
    measured = Measured(model, select(model).layers, windows[:8], others[:6], method_named("wanda"), **about)
    found = measured.sensitivity
    assert (found.model, found.calib, found.samples, found.scored) == (*about.values(), 8, 6)
    assert set(found.layers) == {layer.name for layer in select(model).layers}
    first = {layer.name: parts.first_order.value for layer, parts in measured.parts.items()}
    for name, layer in found.layers.items():
        assert layer.first_order == found.first_order_kept * first[name]
