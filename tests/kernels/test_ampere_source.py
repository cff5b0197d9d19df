"""What can be known of the kernel for sm_80 and later without a GPU: it compiles, and its indices are right.

The emulation below does what cuda/mma_sm80.cu does, thread by thread and address by address, and takes for
the three instructions (cp.async, ldmatrix, mma.sp) what the PTX manual says of them.
"""

import re
import shutil
import subprocess

import pytest
import torch

from twofour.kernels import ampere
from twofour.kernels.ampere import Config
from twofour.packed import Packed24, pack
from twofour.pattern import keep_best

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 1000)


@nvcc
@pytest.mark.parametrize("architecture", ["80", "89", "90"])
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (Config(8, 4, 1, 4, 64, 2), torch.bfloat16),  # few tokens, many rows
        (Config(8, 2, 1, 4, 128, 3), torch.float16),
        (Config(16, 4, 2, 2, 64, 3), torch.bfloat16),  # teams of several warps
        (Config(64, 4, 2, 2, 64, 2), torch.float16),  # the most registers
    ],
)
def test_compiles_without_spills(config, dtype, architecture, tmp_path):
    assert config in ampere.configs(config.tokens)
    (tmp_path / "kernel.cu").write_text(ampere.source(config, dtype))
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in ran.stderr
    (registers,) = re.findall(r"Used (\d+) registers", ran.stderr)
    assert int(registers) * config.threads <= 65536


