"""Block by block: a layer's statistics are those of its inputs after the blocks before it were changed."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from twofour.calibrate.blocks import InModel, Teacher, find_blocks, run_blocks
from twofour.calibrate.statistics import Gram
from twofour.calibrate.windows import sample_windows
from twofour.errors import InputError
from twofour.pattern import check_pattern, keep_best
from twofour.prune import prune_block
from twofour.prune.sparsegpt import SparseGPT
from twofour.select import select

WINDOWS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(_dense):
    return AutoModelForCausalLM.from_pretrained(_dense).eval()


def inputs_of(model, names):
    """What reaches each layer when the whole model runs."""
    found = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: found[n].append(args[0]))
        for name in names
    ]
    with torch.no_grad():
        model(WINDOWS)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts).reshape(-1, parts[0].shape[-1]) for name, parts in found.items()}


def test_gram_is_the_mean_of_outer_products():
    x = torch.randn(50, 6)
    gram = Gram(6)
    for part in (x[:7], x[7:7], x[7:].reshape(1, 43, 6)):
        gram.add(part)
    assert gram.tokens == 50
    torch.testing.assert_close(gram.mean, x.t() @ x / 50)
    torch.testing.assert_close(gram.channel_norms, x.square().mean(0).sqrt())


@pytest.mark.parametrize("batch", [1, 4])
def test_statistics_are_those_of_the_whole_model(model, batch):
    layers = select(model).layers
    expected = inputs_of(model, [layer.name for layer in layers])
    seen = {}
    run_blocks(model, layers, WINDOWS, lambda block: seen.update(block.grams), batch=batch)
    assert set(seen) == set(layers)
    for layer, gram in seen.items():
        x = expected[layer.name]
        assert gram.tokens == len(x)
        torch.testing.assert_close(gram.mean, x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_what_is_derived_from_a_gram_is_made_once():
    gram = Gram(4)
    gram.add(torch.eye(4))
    made = []
    for key in ("a", "a", "b"):
        gram.derived(key, lambda key=key: made.append(key))
    assert made == ["a", "b"]
    gram.add(torch.eye(4))
    gram.derived("a", lambda: made.append("again"))
    assert made[-1] == "again"


def test_layers_with_one_input_share_one_matrix(model):
    layers = {layer.name: layer for layer in select(model).layers}
    seen = {}
    run_blocks(model, list(layers.values()), WINDOWS, lambda block: seen.update(block.grams))
    first = "model.layers.0."
    of = {name: seen[layer] for name, layer in layers.items() if name.startswith(first)}
    assert of[f"{first}self_attn.q_proj"] is of[f"{first}self_attn.v_proj"]
    assert of[f"{first}mlp.gate_proj"] is of[f"{first}mlp.up_proj"]
    assert len({id(gram) for gram in of.values()}) == 4


def test_the_second_block_sees_what_the_changed_first_one_gives(model):
    layers = select(model).layers
    seen = {}

    def change(block):
        seen[block.number] = {layer.name: gram.mean.clone() for layer, gram in block.grams.items()}
        if block.number == 0:
            for layer in block.layers:
                model.get_parameter(f"{layer.name}.weight").mul_(0.5)

    run_blocks(model, layers, WINDOWS, change)
    name = "model.layers.1.mlp.down_proj"
    x = inputs_of(model, [name])[name]  # the model as it is now, its first block changed
    torch.testing.assert_close(seen[1][name], x.t() @ x / len(x), rtol=1e-4, atol=1e-5)


def test_finished_blocks_are_only_passed_through(model):
    layers = select(model).layers
    numbers, restored = [], []
    run_blocks(
        *(model, layers, WINDOWS, lambda block: numbers.append(block.number)),
        finished=1,
        restore=restored.append,
    )
    assert numbers == [1]
    assert restored == [0]


def test_targets_are_the_states_of_the_dense_model(model):
    """Also behind a block that was changed, or restored: the dense model is looked at first."""
    layers = select(model).layers

    def spoil(_):
        for parameter in model.model.layers[0].parameters():
            parameter.mul_(0.5)

    for finished in (0, 1):
        found = {}

        def change(block, found=found):
            found[block.number] = torch.cat(block.targets)
            if block.number == 0:
                spoil(block)

        before = {name: p.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            states = model(WINDOWS, output_hidden_states=True).hidden_states
        run_blocks(model, layers, WINDOWS, change, follow=1.0, finished=finished, restore=spoil)
        # The last of hidden_states is normalised, the targets are not.
        torch.testing.assert_close(model.model.norm(found[1]), states[2], rtol=1e-4, atol=1e-5)
        if not finished:
            torch.testing.assert_close(found[0], states[1], rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])


def test_targets_lie_between_the_block_and_the_model(model):
    layers = select(model).layers
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = {}
    for follow in (None, 0.0, 0.25, 1.0):

        def change(block, follow=follow):
            found[follow, block.number] = block.targets
            for layer in block.layers:
                model.get_parameter(f"{layer.name}.weight").mul_(0.5)

        run_blocks(model, layers, WINDOWS, change, follow=follow)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
    assert found[None, 1] == []
    for of_block, mixed, of_model in zip(found[0.0, 1], found[0.25, 1], found[1.0, 1], strict=True):
        assert not torch.allclose(of_block, of_model)
        torch.testing.assert_close(mixed, 0.75 * of_block + 0.25 * of_model)
    for of_block, of_model in zip(found[0.0, 0], found[1.0, 0], strict=True):
        assert torch.equal(of_block, of_model)  # nothing is lost before the first block


def test_a_teacher_is_followed_from_its_embeddings_on(model):
    """Targets are its states, beside a model that was another before the first block already."""
    layers = select(model).layers
    dense = copy.deepcopy(model)
    found, teachers, statistics = {}, [], {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(0.7)
        states = dense(WINDOWS, output_hidden_states=True).hidden_states
        own = model(WINDOWS, output_hidden_states=True).hidden_states

    def look(block):
        found[block.number] = torch.cat(block.origins), torch.cat(block.targets)
        teachers.append(block.teacher)
        statistics.update(block.grams)

    run_blocks(model, layers, WINDOWS, look, follow=1.0, teacher=Teacher(dense))
    for number in range(2):
        torch.testing.assert_close(found[number][0], states[number], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0][1], states[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dense.model.norm(found[1][1]), states[2], rtol=1e-4, atol=1e-5)
    assert teachers == list(dense.model.layers)
    x = model.model.layers[1].input_layernorm(own[1]).flatten(0, 1)  # the statistics are the model's own
    query = next(gram for layer, gram in statistics.items() if layer.name.endswith("1.self_attn.q_proj"))
    torch.testing.assert_close(query.mean, x.t() @ x / len(x), rtol=1e-3, atol=1e-5)
    whole = found[1][1]
    calls = {}

    def look_at_calls(block):
        look(block)
        with torch.no_grad():
            calls[block.number] = torch.cat([call.through(block.teacher, "cpu") for call in block.calls])

    run_blocks(model, layers, WINDOWS, look_at_calls, follow=0.25, teacher=Teacher(dense))
    torch.testing.assert_close(found[1][0], states[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], 0.75 * calls[1] + 0.25 * whole)
    assert not torch.allclose(calls[1], whole)


def test_modes_and_places_are_as_before(model):
    model.train()
    model.model.layers[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    seen = []
    run_blocks(model, select(model).layers, WINDOWS, lambda block: seen.append(block.module.training))
    assert seen == [False, False]
    assert [module.training for module in model.modules()] == modes


def test_blocks_are_found_without_knowing_the_model(model):
    name, blocks = find_blocks(model, select(model).layers)
    assert name == "model.layers"
    assert len(blocks) == 2
    with pytest.raises(InputError, match="no list of blocks"):
        find_blocks(nn.Sequential(nn.Linear(32, 32)), select(nn.Sequential(nn.Linear(32, 32))).layers)


def test_layers_outside_the_blocks_are_refused(model):
    layers = select(model, include=["lm_head", "model.layers.*.mlp.*"]).layers
    with pytest.raises(InputError, match="lm_head"):
        run_blocks(model, layers, WINDOWS, lambda *_: None)


def test_windows(_dense):
    tokenizer = AutoTokenizer.from_pretrained(_dense)
    windows = sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=3)
    assert windows.shape == (5, 12)
    assert torch.equal(windows, sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=3))
    assert not torch.equal(windows, sample_windows(tokenizer, ["abc " * 30, "xyz " * 30], 5, 12, seed=4))
    text = "<s>" + "abc " * 30 + "<s>" + "xyz " * 30
    for window in windows:
        assert tokenizer.decode(window).replace(" ", "") in text.replace(" ", "")
    with pytest.raises(InputError, match="less than one window"):
        sample_windows(tokenizer, ["short"], 1, 12)
    for samples, length in ((0, 12), (-1, 12), (1, 1), (1, -4)):
        with pytest.raises(InputError, match=f"{samples} windows of {length} tokens"):
            sample_windows(tokenizer, ["abc " * 30], samples, length)


class Numbered:
    """A tokenizer that gives every word its own number."""

    bos_token_id = None

    def __call__(self, text, **options):
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.mark.parametrize("samples", [1, 7, 12, 13])
def test_windows_do_not_overlap_while_there_is_text(samples):
    """What is held out would be known by heart from a window that overlaps it."""
    text = [" ".join(str(i) for i in range(101)), " ".join(str(i) for i in range(101, 157))]
    seen, in_order = torch.zeros(157), 0
    for seed in range(300):
        windows = sample_windows(Numbered(), text, samples, 12, seed)
        assert windows.shape == (samples, 12)
        assert torch.equal(windows, windows[:, :1] + torch.arange(12))
        assert len(windows.unique()) == 12 * samples
        seen[windows.flatten()] += 1
        in_order += bool((windows[1:, 0] > windows[:-1, 0]).all())
    assert bool((seen > 0).all())  # from everywhere
    assert in_order < 20 or samples == 1  # those held out are not all from the same place


def test_more_windows_than_there_is_text_for_overlap():
    text = [" ".join(str(i) for i in range(157))]
    windows = sample_windows(Numbered(), text, 14, 12)
    assert windows.shape == (14, 12)
    assert torch.equal(windows, windows[:, :1] + torch.arange(12))


def test_a_long_text_tells_how_far_its_tokens_are(_dense, monkeypatch):
    monkeypatch.setattr("twofour.calibrate.windows.A_MOMENT", 400)
    tokenizer = AutoTokenizer.from_pretrained(_dense)
    told = []
    documents = ["abc " * 30, "xyz " * 90]
    sample_windows(tokenizer, documents, 1, 12, on_progress=lambda *now: told.append(now))
    assert told == [(0, 480, "tokenizing the text"), (120, 480, "tokenizing the text")]
    sample_windows(tokenizer, documents[1:], 1, 12, on_progress=lambda *now: told.append(now))
    assert len(told) == 2  # less text takes no time


class Experts(nn.Module):
    """A block whose experts get the tokens above and below a bound, and one that gets none."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, hidden_states):
        out = hidden_states.clone()
        high = hidden_states[..., 0] > 2.0
        for chosen, expert in ((~high, self.experts[0]), (high, self.experts[1])):
            if chosen.any():
                out[chosen] += expert(hidden_states[chosen])
        return out


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.embed.weight.data[:, 0] = 0
        self.embed.weight.data[7, 0] = 5.0
        self.blocks = nn.ModuleList([Experts()])

    def forward(self, tokens, use_cache=False):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def test_experts_count_only_the_tokens_they_get():
    """The second expert sees nothing in the first batch; the third never does, and goes by its weights."""
    torch.manual_seed(0)
    model = Mixture().eval()
    windows = torch.randint(7, (8, 5))
    windows[6, :3] = 7  # in the second batch of four
    seen, before = {}, [e.weight.detach().clone() for e in model.blocks[0].experts]

    def change(block):
        seen.update({layer.name: gram.tokens for layer, gram in block.grams.items()})
        notes, _ = prune_block(block, SparseGPT())
        assert {layer.name: note["tokens"] for layer, note in notes.items()} == seen

    run_blocks(model, select(model).layers, windows, change)
    assert seen == {"blocks.0.experts.0": 37, "blocks.0.experts.1": 3, "blocks.0.experts.2": 0}
    by_weight = before[2].where(keep_best(before[2].abs()), 0)
    torch.testing.assert_close(model.blocks[0].experts[2].weight.detach(), by_weight)
    assert all(check_pattern(e.weight.detach()).legal for e in model.blocks[0].experts)


