"""What a scheme promises: zero is zero, scales survive every dtype, what does not exist is refused."""

import pytest
import torch

from twofour.errors import InputError
from twofour.packed import Packed24, from_nibbles, pack, packed_shapes, scale_group, to_nibbles, validate
from twofour.quantize.rounding import quantize_matrix
from twofour.quantize.schemes import SCHEMES, scheme_from_config, scheme_named

ALL = [*SCHEMES.values(), scheme_named("int4", 64), scheme_named("int4", 32)]


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_zero_is_zero_and_too_large_saturates(scheme):
    codes = scheme.to_codes(torch.tensor([0.0, -0.0, 1e9, -1e9, 1.0]))
    assert codes[0] == 0
    assert codes[1] == 0
    assert codes[2] == {"int8": 127, "fp8": 448, "int4": 7}[scheme.codes]
    assert codes[3] == {"int8": -127, "fp8": -448, "int4": -8}[scheme.codes]
    assert codes[4] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [SCHEMES["int8"], SCHEMES["fp8"], SCHEMES["int4"]], ids=str)
def test_a_scale_is_the_same_number_in_every_dtype_that_the_layer_may_have(scheme, dtype):
    raw = torch.logspace(-30, 2, 200, base=10)
    stored = scheme.rounded_scale(raw, dtype)
    assert bool((stored > 0).all())
    for other in (dtype, torch.bfloat16, torch.float32):
        assert torch.equal(stored.to(other).float(), stored)
    if dtype != torch.float16:
        assert float((stored / raw - 1).abs().max()) < 2**-8
    assert scheme.rounded_scale(torch.zeros(1), dtype).item() == 1


def test_settings_that_do_not_exist():
    for wrong in (("int3", None), ("int8", 128), ("int4", 48)):
        with pytest.raises(InputError):
            scheme_named(*wrong)
    for config in ("int8", {"name": "int8", "zero_point": 3}, {"group": 32}, {"name": "nf4"}):
        with pytest.raises(InputError):
            scheme_from_config(config)
    assert scheme_from_config(None) is None


@pytest.mark.parametrize("scheme", ALL, ids=str)
def test_the_config_leads_back_to_the_scheme(scheme):
    assert scheme_from_config(scheme.as_config()) == scheme


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("columns", [4, 31, 32, 33, 100, 128, 129, 288, 500, 768, 4096])
def test_the_group_follows_from_the_number_of_scales(group, columns):
    width = scheme_named("int4", group).scale_width(columns)
    if width > 1:
        assert scale_group(columns, width) == group
    assert scale_group(columns, width) * width >= columns


def test_nibbles_by_hand():
    codes = torch.tensor([[1, -1, -8, 7]], dtype=torch.int8)
    assert to_nibbles(codes).tolist() == [[0xF1, 0x78]]
    every = torch.arange(-8, 8, dtype=torch.int8)
    assert torch.equal(from_nibbles(to_nibbles(every)), every)


@pytest.mark.parametrize("columns", [8, 10, 130, 288])
def test_four_bits_unpack_validate_and_pad(columns):
    random = torch.Generator().manual_seed(columns)
    codes = torch.randint(-8, 8, (5, columns), generator=random, dtype=torch.int8)
    codes[:, 0::4] = 0
    codes[:, 2::4] = 0
    packed = pack(codes)
    width = SCHEMES["int4"].scale_width(columns)
    scale = torch.rand(5, width, generator=random) + 0.5
    four = Packed24(to_nibbles(packed.values), packed.meta, columns, scale)
    four.validate()
    assert tuple(four.values.shape) == packed_shapes(5, columns, torch.uint8)[0]
    dense = codes.float() * scale.repeat_interleave(128, 1)[:, :columns]
    assert torch.equal(four.unpack(), dense)
    grown = four.padded(8, columns + 140)
    grown.validate()
    assert torch.equal(grown.unpack()[:5, :columns], dense)
    assert not grown.unpack()[5:].any()
    assert not grown.unpack()[:, columns:].any()
    with pytest.raises(InputError, match="weight_values has shape"):
        validate(packed.values.view(torch.uint8), packed.meta, columns, scale)


def test_the_bytes_of_the_example_in_the_docs():
    weight = torch.tensor([[0, 1.5, 0, -2, 0, 0, 0, 3.5]])
    packed = quantize_matrix(weight, SCHEMES["int4"]).packed()
    assert packed.values.tolist() == [[0xC3, 0x70]]
    assert packed.meta.tolist() == [[0xCD]]
    assert packed.scale.dtype == torch.bfloat16
    assert packed.scale.tolist() == [[0.5]]