def test_every_candidate_fits_every_multiprocessor():
    for tokens in TOKENS:
        candidates = ampere.configs(tokens)
        assert 1 <= len(candidates) <= 16
        for config in candidates:
            assert config.tokens >= min(tokens, 64)
            assert config.shared_bytes <= 96 << 10  # sm_86 and sm_89 allow 99 KB
            assert config.stages >= 2
            assert config.threads <= 1024
            assert config.k_warps <= 15  # barriers of the hardware, beside that of the block
            assert 256 % config.step == 0
            # The loops of the copies: each thread keeps its 16-byte chunk of a row.
            assert 32 * config.row_warps % (config.step // 8) == 0
            assert (
                config.tokens * config.row_tiles // 2 + 100 <= 255
            )  # sums and about what else is in registers


def test_the_guess_is_a_candidate():
    for tokens in TOKENS:
        for n, k in [(8, 32), (1024, 4096), (4096, 1024), (4096, 14336), (28672, 4096), (128256, 4096)]:
            for processors in (20, 84, 108, 132):
                assert ampere.guess(n, k, tokens, processors) in ampere.configs(tokens)


def test_why_not_says_what_is_missing(monkeypatch):
    cuda, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert ampere.architecture(cuda) == "sm_80"
    assert ampere.why_not(cuda, torch.bfloat16, 1, 32) is None
    assert "CUDA" in ampere.why_not(torch.device("cpu"), torch.bfloat16, 64, 64)
    assert "float32" in ampere.why_not(cuda, torch.float32, 64, 64)
    assert "multiple of 32" in ampere.why_not(cuda, torch.float16, 64, 48)
    capability = (12, 0)
    assert ampere.architecture(cuda) == "sm_120"
    assert ampere.why_not(cuda, torch.float16, 1, 32) is None
    capability = (7, 5)
    assert "8.0" in ampere.why_not(cuda, torch.float16, 64, 64)


# ------------------------------------------------------------------------------------------------------------
# The instructions.


def ldmatrix_x4(memory: torch.Tensor, addresses: list[int]) -> list[list[list[int]]]:
    """[lane][register][element]: lanes 8i … 8i+7 address matrix i's rows of 8, lane l gets 2 of row l/4."""
    for matrix in range(4):  # as it would take more than one pass through the banks
        banks = {addresses[8 * matrix + row] // 16 % 8 for row in range(8)}
        assert len(banks) == 8, "bank conflict"
    bits = memory.view(torch.int16)
    out = []
    for lane in range(32):
        at = [addresses[8 * matrix + lane // 4] // 2 + 2 * (lane % 4) for matrix in range(4)]
        out.append([bits[i : i + 2].tolist() for i in at])
    return out


def mma_sp_m16n8k32(a, b, words, selector, dtype) -> torch.Tensor:
    """[16, 8] of float64 from the registers of a warp's 32 lanes, by the documented fragments."""
    sparse, dense = torch.zeros(16, 32, dtype=torch.float64), torch.zeros(32, 8, dtype=torch.float64)
    a = torch.tensor(a, dtype=torch.int16).view(dtype).double()  # [lane, register, element]
    b = torch.tensor(b, dtype=torch.int16).view(dtype).double()
    for lane in range(32):
        for register in range(4):
            # Registers 0 and 1: group lane%4 of rows lane/4 and lane/4 + 8; 2 and 3: the group 4 further on.
            row, group = lane // 4 + 8 * (register % 2), lane % 4 + 4 * (register // 2)
            # Lanes 2s and 2s+1 of a quad name the positions in groups 0-3 and 4-7; low half: row lane/4.
            word = words[lane // 4 * 4 + 2 * selector + group // 4]
            nibble = word >> (16 * (register % 2) + 4 * (group % 4)) & 15
            assert nibble & 3 < nibble >> 2, "not a valid pair of positions"
            sparse[row, 4 * group + (nibble & 3)] = a[lane, register, 0]
            sparse[row, 4 * group + (nibble >> 2)] = a[lane, register, 1]
            first = 8 * register + 2 * (lane % 4)
            dense[first : first + 2, lane // 4] = b[lane, register]
    return sparse @ dense


# ------------------------------------------------------------------------------------------------------------
# The kernel: names and formulas are those of cuda/mma_sm80.cu.


class Block:
    def __init__(self, config: Config, x: torch.Tensor, packed: Packed24, unit: int) -> None:
        self.config, self.dtype = config, x.dtype
        (self.tokens, self.k), self.n = x.shape, packed.values.shape[0]
        self.x, self.values, self.positions = (
            t.contiguous().view(torch.uint8).flatten() for t in (x, packed.values, packed.meta)
        )
        self.a_pitch, self.e_pitch, self.x_pitch = config.step, config.step // 8, 2 * config.step
        self.a_bytes, self.x_bytes = config.rows * self.a_pitch, config.tokens * self.x_pitch
        self.stage_bytes = self.a_bytes + self.x_bytes + config.rows * self.e_pitch
        assert self.stage_bytes * config.k_warps == config.stage_bytes
        blocks, tiles, wide = -(-self.n // config.rows), -(-self.tokens // config.tokens), 8
        band = unit // (wide * tiles) * wide
        width = min(wide, blocks - band)
        self.first_row = (band + unit % (wide * tiles) % width) * config.rows
        self.first_token = unit % (wide * tiles) // width * config.tokens
        self.last = self.n - 1 - self.first_row

    def columns_of(self, team: int) -> list[int]:
        """The first column of each tile of a team."""
        step, teams = self.config.step, self.config.k_warps
        run, steps = 256 // step, -(-self.k // step)
        rounds = steps // (run * teams)
        count = rounds * run + max(0, min(run, steps - (rounds * teams + team) * run))
        return [((i // run * teams + team) * run + i % run) * step for i in range(count)]

    def a_chunk(self, row: int, chunk: int) -> int:
        return chunk ^ (row & 7) if self.config.step == 128 else chunk ^ (row >> 1 & 3)

    def copy(self, column: int) -> torch.Tensor:
        """A stage after all copies of its team: every byte written once."""
        config, k, team = self.config, self.k, 32 * self.config.row_warps
        stage = torch.full((self.stage_bytes,), 255, dtype=torch.uint8)
        written = torch.zeros(self.stage_bytes, dtype=torch.int32)

        def put(to: int, memory: torch.Tensor, at: int, size: int, there: bool = True) -> None:
            assert to % size == 0
            written[to : to + size] += 1
            if there:
                assert at % size == 0
                assert 0 <= at <= len(memory) - size
                stage[to : to + size] = memory[at : at + size]
            else:
                stage[to : to + size] = 0

        x = 2 * self.first_token * k
        values, positions = self.first_row * k, self.first_row * (k // 8)
        e = self.a_bytes + self.x_bytes
        for member in range(team):
            chunks = self.a_pitch // 16
            chunk = member % chunks
            for j in range(config.rows * chunks // team):
                row = j * (team // chunks) + member // chunks
                at = values + column + 16 * chunk + min(row, self.last) * k
                to = row * self.a_pitch + 16 * self.a_chunk(row, chunk)
                put(to, self.values, at, 16, column + 16 * chunk < k)
            if k % config.step == 0:
                for j in range(-(-config.rows // team)):
                    row = j * team + member
                    if row < config.rows:
                        at = positions + column // 8 + min(row, self.last) * (k // 8)
                        put(e + row * self.e_pitch, self.positions, at, self.e_pitch)
            else:
                pieces = self.e_pitch // 4
                piece = member % pieces
                there = column // 8 + 4 * piece if column + 32 * piece < k else 0
                for row in range(member // pieces, config.rows, team // pieces):
                    at = positions + there + min(row, self.last) * (k // 8)
                    put(e + row * self.e_pitch + 4 * piece, self.positions, at, 4)
            chunks = self.x_pitch // 16
            chunk = member % chunks
            for j in range(-(-config.tokens * chunks // team)):
                token = j * (team // chunks) + member // chunks
                if token < config.tokens:
                    there = token < self.tokens - self.first_token and column + 8 * chunk < k
                    at = x + 2 * column + 16 * chunk + 2 * token * k
                    to = self.a_bytes + token * self.x_pitch + 16 * (chunk ^ (token & 7))
                    put(to, self.x, at, 16, there)
        assert bool((written == 1).all())
        return stage

    def multiply(self, stage: torch.Tensor, warp: int, sums: torch.Tensor) -> None:
        """Add a stage's products to a warp's sums [row_tiles, tokens / 8, 16, 8]."""
        config, units = self.config, self.config.step // 64
        first, b, lanes = 16 * config.row_tiles * warp, self.a_bytes, range(32)

        def word(tile: int, lane: int, u: int) -> int:
            e = self.a_bytes + self.x_bytes + (first + 16 * tile + lane // 4) * self.e_pitch
            e += lane % 4 * (self.e_pitch // 4) + 2 * u
            low = int(stage[e]) | int(stage[e + 1]) << 8
            e += 8 * self.e_pitch
            return low | (int(stage[e]) | int(stage[e + 1]) << 8) << 16

        for u in range(units):
            for selector in range(2):
                here = [(2 * selector + lane // 16) * units + u for lane in lanes]
                x = []
                for t in range(config.tokens // 8):
                    chunks = [(2 * here[lane] + lane // 8 % 2) ^ (lane & 7) for lane in lanes]
                    rows = [8 * t + lane % 8 for lane in lanes]
                    at = [b + r * self.x_pitch + 16 * c for r, c in zip(rows, chunks, strict=True)]
                    x.append(ldmatrix_x4(stage, at))
                for m in range(config.row_tiles):
                    at = [
                        (first + lane % 16 + 16 * m) * self.a_pitch + 16 * self.a_chunk(lane, here[lane])
                        for lane in lanes
                    ]
                    a, words = ldmatrix_x4(stage, at), [word(m, lane, u) for lane in lanes]
                    for t, columns in enumerate(x):
                        sums[m, t] += mma_sp_m16n8k32(a, columns, words, selector, self.dtype)

    def run(self, y: torch.Tensor) -> None:
        config = self.config
        shape = (config.k_warps, config.row_warps, config.row_tiles, config.tokens // 8, 16, 8)
        sums = torch.zeros(shape, dtype=torch.float64)
        for team in range(config.k_warps):
            for column in self.columns_of(team):
                stage = self.copy(column)
                for warp in range(config.row_warps):
                    self.multiply(stage, warp, sums[team, warp])
        # A lane's sums c are row lane/4 + 8·(c/2), token 2·(lane%4) + c%2 of a tile: together all of [16, 8].
        pitch = config.rows + 4
        memory = torch.full((config.k_warps * config.tokens * pitch,), torch.nan, dtype=torch.float64)
        for team in range(config.k_warps):
            for warp in range(config.row_warps):
                for m in range(config.row_tiles):
                    row = 16 * config.row_tiles * warp + 16 * m
                    for t in range(config.tokens // 8):
                        for c in range(4):
                            lanes = [(g * 4 + q) for g in range(8) for q in range(4)]
                            at = [
                                (team * config.tokens + 8 * t + 2 * (lane % 4) + c % 2) * pitch
                                + row
                                + lane // 4
                                + c // 2 * 8
                                for lane in lanes
                            ]
                            assert len({i % 32 for i in at}) == 32, "bank conflict"
                            for lane, i in zip(lanes, at, strict=True):
                                mine = sums[team, warp, m, t]
                                memory[i] = mine[lane // 4 + c // 2 * 8, 2 * (lane % 4) + c % 2]
        for i in range(config.tokens * config.rows // 2):
            token, at = i // (config.rows // 2), 2 * (i % (config.rows // 2))
            for row in (at, at + 1):
                if token < self.tokens - self.first_token and row <= self.last:
                    parts = [(w * config.tokens + token) * pitch + row for w in range(config.k_warps)]
                    place = (self.first_token + token, self.first_row + row)
                    assert bool(y[place].isnan()), "written twice"
                    y[place] = memory[parts].sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("config", "n", "k", "tokens"),
    [
        (Config(8, 2, 1, 4, 64, 3), 40, 320, 3),  # the last row block is not full, teams without tiles
        (Config(8, 2, 1, 2, 128, 3), 33, 512, 8),
        (Config(16, 1, 2, 2, 128, 2), 35, 352, 17),  # tiles of 128 that are not full, two tiles of tokens
        (Config(32, 4, 2, 1, 64, 2), 130, 96, 30),  # a team of two warps, positions in pieces of 4 bytes
    ],
)
def test_emulated_kernel_multiplies(config, n, k, tokens, dtype):
    torch.manual_seed(0)
    weight = torch.randn(n, k).to(dtype)
    weight = weight.where(keep_best(weight.abs()), 0)
    weight[torch.rand(n, k) < 0.3] = 0  # groups with one nonzero, or none
    x = torch.randn(tokens, k).to(dtype)
    y = torch.full((tokens, n), torch.nan, dtype=torch.float64)
    for unit in range(-(-n // config.rows) * -(-tokens // config.tokens)):
        Block(config, x, pack(weight), unit).run(y)
    torch.testing.assert_close(y, x.double() @ weight.double().t(), rtol=1e-12, atol=1e-12)


def test_every_column_is_in_one_tile_of_one_team():
    for step, teams, k in [(64, 1, 32), (64, 8, 4096), (128, 4, 4064), (64, 4, 1312), (128, 8, 14336)]:
        config = Config(8, 1, 1, teams, step, 2)
        weight = torch.zeros(16, k, dtype=torch.bfloat16)
        block = Block(config, weight[:1], pack(weight), 0)
        taken = [column for team in range(teams) for column in block.columns_of(team)]
        assert sorted(taken) == list(range(0, k, step))


def test_every_unit_is_another_part_of_the_output():
    config = Config(8, 1, 1, 1, 64, 2)
    for n, tokens in [(16, 1), (16 * 19 - 3, 1), (16 * 19 - 3, 50), (16 * 8, 20)]:
        weight, x = torch.zeros(n, 32, dtype=torch.float16), torch.zeros(tokens, 32, dtype=torch.float16)
        packed, count = pack(weight), -(-n // 16) * -(-tokens // 8)
        blocks = [Block(config, x, packed, unit) for unit in range(count)]
        assert len({(b.first_row, b.first_token) for b in blocks}) == count
        assert all(b.first_row < n and b.first_token < tokens for b in blocks)
