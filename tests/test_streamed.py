"""Threads' order: what each thread of the kernel finds where, written out, and a layer that holds it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour import kernels
from twofour.kernels import reference
from twofour.nn import fuse_, unfuse_
from twofour.nn.fused import FusedLinear
from twofour.nn.quantized import QuantizedLinear
from twofour.packed import as_stored, from_nibbles, unpack, validate
from twofour.quantize import SCHEMES
from twofour.streamed import is_streamed, stream, unstream

INT4 = SCHEMES["int4"]


@pytest.fixture
def _wanted(monkeypatch):
    """As if the CPU had the kernel."""

    monkeypatch.setattr(kernels.hopper, "why_not", lambda device, dtype, n, k: None)


def layer(n=128, k=256, bias=True, dtype=torch.bfloat16):
    torch.manual_seed(n)
    made = QuantizedLinear(k, n, bias, scheme=INT4, dtype=dtype, memory="small")
    of_bias = torch.randn(n).to(dtype) if bias else None
    made._set_packed(random_weight(n, k, "int4", 128, dtype), of_bias)
    return made


def test_each_thread_finds_its_codes_positions_and_scales():
    n, k = 128, 384
    packed = random_weight(n, k, "int4", 128, torch.bfloat16)
    values, meta, scale = stream(packed.values, packed.meta, packed.scale)
    assert (values.shape, scale.shape) == (packed.values.shape, packed.scale.shape)
    assert meta.shape == (2, 3, 128, 8)
    codes = from_nibbles(packed.values).long() & 15  # [n, k/2]
    words = values.reshape(2, 3, 128, 4, 4).long()
    words = sum(words[..., b] << 8 * b for b in range(4))
    by_thread = scale.reshape(2, 3, 32, 2)
    for block, group, thread in torch.cartesian_prod(*map(torch.arange, (2, 3, 128))).tolist()[::7]:
        w, r, q = thread // 32, thread % 32 // 4, thread % 4
        rows = [64 * block + 16 * w + r, 64 * block + 16 * w + r + 8]
        for p in range(4):
            for i in range(4):
                left = (128 * group + 16 * (2 * p + i // 2) + 4 * q) // 2
                word = int(words[block, group, thread, p])
                found = [word >> 4 * i & 15, word >> (16 + 4 * i) & 15]
                assert found == codes[rows[i % 2], left : left + 2].tolist()
        for h in range(2):
            at = 16 * group + 8 * h + 2 * q
            here = meta[block, group, thread, 4 * h : 4 * h + 4]
            assert torch.equal(here[:2], packed.meta[rows[0], at : at + 2])
            assert torch.equal(here[2:], packed.meta[rows[1], at : at + 2])
        assert torch.equal(by_thread[block, group, thread // 4], packed.scale[rows, group])


@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 640), (0, 256)])
def test_there_and_back(n, k):
    packed = random_weight(n, k, "int4", 128, torch.float16)
    three = (packed.values, packed.meta, packed.scale)
    moved = stream(*three)
    assert [t.nbytes for t in moved] == [t.nbytes for t in three]
    assert is_streamed(moved[1])
    assert not is_streamed(packed.meta)
    for back in (unstream(*moved), as_stored(*moved)):
        assert all(torch.equal(a, b) for a, b in zip(back, three, strict=True))
    assert torch.equal(unpack(moved[0], moved[1], k, moved[2]), packed.unpack())
    validate(moved[0], moved[1], k, moved[2])


@pytest.mark.usefixtures("_wanted")
def test_a_layer_computes_the_same_and_gives_its_tensors_as_files_have_them():
    made, x = layer(), torch.randn(3, 256).bfloat16()
    before, y = copy.deepcopy(made.state_dict()), made(x)
    made._stream()
    assert is_streamed(made.weight_meta)
    assert not torch.equal(made.weight_values, before["weight_values"])
    assert torch.equal(made(x), y)
    assert torch.equal(
        made.weight, unpack(*(before[f"weight_{p}"] for p in ("values", "meta")), 256, before["weight_scale"])
    )
    made.validate()
    for state in (
        made.state_dict(),
        copy.deepcopy(made).state_dict(),
        pickle.loads(pickle.dumps(made)).state_dict(),
    ):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[key], before[key]) for key in before)
    assert is_streamed(made.weight_meta)  # they were copies
    made.to(torch.float16)  # settles anew, on a CPU in the plain order
    assert not is_streamed(made.weight_meta)
    assert torch.equal(made.weight_values, before["weight_values"])


@pytest.mark.usefixtures("_wanted")
def test_other_weights_can_be_loaded_into_it():
    made, other = layer(), layer(128, 256)
    other.weight_values.data.bitwise_xor_(0x11)
    made._stream()
    made.load_state_dict(other.state_dict())
    assert torch.equal(made.weight, other.weight)


@pytest.mark.usefixtures("_wanted")
def test_layers_in_threads_order_are_fused_and_split():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = layer(64), layer(128)

        def forward(self, x):
            return self.q(x), self.k(x)

    model, x = Two().eval(), torch.randn(2, 256).bfloat16()
    before, y = copy.deepcopy(model.state_dict()), model(x)
    for own in (model.q, model.k):
        own._stream()
    assert fuse_(model, x) == 1
    (fused,) = (m for m in model.modules() if isinstance(m, FusedLinear))
    fused._stream()
    assert is_streamed(fused.weight_meta)
    assert all(torch.equal(a, b) for a, b in zip(model(x), y, strict=True))
    state = model.state_dict()
    assert all(torch.equal(state[key], before[key]) for key in before)
    unfuse_(model)
    assert all(torch.equal(a, b) for a, b in zip(model(x), y, strict=True))


@pytest.mark.usefixtures("_wanted")
def test_gradients_reach_the_input():
    made = layer()
    plain, streamed = (
        torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16() for _ in range(2)
    )
    for own, x in ((made, plain.requires_grad_()), (None, streamed.requires_grad_())):
        if own is None:
            made._stream()
        made(x).sum().backward()
    assert torch.equal(plain.grad, streamed.grad)


@pytest.mark.usefixtures("_wanted")
def test_the_reference_takes_strips_of_it(monkeypatch):
    monkeypatch.setattr(reference, "STRIP", 48 * 256)
    made, x = layer(192), torch.randn(2, 256).bfloat16()
    y = made(x)
    made._stream()
    torch.testing.assert_close(made(x), y)


@pytest.mark.usefixtures("_wanted")
def test_what_is_put_back_in_inference_mode_serves_training_too():
    made = layer()
    made._stream()
    with torch.inference_mode():
        made.set_memory("small")
    assert not is_streamed(made.weight_meta)
    x = torch.randn(1, 256).bfloat16().requires_grad_()
    made(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(
    ("dtype", "size", "reached"),
    [
        (torch.bfloat16, 2.0**54, True),
        (torch.bfloat16, -(2.0**55), False),
        (torch.bfloat16, 2.0**-66, True),
        (torch.bfloat16, 2.0**-67, False),
        (torch.bfloat16, 0.0, True),
        (torch.bfloat16, torch.nan, False),
        (torch.float16, -8188.0, True),  # times 8: the largest number
        (torch.float16, 8192.0, False),
        (torch.float16, 2.0**-24, True),
    ],
)
@pytest.mark.usefixtures("_wanted")
def test_layers_with_scales_beyond_the_kernels_reach_stay_as_they_are(dtype, size, reached):
    made = layer(64, 256, dtype=dtype)
    made.weight_scale.data[3, 1] = size
    made._stream()
    assert is_streamed(made.weight_meta) == reached
