"""Masks under DDP and FSDP2: two gloo processes against one, with the same batches."""

import copy
import datetime

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import twofour
from tests.recover.processes import leave
from twofour.errors import InputError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")

STEPS = 10
WORLD = 2


class Net(nn.Module):
    """Rows that two processes cannot share evenly, columns that are no multiple of 4, a transposed layer."""

    def __init__(self, seed=0):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(22, 33)
        self.block = nn.Sequential(nn.GELU(), nn.Linear(33, 18))
        self.last = Conv1D(16, 18)  # weight [18, 16]: groups run down the rows, and 9 rows cut one

    def forward(self, x):
        return self.last(self.block(self.first(x)))


MASKED = ("first", "block.1", "last")


def batch(step, rank=None):
    x = torch.randn(8, 22, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x.chunk(WORLD)[rank]


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def run_steps(model, optimizer, rank=None, steps=range(STEPS)):
    """The losses of the whole batches, whoever computed them."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = batch(step, rank)
        loss = (model(x) - x[:, :16]).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        mean = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(mean)
            mean /= WORLD
        losses.append(mean.item())
    return losses


def one_process():
    model = twofour.prune_(Net())
    optimizer = optimizer_of(model)
    twofour.hold_masks(model).attach(optimizer)
    return model, optimizer, run_steps(model, optimizer)


def require_same(state, losses):
    """State dict and losses against those of one process; masks and zeros exactly."""
    model, _, expected = one_process()
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    want = model.state_dict()
    assert set(state) == set(want)
    for name in MASKED:
        mask = state[f"{name}.weight_mask"]
        assert torch.equal(mask, want[f"{name}.weight_mask"]), name
        weight = state[f"{name}.weight"]
        assert not weight.view(torch.int32)[mask == 0].any(), name
    for key, value in want.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def full_state(model):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def shard(model, own=False, placement=None):
    """`own`: each layer as a unit of its own, which changes its class."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    if own:
        fully_shard(model.first, mesh=mesh)
    fully_shard(model.block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(model, mesh=mesh)
    return model


def require_sharded(model):
    from torch.distributed.tensor import DTensor

    for name in MASKED:
        weight, mask = (
            model.get_submodule(name)._parameters["weight"],
            model.get_buffer(f"{name}.weight_mask"),
        )
        assert isinstance(mask, DTensor)
        assert mask.placements == weight.placements
        assert mask.to_local().shape == weight.to_local().shape


def ddp_held_inside(rank):
    model = twofour.prune_(Net())
    masks = twofour.hold_masks(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    assert not parallel.modules_buffers  # nothing is sent before each forward
    optimizer = optimizer_of(parallel)
    masks.attach(optimizer)
    losses = run_steps(parallel, optimizer, rank)
    require_same(model.state_dict(), losses)


def ddp_held_outside(rank):
    """Ranks that begin differently get the weights of rank 0 from DDP, and then hold_masks sees those."""
    model = twofour.prune_(Net(seed=rank))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = optimizer_of(parallel)
    twofour.hold_masks(parallel).attach(optimizer)
    losses = run_steps(parallel, optimizer, rank)
    require_same(model.state_dict(), losses)


def ddp_masks_of_another_rank(rank):
    """Held before DDP with other weights: on rank 1 they are overwritten, and the masks are refused."""
    model = twofour.prune_(Net(seed=rank))
    masks = twofour.hold_masks(model)
    parallel = nn.parallel.DistributedDataParallel(model)
    if rank == 0:
        masks.attach(optimizer_of(parallel))
    else:
        with pytest.raises(InputError, match="first: .* do not belong together"):
            masks.attach(optimizer_of(parallel))


def fsdp_held_before(rank):
    model = twofour.prune_(Net())
    masks = twofour.hold_masks(model)
    shard(model, own=True)
    optimizer = optimizer_of(model)
    masks.attach(optimizer)
    losses = run_steps(model, optimizer, rank)
    require_sharded(model)
    require_same(full_state(model), losses)
    masks.remove()
    assert not any("mask" in key for key in full_state(model))


def fsdp_held_after(rank):
    model = shard(twofour.prune_(Net()))
    optimizer = optimizer_of(model)
    model(batch(0))  # which leaves the root's parameters gathered
    twofour.hold_masks(model).attach(optimizer)
    require_sharded(model)
    losses = run_steps(model, optimizer, rank)
    require_same(full_state(model), losses)


def fsdp_cut_across_groups(rank):
    """Shard(1) of a [18, 32] weight would cut at a group; of [20, 36] at 18 columns, which cuts one."""
    from torch.distributed.tensor import Shard

    torch.manual_seed(0)
    model = Net()
    model.first, model.block[1], model.last = nn.Linear(22, 36), nn.Linear(36, 20), nn.Linear(20, 16)
    twofour.prune_(model)
    single = copy.deepcopy(model)
    for held_first in (True, False):
        sharded, alone = copy.deepcopy(model), copy.deepcopy(single)
        masks = twofour.hold_masks(sharded) if held_first else None
        shard(sharded, placement=lambda parameter: Shard(1) if parameter.dim() == 2 else None)
        optimizers = optimizer_of(sharded), optimizer_of(alone)
        (masks or twofour.hold_masks(sharded)).attach(optimizers[0])
        require_sharded(sharded)
        twofour.hold_masks(alone).attach(optimizers[1])
        losses = run_steps(sharded, optimizers[0], rank, range(3))
        torch.testing.assert_close(losses, run_steps(alone, optimizers[1], None, range(3)))
        state = full_state(sharded)
        for name in MASKED:
            mask = state[f"{name}.weight_mask"]
            assert torch.equal(mask, alone.get_buffer(f"{name}.weight_mask"))
            assert not state[f"{name}.weight"].view(torch.int32)[mask == 0].any()


def fsdp_checkpoints_go_both_ways(rank):
    """One process → two → one: from full state dicts, with the optimizer's state."""
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(full_state_dict=True)
    model, optimizer, _ = one_process()
    saved = copy.deepcopy(
        (model.state_dict(), dcp.get_optimizer_state_dict(model, optimizer, options=options))
    )
    run_steps(model, optimizer, None, range(STEPS, STEPS + 4))

    sharded = twofour.prune_(Net(seed=9))  # other weights, other masks
    masks = twofour.hold_masks(sharded)
    shard(sharded)
    if rank:  # only rank 0 has the file
        saved = ({}, {})
    broadcast = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp.set_model_state_dict(sharded, dict(saved[0]), options=broadcast)  # it writes into what it is given
    sharded_optimizer = optimizer_of(sharded)
    dcp.set_optimizer_state_dict(sharded, sharded_optimizer, saved[1], options=broadcast)
    masks.attach(sharded_optimizer)
    run_steps(sharded, sharded_optimizer, rank, range(STEPS, STEPS + 2))
    require_sharded(sharded)
    state = full_state(sharded)
    optimizer_state = dcp.get_optimizer_state_dict(sharded, sharded_optimizer, options=options)

    back = twofour.prune_(Net(seed=5))
    back_optimizer = optimizer_of(back)
    twofour.hold_masks(back).attach(back_optimizer)
    back.load_state_dict(state)
    dcp.set_optimizer_state_dict(back, back_optimizer, optimizer_state, options=options)
    run_steps(back, back_optimizer, None, range(STEPS + 2, STEPS + 4))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(back.state_dict()[key], value, rtol=1e-4, atol=1e-5)
        if key.endswith("mask"):
            assert torch.equal(back.state_dict()[key], value)

    # And into the sharded model that is being trained: masks are DTensors by now.
    dcp.set_model_state_dict(sharded, dict(saved[0]), options=broadcast)  # it writes into what it is given
    require_sharded(sharded)
    bad = {key: value.clone() for key, value in state.items()}
    bad["first.weight"] += 1
    with pytest.raises(InputError, match="first: .* are not zero"):
        dcp.set_model_state_dict(sharded, bad, options=options)


def fsdp_sharded_files(rank, directory):
    """torch.distributed.checkpoint writes what each rank has, and another job of two reads it."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = shard(twofour.prune_(Net()))
    optimizer = optimizer_of(model)
    twofour.hold_masks(model).attach(optimizer)
    run_steps(model, optimizer, rank, range(2))
    dcp.save(get_model_state_dict(model), checkpoint_id=directory)

    with torch.device("meta"):
        other = Net()
    masks = twofour.hold_masks(other)
    shard(other)
    other.to_empty(device="cpu")
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(other, state)
    masks.attach(optimizer_of(other))
    want, got = full_state(model), full_state(other)
    assert all(torch.equal(want[key], got[key]) for key in want)


def fsdp_layers_sharded_on_their_own_are_not_overlooked(rank):
    model = shard(twofour.prune_(Net()), own=True)
    with pytest.raises(InputError, match="first: it is sharded on its own.*before fully_shard"):
        twofour.hold_masks(model)


def fsdp_optimizer_from_before(rank):
    model = twofour.prune_(Net())
    optimizer = optimizer_of(model)
    masks = twofour.hold_masks(model)
    shard(model)
    with pytest.raises(InputError, match="Build it after fully_shard"):
        masks.attach(optimizer)


def process(rank, directory, names):
    torch.set_num_threads(1)
    dist.init_process_group(
        *("gloo", f"file://{directory}/rendezvous"),
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    for name in names:
        scenario = globals()[name]
        scenario(rank, f"{directory}/files") if name.endswith("files") else scenario(rank)
        dist.barrier()
    leave()


def run(tmp_path, *scenarios):
    """All in one pair of processes: starting them takes longer than the steps."""
    mp.spawn(process, (str(tmp_path), [s.__name__ for s in scenarios]), nprocs=WORLD)


def test_ddp_is_one_process(tmp_path):
    run(tmp_path, ddp_held_inside, ddp_held_outside, ddp_masks_of_another_rank)


def test_fsdp2_is_one_process(tmp_path):
    run(
        *(tmp_path, fsdp_held_before, fsdp_held_after, fsdp_cut_across_groups),
        *(fsdp_checkpoints_go_both_ways, fsdp_sharded_files),
        *(fsdp_layers_sharded_on_their_own_are_not_overlooked, fsdp_optimizer_from_before),
    )
