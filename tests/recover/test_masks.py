"""What a mask keeps and what it sets to zero, for any layer and any tensor."""

import re
from pathlib import Path

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import twofour
from twofour.pattern import check_pattern
from twofour.recover.mask_tensor import zero_pruned_
from twofour.select import as_layer

from .masked_training import loss_of, masks_of, small_model


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


def test_the_example_in_the_docs_runs(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("train(300)", "train(60)"), "own-loop.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1] == "True"
    saved = torch.load(tmp_path / "recovered.pt")
    assert {"0.weight_mask", "2.weight_mask"} < set(saved)
