"""The kernel for quantized weights, emulated: every address, lane and position is the right one.

This does what cuda/quantized_decode_sm80.cu does, thread by thread and address by address, and takes for the
instructions (cp.async, ldmatrix, prmt, lop3, fma, mma.sp) what the PTX manual says of them.
"""

import itertools

import pytest
import torch

from tests.kernels.test_ampere_source import ldmatrix_x4, mma_sp_m16n8k32
from tests.kernels.test_quantized_decode import DTYPES, byte_perm, numbers
from twofour.kernels.quantized_decode import Config
from twofour.packed import Packed24, pack, to_nibbles
from twofour.pattern import keep_best


class Block:
    def __init__(
        self, config: Config, x: torch.Tensor, packed: Packed24, codes: str, group: int | None, unit: int
    ) -> None:
        self.config, self.dtype, self.codes, self.group = config, x.dtype, codes, group
        (self.tokens, self.k), self.n = x.shape, packed.values.shape[0]
        self.x, self.values, self.positions, self.scale = (
            t.contiguous().view(torch.uint8).flatten() for t in (x, packed.values, packed.meta, packed.scale)
        )
        self.four, step = codes == "int4", config.step
        self.a_pitch, self.e_pitch = step // 4 if self.four else step // 2, step // 8
        self.x_pitch, self.groups_here = 2 * step + 16, step // group if group else 0
        self.z_pitch = 4 * self.groups_here
        self.at_x = config.rows * self.a_pitch
        self.at_e = self.at_x + config.tokens * self.x_pitch
        self.at_z = self.at_e + config.rows * self.e_pitch
        self.stage_bytes = self.at_z + config.rows * self.z_pitch
        assert self.stage_bytes * config.k_warps == config.stage_bytes(codes, group)
        self.groups = -(-self.k // group) if group else 1
        blocks, tiles, wide = -(-self.n // config.rows), -(-self.tokens // config.tokens), 8
        band = unit // (wide * tiles) * wide
        width = min(wide, blocks - band)
        self.first_row = (band + unit % (wide * tiles) % width) * config.rows
        self.first_token = unit % (wide * tiles) // width * config.tokens
        self.last = self.n - 1 - self.first_row
        self.whole = self.k % (256 if group and step < 256 else step) == 0

    def columns_of(self, place: int) -> list[int]:
        """The first column of each tile of a team."""
        step, teams = self.config.step, self.config.k_warps * self.config.split
        run, steps = 256 // min(step, 256), -(-self.k // step)
        rounds = steps // (run * teams)
        count = rounds * run + max(0, min(run, steps - (rounds * teams + place) * run))
        return [((i // run * teams + place) * run + i % run) * step for i in range(count)]

    def a_piece(self, row: int, piece: int) -> int:
        step = self.config.step
        if self.four:
            return piece ^ (row & 7 if step == 512 else row >> 1 & 3 if step == 256 else row >> 2 & 1)
        return piece ^ (row >> 1 & 1 if step == 128 else row & 3) << 1

    def copy(self, column: int) -> torch.Tensor:
        """A stage after all copies of its team: nothing written twice, nothing wanted left out."""
        config, k, last, team = self.config, self.k, self.last, 32 * self.config.row_warps
        stage = torch.full((self.stage_bytes,), 255, dtype=torch.uint8)
        written = torch.zeros(self.stage_bytes, dtype=torch.int32)

        def put(to: int, memory: torch.Tensor, at: int, size: int, there: int | None = None) -> None:
            there = size if there is None else there
            assert to % size == 0
            assert at % size == 0
            assert 0 <= at <= len(memory) - there
            written[to : to + size] += 1
            stage[to : to + size] = 0
            stage[to : to + there] = memory[at : at + there]

        row_codes, row_positions = k // 4 if self.four else k // 2, k // 8
        codes, positions = self.first_row * row_codes, self.first_row * row_positions
        scale, x = 2 * self.first_row * self.groups, 2 * self.first_token * k
        for member in range(team):
            if self.whole:
                pieces, e_pieces = self.a_pitch // 16, self.e_pitch // 16
                piece, e_piece = member % pieces, member % e_pieces
                for j in range(config.rows * pieces // team):
                    row = j * (team // pieces) + member // pieces
                    at = codes + (column // 4 if self.four else column // 2) + 16 * piece
                    to = row * self.a_pitch + 16 * self.a_piece(row, piece)
                    put(to, self.values, at + min(row, last) * row_codes, 16)
                for j in range(-(-config.rows * e_pieces // team)):
                    row = j * (team // e_pieces) + member // e_pieces
                    if row < config.rows:
                        at = positions + column // 8 + 16 * e_piece + min(row, last) * row_positions
                        put(self.at_e + row * self.e_pitch + 16 * e_piece, self.positions, at, 16)
            else:
                pieces, size = config.step // 32, 8 if self.four else 16
                piece = member % pieces
                at = column // 32 + piece
                there = 32 * at < k
                for row in range(member // pieces, config.rows, team // pieces):
                    inside = min(row, last)
                    to = row * self.a_pitch + 16 * self.a_piece(row, size * piece // 16) + size * piece % 16
                    begin = codes + inside * row_codes + (size * at if there else 0)
                    put(to, self.values, begin, size, size if there else 0)
                    begin = positions + inside * row_positions + (4 * at if there else 0)
                    put(self.at_e + row * self.e_pitch + 4 * piece, self.positions, begin, 4)
            if self.group:
                first = column // self.group
                if self.whole:
                    size = 4 if self.groups_here == 1 else min(16, 2 * self.groups_here)
                    pieces = max(1, self.groups_here // 8)
                    for j in range(-(-config.rows * pieces // team)):
                        row, piece = j * (team // pieces) + member // pieces, member % pieces
                        at = min(row, last) * self.groups + 8 * piece
                        at += first & ~1 if self.groups_here == 1 else first
                        if row < config.rows:
                            to = self.at_z + row * self.z_pitch + 16 * piece
                            put(to, self.scale, scale + 2 * at, size)
                else:
                    words, every = self.groups_here // 2 + 1, (last + 1) * self.groups
                    for piece in range(member, config.rows * words, team):
                        row, word = piece // words, piece % words
                        at = (min(row, last) * self.groups + first) // 2 * 2 + 2 * word
                        there = min(4, 2 * (every - at)) if at < every else 0
                        begin = scale + 2 * (at if there else 0)
                        put(self.at_z + row * self.z_pitch + 4 * word, self.scale, begin, 4, there)
            chunks = config.step // 8
            at_once = min(team, chunks)
            for part in range(0, chunks, at_once):
                chunk = part + member % at_once
                there = self.whole or column + 8 * chunk < k
                for token in range(member // at_once, config.tokens, team // at_once):
                    if token < self.tokens - self.first_token:
                        at = x + 2 * token * k + (2 * column + 16 * chunk if there else 0)
                        put(self.at_x + token * self.x_pitch + 16 * chunk, self.x, at, 16, 16 if there else 0)
        assert int(written.max()) == 1
        assert bool((written[: self.at_x] == 1).all())
        assert bool((written[self.at_e : self.at_z] == 1).all())
        return stage

    def multiply(self, stage: torch.Tensor, column: int, section: int, warp: int, sums: torch.Tensor) -> None:
        """Add the products of some of a stage's columns to a warp's sums [row_tiles, tokens / 8, 16, 8]."""
        config, lanes, group = self.config, torch.arange(32), self.group
        wide, row = min(config.step, 256), 16 * config.row_tiles * warp
        units, first_piece = wide // 64, section * (wide // 64 if self.four else wide // 32)
        half, odd, in_row = lanes // 2 % 2, lanes % 2, row + lanes // 4
        words = stage.view(torch.int32).long() & 0xFFFFFFFF

        def word(at: torch.Tensor) -> torch.Tensor:
            assert bool((at % 4 == 0).all())
            return words[at // 4]

        if group == 32:
            pointed, onward = lanes // 8 % 2 * 2 + lanes // 16, 4
        else:
            pointed, onward = lanes // 8 % 2 * 4 + lanes // 16, 2
        pick = 0x1111 * odd + (0x6420 if group == 32 else 0x6240)
        for m in range(config.row_tiles):
            places = {}
            for u in range(0, units, 2):
                at = (
                    self.at_e + (in_row + 16 * m) * self.e_pitch + (2 * section + half) * (wide // 16) + 4 * u
                )
                above = byte_perm(word(at), word(at + 4), pick)
                at = at + 8 * self.e_pitch
                below = byte_perm(word(at), word(at + 4), pick)
                places[u] = byte_perm(above, below, torch.full_like(at, 0x5410))
                places[u + 1] = byte_perm(above, below, torch.full_like(at, 0x7632))
            span_columns = group or wide
            for span in range(wide // span_columns):
                part = torch.zeros_like(sums[m])
                for p in range(span * (span_columns // 32), (span + 1) * (span_columns // 32)):
                    u, j = p // 2, p % 2
                    registers: list[torch.Tensor] = [None] * 4  # type: ignore[list-item]
                    for h in range(2):
                        base = (in_row + 16 * m + 8 * h) * self.a_pitch
                        if not self.four:
                            both = zip(in_row.tolist(), half.tolist(), strict=True)
                            piece = torch.tensor([self.a_piece(r, first_piece + 2 * u + s) for r, s in both])
                            chosen = [word(base + 16 * piece + 4 * (2 * j + r)) for r in range(2)]
                        else:
                            piece = torch.tensor([self.a_piece(r, first_piece + u) for r in in_row.tolist()])
                            at = 8 * j + 4 * half if group == 32 else 8 * half + 4 * j
                            chosen = [word(base + 16 * piece + at)] * 2
                        for upper in range(2):
                            registers[2 * upper + h] = numbers(
                                chosen[upper], upper, odd, self.codes, self.dtype
                            )
                    bits = torch.stack(registers, 1)
                    a = torch.stack([bits & 0xFFFF, bits >> 16], -1)
                    a = torch.where(a >= 1 << 15, a - (1 << 16), a).tolist()
                    where = places[2 * (u % (units // 2)) + j].tolist()
                    for t in range(config.tokens // 8):
                        at = self.at_x + (8 * t + lanes % 8) * self.x_pitch
                        at = at + 2 * wide * section + 128 * u + 16 * (pointed + onward * j)
                        columns = ldmatrix_x4(stage, at.tolist())
                        selector = int(u >= units // 2)
                        part[t] += mma_sp_m16n8k32(a, columns, where, selector, self.dtype)
                if group:
                    amid = (in_row * self.groups + column // group) % 2
                    z = self.at_z + (in_row + 16 * m) * self.z_pitch
                    z = z + 2 * (amid + section * (wide // group) + span)
                    scales = stage.view(torch.int16).view(self.dtype)
                    up, low = scales[z // 2].double(), scales[z // 2 + 4 * self.z_pitch].double()
                    part *= torch.cat([up[::4], low[::4]])[:, None]
                sums[m] += part

    def run(self, sums: torch.Tensor) -> None:
        """Add this block's rows and tokens to sums [tokens, n], the row scales not yet applied."""
        config = self.config
        shape = (config.row_warps, config.row_tiles, config.tokens // 8, 16, 8)
        here = torch.zeros(shape, dtype=torch.float64)
        for place in range(config.k_warps * config.split):
            for column in self.columns_of(place):
                stage = self.copy(column)
                for warp, section in itertools.product(
                    range(config.row_warps), range(-(-config.step // 256))
                ):
                    self.multiply(stage, column, section, warp, here[warp])
        all_of_it = here.permute(2, 4, 0, 1, 3).reshape(config.tokens, config.rows)
        tokens, rows = min(config.tokens, self.tokens - self.first_token), min(config.rows, self.last + 1)
        sums[self.first_token :, self.first_row :][:tokens, :rows] += all_of_it[:tokens, :rows]


def random_weight(
    n: int, k: int, codes: str, group: int | None, dtype: torch.dtype, device: str = "cpu"
) -> Packed24:
    """Codes of every kind, also groups with one nonzero or none, and scales of 8 significant bits."""
    kept = keep_best(torch.rand(n, k, device=device)) & (torch.rand(n, k, device=device) > 0.2)
    if codes == "fp8":
        every = torch.arange(256, dtype=torch.uint8, device=device)
        every = every[every & 0x7F != 0x7F].view(torch.float8_e4m3fn).float()
        weight = (
            every[torch.randint(len(every), (n, k), device=device)].where(kept, 0).to(torch.float8_e4m3fn)
        )
    else:
        low, high = (-8, 8) if codes == "int4" else (-128, 128)
        weight = torch.randint(low, high, (n, k), device=device).where(kept, 0).to(torch.int8)
    packed = pack(weight)
    values = to_nibbles(packed.values) if codes == "int4" else packed.values
    scale = (torch.rand(n, -(-k // group) if group else 1, device=device) + 0.1) / 64
    return Packed24(values, packed.meta, k, scale.bfloat16().to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("codes", "group", "config", "n", "k", "tokens"),
    [
        (
            "int4",
            128,
            Config(8, 2, 1, 2, 256, 2, 2),
            33,
            512,
            3,
        ),  # a cluster, and a row block that is not full
        ("int4", 128, Config(8, 1, 1, 2, 128, 3), 16, 256, 8),
        ("int4", 128, Config(8, 1, 2, 2, 128, 2), 21, 352, 9),  # tiles of tokens, an odd number of scales
        ("int4", 128, Config(8, 1, 2, 1, 512, 2), 18, 512, 8),
        ("int4", 32, Config(8, 1, 1, 2, 512, 2), 11, 544, 2),
        ("int4", 32, Config(8, 2, 1, 1, 512, 2), 32, 512, 2),
        ("int8", None, Config(8, 1, 1, 1, 512, 2), 16, 512, 2),
        ("int4", 64, Config(8, 2, 1, 2, 256, 2), 19, 160, 2),  # one tile that is not full, a team without any
        ("int4", 64, Config(8, 1, 1, 2, 128, 2), 7, 256, 2),
        ("int4", 32, Config(16, 1, 1, 1, 256, 2), 17, 256, 11),
        ("int4", 32, Config(8, 2, 2, 1, 128, 2), 40, 224, 5),
        ("int8", None, Config(8, 2, 1, 2, 256, 2, 2), 33, 512, 3),
        ("int8", None, Config(8, 1, 2, 1, 128, 2), 37, 128, 8),
        ("int8", None, Config(16, 2, 1, 2, 128, 2), 10, 288, 13),
        ("fp8", None, Config(8, 1, 1, 2, 256, 2), 20, 288, 4),
        ("fp8", None, Config(8, 2, 1, 1, 128, 2), 32, 256, 4),
    ],
)
def test_emulated_kernel_multiplies(codes, group, config, n, k, tokens, dtype):
    torch.manual_seed(0)
    packed = random_weight(n, k, codes, group, dtype)
    x = torch.randn(tokens, k).to(dtype)
    sums = torch.zeros(tokens, n, dtype=torch.float64)
    for unit in range(-(-n // config.rows) * -(-tokens // config.tokens)):
        Block(config, x, packed, codes, group, unit).run(sums)
    y = sums if group else sums * packed.scale.double().t()
    exact = packed.unpack(torch.float64)
    torch.testing.assert_close(y, x.double() @ exact.t(), rtol=1e-12, atol=1e-12)


def test_every_column_is_in_one_tile_of_one_team():
    for step, teams, split, k in [(128, 1, 1, 32), (128, 8, 4, 4096), (256, 4, 2, 4064), (512, 2, 4, 14336)]:
        config = Config(8, 1, 1, teams, step, 2, split)
        weight = torch.zeros(16, k, dtype=torch.int8)
        packed = pack(weight)
        packed = Packed24(packed.values, packed.meta, k, torch.ones(16, 1))
        block = Block(config, torch.zeros(1, k, dtype=torch.float16), packed, "int8", None, 0)
        taken = [column for place in range(teams * split) for column in block.columns_of(place)]
        assert sorted(taken) == list(range(0, k, step))
