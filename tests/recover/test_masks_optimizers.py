"""Masks and optimizers: pruned weights stay +0.0, kept ones are what a plain loop gives."""

import copy

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

import twofour
from twofour.pattern import check_pattern

from .masked_training import (
    STEPS,
    equal,
    loss_of,
    mask_gradients,
    mask_weights,
    masks_of,
    matrices,
    require_moved,
    require_zero,
    small_model,
    train,
)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd momentum decay": lambda p: torch.optim.SGD(
        p, lr=0.02, momentum=0.9, weight_decay=0.1, foreach=False
    ),
    "sgd nesterov foreach": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, foreach=True),
    "sgd dampened fused": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, foreach=False),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=False),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    # Decoupled decay by more than the whole weight turns signs round, those of zeros too.
    "adamw decay above 1": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=150.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, weight_decay=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "rmsprop centered": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, weight_decay=0.01),
    "torch adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1),
    "adafactor": lambda p: Adafactor(p),
    "adafactor fixed": lambda p: Adafactor(
        p, lr=0.01, beta1=0.9, weight_decay=0.1, relative_step=False, scale_parameter=False
    ),
    "muon": lambda p: torch.optim.Muon(matrices(p), lr=0.02, weight_decay=0.1),
}


#: Where each entry is updated on its own.
ENTRYWISE = [
    name for name in OPTIMIZERS if "adafactor" not in name and name != "muon"
]  # those two let entries of a matrix influence each other


