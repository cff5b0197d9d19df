"""twofour.save and twofour.load of models that transformers does not know."""

import pytest
import torch
from torch import nn

import twofour
from twofour.io.check import check
from twofour.nn import SparseConv2d, SparseLinear


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 18, 3, stride=2),
        nn.BatchNorm2d(18),
        nn.Conv2d(18, 32, 3, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 30),
        nn.Linear(30, 10),
    ).eval()


IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory", ["fast", "small"])
def test_round_trip(tmp_path, memory):
    model = twofour.prune_(network())
    expected = model(IMAGES)
    twofour.save(twofour.pack_(model), tmp_path / "saved")
    assert check(tmp_path / "saved").ok
    loaded = twofour.load(tmp_path / "saved", model=network(), memory=memory)
    assert [type(loaded[i]) for i in (0, 2, 4, 7, 8)] == [
        nn.Conv2d,
        SparseConv2d,
        SparseConv2d,
        SparseLinear,
        nn.Linear,
    ]
    assert (loaded[2].dense_weight is None) == (memory == "small")
    torch.testing.assert_close(loaded(IMAGES), expected)


def test_dense_loader_is_stopped_by_the_stub(tmp_path):
    from safetensors.torch import load_file

    twofour.save(twofour.pack_(twofour.prune_(network())), tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    with pytest.raises(RuntimeError, match="size mismatch"):
        network().load_state_dict(tensors, strict=False)


def test_wrong_model_is_refused_and_not_changed(tmp_path):
    twofour.save(twofour.pack_(twofour.prune_(network())), tmp_path / "saved")
    other = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(twofour.InputError, match="^2: the checkpoint's shape is"):
        twofour.load(tmp_path / "saved", model=other)
    assert all(type(m) is nn.Linear for m in other)


def test_saving_what_is_not_packed(tmp_path):
    with pytest.raises(twofour.InputError, match="no packed layer"):
        twofour.save(network(), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_loading_what_is_not_packed(dense):
    with pytest.raises(twofour.InputError, match="not a packed twofour checkpoint"):
        twofour.load(dense)


def test_real_resnet_keeps_its_answers(shared_model, tmp_path):
    """ResNet-20's own weights: the convolutions of three stages, groups along the input channels."""
    from safetensors.torch import load_file

    tensors = load_file(shared_model("resnet20-cifar10") / "model.safetensors")
    names = [n for n, t in tensors.items() if t.dim() == 4 and t.shape[1] >= 16]
    model = nn.ModuleDict()
    for name in names:
        out, channels, *kernel = tensors[name].shape
        model[name.replace(".", "_")] = nn.Conv2d(channels, out, tuple(kernel), bias=False)
        model[name.replace(".", "_")].weight.data.copy_(tensors[name])
    twofour.prune_(model)
    images = {n: torch.randn(1, m.in_channels, 8, 8) for n, m in model.items()}
    expected = {n: m(images[n]) for n, m in model.items()}
    for module in model.values():
        assert int((module.weight.reshape(module.out_channels, -1, 4, 9) != 0).sum(2).max()) == 2
    twofour.pack_(model)
    assert len(names) == 18
    for name, module in model.items():
        assert isinstance(module, SparseConv2d)
        torch.testing.assert_close(module(images[name]), expected[name])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.inside, self.head = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 32)
        self.back, self.out = nn.Linear(32, 16), nn.Linear(16, 20, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.back(self.head(self.inside(self.embed(x)))))


def test_tied_weights_are_saved_and_tied_again(tmp_path):
    model, x = Tied(), torch.arange(12).reshape(2, 6)
    model = twofour.pack_(twofour.prune_(model, exclude=["out"]))
    twofour.save(model, tmp_path / "saved")
    assert check(tmp_path / "saved").ok
    loaded = twofour.load(tmp_path / "saved", model=Tied())
    assert loaded.out.weight is loaded.embed.weight
    torch.testing.assert_close(loaded(x), model(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.append(nn.Linear(10, 3)), "the files lack 9.bias, which the model has"),
        (lambda m: m.__setitem__(3, nn.Identity()), "the model lacks 3.bias, which they have"),
        (
            lambda m: setattr(m[3], "weight", nn.Parameter(torch.ones(17))),
            r"3.weight is \[18\] there and \[17\]",
        ),
    ],
)
def test_a_model_that_the_files_do_not_fit_keeps_its_layers_and_weights(tmp_path, change, message):
    twofour.save(twofour.pack_(twofour.prune_(network())), tmp_path / "saved")
    other = network()
    change(other)
    layers, weights = list(other), {n: p.clone() for n, p in other.state_dict().items()}
    with pytest.raises(twofour.InputError, match=message):
        twofour.load(tmp_path / "saved", model=other)
    assert list(other) == layers
    assert all(torch.equal(p, weights[n]) for n, p in other.state_dict().items())
