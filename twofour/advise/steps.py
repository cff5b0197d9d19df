"""How long a whole step takes: one prefill of batch × prompt tokens, or one decode step of batch tokens.

    layers · (products + attention + elementwise bytes + kernels · latency) + output head

Products are those of products.py. Beside them a layer of a transformers decoder runs some thirty small
kernels (norms, rotary positions, residuals, activation), which 2:4 does not touch; `fuse_` makes them ten.
Their number and the bytes they move are counted here; how long a small kernel lasts, and what share of the
bandwidth such kernels and the attention over a key-value cache reach, are fitted to whole-model rows
(`Rest`). Decode reads all keys and values once for every token. Transformers' attention with a static cache
copies them first, once for each query head ("sdpa"); "grouped" is without that copy. Without CUDA graphs the
host may be the slower one: it takes a time for each layer and for each kernel that it launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from twofour.advise.gpus import Gpu
from twofour.advise.layers import Decoder, Network
from twofour.advise.products import Curve, ProductTime, product_time
from twofour.advise.schemes import DENSE, Scheme

Attention = Literal["grouped", "sdpa"]

#: Kernels of one layer of transformers' Llama beside its products and what is named below: residuals 2,
#: cache 2, attention and its copies 3.
SMALL_KERNELS = 7
NORM_KERNELS, FUSED_NORM_KERNELS = 8, 1  # each of two norms
ROTARY_KERNELS, FUSED_ROTARY_KERNELS = 10, 1  # of queries and keys together
ACTIVATION_KERNELS = 2
SDPA_KERNELS = 4  # mask and copies

#: Bytes that these kernels move, for each element of what they work on.
NORM_BYTES, FUSED_NORM_BYTES = 36, 4
RESIDUAL_BYTES = 12  # both residuals
OUTPUT_BYTES = 4  # attention's output is laid out anew
ROTARY_BYTES, FUSED_ROTARY_BYTES = 18, 4
ACTIVATION_BYTES = 10


@dataclass(frozen=True)
class Rest:
    """What a layer does beside its products. Times in microseconds, shares of the data sheet's ceilings."""

    kernel_us: float  # one small kernel in a CUDA graph
    gap_us: float  # a 2:4 product in a model: with other kernels between, it cannot start before its turn
    stream: float  # elementwise kernels' share of the bandwidth
    cache: float  # grouped attention's share of the bandwidth, over keys and values
    cache_copied: float  # the same for "sdpa", its copies included
    attention_us: float  # of one layer's decode before bytes count; may hold what is counted nowhere else
    host_us: float  # Python, for one layer
    host_kernel_us: float  # Python, for one kernel that it launches, products included
    attention: float = 0.4  # prefill attention's share of the arithmetic: taken as given, not fitted

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class TimeModel:
    """All that is fitted, and what it was fitted to."""

    curves: Mapping[str, Curve]  # by the scheme's name; 16 bit, dense and 2:4, are always there
    rest: Rest
    fitted_to: str
    #: Schemes that were timed on the very GPU that is asked about. Curves of others are of another GPU.
    measured: frozenset[str]

    def curve(self, scheme: Scheme) -> Curve:
        own = self.curves.get(scheme.name)
        return self.curves[scheme.in_16_bit.name] if own is None else own

    def product(self, gpu: Gpu, scheme: Scheme, n: int, k: int, tokens: int) -> ProductTime:
        """One product in this scheme, by way of 16 bit where its kernel is not for so many tokens."""
        if tokens <= scheme.most_tokens:
            return product_time(self.curve(scheme), gpu, scheme, n, k, tokens)
        wide, curve = scheme.in_16_bit, self.curve(scheme.in_16_bit)
        after = product_time(curve, gpu, wide, n, k, tokens)
        moved = scheme.weight_bytes(n, k) + wide.weight_bytes(n, k)
        decoding = curve.launch + moved / (gpu.bandwidth_gb_s * 1e3 * curve.bandwidth)
        return replace(after, us=after.us + decoding, bytes_us=after.bytes_us + decoding)


@dataclass(frozen=True)
class Step:
    """Milliseconds of one step, and where they go."""

    ms: float
    products_ms: float  # of the layers that 2:4 can touch
    other_products_ms: float  # of the output head and whatever else stays dense
    attention_ms: float
    elementwise_ms: float
    host_bound: bool


