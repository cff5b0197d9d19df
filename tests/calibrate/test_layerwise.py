"""Any module, layer after layer."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import twofour
from twofour.calibrate.layerwise import patches, reestimate_norms_, run_layers
from twofour.errors import InputError
from twofour.pattern import check_pattern
from twofour.select import as_layer, select


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 1},
        {"padding": 0, "stride": 2},
        {"padding": "same", "dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": (0, 1), "kernel_size": (1, 3), "stride": (2, 1)},
    ],
)
@pytest.mark.parametrize("channels", [8, 6])
def test_a_convolution_is_a_product_with_its_patches(channels, options):
    conv = nn.Conv2d(channels, 16, **{"kernel_size": 3, **options}, bias=False)
    layer, x = as_layer("conv", conv), torch.randn(2, channels, 9, 11)
    product = patches(layer, conv, x) @ layer.to_matrix(conv.weight).t()
    wanted = conv(x)
    torch.testing.assert_close(product.permute(0, 2, 1).reshape(wanted.shape), wanted, atol=1e-5, rtol=1e-5)


class Net(nn.Module):
    """Layers that are defined in another order than they run, one of them twice."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 24)
        self.twice = nn.Linear(32, 32)
        self.conv = nn.Conv2d(16, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.head(self.twice(torch.relu(self.twice(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def data():
    return list(torch.randn(4, 8, 16, 6, 6, generator=torch.Generator().manual_seed(1)))


def test_layers_come_in_the_order_in_which_they_run_and_see_the_changes_before_them(net, data):
    layers = select(net, include=["*"]).layers
    seen = []

    def change(layer, gram):
        seen.append((layer.name, gram.tokens, float(gram.mean.abs().sum())))
        net.get_submodule(layer.name).weight.data.zero_()

    run_layers(net, layers, data, change)
    assert [name for name, _, _ in seen] == ["conv", "twice", "head"]
    assert [tokens for _, tokens, _ in seen] == [4 * 8 * 36, 2 * 4 * 8, 4 * 8]
    bias = net.twice.bias.detach()
    assert seen[2][2] == pytest.approx(float(torch.outer(bias, bias).abs().sum()), rel=1e-4)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "admm"])
def test_prunes_better_than_magnitude(net, data, method):
    wanted = torch.cat([net(x) for x in data])

    def loss(how, **options):
        model = Net().eval()
        model.load_state_dict(net.state_dict())
        twofour.prune_(model, how, include=["*"], **options)
        for layer in select(model, include=["*"]).layers:
            assert check_pattern(layer.to_matrix(model.get_submodule(layer.name).weight)).legal
        return float((torch.cat([model(x) for x in data]) - wanted).norm())

    with torch.no_grad():
        assert loss(method, data=data) < loss("magnitude")


def test_batch_norms_are_measured_anew_and_nothing_else_changes(net, data):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.norm.momentum = 0.3
    assert reestimate_norms_(net, data) == 1
    after = net.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    inputs = torch.cat([net.conv(x) for x in data])
    torch.testing.assert_close(net.norm.running_mean, inputs.mean((0, 2, 3)), atol=1e-4, rtol=1e-3)
    assert (net.norm.momentum, net.norm.training, net.training) == (0.3, False, False)


def test_bad_examples_name_the_layer(net, data):
    data[1][0, 0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="conv: its inputs are NaN"):
        twofour.prune_(net, "admm", include=["*"], data=data)
    net.unused = nn.Linear(32, 32)
    with pytest.raises(InputError, match="unused: the examples do not pass"):
        twofour.prune_(net, "admm", include=["*"], data=data[:1])


def test_tuples_and_dictionaries():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(32, 32)

        def forward(self, x, scale=1.0):
            return self.a(x) * scale

    x = torch.randn(64, 32)
    for example in (x, (x, 2.0), {"x": x, "scale": 3.0}):
        model = twofour.prune_(nn.Sequential(Two())[0], "sparsegpt", data=[example])
        assert check_pattern(model.a.weight).legal
