"""The kernel for 4-bit weights on Hopper, emulated: every address, lane and position is the right one.

The real host code describes the tensors and launches, but to a driver that is written here: it keeps the
descriptions, and a launch does what cuda/decode4_sm90.cu and few_sm90.cuh do, for all threads of a block at
once, address by address. Sums are exact, so a product with the weight as it is in 16 bits must be.
"""

import ctypes
import itertools

import pytest
import torch
from torch import Tensor

from tests.kernels.emulated_hopper import Map, wgmma_sp
from tests.kernels.test_quantized_decode import DTYPES, byte_perm, two
from tests.kernels.test_quantized_decode_emulated import random_weight
from twofour.kernels import hopper_launch, nvrtc, reference
from twofour.kernels.hopper import Decode4
from twofour.kernels.nvrtc import cuda_text
from twofour.packed import Packed24
from twofour.streamed import stream

SHARED = 3 * 1024  # where shared memory begins, when aligned
BYTES = {"values": 2048, "positions": 1024, "scale": 128}  # of 64 rows × 128 columns
# Lines of the source that the emulation below follows.
FOLLOWED = """
constexpr int A_BYTES = 64 * 128 / 4, E_BYTES = 64 * 128 / 8, S_BYTES = 64 * 2;
constexpr int E_FIRST = GROUPS * A_BYTES, S_FIRST = E_FIRST + GROUPS * E_BYTES;
constexpr int W_BYTES = S_FIRST + GROUPS * S_BYTES;
char* weights = shared + X_STAGES * B_BYTES;
constexpr int TALL = (HEIGHT + WARPGROUPS - 1) / WARPGROUPS;
constexpr int W_COPIERS = TALL > 1 && WARPGROUPS > 3 ? WARPGROUPS / 2 : WARPGROUPS;
constexpr int COPIED = (HEIGHT + W_COPIERS - 1) / W_COPIERS;
const int number = w + t * W_COPIERS;
const int beside = TALL > 1 ? number / WARPGROUPS : number % 2;
const int pair = TALL > 1 ? number % WARPGROUPS : number / 2;
const int block = beside * (n / 64) + min(place.block * (HEIGHT / 2) + pair, n / 64 - 1);
const int block = min(place.block * HEIGHT + number, n / 64 - 1);
const int copied = w + (COPIED - 1) * W_COPIERS < HEIGHT ? COPIED : COPIED - 1;
const int w = warp - MULTIPLIERS / 32;
const u32 first = shared_address(weights) + w * W_BYTES;
const long long from = (long long)block * groups + place.first * GROUPS;
codes[t] = values + from * A_BYTES, places[t] = positions + from * E_BYTES;
scales[t] = scale + from * S_BYTES;
int left = groups - place.first * GROUPS;
barrier_expect(barrier, copied * W_BYTES);
const u32 to = first + (stage * HEIGHT + t * W_COPIERS) * W_BYTES;
copy_bytes(to + at * A_BYTES, codes[t], count * A_BYTES, barrier, policy);
copy_bytes(to + E_FIRST + at * E_BYTES, places[t], count * E_BYTES, barrier, policy);
copy_bytes(to + S_FIRST + at * S_BYTES, scales[t], count * S_BYTES, barrier, policy);
copy(0, GROUPS);
copy(0, left);
for (int at = left; at < GROUPS; ++at) copy(at, 1);
codes[t] += GROUPS * A_BYTES, places[t] += GROUPS * E_BYTES, scales[t] += GROUPS * S_BYTES;
left -= GROUPS;
barrier_expect(barrier, B_BYTES);
if (++stage == STAGES) stage = 0, phase ^= 1;
if (++stage == X_STAGES) stage = 0, phase ^= 1;
const u32 mine = shared_address(weights) + warpgroup * W_BYTES;
const u32 my_codes = mine + 16 * thread, my_places = mine + E_FIRST + 8 * thread;
const u32 my_scales = mine + S_FIRST + (warp % 4 * 8 + lane / 4) * 4;
: "r"(my_codes + offset + g * A_BYTES));
: "r"(my_scales + offset + g * S_BYTES));
: "r"(my_places + offset + g * E_BYTES));
for (int p = 0; p < 4; ++p) four_bit_numbers(to.weights[p], codes[p], scales);
WGMMA(sum, of.weights[0], b, of.places[0], 0, 1);
WGMMA(sum, of.weights[1], b + 4, of.places[0], 1, 1);
WGMMA(sum, of.weights[2], b + (B_BOX >> 4), of.places[1], 0, 1);
WGMMA(sum, of.weights[3], b + (B_BOX >> 4) + 4, of.places[1], 1, 1);
for (int i = team; i < count; i += TEAMS) {
const int offset = stage * (HEIGHT * W_BYTES);
auto next = [&](int q) { load(offset + q % TILES * (WARPGROUPS * W_BYTES), q / TILES); };
const int g = q / TILES, t = q % TILES;
convert(offset + t * (WARPGROUPS * W_BYTES), g, ready[q % 2]);
start(tile + 2 * g * (B_BOX >> 4), ready[q % 2], sum + t * ACCUMULATORS);
if (HEIGHT % WARPGROUPS == 0 || warpgroup < HEIGHT % WARPGROUPS) {
for (int j = 0; j < SUMS; ++j) sum[j] *= Scales::LARGER;
return first_token + 8 * (j / 4) + 2 * (threadIdx.x % 4) + j % 2;
asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(two_rows) : "r"(two_tokens));
row += 2 * (threadIdx.x % 4), token += threadIdx.x % 32 / 4;
const bool is_there = token < tokens && row < end, even = ((n | (u32)(u64)y >> 1) & 1) == 0;
constexpr int TOGETHER = SHARE % 2 ? 1 : 2;
const int j = place.rank * SHARE + i, t = j / ACCUMULATORS, in_set = j % ACCUMULATORS;
const int beside = 64 * (group + t * WARPGROUPS) + 16 * (warp % 4) + (in_set % 4 < 2 ? 0 : 8);
const int row = place.block * ROWS + beside, end = TALL == 1 || beside < ROWS ? n : 0;
store_eights(y, n, tokens, row, place.first_token + in_set / 4 * 8, end, pack_two(first, second));
const int at = place.block * (ROWS / 2) + 64 * (warp / 8) + 16 * (warp % 4);
const int at = place.block * (ROWS / 2) + 64 * warpgroup + 16 * (warp % 4);
const int row = at + (j % 4 < 2 ? 0 : 8);
const float second = activate(sum[j + 1] + of_gate) * (beside[j + 1] + of_beside);
const int j = place.rank * SHARE + i, row = at + (j % 4 < 2 ? 0 : 8);
store_eights(y, n, tokens, row, place.first_token + j / 4 * 8, n, pack_two(first, second));
const u32 later = word >> 8;
out[1] = two(and_xor(word, 0x00F000F0, 0x00800080), scales.second, scales.second_less);
out[2] = two(and_xor(later, 0x000F000F, 0x00080008), scales.first, scales.first_less);
static constexpr float LARGER = 1152921504606846976.f;
""".strip().splitlines()


