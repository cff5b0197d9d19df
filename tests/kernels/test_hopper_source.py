"""What can be known of the Hopper kernels without a GPU: they compile, positions are where wgmma reads them.

test_codes_source.py and test_decode4_source.py have what only concerns codes of 8 and of 4 bits.
"""

import importlib.util
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from twofour.kernels import hopper, hopper_choices, hopper_source
from twofour.packed import in_order, pack
from twofour.pattern import keep_best

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
spec = importlib.util.find_spec("triton")
DISASSEMBLER = Path(spec.origin if spec and spec.origin else "").parent / "backends/nvidia/bin/cuobjdump"


@nvcc
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("config", "activation", "codes"),
    [
        (hopper_choices.guess(4096, 4096, 8), None, None),
        (hopper_choices.guess(14336, 4096, 64, gated=True), "silu", None),
        (hopper_choices.guess8(4096, 4096, 8), None, torch.float8_e4m3fn),
        (hopper_choices.guess8(28672, 4096, 64, gated=True), "silu", torch.int8),
        (hopper.Prefill(256), None, None),
        (hopper.Prefill(256), "gelu", None),
        (hopper.Prefill(192, 3, 2), "silu", None),
        (hopper.Prefill(128, 4, 2), "gelu_tanh", None),
    ],
)
@pytest.mark.parametrize("ordered", [False, True])
def test_compiles_without_spills_or_serialised_products(config, activation, codes, dtype, ordered, tmp_path):
    if ordered and (codes is not None or (activation and config.warpgroups == 3)):
        pytest.skip("such positions come row by row only")
    source = hopper_source.source(config, dtype, activation, codes, ordered)
    (tmp_path / "kernel.cu").write_text(source)
    command = [
        "nvcc",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-cubin",
        "-Xptxas",
        "-v",
        "-o",
        "kernel.cubin",
    ]
    ran = subprocess.run([*command, "kernel.cu"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"C75\d\d", ran.stderr) is None  # ptxas' warnings that wgmma is serialised
    # The erf of gelu wants more registers than the sums of a large tile leave, and what three warpgroups and
    # more keep for a tile's end has no room beside the sums either; both are outside the loop of products.
    spilled = sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", ran.stderr))
    assert spilled <= (64 if activation == "gelu" else 32 if config.warpgroups > 2 else 0)
    assert f"m64n{config.tokens}k{64 if codes else 32}" in source


@nvcc
@pytest.mark.skipif(not DISASSEMBLER.is_file(), reason="triton is not here")
@pytest.mark.parametrize(
    ("config", "codes"),
    [
        (hopper.Decode(8, 1, 2, 256, 4), None),
        (hopper.Decode8(16, 2, 4, 256, 4), torch.int8),
        (hopper.Decode4(32, 1, 2, 512, 6, teams=2, x_stages=4), None),
        (hopper.Prefill(192, 3, 2), None),
        (hopper.Prefill8(256, 3, 2), torch.float8_e4m3fn),
    ],
)
def test_what_takes_long_is_not_in_the_machine_code(config, codes, tmp_path):
    """Where blocks of a cluster meet no thread waits for a fence of the whole GPU, and there is no loop over
    lanes around a copy (benchmarks/LOG.md): ptxas says nothing of either."""
    (tmp_path / "kernel.cu").write_text(hopper_source.source(config, torch.bfloat16, None, codes))
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-o", "kernel.cubin", "kernel.cu"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    command = [str(DISASSEMBLER), "-sass", "kernel.cubin"]
    code = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert "UCGABAR_WAIT" in code  # the cluster's barrier
    assert "MEMBAR.ALL.GPU" not in code
    if isinstance(config, hopper.Decode4):  # each instruction is two lines
        assert re.search(r"UBLKCP.*\n.*\n.*", code)
        assert re.search(r"UBLKCP.*\n.*\n.*BRA\.U\.ANY", code) is None
    elif isinstance(config, hopper.Decode):
        assert "UTMALDG" in code
        assert "BRA.U.ANY" not in code


def test_every_candidate_fits_the_multiprocessor():
    for tokens in (1, 8, 9, 64, 65, 128, 256, 257, 1024, 5000):
        for n in (4096, 1001):
            candidates = hopper_choices.configs(tokens, n)
            assert candidates
            assert hopper_choices.guess(n, 4096, tokens) in candidates or tokens > 64
            for config in candidates:
                assert config.shared_bytes + 512 <= 227 << 10  # with the barriers
                assert config.threads * (config.tokens // 2 + 40) <= 65536  # registers
                assert hopper.from_dict(hopper.as_dict(config)) == config
                if isinstance(config, hopper.Prefill):
                    assert n % 8 == 0
                    assert config.a_stages >= 3 <= config.b_stages
                    assert config.tokens % (8 * config.cluster) == 0  # whole swizzled rows for each block
                else:
                    assert config.stages >= 2
                    assert (config.tokens // 2) % config.split == 0
                    assert tokens > 64 or config.tokens >= tokens


def test_units_of_work_cover_every_row_and_token_once():
    """The order in which the blocks of prefill_sm90.cu take their tiles, as the kernel computes it."""
    for sets, tiles, grouped in ((1, 1, 8), (3, 5, 8), (8, 8, 8), (17, 3, 8), (24, 1, 16)):
        seen = []
        for unit in range(sets * tiles):
            first = unit // (grouped * tiles) * grouped
            height = min(grouped, sets - first)
            inside = unit % (grouped * tiles)
            seen.append((first + inside % height, inside // height))
        assert sorted(seen) == [(s, t) for s in range(sets) for t in range(tiles)]


def pieces(units, steps, shares, together):
    """Unit, first step and number of steps of every piece, as cuda/tiles_sm90.cuh numbers them."""
    left = units - shares.whole
    for number in range(shares.whole + left * shares.parts):
        if number < shares.whole:
            yield number, 0, steps
            continue
        part, sets = (number - shares.whole) // left, -(-steps // together)
        first = sets * part // shares.parts * together
        end = min(steps, sets * (part + 1) // shares.parts * together)
        yield shares.whole + (number - shares.whole) % left, first, end - first


@pytest.mark.parametrize(("config", "together"), [(hopper.Prefill(256), 2), (hopper.Prefill8(256), 4)])
def test_parts_of_the_last_round_cover_every_column_once(config, together):
    parts = set()
    for units, steps in itertools.product(
        (1, 2, 7, 33, 34, 65, 66, 67, 92, 132, 160, 1792), (1, 2, 9, 32, 63, 112)
    ):
        shares = config.share_out(units, steps, 66)
        seen = sorted(pieces(units, steps, shares, together))
        parts.add(shares.parts)
        assert all(count > 0 for _, _, count in seen)
        assert [(u, s) for u, first, count in seen for s in range(first, first + count)] == [
            (u, s) for u in range(units) for s in range(steps)
        ]
        # Whoever gathers comes after those that it waits for.
        assert shares.whole % 66 == 0 or shares.parts == 1
        assert (units - shares.whole) * shares.parts <= 66
        assert shares.blocks == 2 * min(66, len(seen))
        assert (shares.part_bytes > 0) == (shares.parts > 1)
    assert {1, 2, 4} <= parts


def words_that_the_kernel_loads(meta: torch.Tensor, step64: int) -> list[int]:
    """Each thread's word of positions for columns 64·step64 …, as decode_sm90.cu addresses them."""
    words = []
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        row, byte = 16 * warp + lane // 4, 8 * step64 + 2 * (lane % 4)
        low, high = meta[row, byte : byte + 2], meta[row + 8, byte : byte + 2]
        words.append(int(low[0]) | int(low[1]) << 8 | int(high[0]) << 16 | int(high[1]) << 24)
    return words


def positions_that_wgmma_reads(words: list[int], selector: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, group of 4 within 32 columns) to the two positions, by the documented fragment of m64nNk32.

    With selector s the lanes 2s and 2s+1 of each quad give the words: the low half for row lane/4 of the
    warp's 16 rows, the high half for the row 8 further; the first lane columns 0-15, the second 16-31.
    """
    read = {}
    for thread, word in enumerate(words):
        warp, lane = thread // 32, thread % 32
        if lane % 4 // 2 != selector:
            continue
        for half in range(2):
            for group in range(4):
                nibble = word >> (16 * half + 4 * group) & 15
                row = 16 * warp + lane // 4 + 8 * half
                read[row, 4 * (lane % 2) + group] = (nibble & 3, nibble >> 2)
    return read


def test_positions_reach_the_instruction_in_its_order():
    weight = torch.randn(64, 256)
    weight = weight.where(keep_best(weight.abs()), 0)
    meta = pack(weight).meta
    for step in range(256 // 32):
        read = positions_that_wgmma_reads(words_that_the_kernel_loads(meta, step // 2), step % 2)
        assert len(read) == 64 * 8
        for (row, group), places in read.items():
            column = 32 * step + 4 * group
            kept = tuple(weight[row, column : column + 4].nonzero().flatten().tolist())
            assert places == kept, (row, column)


def word_in_order(chunks, quad, high=None):
    """A lane's word from its 8 bytes of positions in cuSPARSELt's order, or from those of the gate and of the
    one beside (`high`: which nibbles): the instructions of cuda/positions_sm90.cuh."""
    picked = [int.from_bytes(bytes(chunk[quad % 2 :: 2].tolist()), "little") for chunk in chunks]
    shifts = (0, 4) if high is None else (4 * high, 4 * high)
    halves = []
    for bytes_, shift in zip(picked * (2 // len(picked)), shifts, strict=True):
        low = bytes_ >> shift & 0x0F0F0F0F
        both = low | low >> 4
        halves.append(both & 255 | (both >> 16 & 255) << 8)
    return halves[0] | halves[1] << 16


def test_positions_in_cusparselts_order_give_the_same_words():
    weight = torch.randn(64, 256)
    meta = pack(weight.where(keep_best(weight.abs()), 0)).meta
    ordered = in_order(meta)
    for step64 in range(4):
        words = []
        for thread in range(128):
            warp, lane = thread // 32, thread % 32
            chunk = ordered[0, 2 * step64 + lane % 4 // 2, warp, lane // 4]
            words.append(word_in_order([chunk], lane % 4))
        assert words == words_that_the_kernel_loads(meta, step64)


@pytest.mark.parametrize(
    ("config", "gated"),
    [
        *itertools.product((hopper.Prefill(256), hopper.Prefill(64, cluster=1)), (False, True)),
        *itertools.product((hopper.Prefill(192, 3), hopper.Prefill(128, 4)), (False, True)),
        *itertools.product((hopper.Prefill8(256), hopper.Prefill8(256, 3)), (False, True)),
    ],
)
def test_sums_leave_for_their_rows_and_tokens(config, gated):
    """What tiles_sm90.cuh puts down for the copy engine, as stmatrix and the engine's swizzle see it."""
    pitch, wide = (64, 32) if gated else (128, 64)  # bytes of a token, and rows of y
    room = 128 * config.tokens  # the place of one x, and of W where they are neighbours
    if isinstance(config, hopper.Prefill8):
        room = config.stage_bytes
    places = room // (config.warpgroups * pitch * config.leaving)
    assert places >= 1
    assert pitch * config.leaving % (512 if gated else 1024) == 0  # whole swizzles for every place
    tile = {}  # 16 bits at an address, which are named by their row of the warpgroup's and their token
    for warp, j in itertools.product(range(4), range(0, config.leaving // 8, 2)):
        # A lane of a fragment of 8 × 8 has row lane // 4 and tokens 2·(lane % 4) and the next; transposed,
        # each row of the matrix that is stored is a token. The first 16 or 32 lanes name where these are.
        fragments = [(8 * warp, 8 * (j + i)) for i in range(2)]
        if not gated:
            fragments = [(16 * warp + 8 * i, 8 * (j + k)) for k in range(2) for i in range(2)]
        for lane in range(8 * len(fragments)):
            if gated:
                chunk, token = warp ^ lane % 8 // 2, lane % 16
            else:
                chunk, token = (2 * warp + lane // 8 % 2) ^ lane % 8, lane // 16 * 8 + lane % 8
            row, first = fragments[lane // 8]
            for i in range(8):
                at = 8 * j * pitch + token * pitch + chunk * 16 + 2 * i
                assert at not in tile
                tile[at] = row + i, first + lane % 8
    assert len(tile) == wide * config.leaving
    for token, row in itertools.product(range(config.leaving), range(wide)):
        at = token * pitch + 2 * row
        assert tile[at ^ (at >> 7 & (3 if gated else 7)) << 4] == (row, token)


@pytest.mark.parametrize("warpgroups", [1, 2, 4])
def test_positions_of_gated_rows_in_cusparselts_order_give_the_same_words(warpgroups):
    """As cuda/positions_sm90.cuh copies and addresses them, of a block in the middle."""
    n, columns, block = 256, 128, 1
    weight = torch.randn(2 * n, columns)
    meta = pack(weight.where(keep_best(weight.abs()), 0)).meta
    first = block * 32 * warpgroups  # row of the gate, and of the one beside
    halves = 2 if warpgroups > 1 else 1
    # What the copy engine puts into shared memory: [matrix][64 rows][32 columns][half][2][8][8 bytes].
    matrices = in_order(meta).reshape(2, n // 64, columns // 32, 2, 2, 8, 8)
    half = slice(0, 2) if halves == 2 else slice(block % 2, block % 2 + 1)
    tile = matrices[:, first // 64 : first // 64 + max(1, warpgroups // 2), :, half]
    # The rows as they lie in the row-major order: eight of the gate, eight of the one beside.
    rows = torch.arange(first, first + 32 * warpgroups).reshape(-1, 8)
    in_turns = meta[torch.stack([rows, rows + n], 1).flatten()]
    for group, step64 in itertools.product(range(warpgroups), range(columns // 64)):
        wanted = words_that_the_kernel_loads(in_turns[64 * group : 64 * group + 64], step64)
        for thread in range(128):
            warp, lane = 4 * group + thread // 32, thread % 32
            row, step = 8 * warp + lane // 4, 2 * step64 + lane % 4 // 2
            at = (row // 32 // halves, step, row // 32 % halves, row % 32 // 16, row % 8)
            word = word_in_order([tile[(which, *at)] for which in range(2)], lane % 4, row // 8 % 2)
            assert word == wanted[thread]