#: Relatives of Adam and others that are seldom used: fewer steps of them.
RARE = ("nadam", "radam", "adamax", "adadelta", "asgd", "rprop")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_200_random_steps_are_those_of_the_plain_loop(name):
    """With gradient accumulation, clipping, a schedule and both ways of zeroing the gradients, at random."""
    held, plain = small_model(), small_model()
    masks = masks_of(plain)
    optimizers = []
    for model in (held, plain):
        torch.manual_seed(1)
        optimizers.append(OPTIMIZERS[name](list(model.parameters())))
    twofour.hold_masks(held).attach(optimizers[0])
    has_lr = optimizers[0].param_groups[0]["lr"] is not None
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in optimizers if has_lr]
    chance = torch.Generator().manual_seed(2)
    start = copy.deepcopy(plain)
    for step in range(STEPS // 5 if name in RARE else STEPS):
        accumulate, clip, to_none = torch.randint(2, (3,), generator=chance).tolist()
        for model, optimizer in zip((held, plain), optimizers, strict=True):
            model.zero_grad(set_to_none=bool(to_none))
            for micro in range(accumulate + 1):
                loss_of(model, step, micro).backward()
            if model is plain:
                mask_gradients(model, masks)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            if model is plain:
                mask_weights(model, masks)
        for scheduler in schedulers:
            scheduler.step()
        require_zero(held, masks)
    assert equal(held, plain)
    assert not equal(held, start)
    assert all(check_pattern(m.weight).legal for m in held if isinstance(m, nn.Linear))


@pytest.mark.parametrize("name", ENTRYWISE)
def test_a_plain_loop_that_leaves_the_gradients_alone_gives_the_same(name):
    held, plain = small_model(), small_model()
    masks = masks_of(plain)
    optimizers = [OPTIMIZERS[name](list(model.parameters())) for model in (held, plain)]
    twofour.hold_masks(held).attach(optimizers[0])
    for step in range(20):
        for model, optimizer in zip((held, plain), optimizers, strict=True):
            model.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        mask_weights(plain, masks)
        require_zero(held, masks)
    assert equal(held, plain)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_with_its_closure(search):
    held, plain = small_model(), small_model()
    masks = masks_of(plain)
    optimizers = [
        torch.optim.LBFGS(m.parameters(), lr=0.3, max_iter=6, line_search_fn=search) for m in (held, plain)
    ]
    twofour.hold_masks(held).attach(optimizers[0])
    for step in range(12):
        for model, optimizer in zip((held, plain), optimizers, strict=True):

            def closure(model=model, optimizer=optimizer, step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                if model is plain:
                    mask_gradients(model, masks)
                return loss

            optimizer.step(closure)
        mask_weights(plain, masks)
        require_zero(held, masks)
    assert equal(held, plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    model = small_model().to(dtype)
    masks = masks_of(model)
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # 1e-8 is 0 in float16
    twofour.hold_masks(model).attach(optimizer)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        require_zero(model, masks)
    require_moved(model, start, masks)


def test_an_optimizer_from_before_pruning_keeps_its_moments():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 18))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    twofour.prune_(model)
    masks = masks_of(model)
    twofour.hold_masks(model).attach(optimizer)
    moment = optimizer.state[model[0].weight]["exp_avg"]
    assert (moment[~masks["0"]] != 0).all()
    for step in range(5, 15):
        train(model, optimizer, [step])
        require_zero(model, masks)


def test_frozen_and_unfrozen():
    held, plain = small_model(), small_model()
    masks = masks_of(plain)
    held[0].weight.requires_grad_(False)
    plain[0].weight.requires_grad_(False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (held, plain)]
    twofour.hold_masks(held).attach(optimizers[0])
    assert not held[0].weight.requires_grad
    for step in range(15):
        for model, optimizer in zip((held, plain), optimizers, strict=True):
            model[0].weight.requires_grad_(step // 5 == 1)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if model is plain:
                mask_gradients(model, {k: v for k, v in masks.items() if k != "0" or step // 5 == 1})
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        mask_weights(plain, masks)
        require_zero(held, masks)
        if held[0].weight.grad is not None:
            assert not held[0].weight.grad[~masks["0"]].any()
    assert equal(held, plain)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused):
    """The scaler skips a step that overflows and the masks hold through skipped and taken steps."""
    held, plain = small_model(), small_model()
    masks = masks_of(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (held, plain)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4) for _ in range(2)]
    twofour.hold_masks(held).attach(optimizers[0])
    for step in range(20):
        for model, optimizer, scaler in zip((held, plain), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (torch.inf if step == 7 else 1)
            scaler.scale(loss).backward()
            if model is plain:
                mask_gradients(model, masks)
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        mask_weights(plain, masks)
        require_zero(held, masks)
    assert equal(held, plain)
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**15


def test_autocast_keeps_the_masks():
    model = small_model()
    masks = masks_of(model)
    start = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        require_zero(model, masks)
    require_moved(model, start, masks)


def test_many_optimizers_and_groups_added_later():
    model = small_model()
    masks = masks_of(model)
    first = torch.optim.SGD([model[0].weight], lr=0.1)
    second = torch.optim.AdamW([model[0].bias], lr=0.1)
    held = twofour.hold_masks(model).attach(first, second).attach(first)
    assert repr(held) == "Masks(2 layers, 2 optimizers)"
    second.add_param_group({"params": [model[2].weight, model[2].bias]})
    with torch.no_grad():
        model[2].weight[~masks["2"]] = 1.0
    loss_of(model, 0).backward()
    first.step()
    assert (model[2].weight[~masks["2"]] != 0).all()  # not a weight of the first
    second.step()
    require_zero(model, masks)

    held.detach(second)
    with torch.no_grad():
        model[2].weight[~masks["2"]] = 1.0
    second.step()
    assert (model[2].weight[~masks["2"]] != 0).all()
    held.apply()
    require_zero(model, masks)
    held.detach()
    assert repr(held) == "Masks(2 layers, 0 optimizers)"


def test_an_optimizer_in_the_backward_pass():
    model = small_model()
    masks = masks_of(model)
    start = copy.deepcopy(model)
    held = twofour.hold_masks(model)
    for parameter in model.parameters():
        optimizer = torch.optim.AdamW([parameter], lr=0.01)
        held.attach(optimizer)

        def take(parameter, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(take)
    for step in range(5):
        loss_of(model, step).backward()
        require_zero(model, masks)
    require_moved(model, start, masks)


def test_accelerates_optimizer():
    accelerate = pytest.importorskip("accelerate")
    model = small_model()
    masks = masks_of(model)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    twofour.hold_masks(prepared).attach(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        accelerator.backward(loss_of(prepared, step))
        optimizer.step()
    require_zero(model, masks)
    assert not equal(model, small_model())
