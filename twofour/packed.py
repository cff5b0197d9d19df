"""The packed form of a 2:4 matrix: the kept values, and 2 bits for the position of each.

For a weight of n rows and k columns (k padded with zeros to a multiple of 4 first):

    values  [n, k/2]          the two kept weights of every group of 4, in column order;
            or uint8 [n, k/4] the same in 4 bits (two's complement), the left one in the low nibble
    meta    uint8 [n, ⌈k/8⌉]  group g is the low nibble of byte g/2 when g is even, the high one when odd;
                              nibble = i0 | i1<<2 with i0 < i1 the kept positions: one of 4 8 C 9 D E
    scale   [n, 1] or [n, ⌈k/group⌉], only where the values are quantized; how many columns share one follows
            from the shape, because a group is a power of two: the smallest that so many of cover k

A group with fewer than two nonzeros still names two positions and stores the zero. With an odd number
of groups the last high nibble belongs to no group and is 0. Leading dimensions (experts) are allowed.
The layout is row-major and belongs to no backend: a backend repacks for itself after loading. On Hopper the
positions may lie in memory in cuSPARSELt's order, in which our kernels read them too. Such a `meta` has
five dimensions, [n/64, k/32, 4, 8, 8], and is never in a file: byte 2i + b of [64 rows, 32 columns, a, r] has
group 4b + i of row 16a + r in its low nibble, and of row 16a + r + 8 in its high one. And a matrix of 4 bits
may lie there in threads' order (streamed.py): its `meta` has four dimensions. `as_stored` undoes either.

-0.0 is zero: one that is not in a kept slot comes back as +0.0. All other values survive bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from twofour.errors import InputError
from twofour.pattern import CHUNK, check_pattern
from twofour.streamed import is_streamed, unstream

#: What `values` may be stored in, with the integer type of the same width that we move bits with.
BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.int8,
}

#: Values of 4 bits lie two to a byte. Nothing else is stored in this type.
FOUR_BIT = torch.uint8

#: Exponent bits of each float type: all set means NaN or infinity (e4m3fn has only NaN, all 7 bits).
_NONFINITE = {
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e4m3fn: 0x7F,
}


@dataclass(frozen=True)
class Packed24:
    """A packed matrix. `columns` is the width before padding to a multiple of 4."""

    values: Tensor
    meta: Tensor
    columns: int
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix that `unpack` gives back."""
        return (*self.values.shape[:-1], self.columns)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.values, self.meta, self.scale) if t is not None)

    def unpack(self, dtype: torch.dtype | None = None) -> Tensor:
        return unpack(self.values, self.meta, self.columns, self.scale, dtype)

    def padded(self, rows: int, columns: int) -> Packed24:
        """The same matrix grown to [rows, columns] with zeros, for a backend that needs such a shape.

        Multiplying a zero-padded input and cutting the output back gives the same numbers and gradients.
        """
        (_, kept), (_, meta_bytes) = packed_shapes(rows, columns, self.values.dtype)
        more_rows = rows - self.values.shape[-2]
        if more_rows < 0 or columns < self.columns:
            raise InputError(f"cannot pad {list(self.shape)} to the smaller [{rows}, {columns}].")
        grow = (0, kept - self.values.shape[-1], 0, more_rows)
        bits = self.values.view(BITS.get(self.values.dtype, self.values.dtype))
        values = torch.nn.functional.pad(bits, grow).view(self.values.dtype)
        # New groups name the positions 0 and 1 (nibble 4), as an empty group always does.
        groups = -(-columns // 4)
        nibbles = _nibbles(self.meta)[..., : -(-self.columns // 4)]
        grow = (0, groups - nibbles.shape[-1], 0, more_rows)
        nibbles = torch.nn.functional.pad(nibbles, grow, value=4)
        nibbles = torch.nn.functional.pad(nibbles, (0, 2 * meta_bytes - nibbles.shape[-1]))
        meta = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
        scale = self.scale
        if scale is not None:
            width = scale.shape[-1]
            if width > 1:
                width = -(-columns // scale_group(self.columns, width))
            scale = torch.nn.functional.pad(scale, (0, width - scale.shape[-1], 0, more_rows), value=1)
        return Packed24(values, meta, columns, scale)

    def validate(self, layer: str | None = None) -> None:
        validate(self.values, self.meta, self.columns, self.scale, layer)


def packed_shapes(
    rows: int, columns: int, dtype: torch.dtype | None = None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of `values`, if stored as `dtype`, and `meta` for an unpacked [rows, columns].

    >>> packed_shapes(64, 172)
    ((64, 86), (64, 22))
    >>> packed_shapes(64, 172, FOUR_BIT)
    ((64, 43), (64, 22))
    """
    groups = -(-columns // 4)
    return (rows, groups if dtype == FOUR_BIT else groups * 2), (rows, -(-groups // 2))


def scale_group(columns: int, width: int) -> int:
    """How many columns share a scale, if there are `width` scales a row; the last ones may be fewer.

    The smallest power of two (at least 4) that so many of cover the columns. For a group that is a power of
    two, ⌈columns/group⌉ scales lead back to that group, so a file need not say it.

    >>> scale_group(288, 3), scale_group(256, 2), scale_group(288, 9)
    (128, 128, 32)
    """
    share = -(-columns // max(width, 1))
    return max(4, 1 << (share - 1).bit_length()) if share > 0 else 4


def to_nibbles(codes: Tensor) -> Tensor:
    """int8 codes from -8 to 7, [..., 2m], as bytes [..., m]: two's complement, low nibble first."""
    low, high = (codes.view(torch.uint8) & 15).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def from_nibbles(values: Tensor) -> Tensor:
    """The int8 codes again."""
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    return ((codes ^ 8).view(torch.int8) - 8).contiguous()


def pack(weight: Tensor, layer: str | None = None) -> Packed24:
    """Pack a 2:4 matrix [..., n, k]. Anything that is not 2:4, or not finite, is an error; nothing is lost.

    >>> pack(torch.tensor([[0., 1., 0., 2.]])).values
    tensor([[1., 2.]])
    """
    bits = BITS.get(weight.dtype)
    if bits is None:
        names = ", ".join(str(d).removeprefix("torch.") for d in BITS)
        raise InputError(f"cannot pack {weight.dtype}: the packed form holds {names}.", layer=layer)
    if weight.dim() < 2:
        raise InputError(f"cannot pack a tensor of shape {tuple(weight.shape)}: need a matrix.", layer=layer)
    *lead, rows, columns = weight.shape
    (_, kept), (_, meta_bytes) = packed_shapes(rows, columns)
    flat = weight.detach().reshape(math.prod(weight.shape[:-1]), columns)
    values = torch.empty(flat.shape[0], kept, dtype=bits, device=weight.device)
    meta = torch.empty(flat.shape[0], meta_bytes, dtype=torch.uint8, device=weight.device)
    step = max(1, CHUNK // max(columns, 1))
    for start in range(0, flat.shape[0], step):
        rows_now = slice(start, start + step)
        _pack_rows(flat[rows_now], values[rows_now], meta[rows_now], start, layer)
    return Packed24(
        values.view(weight.dtype).reshape(*lead, rows, kept), meta.reshape(*lead, rows, meta_bytes), columns
    )


def _pack_rows(weight: Tensor, values: Tensor, meta: Tensor, first_row: int, layer: str | None) -> None:
    """Pack some rows into `values` (as integers) and `meta`, both given."""
    columns = weight.shape[-1]
    raw = weight.contiguous().view(BITS[weight.dtype])
    magnitude = raw
    if weight.is_floating_point():
        magnitude = raw & torch.iinfo(raw.dtype).max  # without the sign, so that -0.0 is zero
        limit = _NONFINITE[weight.dtype]
        if magnitude.numel() and int(magnitude.max()) >= limit:
            row = first_row + int((magnitude >= limit).any(-1).int().argmax())
            raise InputError(
                f"row {row} holds NaN or infinity, which cannot be packed.",
                layer=layer,
                hint="Repair the checkpoint or leave this layer out with --exclude.",
            )
    if columns % 4:
        raw = torch.nn.functional.pad(raw, (0, -columns % 4))
        magnitude = torch.nn.functional.pad(magnitude, (0, -columns % 4))
    nonzero = (magnitude != 0).view(torch.uint8).reshape(raw.shape[0], -1, 4)
    b0, b1, b2, b3 = nonzero.unbind(-1)
    if nonzero.numel() and int((b0 + b1 + b2 + b3).max()) > 2:
        first = check_pattern(weight).first
        assert first is not None
        raise InputError(
            f"row {first_row + first.row}, group {first.group} (columns {4 * first.group} to "
            f"{4 * first.group + len(first.values) - 1}) keeps {first.kept} of 4 weights, "
            f"{list(first.values)}, and 2:4 allows 2.",
            layer=layer,
            hint="Prune it first, or leave this layer out with --exclude.",
        )
    # The higher position is the last nonzero (at least 1), the lower one the first nonzero before it.
    # For two nonzeros that is exactly them; with fewer, the other slot stores a zero of the group.
    b2_or_3 = b2 | b3
    high = 1 + b2_or_3 + b3
    low = (1 - b0) * (b1 * b2_or_3 + 2 * (1 - b1) * (b2 & b3))
    w0, w1, w2, w3 = raw.reshape(raw.shape[0], -1, 4).unbind(-1)
    values[:, 0::2] = torch.where(low == 0, w0, torch.where(low == 1, w1, w2))
    values[:, 1::2] = torch.where(high == 1, w1, torch.where(high == 2, w2, w3))
    nibbles = low | (high << 2)
    meta.copy_(nibbles[:, 0::2])
    odd = nibbles[:, 1::2]
    meta[:, : odd.shape[1]] |= odd << 4


def unpack(
    values: Tensor,
    meta: Tensor,
    columns: int,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The dense matrix [..., n, columns] again, in `dtype` (default: that of the values, or of the scale).

    Values of 4 bits without a scale come as the int8 codes that they are.
    """
    if values.dim() == 2:  # with leading dimensions, positions of four or five are row by row as well
        values, meta, scale = as_stored(values, meta, scale)
    if values.dtype == FOUR_BIT:
        values = from_nibbles(values)
    *lead, rows, kept = values.shape
    groups = kept // 2
    v0, v1 = values.view(BITS[values.dtype]).reshape(*lead, rows, groups, 2).unbind(-1)
    positions = _nibbles(meta)[..., :groups]
    low, high = positions & 3, positions >> 2
    dense = torch.stack([v0 * (low == p) + v1 * (high == p) for p in range(4)], dim=-1)
    dense = dense.reshape(*lead, rows, groups * 4)[..., :columns].contiguous().view(values.dtype)
    if scale is None:
        return dense if dtype is None else dense.to(dtype)
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(scale_group(columns, scale.shape[-1]), dim=-1)[..., :columns]
    # Exact in float32: a code and a scale of 8 significant bits each (see quantize/schemes.py). So the
    # product is rounded once, to what is asked for.
    return (dense.float() * scale.float()).to(dtype or scale.dtype)


def ordered_shape(rows: int, columns: int) -> tuple[int, ...]:
    """Of positions in cuSPARSELt's order; rows must be a multiple of 64, columns of 32."""
    return (rows // 64, columns // 32, 4, 8, 8)


def in_order(meta: Tensor) -> Tensor:
    """Positions [n, k/8] in cuSPARSELt's order.

    >>> meta = torch.randint(256, (128, 12), dtype=torch.uint8)
    >>> torch.equal(as_rows(in_order(meta)), meta)
    True
    """
    blocks, steps = meta.shape[0] // 64, meta.shape[1] // 4
    # row / 64, row % 64 / 16, row % 16 / 8, row % 8, column / 32, b, i
    nibbles = _nibbles(meta).reshape(blocks, 4, 2, 8, steps, 2, 4).permute(0, 4, 1, 3, 6, 5, 2)
    return (nibbles[..., 0] | nibbles[..., 1] << 4).reshape(ordered_shape(meta.shape[0], 8 * meta.shape[1]))


def is_ordered(meta: Tensor) -> bool:
    return meta.dim() == 5


def as_rows(meta: Tensor) -> Tensor:
    """Positions row by row, whichever way they lie."""
    if not is_ordered(meta):
        return meta
    blocks, steps = meta.shape[:2]
    nibbles = torch.stack([meta & 15, meta >> 4], dim=-1).reshape(blocks, steps, 4, 8, 4, 2, 2)
    nibbles = nibbles.permute(0, 2, 6, 3, 1, 5, 4).reshape(64 * blocks, 8 * steps)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4


def as_stored(values: Tensor, meta: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The packed tensors of a matrix as files have them, whichever way they lie."""
    if is_streamed(meta):
        assert scale is not None
        return unstream(values, meta, scale)
    return values, as_rows(meta), scale


def _nibbles(meta: Tensor) -> Tensor:
    """[..., bytes] as [..., 2·bytes], low nibble first."""
    return torch.stack([meta & 15, meta >> 4], dim=-1).flatten(-2)


def validate(
    values: Tensor, meta: Tensor, columns: int, scale: Tensor | None = None, layer: str | None = None
) -> None:
    """Refuse a packed matrix that is damaged: shapes that disagree, positions that no packer writes."""
    if values.dim() == 2:
        values, meta, scale = as_stored(values, meta, scale)
    rows = values.shape[-2] if values.dim() >= 2 else -1
    want_values, want_meta = packed_shapes(rows, columns, values.dtype)
    for what, tensor, want in (("values", values, want_values), ("meta", meta, want_meta)):
        if tensor.dim() < 2 or tuple(tensor.shape[-2:]) != want or tensor.shape[:-2] != values.shape[:-2]:
            raise InputError(
                f"weight_{what} has shape {list(tensor.shape)}, but {columns} columns need {list(want)}.",
                layer=layer,
            )
    if values.dtype not in BITS and values.dtype != FOUR_BIT:
        raise InputError(f"weight_values cannot be {values.dtype}.", layer=layer)
    if meta.dtype != torch.uint8:
        raise InputError(f"weight_meta must be uint8, not {meta.dtype}.", layer=layer)
    groups = -(-columns // 4)
    nibbles = _nibbles(meta)
    bad = ((nibbles & 3) >= (nibbles >> 2))[..., :groups].reshape(math.prod(values.shape[:-1]), groups)
    if bool(bad.any()):
        row, group = divmod(int(bad.reshape(-1).int().argmax()), groups)
        nibble = int(nibbles.reshape(bad.shape[0], -1)[row, group])
        raise InputError(
            f"row {row}, group {group}: the position nibble is {nibble:X}, "
            "and only 4, 8, C, 9, D and E exist. The file is damaged.",
            layer=layer,
        )
    if groups % 2 and bool(nibbles[..., groups].any()):
        row = int(nibbles[..., groups].reshape(-1).bool().int().argmax())
        raise InputError(f"row {row}: the unused last nibble is not 0. The file is damaged.", layer=layer)
    if values.is_floating_point():
        magnitude = values.view(BITS[values.dtype]) & torch.iinfo(BITS[values.dtype]).max
        if magnitude.numel() and int(magnitude.max()) >= _NONFINITE[values.dtype]:
            raise InputError("weight_values holds NaN or infinity.", layer=layer)
    beyond = groups * 4 - columns
    if beyond:
        last = unpack(values[..., -want_values[1] // groups :], nibbles[..., groups - 1 : groups], 4)[
            ..., 4 - beyond :
        ]
        if bool((last.float() != 0).any()):
            raise InputError(f"a weight is stored beyond the last of {columns} columns.", layer=layer)
    if scale is not None:
        width = scale.shape[-1] if scale.dim() else 0
        fits = width == 1 or (width > 1 and width == -(-columns // scale_group(columns, width)))
        if scale.shape[:-1] != values.shape[:-1] or not fits:
            raise InputError(
                f"weight_scale has shape {list(scale.shape)}; {rows} rows of {columns} columns need [n, 1] "
                "or [n, ⌈columns/group⌉] with a power of two as group.",
                layer=layer,
            )
        if not bool(scale.isfinite().all()):
            raise InputError("weight_scale holds NaN or infinity.", layer=layer)
