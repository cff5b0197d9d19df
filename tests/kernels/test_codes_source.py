"""The kernels for codes of 8 bits without a GPU: they compile, and positions are where wgmma reads them."""

import re
import shutil
import subprocess

import pytest
import torch

from twofour.bench.random_codes import random_codes
from twofour.kernels import hopper, hopper_choices, hopper_source, token_codes, widen
from twofour.packed import FOUR_BIT, unpack
from twofour.quantize.schemes import SCHEMES

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
FP8, INT8 = torch.float8_e4m3fn, torch.int8


def compiled(source, architecture, folder):
    (folder / "kernel.cu").write_text(source)
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stderr


@nvcc
@pytest.mark.parametrize(
    ("config", "codes", "dtype", "activation"),
    [
        (hopper.Prefill8(256), FP8, torch.bfloat16, None),
        (hopper.Prefill8(256), INT8, torch.float16, None),
        (hopper.Prefill8(256), FP8, torch.float16, "silu"),
        (hopper.Prefill8(128, cluster=1), INT8, torch.bfloat16, "gelu"),
        (hopper.Prefill8(256, 3), FP8, torch.bfloat16, None),
        (hopper.Prefill8(256, 3), INT8, torch.bfloat16, "silu"),
    ],
)
def test_prefill_compiles_without_serialised_products(config, codes, dtype, activation, tmp_path):
    source = hopper_source.source(config, dtype, activation, codes)
    said = compiled(source, "90a", tmp_path)
    assert re.search(r"C75\d\d", said) is None  # ptxas' warnings that wgmma is serialised
    kind = {FP8: "f32.e4m3.e4m3", INT8: "s32.s8.s8"}[codes]
    assert f"wgmma.mma_async.sp.sync.aligned.m64n{config.at_once}k64.{kind}" in source


@nvcc
@pytest.mark.parametrize(
    ("architecture", "codes", "dtype", "k"),
    [
        ("80", INT8, torch.bfloat16, 4096),
        ("89", FP8, torch.float16, 14336),
        ("90a", FP8, torch.bfloat16, 4096),
        ("90a", INT8, torch.float16, 28672),
    ],
)
def test_rounding_tokens_compiles(architecture, codes, dtype, k, tmp_path):
    said = compiled(token_codes.source(k, dtype, codes), architecture, tmp_path)
    assert "warning" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


@nvcc
@pytest.mark.parametrize(
    ("architecture", "codes", "dtype", "scales", "streamed"),
    [
        ("80", FOUR_BIT, torch.bfloat16, 32, False),
        ("80", FP8, torch.float16, 1, False),
        ("89", INT8, torch.bfloat16, 1, False),
        ("90a", FOUR_BIT, torch.float16, 128, False),
        ("90a", FOUR_BIT, torch.bfloat16, 32, True),
    ],
)
def test_widening_compiles(architecture, codes, dtype, scales, streamed, tmp_path):
    said = compiled(widen.source(4096, scales, dtype, codes, streamed), architecture, tmp_path)
    assert "warning" not in said
    assert "0 bytes spill stores, 0 bytes spill loads" in said


def tile_of_positions(meta: torch.Tensor, step: int) -> bytes:
    """64 rows × 64 bytes, those of 512 columns, as the copy engine puts them down: under its swizzle of
    64 bytes the bits 4 and 5 of an address are turned where bits 7 and 8 are set."""
    tile = bytearray(64 * 64)
    for row in range(64):
        for byte in range(64):
            at = 64 * row + byte
            tile[at ^ (at >> 7 & 3) << 4] = int(meta[row, 64 * (step // 4) + byte])
    return bytes(tile)


def words_that_the_kernel_loads(meta: torch.Tensor, step: int) -> list[list[int]]:
    """Each thread's two words of positions for columns 128·step …, as prefill8_sm90.cu addresses them."""
    tile, words = tile_of_positions(meta, step), []
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        row = 16 * warp + lane // 4 + lane % 2 * 8
        first = 64 * row + 16 * (step % 4 ^ row * 64 // 128 % 4) + lane // 2 % 2 * 4
        words.append([int.from_bytes(tile[at : at + 4], "little") for at in (first, first + 8)])
    return words


def positions_that_wgmma_reads(words: list[int]) -> dict[tuple[int, int], tuple[int, int]]:
    """(row, group of 4 within 64 columns) to the two positions, by the fragment of m64nNk64 for 8 bits.

    Every lane gives a word of one row: even lanes row lane/4 of the warp's 16 rows, odd ones the row 8
    further; the first two lanes of a quad columns 0-31, the other two 32-63.
    """
    read = {}
    for thread, word in enumerate(words):
        warp, lane = thread // 32, thread % 32
        row = 16 * warp + (lane >> 2) + 8 * (lane & 1)
        for group in range(8):
            nibble = word >> 4 * group & 15
            read[row, 8 * ((lane >> 1) & 1) + group] = (nibble & 3, nibble >> 2)
    return read


def test_positions_reach_the_instruction_in_its_order():
    packed = random_codes(64, 512, SCHEMES["int8"], torch.float32, torch.Generator().manual_seed(0))
    packed.values[packed.values == 0] = 1  # so that nothing but the pattern is zero
    weight = unpack(packed.values, packed.meta, 512)
    for step in range(512 // 128):
        words = words_that_the_kernel_loads(packed.meta, step)
        for half in range(2):
            read = positions_that_wgmma_reads([both[half] for both in words])
            assert len(read) == 64 * 16
            for (row, group), places in read.items():
                column = 128 * step + 64 * half + 4 * group
                kept = tuple(weight[row, column : column + 4].nonzero().flatten().tolist())
                assert places == kept, (row, column)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("n", [1000, 1004, 1008])
def test_rows_that_come_in_no_eights_go_to_the_kernel_for_few_tokens(n, gated):
    configs = [hopper_choices.guess8(n, 4096, 2048, gated=gated), *hopper_choices.configs8(2048, n)]
    for config in configs:
        assert isinstance(config, hopper.Decode8) or n % 8 == 0
    assert any(isinstance(config, hopper.Prefill8) for config in configs) == (n % 8 == 0)


def test_every_candidate_for_many_tokens_fits_the_multiprocessor():
    for tokens in (33, 128, 129, 1024, 8192):
        for config in hopper_choices.configs8(tokens, 4096):
            if isinstance(config, hopper.Prefill8):
                of_its_own = 4 * config.tokens * config.warpgroups  # scales of tokens
                assert config.shared_bytes + of_its_own + 512 <= 227 << 10
                assert config.stages >= 4
                assert config.threads <= 512
                assert config.at_once // 2 + 27 <= 65536 // config.threads  # what ptxas asks for (C7602)


@pytest.mark.parametrize(
    ("n", "k", "tokens", "warpgroups"),
    [
        (6144, 4096, 1024, 3),  # 128 tiles of 192 rows: one round of 132 multiprocessors
        (4096, 4096, 1024, 2),  # as are 128 of 128 rows
        (28672, 4096, 2048, 2),
        (28672, 4096, 8192, 2),
    ],
)
def test_tiles_of_192_rows_where_they_save_a_round(n, k, tokens, warpgroups):
    """As measured: benchmarks/LOG.md."""
    assert hopper_choices.guess8(n, k, tokens).warpgroups == warpgroups
