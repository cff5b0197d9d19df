"""What a model is trained on: windows of tokens, in an order that depends on nothing but the seed.

Text becomes one long stream of tokens, cut into windows. Each time round (an epoch) it is cut at other
places, so that a short text gives more than the same few windows: the stream is a ring, and an epoch begins
somewhere on it. What a teacher wrote comes in windows that begin where it began, and stays so.

The windows of a step are a function of (seed, step) alone. So a run that is resumed, or is shared by more or
fewer processes, sees the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twofour.calibrate import parallel
from twofour.calibrate.text import read_documents
from twofour.calibrate.windows import require_windows, token_stream
from twofour.calibrate.written import write_windows
from twofour.errors import InputError
from twofour.progress import OnProgress, silent

#: In place of a file: the teacher writes the text.
SELF = "self"

#: At most so much is written, however many tokens are trained on: more of it does not pay for its time.
MOST_WRITTEN = 25_000_000

#: Windows to evaluate on: as many as cost little beside the training, within these.
FEWEST_HELD_OUT, MOST_HELD_OUT = 16, 128

#: Tokens to train on for each token to evaluate on. There are about ten evaluations, forward only.
TRAINED_PER_HELD_OUT = 50

#: Windows that are written at once. A file each: that is how much a killed run has to write again.
WRITTEN_AT_ONCE = {"cuda": 4096, "cpu": 64}

#: Bytes of keys and values that writing may keep on a GPU.
CACHE_BYTES = 12 << 30


@dataclass(frozen=True)
class _Part:
    """A stretch of the stream: `size` tokens from `begin` on, which are a ring or whole windows."""

    begin: int
    size: int
    ring: bool


class Windows:
    """Windows of `length` tokens, as `order` puts them. On the device that is trained on: they are small."""

    def __init__(self, streams: Sequence[tuple[Tensor, bool]], length: int) -> None:
        """`streams` are tokens [n] and whether they are a ring."""
        self.length = length
        self._parts: list[_Part] = []
        tokens: list[Tensor] = []
        begin = 0
        for stream, ring in streams:
            size = len(stream) if ring else len(stream) - len(stream) % length
            if size < length:
                continue
            self._parts.append(_Part(begin, size, ring))
            # A ring is closed by its first tokens: a window may begin at its last one.
            tokens += [stream[:size], stream[: length - 1]] if ring else [stream[:size]]
            begin += size + (length - 1 if ring else 0)
        if not self._parts:
            most = max((len(stream) for stream, _ in streams), default=0)
            raise InputError(
                f"the data has {most} tokens, less than one window of {length}.",
                hint="Give more text, or a smaller --seqlen.",
            )
        self.tokens = torch.cat(tokens).int()
        self._epochs: dict[int, Tensor] = {}

    @classmethod
    def of(cls, windows: Tensor) -> Windows:
        """Windows [count, length] as they are."""
        require_windows(windows)
        return cls([(windows.detach().cpu().reshape(-1), False)], windows.shape[1])

    def __len__(self) -> int:
        return sum(part.size // self.length for part in self._parts)

    def to(self, device: torch.device) -> Windows:
        self.tokens = self.tokens.to(device)
        self._epochs = {}
        return self

    def batch(self, seed: int, step: int, count: int) -> Tensor:
        """The `count` windows of a step, [count, length]."""
        starts: list[Tensor] = []
        first, last = step * count, (step + 1) * count
        while first < last:
            epoch, within = divmod(first, len(self))
            some = self._order(seed, epoch)[within : within + last - first]
            starts.append(some)
            first += len(some)
        offsets = torch.arange(self.length, device=self.tokens.device)
        return self.tokens[torch.cat(starts)[:, None] + offsets].long()

    def _order(self, seed: int, epoch: int) -> Tensor:
        """Where the windows of an epoch begin, shuffled."""
        if epoch not in self._epochs:
            # Mixed by a product: neighbouring seeds and epochs shall not give the same shuffles.
            random = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % (1 << 62))
            starts = []
            for part in self._parts:
                count = part.size // self.length
                offset = int(torch.randint(part.size, (), generator=random)) if part.ring else 0
                starts.append(part.begin + (offset + torch.arange(count) * self.length) % part.size)
            every = torch.cat(starts)
            order = every[torch.randperm(len(every), generator=random)]
            # Kept as long as a step can reach back to it.
            self._epochs = {e: o for e, o in self._epochs.items() if e == epoch - 1}
            self._epochs[epoch] = order.to(self.tokens.device)
        return self._epochs[epoch]


def read_data(
    data: Sequence[str | Path],
    tokenizer: Any,
    *,
    length: int,
    tokens: int,
    seed: int,
    teacher: Any = None,
    work: Path | None = None,
    eval_data: str | Path | None = None,
    begin: Callable[[], None] = lambda: None,
    on_progress: OnProgress = silent,
) -> tuple[Windows, Tensor]:
    """The windows to train on, and those to evaluate on [count, length].

    `data` are files, or SELF. What the teacher writes is kept in `work`, and read there if it is there.
    `begin` is called when all files were found good, and before anything is written.
    Without `eval_data` the end of the data is held out: of the first file, else of what is written.
    """
    if not data:
        raise InputError("there is no data.", hint="Give text with --data FILE, or --data self.")
    wanted = min(max(tokens // (TRAINED_PER_HELD_OUT * length), FEWEST_HELD_OUT), MOST_HELD_OUT)
    held_out = None
    if eval_data is not None:
        held_out = _evaluated(token_stream(tokenizer, read_documents(eval_data), on_progress), length, wanted)
    files = [token_stream(tokenizer, read_documents(path), on_progress) for path in data if str(path) != SELF]
    streams: list[tuple[Tensor, bool]] = [(stream, True) for stream in files]
    writes = len(files) < len(data)
    if writes:
        if teacher is None:
            raise InputError(
                "with --data self the teacher writes the text, and there is none.",
                hint="Give the dense model with --teacher DENSE.",
            )
        begin()
        count = -(-min(tokens, MOST_WRITTEN) // length) + wanted
        written = write_in_units(teacher, tokenizer, count, length, seed, work, on_progress)
        streams.append((written.reshape(-1), False))
    if held_out is None:
        stream, ring = streams[0]
        count = min(wanted, -(-(len(stream) // length) // 10), len(stream) // length // 2)
        if not count:
            raise InputError(
                f"the data has {len(stream)} tokens, less than two windows of {length}.",
                hint="Give more text, or a smaller --seqlen.",
            )
        # Whole windows from the end on, for what was written comes in windows.
        cut = len(stream) - (0 if ring else len(stream) % length) - count * length
        held_out = stream[cut : cut + count * length].reshape(count, length)
        streams[0] = (stream[:cut], ring)
    windows = Windows(streams, length)
    if not writes:
        begin()
    return windows, held_out


def _evaluated(stream: Tensor, length: int, wanted: int) -> Tensor:
    """At most so many windows, spread evenly over the text."""
    count = len(stream) // length
    if not count:
        raise InputError(
            f"the text to evaluate on has {len(stream)} tokens, less than one window of {length}.",
            hint="Give more text, or a smaller --seqlen.",
        )
    windows = stream[: count * length].reshape(count, length)
    return windows[torch.linspace(0, count - 1, min(count, wanted)).long()]


def write_in_units(
    teacher: Any,
    tokenizer: Any,
    count: int,
    length: int,
    seed: int,
    work: Path | None,
    on_progress: OnProgress = silent,
) -> Tensor:
    """Windows [count, length] that the teacher writes, unit by unit, each from a seed of its own.

    The processes share the units out, and what is in `work` already is not written again.
    """
    at_once = _written_at_once(teacher, length)
    units = -(-count // at_once)
    known = {"length": length, "seed": seed, "at_once": at_once}
    rank, processes = parallel.rank(), parallel.processes()
    mine: dict[int, Tensor] = {}
    for unit in range(units):
        if unit % processes != rank:
            continue
        # The last unit is whole too: asking for a little more text does not change what there is.
        found = None if work is None else _read_unit(work / _unit_file(unit), known)
        if found is None:
            found = write_windows(
                *(teacher, tokenizer, at_once, length, seed * 1_000_003 + unit), batch=at_once
            ).int()
            if work is not None:
                partial = work / f"{_unit_file(unit)}.partial"
                save_file({"tokens": found}, partial, metadata={"known": json.dumps(known)})
                partial.replace(work / _unit_file(unit))
        mine[unit] = found
        on_progress(unit + 1, units, "the teacher writes")
    everything = {unit: tokens for part in parallel.of_all(mine) for unit, tokens in part.items()}
    return torch.cat([everything[unit] for unit in range(units)])[:count].long()


def _written_at_once(teacher: Any, length: int) -> int:
    """A power of two whose keys and values fit. A function of the model, so that the text is one too."""
    config = teacher.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * heads * width * length
    most = WRITTEN_AT_ONCE["cuda" if teacher.device.type == "cuda" else "cpu"]
    fits = max(1, CACHE_BYTES // cache)
    return min(most, 1 << (fits.bit_length() - 1))


def _unit_file(unit: int) -> str:
    return f"written-{unit:05d}.safetensors"


def _read_unit(file: Path, known: dict[str, int]) -> Tensor | None:
    """What an earlier run has written, if it wrote the same."""
    try:
        with safe_open(file, framework="pt") as opened:
            if json.loads((opened.metadata() or {}).get("known", "{}")) == known:
                return opened.get_tensor("tokens")
    except (OSError, SafetensorError, json.JSONDecodeError):
        pass
    return None
