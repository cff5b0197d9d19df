"""Masks that move: against SR-STE written out by hand, and a plain 2:4 model at the end of whatever."""

import copy
import datetime
import io

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

import twofour
from tests.recover.processes import leave
from twofour.errors import InputError, TwoFourError
from twofour.pattern import check_pattern, keep_best
from twofour.recover.adaptive import AdaptiveMasks, largest_two
from twofour.select import Layer, as_layer, select


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model(seed=0):
    """Columns that are no multiple of 4, and one weight that is stored transposed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 32), nn.GELU(), Conv1D(18, 32), nn.Linear(18, 18))


def adaptive(model, decay=0.1, until=0.8):
    return AdaptiveMasks(model, select(getattr(model, "_orig_mod", model)).layers, decay, until)


def batch(step, part=0):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(100 * part + step))


def loss_of(model, step, part=0):
    x = batch(step, part).to(next(model.parameters()).dtype)
    return (model(x).float() - 3 * x[:, :18].roll(1, 1)).square().mean()


def require_plain_2_of_4(model):
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.GELU):
            layer = as_layer(name, module)
            assert isinstance(layer, Layer), layer  # as_layer knows plain classes only
            matrix = layer.to_matrix(module.weight.detach())
            report = check_pattern(matrix)
            assert report.legal
            assert report.full > 0
            zeros = matrix.contiguous().view({2: torch.int16, 4: torch.int32}[matrix.element_size()])
            assert (zeros[matrix == 0] == 0).all()  # +0.0, not -0.0


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd momentum decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
}


def by_hand(model, optimizer, masks, progress, parts):
    """One step of SR-STE with nothing of ours: the gradients of the masked weights, the decay, the step."""
    weights = [m.weight for m in model if not isinstance(m, nn.GELU)]
    kept = []
    for module in model:
        if isinstance(module, nn.GELU):
            continue
        groups_along_rows = module.weight.t() if isinstance(module, Conv1D) else module.weight
        keep = torch.zeros(groups_along_rows.shape, dtype=torch.bool)
        for row, values in enumerate(groups_along_rows.tolist()):
            for first in range(0, len(values), 4):
                group = range(first, min(first + 4, len(values)))
                for column in sorted(group, key=lambda i: (-abs(values[i]), i))[:2]:
                    keep[row, column] = True
        kept.append(keep.t() if isinstance(module, Conv1D) else keep)
    dense = [w.detach().clone() for w in weights]
    with torch.no_grad():
        for weight, keep in zip(weights, kept, strict=True):
            weight.mul_(keep)
    optimizer.zero_grad()
    for part in range(parts):
        (loss_of(model, masks["step"], part) / parts).backward()
    with torch.no_grad():
        for weight, keep, before in zip(weights, kept, dense, strict=True):
            weight.copy_(before)
            weight.grad += masks["decay"] * min(1, progress / masks["until"]) * ~keep * before
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("pruned", [False, True])
def test_steps_are_those_of_the_loop_by_hand(name, pruned):
    """With gradient accumulation and clipping; then a plain 2:4 model in which nothing moves any more."""
    model, plain = small_model(), small_model()
    if pruned:
        for one in (model, plain):
            twofour.prune_(one)
    parameters = dict(model.named_parameters())
    optimizer = OPTIMIZERS[name](model.parameters())  # before the masks
    other = OPTIMIZERS[name](plain.parameters())
    masks = adaptive(model)
    steps = 20
    for step in range(15):
        optimizer.zero_grad()
        for part in range(2):
            (loss_of(model, step, part) / 2).backward()
        masks.regularize_(step / steps)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        masks.after_step((step + 1) / steps)
        by_hand(plain, other, {"step": step, "decay": 0.1, "until": 0.8}, step / steps, parts=2)
        assert not masks.frozen
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(parameters[key], parameter, rtol=1e-4, atol=2e-6)
    assert masks.flips > 0
    before = model(batch(99))
    flips = masks.flips
    masks.after_step(0.8)
    assert masks.frozen
    assert masks.flips == flips
    assert torch.equal(model(batch(99)), before)  # what is set to zero counted as zero already
    require_plain_2_of_4(model)
    assert all(value is parameters[key] for key, value in model.named_parameters())

    held = twofour.hold_masks(model).attach(
        optimizer
    )  # the same optimizer, with moments for what is now zero
    patterns = {k: p == 0 for k, p in parameters.items() if p.dim() == 2}
    for step in range(15, 20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        masks.regularize_(step / steps)
        optimizer.step()
        masks.after_step((step + 1) / steps)
        for key, zero in patterns.items():
            assert not parameters[key][zero].any()
    held.remove()
    require_plain_2_of_4(model)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_largest_two_is_keep_best_of_the_magnitudes(data):
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 19))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, float("inf")])  # many of them equal
    matrix = torch.tensor([[data.draw(values) for _ in range(columns)] for _ in range(rows)])
    want = keep_best(matrix.abs())
    assert torch.equal(largest_two(Layer("x", "linear", (rows, columns)), matrix), want)
    assert torch.equal(largest_two(Layer("x", "conv1d", (rows, columns)), matrix.t()), want.t())


def test_a_convolution_along_its_channels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(18, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 16, 1))
    model = model.to(memory_format=torch.channels_last)
    masks = adaptive(model, until=1.0)
    x = torch.randn(2, 18, 6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        assert (model[0].weight.grad != 0).all()  # straight through, to the pruned as well
        masks.regularize_(step / 5)
        optimizer.step()
    before = model(x)
    masks.freeze_()
    torch.testing.assert_close(model(x), before)
    for module in (model[0], model[2]):
        assert type(module) is nn.Conv2d
        groups = module.weight.detach().permute(0, 2, 3, 1)
        assert check_pattern(groups).legal
        assert (groups == 0).any()


def test_the_decay_grows_from_nothing_to_the_freeze_and_touches_the_pruned_only():
    model = small_model()
    weight = model[0].weight
    masks = adaptive(model, decay=0.5, until=0.5)
    pruned = ~keep_best(weight.detach().abs())
    for progress, strength in ((0.0, 0.0), (0.1, 0.1), (0.25, 0.25), (0.49, 0.49)):
        model.zero_grad()
        loss_of(model, 0).backward()
        before = weight.grad.clone()
        masks.regularize_(progress)
        added = weight.grad - before
        torch.testing.assert_close(added[pruned], strength * weight.detach()[pruned], atol=1e-6, rtol=1e-3)
        assert not added[~pruned].any()
    model.zero_grad()
    masks.regularize_(0.3)  # a layer without a gradient (frozen, or not used) is left alone
    assert weight.grad is None


def test_flips_counts_entries_that_differ_from_the_start():
    model = nn.Sequential(nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]).repeat(16, 4))
    masks = adaptive(model)
    assert masks.flips == 0
    with torch.no_grad():
        model[0].weight[0, :4] = torch.tensor([4.0, 3.0, 9.0, 1.0])  # 1 goes, 2 comes
        model[0].weight[5, 8:12] = torch.tensor([0.0, 0.0, 1.0, -1.0])  # both go
    assert masks.flips == 2 + 4


def state_bytes(model, optimizer):
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return file.getvalue()


@pytest.mark.parametrize("stop", [3, 9])
def test_resumed_in_the_middle_to_the_same_bits(stop):
    """Before the freeze (at step 6 of 12) and after it."""
    steps, until = 12, 0.5

    def run(model, optimizer, masks, start, end):
        for step in range(start, end):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            masks.regularize_(step / steps)
            optimizer.step()
            masks.after_step((step + 1) / steps)
            if masks.frozen:
                twofour.hold_masks(model).attach(optimizer)

    def begin():
        model = twofour.prune_(small_model())
        return model, torch.optim.AdamW(model.parameters(), lr=0.02), adaptive(model, until=until)

    model, optimizer, masks = begin()
    run(model, optimizer, masks, 0, stop)
    assert masks.frozen == (stop > 6)
    saved = state_bytes(model, optimizer)
    names = set(small_model().state_dict())
    assert (
        names <= set(model.state_dict()) <= names | {f"{n[:-7]}.weight_mask" for n in names if "weight" in n}
    )
    run(model, optimizer, masks, stop, steps)

    again, optimizer_again, masks_again = begin()
    if stop > 6:
        masks_again.freeze_()
        twofour.hold_masks(again).attach(optimizer_again)
    state = torch.load(io.BytesIO(saved))
    again.load_state_dict(state["model"])
    optimizer_again.load_state_dict(state["optimizer"])
    run(again, optimizer_again, masks_again, stop, steps)
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    if stop < 6:
        assert masks_again.flips == masks.flips > 0


@pytest.mark.parametrize("compile_first", [False, True])
def test_compiled_in_one_graph_and_again_after_the_freeze(compile_first):
    model, plain = small_model(), small_model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if compile_first:
        compiled(batch(0))
    masks, plain_masks = adaptive(compiled if compile_first else model), adaptive(plain)
    for one, its_masks in ((compiled, masks), (plain, plain_masks)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, step).backward()
            its_masks.regularize_(step / 4)
            optimizer.step()
        its_masks.freeze_()
    for ours, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, want)
    torch.testing.assert_close(compiled(batch(9)), plain(batch(9)))
    require_plain_2_of_4(model)


def test_autocast_masks_by_the_float32_weights():
    """Rounded to bfloat16 the four are equal, and the first two would win."""
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 1.0001, 1.0002, 1.0003]).repeat(16, 4))
    masks = adaptive(model)
    x = torch.eye(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal((y != 0).float(), torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(4)[:, None].expand(16, 16))
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert (model[0].weight.grad != 0).all()
    masks.regularize_(0.8)
    masks.freeze_()
    assert (model[0].weight[:, :4] == torch.tensor([0.0, 0.0, 1.0002, 1.0003])).all()


def test_a_model_in_bfloat16():
    model = small_model().bfloat16()
    masks = adaptive(model, until=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        masks.regularize_(step / 10)
        optimizer.step()
        masks.after_step((step + 1) / 10)
    assert masks.frozen
    require_plain_2_of_4(model)


def test_a_copy_moves_on_its_own():
    model = small_model()
    masks = adaptive(model)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(batch(0)), model(batch(0)))
    masks.freeze_()
    assert (twin[0].weight != 0).all()


def test_unfrozen_layers_are_not_packed_or_held_by_mistake():
    model = small_model()
    masks = adaptive(model)
    for call in (twofour.pack_, twofour.hold_masks):
        with pytest.raises(InputError, match="no layer"):
            call(model)
    masks.freeze_()
    twofour.pack_(model)


def test_bad_input():
    model = small_model()
    layers = select(model).layers
    for decay, until in ((-1, 0.5), (float("nan"), 0.5), (0.1, 0), (0.1, 1.5), (0.1, float("nan"))):
        with pytest.raises(InputError, match="must be"):
            AdaptiveMasks(model, layers, decay, until)
    with pytest.raises(InputError, match="no layers"):
        AdaptiveMasks(model, (), 0.1, 0.5)
    with pytest.raises(InputError, match=r"^0: .*its shape is another"):
        AdaptiveMasks(model, [Layer("0", "linear", (3, 4))], 0.1, 0.5)
    with pytest.raises(InputError, match=r"^1: .*not a Linear"):
        AdaptiveMasks(model, [*layers, Layer("1", "linear", (3, 4))], 0.1, 0.5)
    with pytest.raises(InputError, match=r"^model.0: .*no such layer"):
        AdaptiveMasks(model, [Layer("model.0", "linear", (3, 4))], 0.1, 0.5)
    assert type(model[0]) is nn.Linear  # nothing was changed for the layers before the bad one
    masks = AdaptiveMasks(model, layers, 0.1, 0.5)
    with pytest.raises(InputError, match="moving already"):
        AdaptiveMasks(model, layers, 0.1, 0.5)
    with torch.no_grad():
        model[2].weight[3, 3] = float("nan")
    with pytest.raises(TwoFourError, match=r"^2: .*diverged"):
        masks.freeze_()
    assert not masks.frozen
    assert (model[0].weight != 0).all()


WORLD = 2


def train(model, wrapped, rank=None):
    """8 steps with a freeze after 6; how many entries had moved by then."""
    masks = adaptive(model, until=0.75)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.02)
    for step in range(8):
        optimizer.zero_grad()
        x = batch(step)
        x = x if rank is None else x.chunk(WORLD)[rank]
        (wrapped(x) - x[:, :18]).square().mean().backward()
        masks.regularize_(step / 8)
        optimizer.step()
        masks.after_step((step + 1) / 8)
        if masks.frozen:
            twofour.hold_masks(model).attach(optimizer)
    assert masks.frozen
    return masks.flips


def require_same(state, flips):
    model = small_model()
    assert train(model, model) == flips > 0
    for key, value in model.state_dict().items():
        if key.endswith("mask"):
            assert torch.equal(state[key], value), key
        else:
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def ddp(rank):
    model = small_model()
    flips = train(model, nn.parallel.DistributedDataParallel(model), rank)
    require_same(model.state_dict(), flips)


def fsdp2(rank):
    """Conv1D's groups run down the rows, which are cut: each process needs the whole mask for its part."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = small_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    flips = torch.tensor(train(model, model, rank))
    dist.all_reduce(flips)  # each counts its own part
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    require_same(state, flips.item())

    single = small_model()
    masks = adaptive(single)
    fully_shard(single[0], mesh=init_device_mesh("cpu", (WORLD,)))
    with pytest.raises(InputError, match=r"^0: .*FSDPDerivedLinear.*blocks"):
        masks.regularize_(0.1)


def process(rank, directory):
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{directory}/rendezvous"),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    for scenario in (ddp, fsdp2):
        scenario(rank)
        dist.barrier()
    leave()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_ddp_and_fsdp2_are_one_process(tmp_path):
    mp.spawn(process, (str(tmp_path),), nprocs=WORLD)
