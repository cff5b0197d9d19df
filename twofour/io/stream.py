"""Rewrite a checkpoint tensor by tensor: the common road of `prune` and `pack`.

Memory holds one shard being written and one tensor being read, whatever the size of the checkpoint. The
input's tensors are dealt into shards by their bytes alone, so a resumed run deals them the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.workplace import how_to_go_on, run_of
from twofour.io.writer import CheckpointWriter, free_bytes, sha256
from twofour.progress import OnProgress, silent
from twofour.words import size

#: Bytes of input that make one output shard; with the tensor in hand this is what memory holds.
SHARD_BYTES = 512 << 20

#: Bytes whose checksums take a part of a second.
TOLD_EVERY = 256 << 20

#: From a tensor's name and value to what is written in its place, and what to remember about it.
Convert = Callable[[str, Tensor], tuple[dict[str, Tensor], dict[str, Any]]]


def rewrite(
    source: Checkpoint,
    out: str | Path,
    convert: Convert,
    options: dict[str, Any],
    finish: Callable[[CheckpointWriter, dict[str, Any]], None],
    *,
    resume: bool = False,
    shard_bytes: int = SHARD_BYTES,
    least: float = 9 / 16,
    on_progress: OnProgress = silent,
) -> None:
    """Convert every tensor of `source` into a new checkpoint at `out`.

    `finish` gets the writer and all notes once the shards are there, and publishes the result.
    `options` tell one run from another: a partial result is taken over only if they are the same.
    `least` is the smallest share of the input's bytes that can come out; packed in 16 bit it is 9/16.
    """
    shards = deal(source, shard_bytes)
    sums = _checksums(source)
    run = run_of({**options, "shard_bytes": shard_bytes}, source)
    done_bytes = 0
    with CheckpointWriter(out, len(shards), run, resume=resume) as writer:
        _require_space(source, writer, least)
        for number, names in enumerate(shards, 1):
            notes: dict[str, Any] = {}
            new: dict[str, Tensor] = {}
            for name in names:
                if number not in writer.done:
                    tensors, note = convert(name, read_sound(source, name, sums))
                    new.update(tensors)
                    if note:
                        notes[name] = note
                done_bytes += source.tensors[name].nbytes
                on_progress(done_bytes, source.nbytes, name)
            if number not in writer.done:
                writer.write_shard(number, new, notes)
        finish(writer, {k: v for n in sorted(writer.done) for k, v in writer.done[n]["notes"].items()})


def deal(source: Checkpoint, shard_bytes: int) -> list[list[str]]:
    """The names of the input's tensors in the order of the files, cut into shards of about equal bytes."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in sorted(source.tensors.items(), key=lambda item: (item[1].file, item[0])):
        if shards[-1] and filled + info.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.nbytes
    return shards


def read_sound(source: Checkpoint, name: str, sums: dict[str, str]) -> Tensor:
    """A tensor with the bytes that were written: what is made of others would get checksums that fit."""
    tensor = source.read(name)
    if name in sums and sha256(tensor) != sums[name]:
        raise InputError(
            f"{source.directory / source.tensors[name].file}: {name} is not what was written there; "
            "its bytes do not match their checksum.",
            hint="Copy or make the checkpoint again.",
        )
    return tensor


def require_sound(source: Checkpoint, on_progress: OnProgress = silent) -> None:
    """Before hours of work on a checkpoint: all that is stored with a checksum still matches it."""
    sums, done, told = _checksums(source), 0, 0
    for name in sorted(sums.keys() & source.tensors.keys()):
        read_sound(source, name, sums)
        done += source.tensors[name].nbytes
        if done - told > TOLD_EVERY:
            on_progress(done, source.nbytes, "checksums")
            told = done


def _checksums(source: Checkpoint) -> dict[str, str]:
    return {name: checksum for file in source.files for name, checksum in source.checksums(file).items()}


def _require_space(source: Checkpoint, writer: CheckpointWriter, least: float) -> None:
    """Say now what would otherwise be found out hours later."""
    needed = int(source.nbytes * least) - sum(note["bytes"] for note in writer.done.values())
    free = free_bytes(writer.out)
    if free < needed:
        raise InputError(
            f"the disk is too full: {writer.out} needs {size(needed)} or more, and {size(free)} are free.",
            hint=how_to_go_on(writer.out),
        )
