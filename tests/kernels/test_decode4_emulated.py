"""The kernel for 4-bit weights on Hopper, emulated: every address, lane and position is the right one.

The real host code describes the tensors and launches, but to a driver that is written here: it keeps the
descriptions, and a launch does what cuda/decode4_sm90.cu and few_sm90.cuh do, for all threads of a block at
once, address by address. Sums are exact, so a product must be.
"""

import ctypes

import pytest
import torch
from torch import Tensor

from tests.kernels.emulated_hopper import Map, wgmma_sp
from tests.kernels.test_quantized_decode import DTYPES, four_bit_numbers
from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour.kernels import hopper_launch, nvrtc, reference
from twofour.kernels.hopper import Decode4
from twofour.kernels.nvrtc import cuda_text
from twofour.packed import Packed24

SHARED = 3 * 1024  # where shared memory begins, when aligned
# Lines of the source that the emulation below follows.
FOLLOWED = """
return STEP == 512 ? piece ^ (row & 7) : piece ^ (row >> 1 & 3);
return STEP == 512 ? piece ^ (row >> 1 & 3) : piece ^ (row >> 2 & 1);
copy_rows(tile + B_BYTES, &values, step * A_PITCH, place.block, barrier, once);
copy_rows(tile + B_BYTES + A_BYTES, &positions, step * E_PITCH, place.block, barrier, once);
copy_tile(tile + j * B_BOX, &x, column + 64 * j, place.first_token, barrier, often);
const char* codes = tile + B_BYTES + row * A_PITCH;
const char* here = codes + 16 * a_piece(row, 2 * g + half);
const uint4 above = *(const uint4*)here, below = *(const uint4*)(here + 8 * A_PITCH);
const char* e = tile + B_BYTES + A_BYTES + row * E_PITCH + 16 * e_piece(row, g) + 8 * half + 2 * own;
mine.places[half] = *(const u16*)e | (u32) * (const u16*)(e + 8 * E_PITCH) << 16;
const u32 b = low_word(shared_address(tile)) + 2 * g * (B_BOX >> 4);
WGMMA(to, mine.weights[0], full_descriptor(b), mine.places[0], 0, 0);
WGMMA(to, mine.weights[1], full_descriptor(b + 4), mine.places[0], 1, 1);
WGMMA(to, mine.weights[2], full_descriptor(b + (B_BOX >> 4)), mine.places[1], 0, 1);
WGMMA(to, mine.weights[3], full_descriptor(b + (B_BOX >> 4) + 4), mine.places[1], 1, 1);
sum[j] = fmaf(part[j], scales[j % 4 / 2], sum[j]);
if (i + 1 < count) load_scales(groups - 1 - GROUPS * (place.first + i + 1));
return first_token + 8 * (j / 4) + 2 * (lane % 4) + j % 2;
const int j = rank * SHARE + i, token = token_of(j), here = at + (j % 4 < 2 ? 0 : 8);
""".strip().splitlines()