class Biased(nn.Module):
    """A block that is called with more than its states: something of its batch, and something for all."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, states, of_batch, *, scale):
        return self.linear(states + of_batch) * scale[0]


class WithArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.layers = nn.ModuleList(Biased() for _ in range(2))

    def forward(self, tokens, use_cache=False):
        states, of_batch = self.embedding(tokens), self.embedding(tokens.flip(1)) / 2
        for layer in self.layers:
            states = layer(states, of_batch, scale=(torch.full((1, 1, 16), 0.5), "unused"))
        return states


def test_what_is_passed_beside_the_states_is_that_of_the_batch_and_kept_once_if_it_is_the_same():
    torch.manual_seed(0)
    model = WithArguments()
    layers = select(model).layers
    expected = inputs_of(model, [layer.name for layer in layers])
    seen, calls = {}, []

    def look(block):
        seen.update(block.grams)
        calls[:] = block.calls

    run_blocks(model, layers, WINDOWS, look, batch=2)
    for layer, gram in seen.items():
        x = expected[layer.name]
        torch.testing.assert_close(gram.mean, x.t() @ x / len(x), rtol=1e-4, atol=1e-5)
    assert len(calls) == 3
    same = WINDOWS[:1].expand(6, -1)  # now all batches are the same
    run_blocks(model, layers, same, look, batch=2)
    assert len({id(call.rest[0]) for call in calls}) == 1
    assert len({call.states.data_ptr() for call in calls}) == 3


def test_a_block_comes_and_goes_with_its_weights(model):
    """Whoever has the weights is asked for them before the block runs, and told when it is done."""
    log = []

    class Logged(InModel):
        def bring(self, number, block, device):
            log.append(("bring", number))
            super().bring(number, block, device)

        def release(self, number, block):
            log.append(("release", number))
            super().release(number, block)

    layers = select(model).layers
    run_blocks(
        *(model, layers, WINDOWS, lambda block: log.append(("change", block.number))), weights=Logged()
    )
    assert log == [(what, number) for number in (0, 1) for what in ("bring", "change", "release")]
