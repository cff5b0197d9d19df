"""The kernel for quantized weights without a GPU: it compiles, and its conversions are exact.

What it does with addresses and lanes is in test_quantized_decode_emulated.py.
"""

import itertools
import re
import shutil
import subprocess

import pytest
import torch

from twofour.kernels import quantized_decode
from twofour.kernels.nvrtc import cuda_text

nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not here")
TOKENS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 1000)
WEIGHTS = [("int4", 128), ("int4", 64), ("int4", 32), ("int8", None), ("fp8", None)]
DTYPES = [torch.bfloat16, torch.float16]


@nvcc
@pytest.mark.parametrize("architecture", ["80", "89", "90"])
@pytest.mark.parametrize(
    ("codes", "group", "dtype", "tokens", "n"),
    [
        ("int4", 128, torch.bfloat16, 8, 28672),
        ("int4", 64, torch.float16, 32, 28672),
        ("int4", 32, torch.bfloat16, 64, 57344),  # the most registers
        ("int8", None, torch.bfloat16, 8, 4096),
        ("int8", None, torch.float16, 64, 28672),
        ("fp8", None, torch.bfloat16, 32, 28672),
        ("fp8", None, torch.float16, 16, 4096),
    ],
)
def test_the_guess_compiles_without_spills(codes, group, dtype, tokens, n, architecture, tmp_path):
    config = quantized_decode.guess(n, 4096, tokens, codes, group, 132, clusters=architecture == "90")
    (tmp_path / "kernel.cu").write_text(quantized_decode.source(config, dtype, codes, group))
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    command = ["nvcc", target, "-std=c++17", "-cubin", "-Xptxas", "-v", "-o", "kernel.cubin", "kernel.cu"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "warning" not in ran.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in ran.stderr, (config, ran.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", ran.stderr)
    assert int(registers) * config.threads <= 65536


@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
def test_every_candidate_fits_every_multiprocessor(codes, group):
    for tokens, clusters in itertools.product(TOKENS, (False, True)):
        candidates = quantized_decode.configs(tokens, codes, group, clusters)
        assert 4 <= len(candidates) <= 48
        for config in candidates:
            assert config.tokens >= min(tokens, 64)
            assert config.shared_bytes(codes, group) + 4 * config.rows <= 97 << 10  # sm_86 and sm_89 allow 99
            assert config.stages >= 2
            assert config.threads <= 1024
            assert config.k_warps <= 15  # barriers of the hardware, beside that of the block
            assert config.step in (128, 256, 512)
            assert config.split == 1 or clusters
            # The loops of the copies: each thread keeps its 16-byte piece of a row, or its 32 columns.
            assert 32 * config.row_warps % (config.step // 8) == 0 or config.step // 8 % 32 == 0
            assert config.rows * (config.step // 64) % (32 * config.row_warps) == 0


@pytest.mark.parametrize(("codes", "group"), WEIGHTS)
def test_the_guess_is_a_candidate(codes, group):
    for tokens, clusters in itertools.product(TOKENS, (False, True)):
        candidates = quantized_decode.configs(tokens, codes, group, clusters)
        for n, k in [(8, 32), (1024, 4096), (4096, 1024), (4096, 14336), (28672, 4096), (128256, 4096)]:
            for processors in (20, 84, 108, 132):
                guess = quantized_decode.guess(n, k, tokens, codes, group, processors, clusters)
                assert guess in candidates


def test_why_not_says_what_is_missing(monkeypatch):
    cuda, capability = torch.device("cuda", 0), (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    why_not = quantized_decode.why_not
    for (codes, group), dtype in itertools.product(WEIGHTS, DTYPES):
        assert why_not(cuda, dtype, codes, 1, 32, group) is None
    assert "CUDA" in why_not(torch.device("cpu"), torch.bfloat16, "int8", 64, 64, None)
    assert "float32" in why_not(cuda, torch.float32, "int8", 64, 64, None)
    assert "multiple of 32" in why_not(cuda, torch.float16, "int4", 64, 48, 32)
    assert "128 columns" in why_not(cuda, torch.float16, "fp8", 64, 128, 128)
    assert "not for 256" in why_not(cuda, torch.float16, "int4", 64, 512, 256)
    assert "not for a row" in why_not(cuda, torch.float16, "int4", 64, 512, None)
    capability = (7, 5)
    assert "8.0" in why_not(cuda, torch.float16, "int8", 64, 64, None)


# ------------------------------------------------------------------------------------------------------------
# The conversion, for many words at once. Names and constants are those of the source.


def byte_perm(x: torch.Tensor, y: torch.Tensor | int, picks: torch.Tensor) -> torch.Tensor:
    """prmt: byte i of the result is the one of the eight of (x, y) that nibble i of `picks` names."""
    out = torch.zeros_like(x)
    y = torch.as_tensor(y).expand_as(x)
    for i in range(4):
        pick = picks >> 4 * i & 15
        assert int(pick.max()) < 8, "the upper bit of a pick would repeat a sign"
        byte = torch.where(pick < 4, x >> 8 * (pick & 3), y >> 8 * (pick & 3)) & 255
        out |= byte << 8 * i
    return out


def halves(words: torch.Tensor | int, dtype: torch.dtype) -> torch.Tensor:
    """[..., 2] of float64: the low and the high 16-bit number of a word."""
    words = torch.as_tensor(words)
    both = torch.stack([words & 0xFFFF, words >> 16 & 0xFFFF], -1)
    return torch.where(both >= 1 << 15, both - (1 << 16), both).to(torch.int16).view(dtype).double()


def two(
    a: torch.Tensor, b: torch.Tensor | int, c: torch.Tensor | int, dtype: torch.dtype, rounds: bool = False
) -> torch.Tensor:
    """fma on both halves, which must be exact unless it may round."""
    exact = halves(a, dtype) * halves(b, dtype) + halves(c, dtype)
    rounded = exact.to(dtype)
    assert rounds or torch.equal(rounded.double(), exact), "the conversion rounds"
    bits = rounded.view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16


def four_bit_numbers(word: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.float16:
        twice = byte_perm(word, 0, 0x0101 * byte)
        return two((twice & 0x00F0000F) ^ 0x64806408, 0x2C003C00, 0xD480E408, dtype)
    apart = byte_perm(word, 0, 0x4440 + byte) * 0x1001 & 0xFFFFFFFF
    return two((apart & 0x000F000F) ^ 0x43084308, 0x3F803F80, 0xC308C308, dtype)


def numbers(
    word: torch.Tensor, upper: int, odd: torch.Tensor, codes: str, dtype: torch.dtype
) -> torch.Tensor:
    fp16 = dtype == torch.float16
    if codes == "int4":
        return four_bit_numbers(word, 2 * upper + odd, dtype)
    if codes == "int8":
        if fp16:
            apart = byte_perm(word, 0x64646464, 0x0202 * odd + 0x4140)
            return two(apart ^ 0x00800080, 0x3C003C00, 0xE480E480, dtype)
        apart = byte_perm(word, 0x43434343, 0x0202 * odd + 0x4140)
        return two(apart & 0xFF80FF80, 0xBF80BF80, apart & 0xFF7FFF7F, dtype)
    apart = byte_perm(word, 0, 0x2020 * odd + 0x1404)
    sign = apart & 0x80008000
    if fp16:
        return two((apart >> 1 & 0x3F803F80) | sign, 0x5C005C00, 0x80008000, dtype)
    return two((apart >> 4 & 0x07F007F0) | sign, 0x7B807B80, 0x80008000, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", ["int4", "int8", "fp8"])
def test_every_code_becomes_its_number(codes, dtype):
    generator = torch.Generator().manual_seed(0)
    for upper, odd in itertools.product((0, 1), (0, 1)):
        other = torch.randint(256, (4, 256), generator=generator)  # whatever lies beside must not matter
        first = torch.arange(256)
        if codes == "fp8":
            first[0x7F], first[0xFF] = 0x7E, 0x80  # NaN is refused when a file is loaded
            other[other & 0x7F == 0x7F] = 0
        for second in (first, first.flip(0)):
            lanes = [*other]
            if codes == "int4":  # two codes in a byte: byte `odd` of the half `upper`
                lanes[2 * upper + odd] = first
                want = torch.stack([(first & 15 ^ 8) - 8, (first >> 4 ^ 8) - 8], -1).double()
            else:
                lanes[2 * odd], lanes[2 * odd + 1] = first, second
                both = torch.stack([first, second], -1).to(torch.uint8)
                stored = torch.int8 if codes == "int8" else torch.float8_e4m3fn
                want = both.view(stored).double()
            word = sum(byte << 8 * i for i, byte in enumerate(lanes))
            got = halves(numbers(word, upper, torch.full_like(word, odd), codes, dtype), dtype)
            assert torch.equal(got, want)
            assert codes != "fp8" or torch.equal(got.signbit(), want.signbit())  # -0.0 stays what it is


def test_the_constants_are_those_of_the_source():
    """The emulation above proves something only while it is what the source says."""

    def constants(text: str) -> list[str]:
        return re.findall(r"0x([0-9A-F]+)", re.sub("//.*", "", text))

    # 6A and EA are the truth tables of (a & b) ^ c and (a & b) | c.
    assert (0xF0 & 0xCC) ^ 0xAA == 0x6A
    assert (0xF0 & 0xCC) | 0xAA == 0xEA
    expected = """6A EA 0101 00F0000F 64806408 2C003C00 D480E408
        1001 4440 000F000F 43084308 3F803F80 C308C308
"""
    twice = """000F000F 64086408 3C003C00 E408E408 80008000 00F000F0 64806480 2C002C00 D480D480 80008000 """
    expected += f"1010 3232 {twice} {twice}"  # these and those that follow: see test_decode4_emulated.py
    expected += """1010 3232 64006400 80008000 62006200 80008000 A300A300 80008000 A300A300 80008000
        000F000F 00080008 00F000F0 00800080 000F000F 00080008 00F000F0 00800080"""
    assert constants(cuda_text("numbers.cuh")) == expected.split()
    text = cuda_text("quantized_decode_sm80.cu")
    body = text[text.index("u32 numbers(") : text.index("int a_piece(")]
    assert "return four_bit_numbers(word, 2 * upper + odd);" in body
    expected = """64646464 0202 4140 00800080 3C003C00 E480E480 43434343 0202 4140 FF80FF80 BF80BF80 FF7FFF7F
        2020 1404 80008000 3F803F80 5C005C00 80008000 07F007F0 7B807B80 80008000"""
    assert constants(body) == expected.split()
