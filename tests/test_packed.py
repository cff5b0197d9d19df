"""The packed form: its bytes as the format says, every value back, every damage refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twofour import packed as packed_module
from twofour.errors import InputError
from twofour.packed import Packed24, pack, packed_shapes, unpack, validate

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
DTYPES = [*FLOATS, torch.int8]
LEGAL = (0x4, 0x8, 0xC, 0x9, 0xD, 0xE)


def two_four(*shape, dtype=torch.float32, seed=0):
    """A random 2:4 tensor: no, one or two places of every group, drawn at random."""
    *lead, columns = shape
    draw = torch.Generator().manual_seed(seed)
    groups = -(-columns // 4)
    places = torch.rand(*lead, groups, 4, generator=draw).argsort(-1)
    weight = torch.randn(*lead, groups, 4, generator=draw) * 20
    kept = torch.randint(0, 3, (*lead, groups, 1), generator=draw)
    weight = weight.where(places < kept, 0.0).reshape(*lead, groups * 4)[..., :columns]
    weight = weight.clamp(-100, 100).to(dtype).float() + 0.0  # where rounding made a -0.0, it is 0.0 again
    return weight.to(dtype).contiguous()


def bytes_of(x):
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)


# The bytes

KNOWN = [
    # positions 1,3 = D | none: 0,1 = 4        | one, at 2: 0,2 = 8
    [0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -3.0, 0.0],
    # 0,1 = 4           | 2,3 = E              | one, at 3: 0,3 = C
    [0.5, 0.25, 0.0, 0.0, 0.0, 0.0, -0.5, 4.0, 0.0, 0.0, 0.0, 1.5],
    # 0,3 = C           | 1,2 = 9              | 0,2 = 8
    [7.0, 0.0, 0.0, -7.0, 0.0, 1.0, 1.0, 0.0, 2.0, 0.0, 2.0, 0.0],
    # one, at 0: 0,1 = 4 | one, at 1: 0,1 = 4  | 0,1 = 4
    [1.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 4.0, 0.5, 0.0, 0.0],
]
KNOWN_META = bytes.fromhex("4d08 e40c 9c08 4404")
KNOWN_FLOAT32 = bytes.fromhex(
    "0000803f 00000040 00000000 00000000 00000000 000040c0"
    "0000003f 0000803e 000000bf 00008040 00000000 0000c03f"
    "0000e040 0000e0c0 0000803f 0000803f 00000040 00000040"
    "0000803f 00000000 00000000 00000040 00008040 0000003f"
)
KNOWN_BFLOAT16 = bytes.fromhex(
    "803f 0040 0000 0000 0000 40c0"
    "003f 803e 00bf 8040 0000 c03f"
    "e040 e0c0 803f 803f 0040 0040"
    "803f 0000 0000 0040 8040 003f"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_of_a_known_matrix(dtype):
    values = KNOWN_FLOAT32 if dtype == torch.float32 else KNOWN_BFLOAT16
    packed = pack(torch.tensor(KNOWN, dtype=dtype))
    assert (packed.values.shape, packed.meta.shape) == ((4, 6), (4, 2))
    assert bytes_of(packed.values) == values
    assert bytes_of(packed.meta) == KNOWN_META
    from_bytes = torch.frombuffer(bytearray(values), dtype=dtype).reshape(4, 6)
    assert torch.equal(unpack(from_bytes, packed.meta, 12), torch.tensor(KNOWN, dtype=dtype))


def test_canonical_positions_of_a_group_with_room():
    """The higher position is the last nonzero (at least 1); the lower is 0 unless it must be another."""
    groups = [
        [0, 0, 0, 0],
        [5, 0, 0, 0],
        [0, 5, 0, 0],
        [0, 0, 5, 0],
        [0, 0, 0, 5],
        [0],
        [5],
        [0, 0, 5],
        [0, 5, 6],
    ]
    nibbles = [0x4, 0x4, 0x4, 0x8, 0xC, 0x4, 0x4, 0x8, 0x9]
    values = [[0, 0], [5, 0], [0, 5], [0, 5], [0, 5], [0, 0], [5, 0], [0, 5], [5, 6]]
    packed = [pack(torch.tensor([group], dtype=torch.int8)) for group in groups]
    assert [p.meta.item() for p in packed] == nibbles
    assert [p.values[0].tolist() for p in packed] == values


# There and back


VIEWS = {
    "plain": lambda w: w,
    "transposed": lambda w: w.transpose(-1, -2).contiguous().transpose(-1, -2),
    "strided": lambda w: torch.stack([w, w], dim=-1)[..., 0],
    "offset": lambda w: torch.cat([w, w], dim=-1)[..., w.shape[-1] :],
}


@settings(deadline=None, max_examples=80)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 19)),
    lead=st.sampled_from([(), (2,), (2, 1), (2, 1, 2)]),
    view=st.sampled_from(list(VIEWS)),
    seed=st.integers(0, 999),
)
def test_round_trip_bit_for_bit(dtype, shape, lead, view, seed):
    weight = two_four(*lead, *shape, dtype=dtype, seed=seed)
    packed = pack(VIEWS[view](weight))
    packed.validate()
    values, meta = packed_shapes(*shape)
    assert packed.values.shape == (*lead, *values)
    assert packed.meta.shape == (*lead, *meta)
    assert packed.shape == weight.shape
    assert same_bits(packed.unpack(), weight)
    assert torch.equal(packed.unpack(torch.float64), weight.double())


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0, 3, 8), (2, 3, 0)])
def test_empty_matrices_round_trip(shape):
    packed = pack(torch.zeros(shape))
    packed.validate()
    assert packed.unpack().shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extreme_values_survive(dtype):
    info = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    smallest = 1 if dtype == torch.int8 else info.smallest_normal * info.eps  # the smallest denormal
    row = torch.tensor([[info.max, 0, 0, info.min, 0, smallest, -smallest, 0]], dtype=torch.float64).to(dtype)
    assert row.double().count_nonzero() == 4
    assert same_bits(pack(row).unpack(), row)


def test_negative_zero_is_kept_only_in_a_kept_slot():
    weight = torch.tensor([[-0.0, 3.0, -0.0, 0.0, 1.0, 2.0, -0.0, -0.0, -0.0, -0.0, -0.0, -0.0]])
    back = pack(weight).unpack()
    assert torch.equal(back, weight)  # as numbers: -0.0 == 0.0
    signs = torch.signbit(back)[0].tolist()
    assert signs == [True, False, False, False, False, False, False, False, True, True, False, False]


def test_a_matrix_of_several_chunks(monkeypatch):
    weight = two_four(37, 22, dtype=torch.bfloat16)
    whole = pack(weight)
    for chunk in (1, 22, 50, 22 * 37):
        monkeypatch.setattr(packed_module, "CHUNK", chunk)
        packed = pack(weight)
        assert same_bits(packed.values, whole.values)
        assert torch.equal(packed.meta, whole.meta)
        assert same_bits(packed.unpack(), weight)


def test_packing_detaches_and_does_not_touch_the_weight():
    weight = two_four(8, 16).requires_grad_()
    before = weight.detach().clone()
    packed = pack(weight)
    assert not packed.values.requires_grad
    packed.values.zero_()
    assert torch.equal(weight.detach(), before)


# What is refused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [8, 7])
def test_a_matrix_that_is_not_2_4_is_named_with_row_and_group(dtype, columns):
    weight = torch.zeros(5, columns)
    weight[3, 4:7] = torch.tensor([1.0, -2.0, 3.0])
    weight[4] = 1
    last = min(columns, 8) - 1
    message = rf"decoder\.fc1: row 3, group 1 \(columns 4 to {last}\) keeps 3 of 4 weights, \[1.0, -2.0, 3.0"
    with pytest.raises(InputError, match=message):
        pack(weight.to(dtype), "decoder.fc1")


def test_a_fault_past_the_first_chunk_is_located():
    weight = torch.zeros(1300, 1024, dtype=torch.bfloat16)
    assert packed_module.CHUNK < 1111 * 1024
    weight[1111, 804:807] = 1
    with pytest.raises(InputError, match="deep: row 1111, group 201 "):
        pack(weight, "deep")
    weight[1111, 806] = 0
    weight[1111, 900] = math.nan
    with pytest.raises(InputError, match="deep: row 1111 holds NaN"):
        pack(weight, "deep")


def test_the_row_of_an_expert_counts_over_all_experts():
    weight = torch.zeros(3, 4, 8)
    weight[2, 1, :3] = 1
    with pytest.raises(InputError, match="row 9, group 0"):
        pack(weight)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_are_refused_by_name(dtype):
    infinities = [math.inf, -math.inf] if dtype != torch.float8_e4m3fn else []  # which has none
    for bad in [math.nan, -math.nan, *infinities]:
        weight = torch.zeros(4, 6)
        weight[2, 5] = bad
        with pytest.raises(InputError, match="head: row 2 holds NaN or infinity") as caught:
            pack(weight.to(dtype), "head")
        assert caught.value.layer == "head"


def test_other_dtypes_and_what_is_no_matrix_are_refused():
    for dtype in (torch.float64, torch.float8_e5m2, torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(InputError, match="layer: cannot pack"):
            pack(torch.zeros(4, 8).to(dtype), "layer")
    for shape in [(), (8,)]:
        with pytest.raises(InputError, match="need a matrix"):
            pack(torch.zeros(shape))


@pytest.mark.parametrize("nibble", [n for n in range(16) if n not in LEGAL])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_validate_refuses_the_ten_illegal_nibbles(nibble, group):
    packed = pack(two_four(3, 12))
    shift = 4 * (group % 2)
    meta = packed.meta.clone()
    meta[1, group // 2] = int(meta[1, group // 2]) & ~(0xF << shift) & 0xFF | nibble << shift
    with pytest.raises(InputError, match=f"q_proj: row 1, group {group}: the position nibble is {nibble:X},"):
        validate(packed.values, meta, 12, layer="q_proj")


def test_validate_refuses_a_spare_nibble_in_use():
    packed = pack(two_four(3, 12))
    meta = packed.meta.clone()
    meta[2, 1] |= 0x40
    with pytest.raises(InputError, match="row 2: the unused last nibble is not 0"):
        validate(packed.values, meta, 12)


def test_validate_accepts_the_six_legal_nibbles():
    for nibble in LEGAL:
        validate(torch.ones(1, 4), torch.tensor([[nibble | nibble << 4]], dtype=torch.uint8), 8)


def test_validate_refuses_a_nonzero_beyond_the_last_column():
    with pytest.raises(InputError):  # 2 columns, and nonzeros in columns 2 and 3
        validate(torch.ones(1, 2), torch.tensor([[0xE]], dtype=torch.uint8), 2)


WRONG_VALUES = [((3, 4), (3, 2)), ((3, 8), (3, 2)), ((6,), (3, 2)), ((4, 6), (3, 2)), ((2, 3, 6), (3, 2))]
WRONG_META = [((3, 6), (3, 1)), ((3, 6), (3, 3)), ((3, 6), (2,)), ((3, 6), (4, 2)), ((2, 3, 6), (1, 3, 2))]


@pytest.mark.parametrize(("values", "meta"), WRONG_VALUES + WRONG_META)
def test_validate_refuses_shapes_that_disagree(values, meta):
    good = torch.full(meta, 0x44, dtype=torch.uint8)
    good[..., -1] = 0x04
    with pytest.raises(InputError, match=r"fc: weight_(values|meta) has shape .* 12 columns"):
        validate(torch.zeros(values), good, 12, layer="fc")


def test_validate_refuses_wrong_dtypes_and_nan_values():
    packed = pack(two_four(3, 12))
    with pytest.raises(InputError, match=r"weight_values cannot be torch\.float64"):
        validate(packed.values.double(), packed.meta, 12)
    with pytest.raises(InputError, match="weight_meta must be uint8"):
        validate(packed.values, packed.meta.short(), 12)
    for dtype in FLOATS:
        values = packed.values.clone()
        values[2, 3] = math.nan
        with pytest.raises(InputError, match="up: weight_values holds NaN"):
            validate(values.to(dtype), packed.meta, 12, layer="up")


NOT_FINITE = [[[1.0], [math.nan], [1.0]], [[1.0], [1.0], [math.inf]]]
WRONG_SHAPE = [(4, 1), (3,), (3, 0), (3, 5), (2, 3, 1)]  # 12 columns do not fall into 0 or 5 groups


@pytest.mark.parametrize("scale", [*map(torch.tensor, NOT_FINITE), *map(torch.ones, WRONG_SHAPE)])
def test_validate_refuses_a_bad_scale(scale):
    packed = pack(two_four(3, 12, dtype=torch.int8))
    with pytest.raises(InputError, match="v_proj: weight_scale"):
        validate(packed.values, packed.meta, 12, scale, "v_proj")


# Scales, padding, sizes

SCALES = [(16, None), (13, None), (16, 4), (16, 8), (24, 8), (9, 4), (13, 8)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("columns", "group"), SCALES)
def test_unpack_with_scales(dtype, columns, group):
    """group None: one scale a row. The width that falls into groups is that padded to a multiple of 4."""
    weight = torch.tensor([2.0, 0.0, 0.0, -3.0]).repeat(3, 6)[:, :columns].to(dtype)
    width = 1 if group is None else -(-columns // group)
    scale = 0.25 + torch.arange(3 * width, dtype=torch.float32).reshape(3, width)
    packed = pack(weight)
    dense = Packed24(packed.values, packed.meta, columns, scale).unpack()
    assert dense.dtype == torch.float32
    for i in range(3):
        for j in range(columns):
            expected = float(weight[i, j]) * float(scale[i, 0 if group is None else j // group])
            assert float(dense[i, j]) == pytest.approx(expected, rel=1e-6)
    half = unpack(packed.values, packed.meta, columns, scale, torch.float16)
    assert torch.equal(half, dense.half())


@pytest.mark.parametrize("columns", [7, 8, 9, 12, 20])
@pytest.mark.parametrize("grown", [(6, 20), (5, 32), (16, 21)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_padded_is_the_zero_padded_matrix(columns, grown, dtype):
    weight = two_four(5, columns, dtype=dtype)
    padded = pack(weight).padded(*grown)
    padded.validate()
    assert padded.shape == grown
    expected = torch.zeros(grown, dtype=torch.float32)
    expected[:5, :columns] = weight.float()
    assert torch.equal(padded.unpack().float(), expected)
    assert torch.equal(padded.meta, pack(expected).meta)  # new groups name the positions 0 and 1


def test_padded_product_and_gradient_are_those_of_the_unpadded():
    weight = two_four(5, 11)
    padded = pack(weight).padded(8, 16).unpack()
    x = torch.randn(3, 11, requires_grad=True)
    y = (torch.nn.functional.pad(x, (0, 5)) @ padded.T)[:, :5]
    direction = torch.randn(3, 5)
    (grad,) = torch.autograd.grad(y, x, direction)
    torch.testing.assert_close(y, x.detach() @ weight.T)
    torch.testing.assert_close(grad, direction @ weight)


@pytest.mark.parametrize(("width", "columns"), [(1, 32), (4, 24), (4, 20), (2, 20)])
def test_padded_keeps_the_scales_of_the_old_columns(width, columns):
    packed = pack(two_four(5, 16, dtype=torch.int8))
    scaled = Packed24(packed.values, packed.meta, 16, torch.rand(5, width) + 0.5)
    padded = scaled.padded(8, columns)
    padded.validate()
    expected = torch.zeros(8, columns)
    expected[:5, :16] = scaled.unpack()
    assert torch.equal(padded.unpack(), expected)


def test_padded_experts_and_no_shrinking():
    weight = two_four(2, 3, 10)
    assert torch.equal(pack(weight).padded(4, 12).unpack(), torch.nn.functional.pad(weight, (0, 2, 0, 1)))
    assert torch.equal(pack(weight).padded(3, 10).unpack(), weight)
    for rows, columns in [(2, 12), (3, 9)]:
        with pytest.raises(InputError, match="cannot pad"):
            pack(weight).padded(rows, columns)


def test_shapes_and_sizes():
    assert packed_shapes(64, 172) == ((64, 86), (64, 22))
    assert packed_shapes(3, 12) == ((3, 6), (3, 2))
    assert packed_shapes(1, 1) == ((1, 2), (1, 1))
    assert packed_shapes(0, 0) == ((0, 0), (0, 0))
    dense = two_four(32, 64, dtype=torch.bfloat16)
    packed = pack(dense)
    assert packed.nbytes * 16 == dense.nbytes * 9
    assert Packed24(packed.values, packed.meta, 64, torch.ones(32, 1)).nbytes == packed.nbytes + 128
