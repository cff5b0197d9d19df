"""SparseLinear and SparseConv2d against the dense layer they replace, and all that is done to modules."""

import copy
import io

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from twofour import kernels
from twofour.errors import InputError
from twofour.kernels import cusparselt
from twofour.nn import SparseConv2d, SparseLinear
from twofour.nn.fused import FusedLinear
from twofour.packed import in_order
from twofour.select import Layer

MEMORY = ["fast", "small"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_2_4_(module):
    """Set two places, drawn at random, of every four neighbouring inputs or channels to zero."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        inputs_last = module.weight.movedim(1, -1)
        for start in range(0, inputs_last.shape[-1], 4):
            group = inputs_last[..., start : start + 4]
            places = torch.rand(*group.shape[:-1], 4, generator=draw).argsort(-1)[..., : group.shape[-1]]
            group.mul_(places < 2)
    return module


def linear(inputs=20, outputs=12, bias=True, dtype=torch.float32):
    return make_2_4_(nn.Linear(inputs, outputs, bias)).to(dtype)


def conv(channels=6, outputs=8, kernel=3, dtype=torch.float32, **options):
    return make_2_4_(nn.Conv2d(channels, outputs, kernel, **options)).to(dtype)


def pack_module(dense, memory="auto"):
    kind = SparseConv2d if isinstance(dense, nn.Conv2d) else SparseLinear
    return kind.from_dense(copy.deepcopy(dense), "block.fc", memory)


def assert_same(dense, sparse, x):
    """Forward and the gradient for the input."""
    results = []
    for module in (sparse, dense):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, direction)))
    limit = TOLERANCE[x.dtype]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=limit, atol=limit)


# Numbers


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (20, 12), (13, 7), (1, 3)])
def test_linear_is_the_dense_layer(inputs, outputs, dtype, memory):
    for bias in (True, False):
        dense = linear(inputs, outputs, bias, dtype)
        sparse = pack_module(dense, memory)
        assert (sparse.dense_weight is not None) == (memory == "fast")
        assert torch.equal(sparse.unpacked(), dense.weight)
        assert_same(dense, sparse, torch.randn(5, inputs).to(dtype))


@pytest.mark.parametrize("memory", MEMORY)
def test_linear_takes_any_batch_and_views(memory):
    dense = linear(20, 12)
    sparse = pack_module(dense, memory)
    for x in (
        torch.randn(20),
        torch.randn(2, 3, 20),
        torch.randn(0, 20),
        torch.randn(2, 0, 20),
        torch.randn(20, 5).t(),
        torch.randn(4, 5, 40)[:, 1::2, ::2],
    ):
        assert_same(dense, sparse, x)


CONVOLUTIONS = [
    {},
    {"channels": 8, "bias": False},
    {"channels": 3, "kernel": 7, "stride": 2, "padding": 3},
    {"kernel": (3, 2), "stride": (1, 2), "padding": (2, 0), "dilation": (1, 2)},
    {"kernel": (4, 3), "padding": "same"},
    {"padding": "valid"},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": (1, 2), "padding_mode": "circular", "stride": 2},
    {"padding": "same", "kernel": (2, 3), "padding_mode": "replicate"},
    {"kernel": 1, "channels": 16},
]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_conv2d_is_the_dense_layer(options, memory):
    dense = conv(**options)
    sparse = pack_module(dense, memory)
    assert torch.equal(sparse.unpacked(), dense.weight)
    channels = dense.in_channels
    assert_same(dense, sparse, torch.randn(2, channels, 9, 11))
    assert_same(dense, sparse, torch.randn(channels, 9, 11))
    assert_same(dense, sparse, torch.randn(2, channels, 9, 11).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_conv2d_in_16_bit(dtype, memory):
    dense = conv(dtype=dtype, padding=1)
    assert_same(dense, pack_module(dense, memory), torch.randn(2, 6, 5, 5).to(dtype))


def test_a_gpt2_conv1d_becomes_a_linear():
    from transformers.pytorch_utils import Conv1D

    dense = Conv1D(12, 20)  # 12 outputs, 20 inputs, weight [20, 12]
    with torch.no_grad():
        dense.bias.normal_()
        dense.weight.copy_(linear(20, 12).weight.t())
    assert_same(dense, pack_module(dense, "small"), torch.randn(2, 3, 20))


def test_the_bias_learns_and_the_weight_does_not():
    dense = linear()
    for memory in MEMORY:
        sparse = pack_module(dense, memory)
        sparse(torch.randn(3, 20)).sum().backward()
        assert sparse.bias.grad.tolist() == [3.0] * 12
        assert [name for name, p in sparse.named_parameters() if p.requires_grad] == ["bias"]


@pytest.mark.parametrize("memory", MEMORY)
def test_the_dense_weight_can_be_read_and_frozen_again(memory):
    dense = linear()
    sparse = pack_module(dense, memory)
    assert torch.equal(sparse.weight, dense.weight)
    sparse.weight_values.requires_grad_()
    sparse.freeze()
    assert not sparse.weight_values.requires_grad


def test_a_new_module_is_a_legal_matrix_of_zeros():
    for sparse in (SparseLinear(20, 12), SparseLinear(16, 5, bias=False), SparseConv2d(nn.Conv2d(6, 8, 3))):
        sparse.validate()
        assert not sparse.unpacked().any()
    x = torch.randn(2, 20)
    assert torch.equal(SparseLinear(20, 12)(x), torch.zeros(2, 12))


# What is done to modules


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("make", [linear, conv])
def test_to_dtype_and_back(make, memory):
    dense = make()
    sparse = pack_module(dense, memory).to(torch.bfloat16)
    assert sparse.weight_meta.dtype == torch.uint8
    assert sparse.weight_values.dtype == sparse.bias.dtype == torch.bfloat16
    shape = (3, 20) if make is linear else (2, 6, 5, 5)
    assert_same(copy.deepcopy(dense).to(torch.bfloat16), sparse, torch.randn(shape).bfloat16())
    assert torch.equal(sparse.float().unpacked(), dense.weight.bfloat16().float())


@pytest.mark.parametrize("memory", MEMORY)
def test_to_a_dtype_that_cannot_be_packed_is_refused_by_name(memory):
    with pytest.raises(InputError, match=r"block\.fc"):
        pack_module(linear(), memory).to(torch.float64)(torch.randn(2, 20).double())


@pytest.mark.parametrize("make", [linear, conv])
def test_to_meta_and_loading_from_there(make):
    sparse = pack_module(make(), "fast")
    state = {name: tensor.clone() for name, tensor in sparse.state_dict().items()}
    weight = sparse.unpacked()
    sparse.to("meta")
    assert all(t.device.type == "meta" for t in sparse.state_dict().values())
    assert sparse.dense_weight is None
    sparse.load_state_dict(state, assign=True)
    assert torch.equal(sparse.dense_weight, weight)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(("make", "shape"), [(linear, (3, 20)), (conv, (2, 6, 5, 5))])
def test_forward_on_meta_gives_the_shape(make, shape, memory):
    dense = make()
    y = pack_module(dense, memory).to("meta")(torch.empty(shape, device="meta"))
    assert y.is_meta
    assert y.shape == dense(torch.zeros(shape)).shape


def test_deepcopy_is_independent():
    dense = linear()
    for memory in MEMORY:
        sparse = pack_module(dense, memory)
        twin = copy.deepcopy(sparse)
        with torch.no_grad():
            sparse.weight_values.zero_()
            sparse.bias.zero_()
        sparse.settle()
        assert_same(dense, twin, torch.randn(3, 20))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("make", [linear, conv])
def test_state_dict_and_safetensors_round_trip(make, memory, tmp_path):
    dense, other = make(), make()
    sparse = pack_module(dense, memory)
    assert set(sparse.state_dict()) == {"weight_values", "weight_meta", "bias"}
    save_file(sparse.state_dict(), tmp_path / "layer.safetensors")
    loaded = pack_module(other, memory)
    assert not torch.equal(loaded.unpacked(), dense.weight)
    loaded.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    shape = (3, 20) if make is linear else (2, 6, 5, 5)
    assert_same(dense, loaded, torch.randn(shape))  # with "fast", only if the kept weight was made again


def test_load_state_dict_refuses_other_shapes_and_missing_tensors():
    sparse = pack_module(linear())
    with pytest.raises(RuntimeError, match="size mismatch for weight_values"):
        sparse.load_state_dict(pack_module(linear(24, 12)).state_dict())
    state = sparse.state_dict()
    del state["weight_meta"]
    with pytest.raises(RuntimeError, match="weight_meta"):
        sparse.load_state_dict(state)


def test_set_memory():
    dense = linear()
    sparse = pack_module(dense, "small")
    x = torch.randn(3, 20)
    for memory, kept in (("fast", True), ("small", False), ("fast", True)):
        sparse.set_memory(memory)
        assert (sparse.dense_weight is not None) == kept
        assert "dense_weight" not in sparse.state_dict()
        assert f"memory={memory}" in repr(sparse)
        assert_same(dense, sparse, x)
    with pytest.raises(InputError, match="memory must be auto, fast or small, not 'big'"):
        sparse.set_memory("big")


def test_a_memory_that_does_not_exist_is_refused_from_the_start():
    with pytest.raises(InputError, match="memory must be"):
        pack_module(linear(), "big")


def test_auto_keeps_the_dense_weight_only_with_memory_to_spare(monkeypatch):
    import psutil

    gib = 1 << 30
    for available, kept in ((60 * gib, True), (2 * gib, False)):
        machine = type("Memory", (), {"available": available, "total": 64 * gib})
        monkeypatch.setattr(psutil, "virtual_memory", lambda machine=machine: machine)
        assert (pack_module(linear(), "auto").dense_weight is not None) == kept


@pytest.mark.parametrize("memory", MEMORY)
def test_an_input_of_another_dtype_is_refused_by_name(memory):
    for make, shape in ((linear, (3, 20)), (conv, (2, 6, 5, 5))):
        sparse = pack_module(make(), memory)
        with pytest.raises(InputError, match=r"block\.fc: the input is torch\.bfloat16 .* torch\.float32"):
            sparse(torch.randn(shape).bfloat16())


@pytest.mark.parametrize("memory", MEMORY)
def test_autocast(memory):
    for make, shape in ((linear, (3, 20)), (conv, (2, 6, 5, 5))):
        dense = make()
        sparse = pack_module(dense, memory)
        x = torch.randn(shape)
        leaves = x.clone().requires_grad_(), x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            ours, theirs = sparse(leaves[0]), dense(leaves[1])
        assert ours.dtype == theirs.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
        ours.float().sum().backward()
        theirs.float().sum().backward()
        assert leaves[0].grad.dtype == torch.float32
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(sparse.bias.grad, dense.bias.grad, rtol=3e-2, atol=3e-2)


def test_autocast_of_a_traced_layer():
    dense = linear()
    sparse = torch.compile(pack_module(dense, "small"), backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 20)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = sparse(x), dense(x)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("memory", MEMORY)
def test_inference_mode_does_not_spoil_later_gradients(memory):
    dense = linear()
    sparse = pack_module(dense, memory)
    x = torch.randn(3, 20)
    with torch.inference_mode():
        torch.testing.assert_close(sparse(x), dense(x))
    assert_same(dense, sparse, x)


def test_damaged_tensors_are_refused_by_name():
    sparse = pack_module(linear())
    sparse.validate()
    with torch.no_grad():
        sparse.weight_meta[3, 0] = 0
    with pytest.raises(InputError, match=r"block\.fc: row 3, group 0"):
        sparse.validate()
    with pytest.raises(InputError, match=r"renamed: row 3, group 0"):
        sparse.validate("renamed")
    assert sparse.layer == Layer("block.fc", "linear", (12, 20))


# The compiler and the exporter


def network():
    return nn.Sequential(conv(6, 8, padding=1), nn.ReLU(), nn.Flatten(), linear(8 * 5 * 5, 12))


def packed_network(dense, memory):
    return nn.Sequential(pack_module(dense[0], memory), dense[1], dense[2], pack_module(dense[3], memory))


@pytest.mark.parametrize("memory", MEMORY)
def test_compile_whole(memory):
    torch.compiler.reset()
    dense = network()
    compiled = torch.compile(packed_network(dense, memory), fullgraph=True)
    assert_same(dense, compiled, torch.randn(2, 6, 5, 5))


@pytest.mark.parametrize("memory", MEMORY)
def test_export_save_and_load(memory):
    dense = network().eval()
    x = torch.randn(2, 6, 5, 5)
    batch = {0: torch.export.Dim("batch", min=1, max=64)}
    program = torch.export.export(packed_network(dense, memory).eval(), (x,), dynamic_shapes=(batch,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (2, 5):
        x = torch.randn(rows, 6, 5, 5)
        torch.testing.assert_close(loaded(x), dense(x))


@pytest.mark.parametrize("memory", ["auto", "fast"])
@pytest.mark.parametrize("empty", ["as ours", "elsewhere", "nowhere"])
def test_cusparselts_form_is_shared_where_it_says_the_same(empty, memory, monkeypatch):
    """A stand-in for its compression. The zeros of a group that keeps fewer than two may be anywhere."""
    dense = linear(128, 192, bias=False)
    with torch.no_grad():
        dense.weight[5, 8:12] = 0
    layer = SparseLinear.from_dense(dense, memory="small")

    def compress(weight):
        packed = layer.packed
        meta = packed.meta.clone()
        if empty != "as ours":  # the group has the low nibble of byte 1: positions 2 and 3, or no legal ones
            meta[5, 1] = meta[5, 1] & 0xF0 | (0xE if empty == "elsewhere" else 0)
        return torch.cat([packed.values.detach().reshape(-1).view(torch.uint8), in_order(meta).flatten()])

    monkeypatch.setattr(cusparselt, "why_not", lambda *_: None)
    monkeypatch.setattr(cusparselt, "compress", compress)
    monkeypatch.setattr(kernels.dispatch, "has_own_kernel", lambda *_: True)
    layer.memory = memory
    layer._compress()
    one_form = empty != "nowhere"
    assert (layer.weight_meta.dim() == 5) == one_form
    assert (layer.compressed_weight is not None) == (one_form or memory == "fast")
    if one_form:
        inside = layer.compressed_weight.untyped_storage().data_ptr()
        for shared in (layer.weight_values, layer.weight_meta):
            assert shared.untyped_storage().data_ptr() == inside
    layer.validate()
    assert torch.equal(layer.unpacked(), dense.weight)
    again = SparseLinear(128, 192, bias=False, memory="small")
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.unpacked(), dense.weight)

    file = io.BytesIO()
    torch.save(layer, file)
    assert len(file.getvalue()) < 1.2 * sum(x.nbytes for x in layer.state_dict().values()) + 10_000
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    for twin in (saved, copy.deepcopy(layer)):  # without what is one GPU's own, and in memory of their own
        assert twin.compressed_weight is None
        assert twin.weight_meta.dim() == 2
        twin.weight_values.data.zero_()
        assert torch.equal(layer.unpacked(), dense.weight)
    if layer.compressed_weight is not None:
        assert layer._compressed is layer.compressed_weight
        layer.weight_values = nn.Parameter(torch.zeros_like(layer.weight_values), requires_grad=False)
        assert layer._compressed is None, "it still has the old values"


@pytest.mark.parametrize("bias", [True, False])
def test_a_replica_as_data_parallel_makes_it(bias):
    """It has tensors where a module has parameters."""
    dense = linear(bias=bias)
    layer = SparseLinear.from_dense(dense, memory="small")
    replica = layer._replicate_for_data_parallel()
    for name, tensor in layer.named_parameters():
        setattr(replica, name, tensor.detach().clone())
        assert name not in replica._parameters
    for name in [name for name, tensor in layer._parameters.items() if tensor is None]:
        replica._parameters[name] = None
    x = torch.randn(3, 20)
    assert torch.equal(replica(x), layer(x))


def test_positions_may_lie_in_cusparselts_order():
    """On Hopper they do, and nothing but memory shows it."""
    dense = linear(128, 192)
    layer = SparseLinear.from_dense(dense, memory="small")
    x = torch.randn(3, 128)
    wanted, state = layer(x), {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.weight_meta.data = in_order(layer.weight_meta)
    assert layer.weight_meta.shape == (3, 4, 4, 8, 8)
    layer.validate()
    assert torch.equal(layer.unpacked(), dense.weight)
    for same in (layer, copy.deepcopy(layer)):
        assert torch.equal(same(x), wanted)
        assert all(torch.equal(tensor, state[name]) for name, tensor in same.state_dict().items())
        assert torch.equal(same.packed.meta, state["weight_meta"])
    fused = FusedLinear({"a": layer, "b": copy.deepcopy(layer)})
    assert torch.equal(fused(x), torch.cat([wanted, wanted], -1))
    layer.load_state_dict(state)
    assert torch.equal(layer.weight_meta, state["weight_meta"])
    layer.weight_meta.data = in_order(layer.weight_meta)
    assert layer.to(torch.bfloat16).weight_meta.shape == (192, 16)
