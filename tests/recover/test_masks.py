"""Masks in somebody's own loop: pruned weights stay +0.0, kept ones are what a plain loop gives.

The plain loop, which everything is compared with bit for bit: mask the gradients after the backward passes,
clip, step, mask the weights.
"""

import copy
import gc
import io
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from transformers.optimization import Adafactor
from transformers.pytorch_utils import Conv1D

import twofour
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.recover.mask_tensor import zero_pruned_
from twofour.select import as_layer

STEPS = 200


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model(seed=0):
    torch.manual_seed(seed)
    return twofour.prune_(nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 18)))


def masks_of(model):
    """What should be held, said in another way: two of four stay, nonzeros first, then those on the left."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            mask = torch.zeros(module.weight.shape, dtype=torch.bool)
            for row, values in enumerate(module.weight.tolist()):
                for start in range(0, len(values), 4):
                    group = values[start : start + 4]
                    for kept in sorted(range(len(group)), key=lambda i: (group[i] == 0, i))[:2]:
                        mask[row, start + kept] = True
            found[name] = mask
    return found


def require_zero(model, masks):
    for name, mask in masks.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        assert not bits[~mask].any(), name  # no bit is set, so not even a sign


INPUTS = torch.randn(STEPS + 2, 8, 24, generator=torch.Generator().manual_seed(3))


def loss_of(model, step, micro=0):
    x = INPUTS[step + micro].to(model[0].bias.dtype)
    return (model(x) - 3 * x[:, :18].roll(1, 1)).square().mean()


def mask_gradients(model, masks):
    for name, mask in masks.items():
        gradient = model.get_parameter(f"{name}.weight").grad
        gradient.copy_(torch.where(mask, gradient, 0.0))


@torch.no_grad()
def mask_weights(model, masks):
    for name, mask in masks.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(torch.where(mask, weight, 0.0))


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def matrices(parameters):
    return [p for p in parameters if p.dim() == 2]


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    for step in range(20):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        require_zero(model, masks)


def train(model, optimizer, steps=range(5)):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


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


def test_the_state_of_an_optimizer_is_loaded_and_goes_on():
    """Stop and resume, with everything from the saved file: the same weights as without the stop."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    train(model, optimizer, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(10, 20))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = small_model(seed=7)  # other weights, other masks
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=0.5)
    twofour.hold_masks(resumed).attach(optimizer)
    resumed.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    train(resumed, optimizer, range(10, 20))
    assert equal(model, resumed)
    assert torch.equal(model[0].weight_mask, resumed[0].weight_mask)


