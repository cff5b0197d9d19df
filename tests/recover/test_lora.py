"""Masked adapters: against plain autograd on the dense formula, and merged into a legal 2:4 model."""

import datetime
import io
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import twofour
from tests.recover.processes import leave
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.recover.lora import add_masked_lora_, merge_masked_lora_
from twofour.select import as_layer


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model(seed=0):
    torch.manual_seed(seed)
    return twofour.prune_(
        nn.Sequential(nn.Linear(24, 32), nn.GELU(), Conv1D(18, 32), nn.Linear(18, 18, bias=False))
    )


def batch(step):
    return torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    x = batch(step).to(model[0].weight.dtype)
    return (model(x).float() - 3 * x[..., :18].roll(1, -1)).square().mean()


def train(model, optimizer, steps=20):
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
    return loss.item()


def require_plain_2_of_4(model, zeros):
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            assert type(module) in (nn.Linear, Conv1D)
            assert set(dict(module.named_parameters())) <= {"weight", "bias"}
            assert check_pattern(as_layer(name, module).to_matrix(module.weight.detach())).legal
            assert not module.weight[zeros[name]].any()


def zeros_of(model):
    return {
        name: module.weight == 0
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    }


def test_it_begins_as_the_model_was_and_trains_nothing_else():
    model = small_model()
    before = model(batch(0))
    own = {name: p.clone() for name, p in model.named_parameters()}
    trained = add_masked_lora_(model, rank=4, alpha=8)
    torch.testing.assert_close(model(batch(0)), before)
    assert [tuple(p.shape) for p in trained] == [(4, 24), (32, 4), (4, 32), (18, 4), (4, 18), (18, 4)]
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in trained}
    first, last = loss_of(model, 19).item(), train(model, torch.optim.AdamW(trained, lr=0.02))
    assert last < 0.9 * first
    for name, value in own.items():
        assert torch.equal(model.get_parameter(name), value), name


@pytest.mark.parametrize("position", [0, 2])
def test_output_and_gradients_are_those_of_the_formula(position):
    """In float64, written out with autograd: W + mask * (alpha / rank) * B @ A."""
    model = small_model().double()
    layer = model[position]
    add_masked_lora_(model, rank=3, alpha=6.0)
    a, b = layer.lora_a, layer.lora_b
    assert a.dtype == torch.float64
    torch.manual_seed(1)
    with torch.no_grad():
        b.normal_()
    layer.bias.requires_grad_(True)
    x = torch.randn(2, 5, a.shape[1], dtype=torch.float64, requires_grad=True)
    y = layer(x)
    weights = torch.randn_like(y)
    got = torch.autograd.grad((y * weights).sum(), (x, a, b, layer.bias))

    matrix = layer.weight.t() if position == 2 else layer.weight
    plain = F.linear(x, matrix + (matrix != 0) * 2.0 * (b @ a), layer.bias)
    want = torch.autograd.grad((plain * weights).sum(), (x, a, b, layer.bias))
    torch.testing.assert_close(y, plain)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_numerical_gradients_of_a_single_vector():
    model = twofour.prune_(nn.Sequential(nn.Linear(16, 16))).double()
    a, b = add_masked_lora_(model, rank=2, alpha=2)
    x = torch.randn(16, dtype=torch.float64, requires_grad=True)

    def run(x, a, b):
        return torch.func.functional_call(model, {"0.lora_a": a, "0.lora_b": b}, (x,))

    assert torch.autograd.gradcheck(run, (x, a, torch.randn_like(b, requires_grad=True)))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_logits_are_the_unmerged_ones_and_zeros_stay(name, dtype):
    model = small_model().to(dtype)
    zeros = zeros_of(model)
    trained = add_masked_lora_(model, rank=4, alpha=16)
    assert all(p.dtype == torch.float32 for p in trained)
    train(model, OPTIMIZERS[name](trained))
    x = batch(99).to(dtype)
    before = model(x)
    weights = {n: p.clone() for n, p in model.named_parameters() if n.endswith("weight")}
    assert merge_masked_lora_(model) is model
    assert any(not torch.equal(model.get_parameter(n), w) for n, w in weights.items())
    after = model(x)
    # The weights are the same numbers; only Conv1D's product may be summed in another order.
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(after, before, rtol=rtol, atol=atol)
    require_plain_2_of_4(model, zeros)


def test_rounding_to_bfloat16_is_part_of_the_forward():
    """So the merged linear layer gives the same bits, though the adapter is float32."""
    model = twofour.prune_(nn.Sequential(nn.Linear(64, 48))).bfloat16()
    _, b = add_masked_lora_(model, rank=2, alpha=2)
    nn.init.normal_(b)
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    before = model(x)
    assert torch.equal(merge_masked_lora_(model)(x), before)


def test_autocast_keeps_the_adapter_in_float32_and_gives_what_merging_gives():
    model = small_model()
    trained = add_masked_lora_(model, rank=4, alpha=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(model, torch.optim.AdamW(trained, lr=0.02), steps=5)  # with backward inside, too
        before = model(batch(0))
    assert before.dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in trained)
    merge_masked_lora_(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(batch(0)), before, rtol=2e-2, atol=2e-2)


