"""Layers of one kind: `model.layers.0.mlp.up_proj`, `…1.mlp.up_proj`, … are one row of a table, one panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twofour.words import alike

#: Layers with the same input that `fuse_` computes as one product, as most decoders name them.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Kind:
    """Layers with the same name but for its numbers, and the same shape."""

    pattern: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    parts: tuple[str, ...] = ()  # the patterns of the layers that it is fused from

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        """Of the weight as a matrix: a convolution's kernel places stand beside each other."""
        columns = 1
        for side in self.shape[1:]:
            columns *= side
        return columns


def kinds_of(layers: Mapping[str, Sequence[int]]) -> list[Kind]:
    grouped: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name, shape in layers.items():
        grouped.setdefault((alike(name), tuple(shape)), []).append(name)
    return [Kind(pattern, shape, tuple(names)) for (pattern, shape), names in grouped.items()]


def fused_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """The products that fusing makes of these layers, where all their parts are there."""
    found = []
    for ends in FUSED:
        by_parent: dict[str, list[Kind]] = {}
        for kind in kinds:
            parent, _, own = kind.pattern.rpartition(".")
            if own in ends:
                by_parent.setdefault(parent, []).append(kind)
        for parent, parts in by_parent.items():
            same = len({(p.columns, len(p.names)) for p in parts}) == 1
            if len(parts) == len(ends) and same:
                shape = (sum(p.rows for p in parts), parts[0].columns)
                pattern = f"{parent}.{{{', '.join(end.removesuffix('_proj') for end in ends)}}}_proj"
                found.append(Kind(pattern, shape, parts[0].names, tuple(p.pattern for p in parts)))
    return found


def short_labels(patterns: Sequence[str]) -> dict[str, str]:
    """The ends of the names, as long as it takes to tell them apart.

    >>> short_labels(["model.layers.*.mlp.up_proj", "model.layers.*.attn.q_proj"])
    {'model.layers.*.mlp.up_proj': 'mlp.up_proj', 'model.layers.*.attn.q_proj': 'attn.q_proj'}
    """
    unique = list(dict.fromkeys(patterns))
    for parts in range(2, 32):
        labels = {p: ".".join(p.split(".")[-parts:]) for p in unique}
        if len(set(labels.values())) == len(unique):
            return labels
    return {p: p for p in unique}