def test_resumed_on_the_meta_device():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    train(model, optimizer)
    with torch.device("meta"):
        fresh = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 18))
    masks = twofour.hold_masks(fresh)
    with pytest.raises(InputError, match=r"0: the weight has no values yet .* Load a state dict"):
        masks.attach(torch.optim.SGD(fresh.parameters(), lr=0.01))
    fresh.load_state_dict(model.state_dict(), assign=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, fresh)]
    masks.attach(optimizers[1])
    twofour.hold_masks(model).attach(optimizers[0])
    for m, o in zip((model, fresh), optimizers, strict=True):
        for p in m.parameters():
            p.requires_grad_(True)
        train(m, o, range(5, 9))
    assert equal(model, fresh)
    require_zero(fresh, {"0": model[0].weight_mask.bool()})


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        require_zero(model, masks)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("average", [None, swa_utils.get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_models_have_the_same_zeros(average, use_buffers):
    model = small_model()
    masks = masks_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    twofour.hold_masks(model).attach(optimizer)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
    for step in range(10):
        train(model, optimizer, [step])
        averaged.update_parameters(model)
        require_zero(averaged.module, masks)
    assert not equal(model, averaged.module)
    assert torch.equal(averaged.module[0].weight_mask, model[0].weight_mask)
    twofour.hold_masks(averaged.module).remove()
    twofour.pack_(averaged.module)


def graph_breaks(compiled, *arguments):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled(*arguments)
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_a_compiled_step_of_adamw():
    """torch breaks the graph at AdamW's step by itself; masks add no break."""
    held, dense = small_model(), small_model()
    masks = masks_of(held)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (held, dense)]
    twofour.hold_masks(held).attach(optimizers[0])
    breaks = []
    for model, optimizer in zip((held, dense), optimizers, strict=True):

        @torch.compile(backend="aot_eager")
        def train_step(step, model=model, optimizer=optimizer):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        breaks.append(graph_breaks(train_step, 0))
        for step in range(1, 4):
            with torch.no_grad():
                model[0].weight[~masks["0"]] = 1.0  # so that the compiled step has something to undo
            train_step(step)
            if model is held:
                require_zero(held, masks)
                assert not optimizer.state[model[0].weight]["exp_avg"][~masks["0"]].any()
    assert breaks[0] == breaks[1]


def test_a_step_compiled_into_one_graph():
    model = small_model()
    eager = small_model()
    masks = masks_of(model)
    optimizers = [torch.optim.Muon(matrices(m.parameters()), lr=0.01) for m in (model, eager)]
    twofour.hold_masks(model).attach(optimizers[0])
    twofour.hold_masks(eager).attach(optimizers[1])
    compiled = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager")
    for step in range(4):
        for m, take in ((model, compiled), (eager, optimizers[1].step)):
            m.zero_grad()
            loss_of(m, step).backward()
            take()
        require_zero(model, masks)
    torch.testing.assert_close(model[0].weight, eager[0].weight, atol=1e-3, rtol=1e-2)  # bf16 inside


def test_a_compiled_model_is_held_by_its_own_names():
    compiled = torch.compile(small_model(), backend="eager")
    masks = twofour.hold_masks(compiled)
    assert [layer.name for layer in masks.layers] == ["0", "2"]


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


def test_nan_and_infinity_do_not_pass_the_mask():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.tensor([torch.nan, -torch.inf, -1.0, -0.0, 5.0, torch.nan], dtype=dtype)
        zero_pruned_(tensor, torch.tensor([0, 0, 0, 0, 1, 1], dtype=torch.uint8))
        assert tensor[:4].tolist() == [0.0] * 4
        assert not tensor[:4].signbit().any()
        assert tensor[4] == 5
        assert tensor[5].isnan()


def test_masking_in_place_for_any_layout():
    torch.manual_seed(0)
    for make in (
        lambda: torch.randn(300, 401),
        lambda: torch.randn(300, 401).t(),
        lambda: torch.randn(8, 6, 3, 3).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(0, 4),
    ):
        tensor = make()
        mask = (torch.rand(tensor.shape) < 0.5).to(torch.uint8)
        expected = torch.where(mask.bool(), tensor, 0)
        address = tensor.data_ptr()
        zero_pruned_(tensor, mask)
        assert torch.equal(tensor, expected)
        assert tensor.data_ptr() == address


def test_gradients_with_a_graph():
    model = small_model()
    masks = masks_of(model)
    twofour.hold_masks(model)
    loss_of(model, 0).backward(create_graph=True)
    gradient = model[0].weight.grad
    assert gradient.requires_grad
    assert not gradient[~masks["0"]].any()
    gradient.square().sum().backward()


def test_a_kept_zero_may_move():
    """Groups with more than two zeros keep the left ones of them, the positions that pack stores."""
    model = nn.Sequential(nn.Linear(20, 16))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[:, 7] = 1.0
        model[0].weight[:, 8] = 1.0
        model[0].weight[:, 13] = -0.0
        model[0].weight[:, 18] = 1.0
    masks = twofour.hold_masks(model)
    assert model[0].weight_mask[0].tolist() == [1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 0]
    assert torch.equal(model[0].weight_mask.bool(), masks_of(model)["0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks.attach(optimizer)
    model(torch.randn(8, 20)).square().sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight != 0, model[0].weight_mask.bool())
    masks.remove()
    packed = twofour.pack_(model)[0].packed
    assert packed.shape == (16, 20)


def test_convolutions_and_transposed_linears():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(16, 16, 3)
            self.odd = nn.Conv2d(16, 18, 1)
            self.second = nn.Conv2d(18, 16, 1)
            self.last = Conv1D(20, 16)

        def forward(self, x):
            return self.last(self.second(self.odd(self.first(x).relu())).mean((2, 3)))

    torch.manual_seed(0)
    model = twofour.prune_(Net())
    masks = twofour.hold_masks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.3)
    masks.attach(optimizer)
    before = {name: mask.clone() for name, mask in model.named_buffers()}
    assert list(before) == [f"{n}.weight_mask" for n in ("first", "odd", "second", "last")]
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(4, 16, 5, 5)).square().sum().backward()
        optimizer.step()
    for layer in masks.layers:
        weight = model.get_parameter(f"{layer.name}.weight")
        assert check_pattern(layer.to_matrix(weight)).legal
        assert torch.equal(weight != 0, before[f"{layer.name}.weight_mask"].bool())
        assert as_layer(layer.name, model.get_submodule(layer.name)) == layer


def test_a_dense_model_is_refused_and_left_as_it_was():
    model = small_model()
    with torch.no_grad():
        model[2].weight[3, 4:8] = torch.tensor([1.0, 2.0, 3.0, 0.0])
    before = set(model.state_dict())
    with pytest.raises(InputError, match=r"^2: row 3, group 1 keeps 3 of 4 .*twofour.prune_\(model\)"):
        twofour.hold_masks(model)
    assert set(model.state_dict()) == before
    assert not model[0].weight._post_accumulate_grad_hooks
    assert len(twofour.hold_masks(model, exclude=["2"]).layers) == 1
    model = small_model()
    with torch.no_grad():
        model[2].weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="2: .*NaN"):
        twofour.hold_masks(model)


