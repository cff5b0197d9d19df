"""The kernel for 4-bit weights on Hopper without a GPU: its candidates fit, and compile to what was meant.

What it does with addresses and lanes is in test_decode4_emulated.py.
"""

import re

import pytest
import torch

from tests.kernels.test_codes_source import compiled, nvcc
from twofour.kernels import hopper, hopper_choices, hopper_source

BF16, FP16 = torch.bfloat16, torch.float16
TOKENS = (1, 8, 16, 32, 64)
EVERY = 4  # of the configurations is compiled: with 1 it takes minutes


def registers_allowed(config: hopper.Decode4) -> int:
    """For a thread: warps of the blocks on a multiprocessor are dealt out to four schedulers, each with 16384
    registers."""
    warps = config.resident * (config.threads // 32)
    return min(16384 // (-(-warps // 4) * 32) // 8 * 8, 255)


#: Each that compiles to something else: how many tiles are in flight changes nothing but numbers.
COMPILED = [
    (config, dtype, activation)
    for tokens, dtype, activation in (
        *((tokens, BF16, None) for tokens in (8, 16, 24, 32, 48, 64)),
        (8, FP16, "gelu"),
        (32, BF16, "silu"),
        (64, FP16, "gelu_tanh"),
    )
    for config in {
        (c.warpgroups, c.blocks, c.teams, c.split > 1, c.step, c.resident): c
        for c in hopper_choices.configs4(tokens)
    }.values()
    if config.gates or activation is None
]


@nvcc
@pytest.mark.parametrize("part", range(6))
def test_products_run_side_by_side_and_nothing_is_spilled(part, tmp_path):
    """Every fourth, in six parts: they take a second each."""
    for config, dtype, activation in COMPILED[part :: 6 * EVERY]:
        _compile(config, dtype, activation, tmp_path)


def _compile(config, dtype, activation, tmp_path):
    source = hopper_source.source(config, dtype, activation)
    kind = "f32.bf16.bf16" if dtype == BF16 else "f32.f16.f16"
    assert f"wgmma.mma_async.sp.sync.aligned.m64n{config.tokens}k32.{kind}" in source
    said = compiled(source, "90a", tmp_path)
    assert re.search(r"C75\d\d|serialized", said) is None, (
        said
    )  # ptxas' word for products that wait for others
    assert "warning" not in said, said
    assert "0 bytes spill stores, 0 bytes spill loads" in said, config
    (registers,) = re.findall(r"Used (\d+) registers", said)
    assert int(registers) <= registers_allowed(config)


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_candidate_fits_the_multiprocessor(tokens):
    candidates = hopper_choices.configs4(tokens)
    assert len(candidates) == len(set(candidates)) >= 20
    for config in candidates:
        assert config.tokens == max(tokens, 8)
        assert config.stages >= 2
        assert config.stages % config.teams == config.x_stages % config.teams == 0
        barriers = 16 * (config.stages + config.x_stages)
        taken = config.shared_bytes + barriers + 1024  # with what is kept back
        assert config.resident >= 1
        assert config.resident * taken <= 228 << 10
        # Sums, numbers and positions of two groups, codes and scales of the next: all at the same time.
        assert config.tall * config.tokens // 2 + 2 * (16 + 2) + 5 <= registers_allowed(config)
        assert config.resident * config.threads <= 2048
        assert (config.tokens // 2) % config.split == 0
        assert config.split <= 8  # blocks of a cluster that every GPU runs
        assert hopper.from_dict(hopper.as_dict(config)) == config


def test_more_tokens_come_in_several_tiles():
    assert hopper_choices.configs4(65) == hopper_choices.configs4(5000) == hopper_choices.configs4(64)


@pytest.mark.parametrize("gated", [False, True])
def test_the_guess_is_a_candidate(gated):
    for tokens in (*TOKENS, 20, 48, 65, 1000):
        candidates = hopper_choices.configs4(tokens)
        for rows in (8, 1000, 4096, 6144, 28672, 128256):
            for processors in (20, 78, 132):
                guess = hopper_choices.guess4(rows, tokens, processors, gated)
                assert guess in candidates
                assert guess.gates or not gated
