"""Where the order of channels might be free, guessed from the order in which a model's layers run.

    chain     the layers just before make exactly the channels that this one reads: up, gate → down;
              convolution → BatchNorm → ReLU → convolution. Any order will do.
    heads     attention's output layer reads what v made, head by head. Channels may move only within their
              head, and in the same way in all query heads that share a key-value head.
    residual  one order for the whole residual stream of a transformer: embeddings, every norm, every layer
              that reads it or adds to it, the output head.

Guesses may be wrong: there is a residual connection, another reader, another layout of a fused weight.
`twofour.prune.find_folds` tries each of them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour.prune.folds import Constraint, Fold, Kind, Site
from twofour.prune.trace import Event, Trace
from twofour.select import Layer, as_layer

#: What models and their configs call the number of heads, and of key-value heads.
HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")


def _reads(event: Event, channels: Tensor) -> Site:
    assert event.layer is not None
    return Site(event.module, "weight", 0 if event.layer.kind == "conv1d" else 1, channels)


def _makes(event: Event, channels: Tensor) -> list[Site]:
    assert event.layer is not None
    sites = [Site(event.module, "weight", 1 if event.layer.kind == "conv1d" else 0, channels)]
    if event.module.bias is not None:
        sites.append(Site(event.module, "bias", 0, channels))
    return sites


def _along(event: Event, channels: Tensor) -> list[Site]:
    """What a module that treats each channel on its own (a norm, a depthwise convolution) keeps of them."""
    tensors = {**event.module._parameters, **event.module._buffers}
    return [Site(event.module, name, 0, channels) for name, x in tensors.items() if x is not None and x.dim()]


def _is_channelwise(event: Event, size: int) -> bool:
    own = [getattr(event.module, site.tensor) for site in _along(event, torch.arange(0))]
    plain = event.layer is None and not isinstance(event.module, nn.Embedding)
    return plain and bool(own) and all(tensor.shape[0] == size for tensor in own)


def _fold(
    kind: Kind,
    constraint: Constraint,
    readers: Sequence[Event],
    wanted: set[str],
    columns: Tensor,
    makers: Sequence[tuple[Event, Tensor]],
    along: Iterable[Event] = (),
) -> Fold:
    reads = {reader.name: _reads(reader, columns) for reader in readers}
    sites = [*reads.values()]
    for maker, rows in makers:
        sites += _makes(maker, rows)
    for event in along:
        sites += _along(event, torch.arange(constraint.size)[None])
    consumers = tuple(reader.layer for reader in readers if reader.layer and reader.name in wanted)
    names = tuple(maker.name for maker, _ in makers)
    return Fold(kind, consumers, names, constraint, tuple(sites), reads)


def chains(trace: Trace, i: int, wanted: set[str]) -> Iterator[Fold]:
    """The layer (and others that read the very same tensor) behind one, two or one fused producer."""
    reader = trace.events[i]
    assert reader.layer is not None
    size = reader.layer.shape[1]
    same = [e for e in trace.events if e.layer and e.source == reader.source and e.layer.shape[1] == size]
    readers = list({e.name: e for e in (reader, *same)}.values())
    channels = torch.arange(size)[None]
    along: list[Event] = []
    before = list(trace.before(i))
    for n, maker in enumerate(before):
        if _is_channelwise(maker, size):
            along.append(maker)
        elif maker.outs == size:
            twin = next((e for e in before[n + 1 :] if e.outs == size and e.source == maker.source), None)
            if twin is not None:
                makers = [(maker, channels), (twin, channels)]
                yield _fold("chain", Constraint(size), readers, wanted, channels, makers, along)
            yield _fold("chain", Constraint(size), readers, wanted, channels, [(maker, channels)], along)
            return
        elif maker.outs == 2 * size:  # gate and up in one
            both = torch.arange(2 * size).reshape(2, size)
            yield _fold("chain", Constraint(size), readers, wanted, channels, [(maker, both)], along)
            return


def by_head(model: nn.Module, config: Any, trace: Trace, i: int) -> Iterator[Fold]:
    """Attention's output layer behind v, which may be a part of a fused weight."""
    reader = trace.events[i]
    assert reader.layer is not None
    size = reader.layer.shape[1]
    if reader.layer.kind == "conv2d" or reader.source in trace.normed(size):
        return  # what reads a norm's output reads the residual stream
    for heads, shared in _head_counts(model, config, reader.name):
        if size % heads or (width := size // heads) % 4 or heads % shared:
            continue
        kept = shared * width
        constraint = Constraint(kept, width)
        columns = torch.arange(size).reshape(shared, heads // shared, width)
        columns = columns.transpose(0, 1).reshape(heads // shared, kept)
        for maker in trace.before(i):
            if maker.outs < kept:
                continue
            # v alone; or the last part of q, k and v in a row; or the last part of each head's q, k and v.
            layouts = [torch.arange(maker.outs - kept, maker.outs)]
            if maker.outs > kept and maker.outs % shared == 0:
                layouts.append(torch.arange(maker.outs).reshape(shared, -1)[:, -width:].reshape(-1))
            for rows in layouts:
                yield _fold("heads", constraint, [reader], {reader.name}, columns, [(maker, rows[None])])


def _head_counts(model: nn.Module, config: Any, name: str) -> Iterator[tuple[int, int]]:
    """Numbers of heads and key-value heads that the layer's parent, or the config, speaks of."""
    places: list[Any] = []
    while name:
        name = name.rpartition(".")[0]
        places.append(model.get_submodule(name))
    places.append(config.get_text_config() if hasattr(config, "get_text_config") else config)
    seen = set()
    for place in places:
        for heads in _numbers(place, HEADS):
            # A module may know its heads, and only the config which of them are shared.
            shared = [n for where in (place, places[-1]) for n in _numbers(where, KV_HEADS)]
            for pair in ((heads, n) for n in (*shared, heads)):
                if pair not in seen:
                    seen.add(pair)
                    yield pair


def _numbers(place: Any, names: Sequence[str]) -> list[int]:
    values = (getattr(place, name, None) for name in names)
    return [value for value in values if isinstance(value, int) and value > 0]


def residual(model: nn.Module, trace: Trace, wanted: set[str]) -> Fold | None:
    """One order for the stream that embeddings start, norms read and layers add to.

    A layer reads the stream if its input is a norm's output, or if it makes another number of channels of as
    many as the stream has; a layer that makes as many without reading the stream adds to it. Everything else
    of that width belongs to it as well.
    """
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        return None
    size = embeddings[0].embedding_dim  # of the tokens; positions come later
    channels = torch.arange(size)[None]
    normed = trace.normed(size)
    events = list({e.name: e for e in trace.events}.values())
    wide = [e for e in events if e.layer and e.layer.shape[1] == size]
    readers = [e for e in wide if e.source in normed or e.outs != size]
    writers = [e for e in events if e.outs == size and e not in readers]
    ran = {e.name for e in events}
    for name, module in model.named_modules():
        if name not in ran and any(size in p.shape for p in module.parameters(recurse=False)):
            return None  # an expert that no token reached: nobody knows how it is connected
    if not writers or not any(e.name in wanted for e in readers):
        return None
    makers = [(e, channels) for e in writers]
    fold = _fold("residual", Constraint(size), readers, wanted, channels, makers)
    sites = list(fold.sites)
    for name, module in model.named_modules():
        if isinstance(as_layer(name, module), Layer):
            continue
        for own, tensor in module._parameters.items():
            # Embeddings [·, size], norms [size], positions [1, ·, size], experts in one tensor [E, ·, size].
            dims = [d for d in range(tensor.dim()) if tensor.shape[d] == size] if tensor is not None else []
            if dims:
                sites.append(Site(module, own, dims[-1], channels))
    return replace(fold, sites=tuple(sites))
