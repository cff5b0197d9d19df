"""Which configurations of the Hopper kernels are worth a try for a product, and which to take untried."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import TypeVar

from twofour.kernels.hopper import (
    BARRIERS,
    RESERVED,
    SHARED_BYTES,
    Config,
    Decode,
    Decode4,
    Decode8,
    Prefill,
    Prefill8,
    round_of_parts,
)


def configs(tokens: int, n: int = 8) -> list[Config]:
    """Candidates for a number of tokens. `n`: rows, of both matrices if gated."""
    small = tokens <= 768 or (
        tokens <= 2048 and n <= 2048
    )  # not enough large tiles for every block to have one
    few: list[Config] = list(_decode_configs(tokens)) if small or n % 8 else []
    many: list[Config] = list(_prefill_configs(tokens)) if tokens > 64 and n % 8 == 0 else []
    return list(dict.fromkeys(few + many))


def configs8(tokens: int, n: int = 8) -> list[Decode8 | Prefill8]:
    """Candidates for products of codes."""
    few: list[Decode8 | Prefill8] = []
    if tokens <= 256 or n % 8:
        room = _room(tokens)
        heights = (1, 2, 3, 4) if tokens <= 64 else (1, 2, 4)
        for resident, warpgroups, split, step in itertools.product((2, 1), heights, (1, 2, 4), (256, 512)):
            few += [c] if (c := _fit8(room, warpgroups, split, step, resident)) else []
    if tokens <= 32 or n % 8:
        return list(dict.fromkeys(few))
    many = [Prefill8(**asdict(config)) for config in _prefill_configs(tokens) if config.warpgroups == 2]
    if tokens > 128:  # x is read for more rows at a time
        many += [Prefill8(256, 3, 2, grouped) for grouped in (8, 16)]
    return list(dict.fromkeys([*few, *many]))


def configs4(tokens: int) -> list[Decode4]:
    """Candidates for weights of 4 bits; beyond 64 tokens they come in several tiles."""
    room = min(_room(tokens), 64)
    shapes = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1))
    found = [
        _fit4(room, warpgroups, split, step, teams, rounds * teams, resident)
        for resident, (warpgroups, teams), split, step, rounds in itertools.product(
            (4, 3, 2, 1), shapes, (1, 2, 4), (256, 512), (2, 3, 4)
        )
    ]
    found += [
        _fit4(room, warpgroups, 1, step, 1, x_stages, 1, blocks)
        for (warpgroups, blocks), step, x_stages in itertools.product(_TALL, (256, 512), (2, 3, 4))
    ]
    return [c for c in dict.fromkeys(found) if c is not None]


#: Warpgroups, and more blocks of 64 rows than these.
_TALL = ((2, 4), (4, 6), (4, 7), (4, 8))


def _fit4(
    room: int,
    warpgroups: int,
    split: int,
    step: int,
    teams: int,
    x_stages: int,
    resident: int,
    blocks: int = 0,
) -> Decode4 | None:
    """With as many tiles of the weight in flight as there is memory for. None if nothing fits."""
    one = Decode4(room, warpgroups, split, step, 1, teams=teams, x_stages=x_stages, blocks=blocks)
    each = (SHARED_BYTES + RESERVED) // resident - RESERVED - BARRIERS
    stages = min((each - one.shared_bytes) // one.stage_bytes + 1, 16)
    # A stage is always the same team's: a barrier tells a phase from the next, not from the one after that.
    config = replace(one, stages=stages // teams * teams)
    fits = config.stages > 1 and config.resident >= resident and (room // 2) % split == 0
    return config if fits else None


def guess4(rows: int, tokens: int, processors: int = 132, gated: bool = False) -> Decode4:
    """A good configuration for a shape that was not measured, after those that were (benchmarks/LOG.md).

    Many rows come in blocks of two warpgroups, which read x less often, and half the memory for a block
    leaves room for the next kernel's first ones. From 17 tokens on x counts for more: there a warpgroup has
    twice the rows, with four times 64 in a block or, up to 32 tokens, seven, whichever goes into the
    multiprocessors more evenly. Few rows are for two or three teams, and if they are fewer than
    multiprocessors, several blocks share the columns.
    """
    units, step, resident, blocks = -(-rows // 64), 512, 2, 0
    if units >= 3 * processors:
        shape = (2, 1, 1)
        if tokens > 16:
            heights = (4,) if gated or tokens > 32 else (4, 7)
            blocks = min(heights, key=lambda height: -(-units // (height * processors)) * height)
            shape, step, resident = (2 if blocks == 4 else 4, 1, 1), 256, 1
    else:
        split = next((split for split in (1, 2) if units * split >= 0.7 * processors), 4)
        shape, resident = ((2, split, 1), 2) if gated else ((1, split, 3 if tokens <= 16 else 2), 1)

    def unlikeness(config: Decode4) -> tuple[bool, bool, int, int, bool, int, int]:
        rows, split, teams = config.warpgroups, config.split, config.teams
        apart = (rows != shape[0], abs(split - shape[1]), abs(teams - shape[2]), config.step != step)
        return config.blocks != blocks, *apart, abs(config.resident - resident), -config.stages

    return min((c for c in configs4(tokens) if c.gates or not gated), key=unlikeness)


def guess8(n: int, k: int, tokens: int, processors: int = 132, gated: bool = False) -> Decode8 | Prefill8:
    """As `guess` for products of codes, the tiles being the same in bytes. `n`: rows, of both if gated."""
    few = guess(n // 2 if gated else n, k, tokens, processors, gated)
    if isinstance(few, Decode):
        fitted = _fit8(few.tokens, few.warpgroups, few.split, 2 * few.step, 1)
        return fitted or _fit8(few.tokens, few.warpgroups, few.split, 256, 1) or configs8(tokens, n)[0]
    # A tile of 192 rows takes half as long again as one of 128, and 3 % (benchmarks/LOG.md).
    low, high = Prefill8(**asdict(few)) if few.warpgroups == 2 else Prefill8(256), Prefill8(256, 3)
    times = [
        _rounds(config, n, k, tokens, processors) * config.tokens * relative
        for config, relative in ((low, 1), (high, 1.5 * 1.03))
    ]
    return high if times[1] < times[0] else low


def guess(n: int, k: int, tokens: int, processors: int = 132, gated: bool = False) -> Config:
    """A good configuration for a shape that was not measured, after those that were (benchmarks/LOG.md)."""
    rows = 2 * n if gated else n
    if tokens > 128 and rows % 8 == 0:
        return _least_cycles(rows, k, tokens, processors)
    room = _room(tokens)
    if tokens > room:
        first = _fit(128, 4, 1, 128, 1)
    else:
        first = _fit_rows(-(-rows // 64), room, processors, gated)
    return first or _fit(room, 1, 1, 128, 1) or _decode_configs(tokens)[0]


def _fit_rows(blocks: int, room: int, processors: int, gated: bool) -> Decode | None:
    """By how often 64 rows go into the multiprocessors: all of these should stream at the same time."""
    step = 256 if room <= 32 else 128
    if blocks <= processors:  # few rows: several blocks share their columns, unless their sums end in a gate
        split = 1 if gated or 2 * blocks > processors else 2 if 4 * blocks > processors else 4
        return _fit(
            room, 1, split, step, 2 if split > 1 and room <= 16 and blocks * split <= processors else 1
        )
    if 2 * blocks <= 3 * processors and 16 <= room <= 64:  # few enough for blocks of three times the rows
        return _fit(room, 3, 2, 128, 1)
    # More than one each: two small blocks side by side, or one of twice the rows if enough of these are left.
    if room <= 8 or (room <= 64 and 10 * blocks < 14 * processors):
        return _fit(room, 1, 1, step if blocks <= 2 * processors else 128, 2)
    many = room == 96 and blocks > 3 * processors
    return _fit(room, 4 if many else 2, 1, 256 if room == 16 and blocks <= 2 * processors else 128, 1)


def _least_cycles(rows: int, k: int, tokens: int, processors: int) -> Prefill:
    """The tile with which the blocks finish first, by a count of cycles.

    A tile's products of 128 columns take 2·tokens cycles a warpgroup, but mostly its bytes do not arrive that
    fast: 33 a cycle for each multiprocessor. With 3000 more for a tile's beginning and end, and a blunt 12 %
    for more than two warpgroups (less of the memory is left for stages), this was within 10 % of the times of
    an earlier kernel. Its tile is the measured one in 32 of 35 rows of benchmarks/results/h200-tune-8b.json.
    """

    def cycles(config: Prefill) -> float:
        arriving = (64 * config.warpgroups * 144 + 256 * config.tokens / config.cluster) / 33
        tile = max(arriving, 2 * config.tokens * config.warpgroups) * k / 128 + 3000
        rounds = _rounds(config, rows, k, tokens, processors)
        return rounds * tile * (1.12 if config.warpgroups > 2 else 1)

    return min(_prefill_configs(tokens), key=cycles)


def _rounds(config: Prefill, rows: int, k: int, tokens: int, processors: int) -> float:
    """How often every block takes a tile, the last time perhaps a part of one."""
    units, clusters = config.row_units(rows) * -(-tokens // config.tokens), processors // config.cluster
    shares = config.share_out(units, -(-k // 128), clusters)
    rounds: float = -(-shares.whole // clusters)
    return rounds + (round_of_parts(shares.parts, k / 128) if units > shares.whole else 0)


def _prefill_configs(tokens: int) -> list[Prefill]:
    tiles = [t for t in (64, 128, 160, 192, 224, 256) if t < tokens + 64]
    found = [Prefill(t, 2, cluster) for t in reversed(tiles) for cluster in (2, 1)]
    if tokens >= 128:
        found += [Prefill(192, 3, 2), Prefill(128, 4, 2)]
    if tokens >= 1024:
        found.append(Prefill(256, 2, 2, 16))
    if tokens >= 4096:  # x no longer fits the cache, and with more rows at a time it is read less often
        found.append(Prefill(256, 2, 2, 32))
    return found


def _decode_configs(tokens: int) -> list[Decode]:
    """In one tile while they are few, in one or several after that."""
    room = _room(tokens)
    if tokens <= 64:
        choices = itertools.product((room,), (2, 1), (1, 2, 3, 4), (1, 2, 4), (128, 256))
    else:  # what was never among the best is left out: benchmarks/results/h200-tune-8b.json
        tiles = [t for t in (64, 96, 128, 192, 256) if t <= room]
        choices = itertools.product(tiles, (1,), (1, 2, 4), (1, 2, 4) if room <= 96 else (1, 2), (128,))
    found = [
        _fit(tile, warpgroups, split, step, resident) for tile, resident, warpgroups, split, step in choices
    ]
    return [c for c in dict.fromkeys(found) if c is not None]


def _room(tokens: int) -> int:
    """Tokens that one tile holds: rounded up to a size there is, at most 256."""
    return next((t for t in (8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if t >= tokens), 256)


def _fit(room: int, warpgroups: int, split: int, step: int, resident: int) -> Decode | None:
    """The configuration with as many stages as `resident` blocks have memory for, None if they do not fit."""
    return _fit_of(Decode, room, warpgroups, split, step, resident)


def _fit8(room: int, warpgroups: int, split: int, step: int, resident: int) -> Decode8 | None:
    return _fit_of(Decode8, room, warpgroups, split, step, resident)


_Kind = TypeVar("_Kind", bound=Decode)


def _fit_of(
    kind: type[_Kind], room: int, warpgroups: int, split: int, step: int, resident: int, **others: int
) -> _Kind | None:
    one = kind(room, warpgroups, split, step, 1, **others)
    registers = 65536 // resident // one.threads
    room_each = (SHARED_BYTES + RESERVED) // resident - RESERVED - BARRIERS
    stages = (room_each - one.shared_bytes) // one.stage_bytes + 1
    if stages < 2 or one.registers > min(registers, 255) or (room // 2) % split:
        return None
    return kind(room, warpgroups, split, step, min(stages, 16), **others)