def test_patterns():
    model = small_model()
    assert [layer.name for layer in twofour.hold_masks(model, include=["2"]).layers] == ["2"]
    with pytest.raises(InputError, match="has masks already"):
        twofour.hold_masks(model, include=["0"])
    with pytest.raises(InputError, match="no layer of the model matches"):
        twofour.hold_masks(small_model(), exclude=["nothing"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda state: state["0.weight_mask"].fill_(1),
            r"0: the mask keeps 4 of 4 weights in row 0, group 0",
        ),
        (lambda state: state["2.weight_mask"].zero_(), r"2: \d+ weights that the mask prunes are not zero"),
        (lambda state: state["2.weight"].fill_(1), r"2: \d+ weights that the mask prunes are not zero"),
        (lambda state: state["0.weight_mask"].mul_(2), r"0: the mask has values other than 0 and 1"),
    ],
)
def test_masks_that_do_not_fit_are_refused_by_name(damage, message):
    model = small_model()
    twofour.hold_masks(model)
    state = copy.deepcopy(model.state_dict())
    damage(state)
    with pytest.raises(InputError, match=message):
        model.load_state_dict(state)
    damaged = copy.deepcopy(model)  # with masks, but held by nobody
    with pytest.raises(InputError, match=message):
        twofour.hold_masks(damaged)


def test_weights_alone_must_fit_the_masks_that_are_there():
    model, other = small_model(), small_model(seed=5)
    twofour.hold_masks(model)
    with pytest.raises(InputError, match="not zero"):
        model.load_state_dict(other.state_dict(), strict=False)


def test_the_masks_of_a_copy_are_taken():
    model = small_model()
    masks = masks_of(model)
    held = twofour.hold_masks(model)
    assert twofour.hold_masks(model) is held
    # A weight that is kept but zero now: only the mask knows that the right one of the zeros is kept.
    with torch.no_grad():
        model[0].weight.zero_()
    copied = copy.deepcopy(model)
    again = twofour.hold_masks(copied)
    assert again is not held
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
    again.attach(optimizer)
    train(copied, optimizer, range(3))
    assert torch.equal(copied[0].weight_mask.bool(), masks["0"])
    require_zero(copied, masks)


def test_remove_leaves_a_plain_model(tmp_path):
    plain, model = small_model(), small_model()
    masks = twofour.hold_masks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks.attach(optimizer)
    masks.remove()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.__dict__.keys() == plain.__dict__.keys()
    for module, other in zip(model, plain, strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
        assert not module._load_state_dict_post_hooks
    assert not optimizer._optimizer_step_post_hooks
    train(model, optimizer)
    assert not check_pattern(model[0].weight).legal
    with pytest.raises(InputError, match="were removed"):
        masks.attach(optimizer)
    twofour.hold_masks(twofour.prune_(model)).attach(optimizer)


def test_a_held_transformers_model_is_trained_removed_saved_and_packed(pruned, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pruned, dtype=torch.float32)
    masks = twofour.hold_masks(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    masks.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        tokens = torch.randint(3, 100, (2, 16))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    masks.remove()
    model.save_pretrained(tmp_path / "trained")
    report = twofour.check(tmp_path / "trained")
    assert report.ok, report.faults
    assert len(report.layers) == len(twofour.check(pruned).layers)
    twofour.pack_(model)
    twofour.save(model, tmp_path / "packed")
    assert twofour.check(tmp_path / "packed").ok


def test_optimizers_that_cannot_be_attached():
    model = small_model()
    masks = twofour.hold_masks(model)
    stranger = torch.optim.SGD(small_model().parameters(), lr=0.1)
    with pytest.raises(InputError, match="none of the model's parameters"):
        masks.attach(stranger)
    with pytest.raises(InputError, match="int is not a torch optimizer"):
        masks.attach(3)
    assert repr(masks) == "Masks(2 layers, 0 optimizers)"


def test_masks_that_were_dropped_still_mask_gradients_and_are_found_again():
    model = small_model()
    masks = masks_of(model)
    twofour.hold_masks(model)
    gc.collect()
    loss_of(model, 0).backward()
    assert not model[0].weight.grad[~masks["0"]].any()
    held = twofour.hold_masks(model)
    assert len(model[0].weight._post_accumulate_grad_hooks) == 1
    held.remove()
    assert not model[0].weight._post_accumulate_grad_hooks


def test_a_held_model_is_freed():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twofour.hold_masks(model).attach(optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("train(300)", "train(60)"), "own-loop.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "True"
    saved = torch.load(tmp_path / "recovered.pt")
    assert {"0.weight_mask", "2.weight_mask"} < set(saved)