@dataclass(frozen=True)
class Workload:
    """What is run: `tokens` of each sequence at once, after `context - tokens` others."""

    batch: int
    tokens: int
    context: int
    graph: bool
    attention: Attention = "grouped"


def step_time(
    network: Network, gpu: Gpu, model: TimeModel, scheme: Scheme, fused: bool, work: Workload
) -> Step:
    """One step of the model with its eligible layers in `scheme` and the others dense."""
    at_once = work.batch * work.tokens
    decode = work.tokens == 1
    touched = other = 0.0
    launched = 0
    # fuse_ makes products of packed layers one; those of a dense model it leaves.
    for group in network.products(fused and scheme.sparse):
        chosen = scheme if group.eligible else DENSE
        tokens = work.batch if group.is_head else at_once
        us = group.count * model.product(gpu, chosen, group.rows, group.columns, tokens).us
        launched += group.count
        if group.eligible:
            gap = model.rest.gap_us if scheme.sparse and decode else 0.0
            touched += us + group.count * gap
        else:
            other += us
    attention = elementwise = host = 0.0
    if network.decoder is not None:
        # A weight that is decoded before its product has no kernel that ends in the activation.
        gated = fused and scheme.sparse and at_once <= scheme.most_tokens
        per_layer = _small_kernels(fused, gated, work.attention if decode else "grouped")
        stream = gpu.bandwidth_gb_s * 1e3 * model.rest.stream
        moved = network.decoder.layers * at_once * _elementwise_bytes(network.decoder, fused, gated)
        elementwise = network.decoder.layers * per_layer * model.rest.kernel_us + moved / stream
        attention = _attention_us(network.decoder, gpu, model.rest, work)
        if not work.graph:
            launched += network.decoder.layers * per_layer
            host = network.decoder.layers * model.rest.host_us + launched * model.rest.host_kernel_us
    device = touched + other + attention + elementwise
    return Step(
        max(device, host) / 1e3, touched / 1e3, other / 1e3, attention / 1e3, elementwise / 1e3, host > device
    )


def _small_kernels(fused: bool, gated: bool, attention: Attention) -> int:
    """Of one layer. `gated`: the activation is in the kernel of a product."""
    norms = 2 * (FUSED_NORM_KERNELS if fused else NORM_KERNELS)
    rotary = FUSED_ROTARY_KERNELS if fused else ROTARY_KERNELS
    activation = 0 if gated else ACTIVATION_KERNELS
    return SMALL_KERNELS + norms + rotary + activation + (SDPA_KERNELS if attention == "sdpa" else 0)


def _elementwise_bytes(decoder: Decoder, fused: bool, gated: bool) -> int:
    """Of one token in one layer."""
    norms = 2 * (FUSED_NORM_BYTES if fused else NORM_BYTES)
    rotary = (FUSED_ROTARY_BYTES if fused else ROTARY_BYTES) * decoder.head_dim
    activation = 0 if gated else ACTIVATION_BYTES
    of_hidden = norms + RESIDUAL_BYTES + OUTPUT_BYTES
    turned = rotary * (decoder.heads + decoder.kv_heads)
    return of_hidden * decoder.hidden + turned + activation * decoder.intermediate


def _attention_us(decoder: Decoder, gpu: Gpu, rest: Rest, work: Workload) -> float:
    """Of all layers: arithmetic of the new tokens over the context, and the bytes of keys and values."""
    # Of a prompt a token sees half of the others on average.
    seen = work.context - (work.tokens - 1) / 2
    operations = 4 * decoder.layers * work.batch * decoder.heads * decoder.head_dim * work.tokens * seen
    arithmetic = operations / (gpu.tflops_16bit * 1e6 * rest.attention)
    share = rest.cache_copied if work.attention == "sdpa" and work.tokens == 1 else rest.cache
    moved = decoder.cache_bytes(work.batch, work.context) / (gpu.bandwidth_gb_s * 1e3 * share)
    fixed = decoder.layers * rest.attention_us if work.tokens == 1 else 0.0
    return fixed + max(arithmetic, moved)