def four_bit_numbers(word: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[…, 4] of a word and the word of two scales."""
    first, second = (byte_perm(scales, 0, torch.tensor(selector)) for selector in (0x1010, 0x3232))
    later = word >> 8
    if dtype == torch.float16:
        exact = [
            two((word & 0x000F000F) ^ 0x64086408, 0x3C003C00, 0xE408E408, dtype),
            two((word & 0x00F000F0) ^ 0x64806480, 0x2C002C00, 0xD480D480, dtype),
            two((later & 0x000F000F) ^ 0x64086408, 0x3C003C00, 0xE408E408, dtype),
            two((later & 0x00F000F0) ^ 0x64806480, 0x2C002C00, 0xD480D480, dtype),
        ]
        out = [
            two(codes, (first, second)[i % 2], 0x80008000, dtype, rounds=True)
            for i, codes in enumerate(exact)
        ]
        return torch.stack(out, -1)
    by = [two(first, 0x64006400, 0x80008000, dtype), two(second, 0x62006200, 0x80008000, dtype)]
    less = [two(scale, 0xA300A300, 0x80008000, dtype) for scale in (first, second)]
    moved = [
        (word & 0x000F000F) ^ 0x00080008,
        (word & 0x00F000F0) ^ 0x00800080,
        (later & 0x000F000F) ^ 0x00080008,
        (later & 0x00F000F0) ^ 0x00800080,
    ]
    return torch.stack([two(m, by[i % 2], less[i % 2], dtype, rounds=True) for i, m in enumerate(moved)], -1)


LARGER = {torch.bfloat16: 2.0**60, torch.float16: 1.0}


class Kernel:
    """One launch. `fault` is done to a warpgroup's part of shared memory after the copies of each tile."""

    def __init__(self, config: Decode4, dtype: torch.dtype, activation: str | None, maps, arguments, fault):
        def number(i: int, kind: type = ctypes.c_int) -> int:
            return kind.from_address(arguments[i]).value

        self.config, self.dtype, self.activation, self.fault = config, dtype, activation, fault
        self.x = maps[arguments[2]]
        self.n, self.tokens, self.steps, self.blocks, self.tiles, self.grouped = map(number, range(5, 11))
        self.k = number(12)
        self.rows_of_w = 2 * self.n if activation else self.n
        self.groups, self.groups_here = self.k // 128, config.step // 128
        pieces = self.rows_of_w // 64 * self.groups
        self.stored = {
            name: self.bytes_at(number(i, ctypes.c_uint64), pieces * BYTES[name])
            for name, i in (("values", 0), ("positions", 1), ("scale", 11))
        }
        address = number(4, ctypes.c_uint64)
        bias = self.bytes_at(address, 2 * self.rows_of_w) if address else None
        self.bias = None if bias is None else bias.view(dtype).double()
        self.rows, self.consumers = 64 * config.height, 128 * config.warpgroups
        self.copiers = 2 if config.warpgroups > 3 and config.tall > 1 else config.warpgroups
        self.b_box = config.tokens * 128
        self.b_bytes, self.w_bytes = self.b_box * (config.step // 64), self.groups_here * sum(BYTES.values())
        self.weights = SHARED + config.x_stages * self.b_bytes
        self.share = config.tall * config.tokens // 2 // config.split
        self.memory = torch.full((SHARED + config.shared_bytes - 1024,), 0xAB, dtype=torch.uint8)
        thread = torch.arange(self.consumers)
        self.warp, self.lane, self.thread = thread // 32, thread % 32, thread % 128
        self.y = torch.full((self.tokens, self.n), torch.nan, dtype=torch.float64)

    @staticmethod
    def bytes_at(address: int, count: int) -> Tensor:
        return torch.frombuffer(bytearray(ctypes.string_at(address, count)), dtype=torch.uint8)

    def copy(self, i: int, step: int, block: int, first_token: int) -> None:
        config, half = self.config, self.n // 64
        now = min(self.groups_here, self.groups - step * self.groups_here)
        each = range(0, config.height, self.copiers)
        for number in [w + t for w in range(self.copiers) for t in each if w + t < config.height]:
            come = 0
            if self.activation:
                beside, pair = (
                    divmod(number, config.warpgroups) if config.tall > 1 else (number % 2, number // 2)
                )
                of = beside * half + min(block * (config.height // 2) + pair, half - 1)
            else:
                of = min(block * config.height + number, half - 1)
            first = of * self.groups + step * self.groups_here
            to = self.weights + (i % config.stages * config.height + number) * self.w_bytes
            area = self.memory[to : to + self.w_bytes]
            for name, size in BYTES.items():
                assert to % 16 == 0
                pieces = self.stored[name].view(-1, size)[first : first + now]
                again = pieces[:1].expand(self.groups_here - now, -1)  # beyond the edge x is zero
                self.memory[to : to + self.groups_here * size] = torch.cat([pieces, again]).flatten()
                to, come = to + self.groups_here * size, come + self.groups_here * size
            assert come == self.w_bytes  # what a copying warp says will come, for each that it copies
            if self.fault:
                self.fault(area)
        tile = SHARED + i % config.x_stages * self.b_bytes
        self.x.copy(self.memory, tile, 0, first_token, step * config.step // 64)
        assert (
            self.x.box_bytes == self.b_bytes
        )  # barriers open when so many have come, not before and not after
        assert tile % 1024 == 0  # where the swizzle begins anew

    def loaded(self, at: Tensor, size: int) -> Tensor:
        """[thread, size] bytes: what each reads. Lanes that are served at once have banks of their own."""
        assert bool((at % size == 0).all())
        for together in at.view(-1, 128 // size).tolist():
            words = {byte // 4 for first in together for byte in range(first, first + size)}
            assert len(words) == len({word % 32 for word in words}), "bank conflict"
        return self.memory[at[:, None] + torch.arange(size)].contiguous()

    def products(self, i: int, g: int, t: int) -> Tensor:
        """[thread, sum]: those of group g of a tile, of each warpgroup's set of rows number t."""
        config = self.config
        mine = i % config.stages * config.height + self.warp // 4 + t * config.warpgroups
        mine = self.weights + mine * self.w_bytes
        there = self.warp // 4 + t * config.warpgroups < config.height
        mine = mine.where(there, mine[0])  # which has no such rows: its sums are left out below
        words = self.loaded(mine + g * 2048 + 16 * self.thread, 16).view(torch.int32).long() & 0xFFFFFFFF
        places = self.groups_here * 2048 + g * 1024 + 8 * self.thread
        places = self.loaded(mine + places, 8).view(torch.int32).long() & 0xFFFFFFFF
        at = self.groups_here * 3072 + g * 128 + (self.warp % 4 * 8 + self.lane // 4) * 4
        scales = self.memory[(mine + at)[:, None] + torch.arange(4)].contiguous().view(torch.int32).long()
        scales = scales[:, 0] & 0xFFFFFFFF
        box, tile = self.b_box >> 4, SHARED + i % config.x_stages * self.b_bytes
        b = ((tile & 0x3FFFF) >> 4 | 1 << 16) + 2 * g * box
        total = torch.zeros(self.consumers, config.tokens // 2, dtype=torch.float64)
        for p, onward in enumerate((0, 4, box, box + 4)):
            weights = four_bit_numbers(words[:, p], scales, self.dtype)
            full = b + onward | (1024 >> 4) << 32 | 1 << 62
            of_warps = (weights.view(-1, 32, 4), full, places[:, p // 2].reshape(-1, 32), p % 2)
            total += wgmma_sp(self.memory, *of_warps, config.tokens, self.dtype).view_as(total)
        return total.where(there[:, None], 0)

    def sums(self, rank: int, block: int, first_token: int) -> Tensor:
        """[thread, sum] of one block of a cluster."""
        config = self.config
        first = self.steps * rank // config.split
        count = self.steps * (rank + 1) // config.split - first
        size = (config.teams, self.consumers, config.tall, config.tokens // 2)
        teams = torch.zeros(size, dtype=torch.float64)
        for i in range(count):
            self.copy(i, first + i, block, first_token)
            for g, t in itertools.product(range(self.groups_here), range(config.tall)):
                teams[i % config.teams, :, t] += self.products(i, g, t)
        return teams.sum(0).flatten(1) * LARGER[self.dtype]

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
        warpgroup, warp, eighth = self.warp // 4, self.warp % 4, self.lane // 4
        tall, room = self.config.tall, self.config.tokens // 2
        together = 1 if self.share % 2 else 2  # sums that leave together: of a row, and neighbouring tokens
        for i in range(0, self.share, together):
            t, j = divmod(rank * self.share + i, room)
            token, eight = first_token + j // 4 * 8, 0 if j % 4 < 2 else 8
            pair = sums[:, i : i + together]
            if self.activation and tall > 1:
                if t:
                    continue  # used with its gate
                row = block * (self.rows // 2) + 64 * warpgroup + 16 * warp + eight
                both = [pair, sums[:, room + i : room + i + together]]
                if self.bias is not None:
                    at = (row + eighth).clamp(max=self.n - 1)
                    both = [both[0] + self.bias[at, None], both[1] + self.bias[self.n + at, None]]
                out = reference.gate(torch.cat(both).mT, self.activation).mT
                self.store(row, token, torch.full_like(row, self.n), out)
            elif self.activation:
                row = block * (self.rows // 2) + 64 * (warpgroup // 2) + 16 * warp + eight
                if self.bias is not None:
                    own = (warpgroup % 2 * self.n + row + eighth).clamp(max=2 * self.n - 1)
                    pair = pair + self.bias[own, None]
                gate, beside = pair.view(-1, 2, 128, together).unbind(1)
                both = torch.cat([gate.reshape(-1, together), beside.reshape(-1, together)])
                out = reference.gate(both.mT, self.activation).mT
                owner = warpgroup % 2 == 0
                self.store(row[owner], token, torch.full_like(row[owner], self.n), out, owner)
            else:
                beside = 64 * (warpgroup + t * self.config.warpgroups) + 16 * warp + eight
                row = block * self.rows + beside
                end = torch.where(beside < self.rows, self.n, 0)
                if self.bias is not None:
                    pair = pair + self.bias[(row + eighth).clamp(max=self.n - 1), None]
                if together == 2:
                    self.store(row, token, end, pair)
                else:
                    tokens = torch.full_like(row, first_token + 8 * (j // 4) + j % 2) + 2 * (self.lane % 4)
                    self.write(tokens, row + eighth, end, pair[:, 0])

    def store(self, row: Tensor, token: int, end: Tensor, two_tokens: Tensor, threads=slice(None)) -> None:
        """What `store_eights` does: eight rows × eight tokens of each warp are transposed among its lanes."""
        # lane / 4 is the row and lane % 4 names two tokens; after that the token, and two rows.
        two_rows = two_tokens.reshape(-1, 8, 8).mT.reshape(-1, 2)
        lane = self.lane[threads]
        for b in range(2):
            self.write(token + lane // 4, row + 2 * (lane % 4) + b, end, two_rows[:, b])

    def write(self, token: Tensor, row: Tensor, end: Tensor, out: Tensor) -> None:
        there = (token < self.tokens) & (row < end)
        token, row = token[there], row[there]
        assert bool(self.y[token, row].isnan().all()), "written twice"
        self.y[token, row] = out[there]


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
    values, meta, scale = stream(packed.values, packed.meta, packed.scale)
    launches = hopper_launch.Launches(n, x.shape[1], x.dtype, config, 0, activation)
    launches.run(x, values, meta, bias, x.new_empty(x.shape[0], n), scale)
    return driver.y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("config", "n", "k", "tokens", "activation"),
    [
        (Decode4(8, 1, 1, 256, 2), 64, 256, 8, None),  # one tile
        (Decode4(8, 1, 1, 512, 2), 64, 512, 8, None),
        (Decode4(8, 2, 2, 256, 2), 192, 384, 3, None),  # a cluster, edges in rows and columns
        (Decode4(16, 1, 4, 512, 2), 64, 1152, 5, None),  # of which one block has no columns
        (Decode4(8, 1, 1, 512, 2, grouped=2), 192, 640, 11, None),  # two tiles of tokens
        (Decode4(8, 1, 1, 256, 2, x_stages=3), 64, 1408, 1, None),  # more tiles than there are stages
        (Decode4(8, 1, 1, 256, 4, teams=2, x_stages=2), 64, 1408, 1, None),  # which two teams take in turns
        (Decode4(16, 1, 2, 256, 4, teams=4, x_stages=8), 64, 1920, 9, None),
        (Decode4(8, 1, 4, 256, 2), 192, 1152, 5, None),  # each block finishes one sum of a thread
        (Decode4(64, 1, 4, 256, 2), 64, 256, 64, None),
        (Decode4(8, 3, 1, 512, 2), 256, 512, 2, None),
        (Decode4(8, 2, 1, 256, 2), 64, 384, 8, "silu"),
        (Decode4(16, 2, 4, 512, 2, teams=2, x_stages=4), 192, 1152, 9, "gelu"),
        (Decode4(8, 4, 2, 256, 2), 192, 384, 3, "silu"),
        (Decode4(8, 2, 1, 256, 2, blocks=3), 448, 384, 3, None),  # one warpgroup has twice the rows
        (Decode4(16, 2, 1, 512, 2, blocks=4), 512, 640, 16, None),
        (Decode4(8, 4, 1, 256, 2, blocks=7), 512, 256, 8, None),  # two copying warps for four warpgroups
        (Decode4(8, 1, 2, 256, 2, blocks=2), 192, 384, 5, None),
        (Decode4(8, 2, 1, 256, 2, blocks=4), 192, 384, 8, "silu"),
        (Decode4(8, 4, 1, 256, 2, blocks=8), 320, 256, 3, "gelu"),
    ],
)
def test_emulated_kernel_multiplies(config, n, k, tokens, activation, dtype, monkeypatch):
    torch.manual_seed(0)
    rows = 2 * n if activation else n
    packed = random_weight(rows, k, "int4", 128, dtype)
    x, bias = torch.randn(tokens, k).to(dtype), torch.randn(rows).to(dtype)
    y = product(monkeypatch, config, x, packed, bias, activation)
    exact = x.double() @ packed.unpack(dtype).double().t() + bias.double()
    exact = reference.gate(exact, activation) if activation else exact
    torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)


def test_the_emulation_is_of_this_source():
    """It proves something only while it does what the source says."""
    text = cuda_text("few_sm90.cuh", "numbers.cuh", "decode4_sm90.cu")
    assert [line for line in FOLLOWED if line not in text] == []


def swap_two_bytes(first: int, size: int):
    """A fault in one of the areas of a tile's weights: of codes, of positions, of scales."""

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
    config, groups = Decode4(8, 1, 1, step, 2), step // 128
    packed, x = random_weight(64, step, "int4", 128, torch.bfloat16), torch.randn(8, step).bfloat16()
    right = product(monkeypatch, config, x, packed)

    def right_with(fault) -> bool:
        try:
            return torch.equal(product(monkeypatch, config, x, packed, fault=fault), right)
        except AssertionError as error:
            # Which wgmma_sp refuses, as no packer writes them; or a scale that is too large or not a number.
            if not any(what in str(error) for what in ("valid pair of positions", "the conversion rounds")):
                raise
            return False

    assert right_with(None)
    for first, size in ((0, 2048), (2048, 1024), (3072, 128)):
        for _ in range(8):
            assert not right_with(swap_two_bytes(groups * first, groups * size))


def test_another_swizzle_than_the_kernel_undoes_is_noticed(monkeypatch):
    """That a description has and what the source makes of it are in two files."""
    torch.manual_seed(0)
    packed, x = random_weight(64, 256, "int4", 128, torch.bfloat16), torch.randn(8, 256).bfloat16()
    exact = x.double() @ packed.unpack(torch.float64).t()
    monkeypatch.setattr(hopper_launch, "_SWIZZLE_128", 0)
    y = product(monkeypatch, Decode4(8, 1, 1, 256, 2), x, packed)
    assert float((y - exact).norm() / exact.norm()) > 0.1
