"""What cannot be held or attached is refused by name, and left as it was."""

import copy

import pytest
import torch

import twofour
from tests.io.models_with_experts import mixtral
from twofour.calibrate.experts import open_experts_, stack_experts_
from twofour.errors import InputError
from twofour.nn import packed_layers
from twofour.pattern import check_pattern

from .masked_training import (
    small_model,
)


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


def test_optimizers_that_cannot_be_attached():
    model = small_model()
    masks = twofour.hold_masks(model)
    stranger = torch.optim.SGD(small_model().parameters(), lr=0.1)
    with pytest.raises(InputError, match="none of the model's parameters"):
        masks.attach(stranger)
    with pytest.raises(InputError, match="int is not a torch optimizer"):
        masks.attach(3)
    assert repr(masks) == "Masks(2 layers, 0 optimizers)"


def test_experts_in_one_tensor_are_refused_and_apart_they_are_held():
    model = twofour.prune_(mixtral())
    before = set(model.state_dict())
    with pytest.raises(
        InputError, match=r"^model.layers.0.mlp.experts: .*open_experts_\(model\).*\*.experts"
    ):
        twofour.hold_masks(model)
    assert set(model.state_dict()) == before
    assert len(twofour.hold_masks(copy.deepcopy(model), exclude=["*.experts"]).layers) == 8
    assert len(twofour.hold_masks(copy.deepcopy(model), include=["*.q_proj"]).layers) == 2
    open_experts_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    masks = twofour.hold_masks(model).attach(optimizer)
    assert len(masks.layers) == 2 * (4 + 4 * 3)
    tokens = torch.arange(3, 43).reshape(2, 20)
    start = model.model.layers[1].mlp.experts[2]["w1"].weight.detach().clone()
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
    masks.remove()
    stack_experts_(model)
    assert set(model.state_dict()) == before
    experts = model.model.layers[1].mlp.experts
    assert not torch.equal(experts.gate_up_proj[2, :48], start)
    for weight in (experts.gate_up_proj, experts.down_proj):
        assert check_pattern(weight.detach()).legal
    assert len(packed_layers(twofour.pack_(model))) == 2 * (4 + 4 * 3)