class Kernel:
    """One launch. `fault` is done to shared memory after the copies of each tile."""

    def __init__(self, config: Decode4, dtype: torch.dtype, activation: str | None, maps, arguments, fault):
        def number(i: int, kind: type = ctypes.c_int) -> int:
            return kind.from_address(arguments[i]).value

        self.config, self.dtype, self.activation, self.fault = config, dtype, activation, fault
        self.values, self.positions, self.x = (maps[arguments[i]] for i in range(3))
        self.n, self.tokens, self.steps, self.blocks, self.tiles, self.grouped = map(number, range(5, 11))
        self.k = number(12)
        rows = 2 * self.n if activation else self.n
        self.groups = self.k // 128
        self.bias = self.numbers_at(number(4, ctypes.c_uint64), rows)
        self.scale = self.numbers_at(number(11, ctypes.c_uint64), rows * self.groups)
        self.groups_here, self.a_pitch, self.e_pitch = config.step // 128, config.step // 4, config.step // 8
        self.rows, self.consumers = 64 * config.warpgroups, 128 * config.warpgroups
        self.b_box = config.tokens * 128
        self.b_bytes, self.a_bytes = self.b_box * (config.step // 64), self.rows * self.a_pitch
        self.share = config.tokens // 2 // config.split
        self.memory = torch.full((SHARED + config.shared_bytes - 1024,), 0xAB, dtype=torch.uint8)
        thread = torch.arange(self.consumers)
        self.warp, self.lane = thread // 32, thread % 32
        self.row, self.own = 64 * (self.warp // 4) + 16 * (self.warp % 4) + self.lane // 4, self.lane % 4
        self.y = torch.full((self.tokens, self.n), torch.nan, dtype=torch.float64)

    def numbers_at(self, address: int, count: int) -> Tensor | None:
        if not address:
            return None
        return torch.frombuffer(bytearray(ctypes.string_at(address, 2 * count)), dtype=self.dtype).double()

    def a_piece(self, piece: int) -> Tensor:
        return piece ^ (self.row & 7) if self.config.step == 512 else piece ^ (self.row >> 1 & 3)

    def e_piece(self, piece: int) -> Tensor:
        return piece ^ (self.row >> 1 & 3) if self.config.step == 512 else piece ^ (self.row >> 2 & 1)

    def copy(self, tile: int, step: int, block: int, first_token: int) -> None:
        at = (0, 0, block * (self.rows // 16)) if self.activation else (block * self.rows,)
        self.values.copy(self.memory, tile + self.b_bytes, step * self.a_pitch, *at)
        self.positions.copy(self.memory, tile + self.b_bytes + self.a_bytes, step * self.e_pitch, *at)
        for j in range(self.config.step // 64):
            self.x.copy(self.memory, tile + j * self.b_box, step * self.config.step + 64 * j, first_token)
        # The barrier opens when so many bytes have come, not before and not after.
        come = self.values.box_bytes + self.positions.box_bytes
        assert come + self.x.box_bytes * (self.config.step // 64) == self.config.stage_bytes
        if self.fault:
            self.fault(self.memory[tile + self.b_bytes : tile + self.config.stage_bytes])

    def loaded(self, at: Tensor, size: int) -> Tensor:
        """[thread, size] bytes: what each reads. Lanes of a warp that want the same have it at once."""
        assert bool((at % size == 0).all())
        for warp in at.view(-1, 32).tolist():
            words = {byte // 4 for first in warp for byte in range(first, first + size)}
            assert len(words) == len({word % 32 for word in words}), "bank conflict"
        return self.memory[at[:, None] + torch.arange(size)]

    def products(self, tile: int, g: int) -> Tensor:
        """[thread, sum]: those of group g of a tile."""
        weights, places = [], []
        codes = tile + self.b_bytes + self.row * self.a_pitch
        for half in range(2):
            here = codes + 16 * self.a_piece(2 * g + half)
            above, below = (self.loaded(at, 16).contiguous() for at in (here, here + 8 * self.a_pitch))
            above, below = (words.view(torch.int32).long() & 0xFFFFFFFF for words in (above, below))
            for word in (0, 2):
                four = (above[:, word], below[:, word], above[:, word + 1], below[:, word + 1])
                weights.append(torch.stack([four_bit_numbers(w, self.own, self.dtype) for w in four], -1))
            e = tile + self.b_bytes + self.a_bytes + self.row * self.e_pitch
            e = e + 16 * self.e_piece(g) + 8 * half + 2 * self.own
            up, low = (self.loaded(at, 2).long() for at in (e, e + 8 * self.e_pitch))
            places.append(up[:, 0] | up[:, 1] << 8 | low[:, 0] << 16 | low[:, 1] << 24)
        box = self.b_box >> 4
        b = ((tile & 0x3FFFF) >> 4 | 1 << 16) + 2 * g * box
        total = torch.zeros(self.consumers, self.config.tokens // 2, dtype=torch.float64)
        for p, onward in enumerate((0, 4, box, box + 4)):
            full = b + onward | (1024 >> 4) << 32 | 1 << 62
            of_warps = (weights[p].view(-1, 32, 4), full, places[p // 2].view(-1, 32), p % 2)
            total += wgmma_sp(self.memory, *of_warps, self.config.tokens, self.dtype).view_as(total)
        return total

    def sums(self, rank: int, block: int, first_token: int) -> Tensor:
        """[thread, sum] of one block of a cluster."""
        config, n = self.config, self.n
        first = self.steps * rank // config.split
        count = self.steps * (rank + 1) // config.split - first
        if self.activation:
            at = block * (self.rows // 2) + 32 * (self.warp // 4) + 8 * (self.warp % 4) + self.lane // 4
            rows = [at.clamp(max=n - 1), n + at.clamp(max=n - 1)]
        else:
            at = block * self.rows + self.row
            rows = [at.clamp(max=n - 1), (at + 8).clamp(max=n - 1)]
        total = torch.zeros(self.consumers, config.tokens // 2, dtype=torch.float64)
        of_sum = torch.arange(config.tokens // 2) % 4 // 2
        for i in range(count):
            step = first + i
            tile = SHARED + i % config.stages * config.stage_bytes
            self.copy(tile, step, block, first_token)
            for g in range(self.groups_here):
                group = self.groups_here * step + min(g, self.groups - 1 - self.groups_here * step)
                scales = torch.stack([self.scale[row * self.groups + group] for row in rows], -1)
                total += self.products(tile, g) * scales[:, of_sum]
        return total

    def run(self, grid: int) -> None:
        config, split = self.config, self.config.split
        assert grid == self.blocks * self.tiles * split
        for unit in range(grid // split):
            first_of_set = unit // (self.grouped * self.tiles) * self.grouped
            rows_in_set = min(self.grouped, self.blocks - first_of_set)
            block = first_of_set + unit % (self.grouped * self.tiles) % rows_in_set
            first_token = unit % (self.grouped * self.tiles) // rows_in_set * config.tokens
            total = sum(self.sums(rank, block, first_token) for rank in range(split))
            for rank in range(split):
                self.finish(total[:, rank * self.share : (rank + 1) * self.share], rank, block, first_token)

    def finish(self, sums: Tensor, rank: int, block: int, first_token: int) -> None:
        group, warp = self.warp // 4, self.warp % 4
        for i in range(self.share):
            j = rank * self.share + i
            token = first_token + 8 * (j // 4) + 2 * self.own + j % 2
            if self.activation:
                if i % 4 > 1:
                    continue
                at = block * (self.rows // 2) + 32 * group + 8 * warp + self.lane // 4
                there = (token < self.tokens) & (at < self.n)
                both = [sums[there, i], sums[there, i + 2]]
                if self.bias is not None:
                    both = [both[0] + self.bias[at[there]], both[1] + self.bias[self.n + at[there]]]
                out = reference.gate(torch.cat(both)[None], self.activation)[0]
            else:
                at = block * self.rows + 64 * group + 16 * warp + self.lane // 4 + (0 if j % 4 < 2 else 8)
                there = (token < self.tokens) & (at < self.n)
                out = sums[there, i] + (0 if self.bias is None else self.bias[at[there]])
            assert bool(self.y[token[there], at[there]].isnan().all()), "written twice"
            self.y[token[there], at[there]] = out


class Driver:
    """What the host code asks of the CUDA driver: it keeps descriptions, and a launch runs the emulation."""

    def __init__(self, config: Decode4, dtype: torch.dtype, activation: str | None, fault=None) -> None:
        self.options, self.fault = (config, dtype, activation), fault
        self.maps: dict[int, Map] = {}

    def cuTensorMapEncodeTiled(
        self, at, element, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill
    ) -> int:
        assert list(steps) == [1] * rank
        assert interleave == fill == 0
        size = {0: 1, 6: 2, 9: 2}[element]
        self.maps[at.value] = Map(size, address.value, list(sizes), list(strides), list(box), swizzle)
        return 0

    def cuLaunchKernelEx(self, launch, function, arguments, extra) -> int:
        launch = nvrtc.LaunchConfig.from_address(launch)
        config, *_ = self.options
        assert (launch.block[0], launch.shared_bytes) == (config.threads, config.shared_bytes)
        kernel = Kernel(*self.options, self.maps, arguments, self.fault)
        kernel.run(launch.grid[0])
        self.y = kernel.y
        return 0


def product(
    monkeypatch, config: Decode4, x: Tensor, packed: Packed24, bias=None, activation=None, fault=None
) -> Tensor:
    """x·Wᵀ + bias, unrounded, by the real host code and the emulated kernel."""
    driver = Driver(config, x.dtype, activation, fault)
    monkeypatch.setattr(nvrtc, "driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "load", lambda *_: ctypes.c_void_p())
    monkeypatch.setattr(nvrtc, "resident_clusters", lambda *_: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    n = packed.values.shape[0] // (2 if activation else 1)
    launches = hopper_launch.Launches(n, x.shape[1], x.dtype, config, 0, activation)
    launches.run(x, packed.values, packed.meta, bias, x.new_empty(x.shape[0], n), packed.scale)
    return driver.y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("config", "n", "k", "tokens", "activation"),
    [
        (Decode4(8, 1, 1, 256, 2), 64, 256, 8, None),  # one tile
        (Decode4(8, 1, 1, 512, 2), 64, 512, 8, None),
        (Decode4(8, 2, 2, 256, 2), 200, 384, 3, None),  # a cluster, edges in rows and columns
        (Decode4(16, 1, 4, 512, 2), 72, 1152, 5, None),  # of which one block has no columns
        (Decode4(8, 1, 1, 512, 2, grouped=2), 170, 640, 11, None),  # two tiles of tokens
        (Decode4(8, 1, 1, 256, 2), 1, 1408, 1, None),  # more tiles than there are stages
        (Decode4(64, 1, 8, 256, 2), 16, 256, 64, None),
        (Decode4(8, 4, 1, 512, 2), 256, 512, 2, None),
        (Decode4(8, 1, 1, 256, 2), 40, 384, 8, "silu"),
        (Decode4(16, 2, 2, 512, 2), 72, 1152, 9, "gelu"),
    ],
)
def test_emulated_kernel_multiplies(config, n, k, tokens, activation, dtype, monkeypatch):
    torch.manual_seed(0)
    rows = 2 * n if activation else n
    packed = random_weight(rows, k, "int4", 128, dtype)
    x, bias = torch.randn(tokens, k).to(dtype), torch.randn(rows).to(dtype)
    y = product(monkeypatch, config, x, packed, bias, activation)
    exact = x.double() @ packed.unpack(torch.float64).t() + bias.double()
    exact = reference.gate(exact, activation) if activation else exact
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)


def test_the_emulation_is_of_this_source():
    """It proves something only while it does what the source says."""
    text = cuda_text("few_sm90.cuh", "decode4_sm90.cu")
    assert [line for line in FOLLOWED if line not in text] == []


def swap_two_bytes(first: int, size: int):
    """A fault in one of the two areas of a tile's weights: of codes, of positions."""

    def fault(weights: Tensor) -> None:
        here = weights[first : first + size]
        one = int(torch.randint(size, ()))
        others = (here != here[one]).nonzero().flatten()
        other = int(others[torch.randint(len(others), ())])
        here[[one, other]] = here[[other, one]]

    return fault


@pytest.mark.parametrize("step", [256, 512])
def test_two_bytes_that_change_places_are_noticed(step, monkeypatch):
    torch.manual_seed(0)
    config = Decode4(8, 1, 1, step, 2)
    packed, x = random_weight(64, step, "int4", 128, torch.bfloat16), torch.randn(8, step).bfloat16()
    right = product(monkeypatch, config, x, packed)
    assert torch.equal(product(monkeypatch, config, x, packed), right)
    for first, size in ((0, 16 * step), (16 * step, 8 * step)):
        for _ in range(8):
            wrong = product(monkeypatch, config, x, packed, fault=swap_two_bytes(first, size))
            assert not torch.equal(wrong, right)


@pytest.mark.parametrize(("step", "name"), [(256, "_SWIZZLE_32"), (256, "_SWIZZLE_64"), (512, "_SWIZZLE_64")])
def test_another_swizzle_than_the_kernel_undoes_is_noticed(step, name, monkeypatch):
    """That a description has and what the source makes of it are in two files."""
    torch.manual_seed(0)
    packed, x = random_weight(64, step, "int4", 128, torch.bfloat16), torch.randn(8, step).bfloat16()
    exact = x.double() @ packed.unpack(torch.float64).t()
    monkeypatch.setattr(hopper_launch, name, getattr(hopper_launch, name) + 1)
    y = product(monkeypatch, Decode4(8, 1, 1, step, 2), x, packed)
    assert float((y - exact).norm() / exact.norm()) > 0.1
