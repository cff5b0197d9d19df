"""Where masks are kept: saved, loaded, averaged, copied, removed and freed."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import twofour
from twofour.errors import InputError
from twofour.pattern import check_pattern

from .masked_training import (
    equal,
    loss_of,
    masks_of,
    require_zero,
    small_model,
    train,
)


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