def test_nothing_of_the_weight_s_size_is_kept_for_backward():
    model = twofour.prune_(nn.Sequential(nn.Linear(256, 256, bias=False)))
    add_masked_lora_(model, rank=2, alpha=2)
    x = torch.randn(3, 256)
    there_anyway = {x.data_ptr(), *(p.data_ptr() for p in model.parameters())}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x).sum()
    assert kept
    assert all(t.data_ptr() in there_anyway for t in kept)


def test_compiled_in_one_graph():
    model, plain = small_model(), small_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, run in ((model, compiled), (plain, plain)):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(add_masked_lora_(one, rank=4, alpha=8), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            (run(batch(step)) - 1).square().mean().backward()
            optimizer.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(batch(0)).float().sum().backward()
    for ours, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, want)
    before = compiled(batch(7))
    merge_masked_lora_(model)
    torch.testing.assert_close(compiled(batch(7)), before)


def test_saved_and_resumed_to_the_same_bits():
    model = small_model()
    optimizer = torch.optim.AdamW(add_masked_lora_(model, rank=4, alpha=8), lr=0.02)
    train(model, optimizer, steps=5)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, steps=5)

    again = small_model(seed=1)  # other zeros: the mask is that of the weights that are loaded
    optimizer_again = torch.optim.AdamW(add_masked_lora_(again, rank=4, alpha=8), lr=0.02)
    file.seek(0)
    weights, moments = torch.load(file)
    again.load_state_dict(weights)
    optimizer_again.load_state_dict(moments)
    train(again, optimizer_again, steps=5)
    merge_masked_lora_(model)
    merge_masked_lora_(again)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_a_language_model_to_a_checkpoint_that_check_finds_legal(pruned, tmp_path, twofour):
    model = AutoModelForCausalLM.from_pretrained(pruned)
    trained = add_masked_lora_(model, rank=4, alpha=8, exclude=["*.q_proj"])
    names = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert names
    assert not any("q_proj" in n or "lm_head" in n or "embed" in n for n in names)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    tokens = torch.randint(3, 90, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    model.eval()
    with torch.no_grad():
        before = model(tokens).logits
        torch.testing.assert_close(merge_masked_lora_(model)(tokens).logits, before, rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "merged")
    ran = twofour("pack", tmp_path / "merged", tmp_path / "packed")  # which refuses what is not 2:4
    assert ran.status == 0, ran.err
    ran = twofour("check", tmp_path / "packed", "--json")
    assert ran.status == 0, ran.err
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    with torch.no_grad():
        torch.testing.assert_close(packed(tokens).logits, before, rtol=1e-4, atol=1e-4)


def test_convolutions_stay_and_are_frozen():
    model = twofour.prune_(nn.Sequential(nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(64, 16)))
    assert len(add_masked_lora_(model, rank=2, alpha=2)) == 2
    assert type(model[0]) is nn.Conv2d
    assert not model[0].weight.requires_grad


def test_bad_input():
    model = small_model()
    for rank, alpha in ((0, 1.0), (-2, 1.0), (2, 0.0), (2, float("inf")), (2, float("nan"))):
        with pytest.raises(InputError, match="must be"):
            add_masked_lora_(model, rank, alpha)
    with pytest.raises(InputError, match="no masked adapters"):
        merge_masked_lora_(model)
    with torch.no_grad():
        model[2].weight[:4, 5] = 1.0
    with pytest.raises(InputError, match=r"^2: row 5, group 0 keeps 4 of 4.*exclude"):
        add_masked_lora_(model, 2, 2)
    assert type(model[0]) is nn.Linear
    assert model[0].weight.requires_grad  # nothing was changed for the layers before the bad one
    add_masked_lora_(model, 2, 2, exclude=["2"])
    with pytest.raises(InputError, match="already"):
        add_masked_lora_(model, 2, 2, exclude=["2"])
    with pytest.raises(InputError, match="input is torch.float64"):
        model(batch(0).double())
    with pytest.raises(InputError, match="no linear layer"):
        add_masked_lora_(twofour.prune_(nn.Sequential(nn.Conv2d(16, 16, 1))), 2, 2)
    with pytest.raises(InputError, match="packed already"):
        add_masked_lora_(twofour.pack_(small_model()), 2, 2)


def test_the_example_in_the_docs_runs():
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(script, "lora.md", "exec"), names)
    assert all(type(names["model"][i]).__name__ == "SparseLinear" for i in (0, 2))


WORLD = 2


def process(rank, directory):
    """FSDP2: adapters before fully_shard, training, and a merge of the sharded tensors."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{directory}/rendezvous"),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    model, plain = small_model(), small_model()
    for one in (model, plain):
        torch.manual_seed(3)
        add_masked_lora_(one, rank=4, alpha=8)
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    for one in (model, plain):
        optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.02)
        for step in range(5):
            optimizer.zero_grad()
            x = batch(step)
            x = x[rank : rank + 1] if one is model else x
            (one(x) - x[..., :18]).square().mean().backward()
            optimizer.step()
        merge_masked_lora_(one)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)
        assert torch.equal(state[key] == 0, value == 0)
    dist.barrier()
    leave()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_fsdp2_is_one_process(tmp_path):
    mp.spawn(process, (str(tmp_path),), nprocs=WORLD)
