"""`twofour.advise`: is 2:4 worth it for this model, on this GPU, for this work? And what instead?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from twofour.advise.gpus import MEASURED, Gpu, find_gpu, this_machine
from twofour.advise.layers import LayerGroup, Network, read_network
from twofour.advise.model import read_rows, refine, shipped
from twofour.advise.products import Bound, intensity
from twofour.advise.schemes import DENSE, SCHEMES, SPARSE, Scheme
from twofour.advise.sentences import cannot_tell, verdict_of, what_instead, what_it_rests_on
from twofour.advise.steps import Attention, Step, TimeModel, Workload, step_time
from twofour.errors import InputError

DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Phase:
    """One layer in prefill or decode."""

    tokens: int
    intensity: float  # operations per byte, dense
    bound: Bound  # dense: what most of its time goes to
    us: dict[str, float]  # by scheme, one product


@dataclass(frozen=True)
class LayerAdvice:
    name: str
    count: int
    rows: int
    columns: int
    kind: str
    eligible: bool
    reason: str | None  # why it stays as it is
    padding: tuple[int, int]  # rows and columns that it lacks for the fast kernels
    dense_bytes: float  # all of the group
    sparse_bytes: float
    prefill: Phase | None
    decode: Phase | None


@dataclass(frozen=True)
class Form:
    """The whole model with its eligible layers in one scheme. × is against dense with the same fusing."""

    name: str
    measured: bool
    prefill_ms: float
    decode_ms: float
    tokens_per_s: float
    request_s: float
    prefill_x: float
    decode_x: float
    request_x: float
    weight_bytes: float
    cache_bytes: float
    fits: bool | None  # into the GPU's memory; None where that is not known


@dataclass(frozen=True)
class Advice:
    """What `twofour advise` says. Times are predictions; `notes` says what they rest on."""

    model: str
    source: str
    gpu: Gpu
    batch: int
    prompt: int
    generate: int
    dtype: str
    fused: bool
    graph: bool
    attention: Attention
    verdict: str
    instead: str
    timed: bool  # False: most of the model is in layers whose time is not known, and `forms` leaves them out
    forms: tuple[Form, ...]
    touched_prefill: float  # share of dense time in layers that 2:4 can touch
    touched_decode: float
    prefill: Step  # dense, where the time goes
    decode: Step
    layers: tuple[LayerAdvice, ...]
    notes: tuple[str, ...]

    def form(self, name: str) -> Form:
        return next(form for form in self.forms if form.name == name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def advise(
    model: str | Path | Mapping[str, Any],
    gpu: str | None = None,
    *,
    batch: int = 1,
    prompt: int = 2048,
    generate: int = 256,
    dtype: str = "bfloat16",
    fused: bool = True,
    graph: bool = True,
    attention: Attention = "grouped",
    measured: str | Path | None = None,
) -> Advice:
    """Predict what 2:4 brings to `model` (a directory, a config.json, or a config as a mapping).

    `gpu` is the name of a known one; without it this machine's, or the H200. `measured` is a file that
    `twofour bench --shapes 8B --json` wrote on the GPU in question, with --scheme or without. `graph` says
    whether decode is run from a CUDA graph (or torch.compile), `attention` whether it copies keys and values
    ("sdpa", see docs/advise.md).

    >>> config = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32}
    >>> config |= {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    >>> advise(config, "H200").form("2:4").decode_x > 1.2
    True
    """
    for name, value, least in (("batch", batch, 1), ("prompt", prompt, 1), ("generate", generate, 0)):
        if value < least:
            raise InputError(f"{name} is {value}, and must be at least {least}.")
    if dtype not in DTYPES:
        raise InputError(
            f"2:4 layers are multiplied in 16 bit, not in {dtype!r}.",
            hint=f"Choose one of: {', '.join(DTYPES)}.",
        )
    if attention not in ("grouped", "sdpa"):
        raise InputError(f"no attention {attention!r}.", hint="Choose one of: grouped, sdpa.")
    chosen, times, notes = machine_and_times(gpu, measured)
    network = read_network(model)
    if not any(group.eligible for group in network.groups):
        reasons = sorted({group.reason for group in network.groups if group.reason})
        hint = "Left alone: " + "; ".join(reasons[:6]) + "." if reasons else None
        raise InputError("no layer of this model can be made 2:4.", hint=hint)
    work_prefill = Workload(batch, prompt, prompt, graph=False)
    work_decode = Workload(batch, 1, prompt + generate // 2, graph, attention)
    cache = network.decoder.cache_bytes(batch, prompt + generate) if network.decoder else 0

    def steps(scheme: Scheme) -> tuple[Step, Step]:
        prefill, decode = (
            step_time(network, chosen, times, scheme, fused, w) for w in (work_prefill, work_decode)
        )
        return prefill, decode

    prefill, decode = steps(DENSE)
    forms: list[Form] = []
    for scheme in SCHEMES:
        if chosen.rate(scheme.arithmetic) is None:
            continue
        first, each = steps(scheme)
        request, dense_request = (f.ms + generate * e.ms for f, e in ((first, each), (prefill, decode)))
        weights = weight_bytes(network, scheme)
        fits = None if chosen.memory_gb is None else weights + cache < chosen.memory_gb * 1e9
        forms.append(
            Form(
                name=scheme.name,
                measured=scheme.name in times.measured,
                prefill_ms=first.ms,
                decode_ms=each.ms,
                tokens_per_s=batch / each.ms * 1e3,
                request_s=request / 1e3,
                prefill_x=prefill.ms / first.ms,
                decode_x=decode.ms / each.ms,
                request_x=dense_request / request,
                weight_bytes=weights,
                cache_bytes=cache,
                fits=fits,
            )
        )
    layers = tuple(_layer(group, chosen, times, batch, batch * prompt) for group in network.groups)
    if dtype != DTYPES[0]:
        notes.append(f"Measured in {DTYPES[0]}: {dtype} is taken to be as fast.")
    notes += what_it_rests_on(network, chosen, times, prefill, decode, fused)
    by_name = {form.name: form for form in forms}
    return Advice(
        model=network.name,
        source=network.source,
        gpu=chosen,
        batch=batch,
        prompt=prompt,
        generate=generate,
        dtype=dtype,
        fused=fused,
        graph=graph,
        attention=attention,
        verdict=verdict_of(by_name, layers, batch) if network.timed else cannot_tell(network, by_name),
        instead=what_instead(by_name) if network.timed else "",
        timed=network.timed,
        forms=tuple(forms),
        touched_prefill=prefill.products_ms / prefill.ms,
        touched_decode=decode.products_ms / decode.ms,
        prefill=prefill,
        decode=decode,
        layers=layers,
        notes=tuple(notes),
    )


def weight_bytes(network: Network, scheme: Scheme) -> float:
    """Of the whole model: eligible layers in the scheme, all else in 16 bit."""
    chosen = [group for group in network.groups if group.eligible]
    rest = network.parameters - sum(group.weights for group in chosen)
    return 2.0 * rest + sum(group.count * scheme.weight_bytes(group.rows, group.columns) for group in chosen)


def machine_and_times(name: str | None, measured: str | Path | None) -> tuple[Gpu, TimeModel, list[str]]:
    """The GPU, the time model for it, and sentences about where they come from."""
    if measured is not None:
        rows = read_rows(measured)
        gpu, model = refine(rows, shipped())
        if name is not None and find_gpu(name) != gpu:
            raise InputError(f"the rows in {measured} are of {rows.gpu!r}, not of {name!r}.")
        return gpu, model, [f"Times follow {model.fitted_to}."]
    model = shipped()
    notes = []
    if name is None:
        here = this_machine()
        try:
            gpu = find_gpu(here or MEASURED)
            if here is None:
                notes.append(f"There is no GPU here: this is for the {MEASURED}. Name another with --gpu.")
        except InputError:
            gpu = find_gpu(MEASURED)
            notes.append(
                f"The data sheet of this machine's GPU ({here}) is not known: this is for the {MEASURED}. "
                "Measure with twofour bench --shapes 8B --json > rows.json, then give --measured rows.json."
            )
    else:
        gpu = find_gpu(name)
    if gpu.name == MEASURED:
        notes.append(f"Times follow {model.fitted_to}.")
    else:
        model = replace(model, measured=frozenset())
        notes.append(
            f"Nothing was measured on this GPU: the efficiencies of the {MEASURED} on the data sheet of the "
            f"{gpu.name}. Refine with twofour bench --shapes 8B --json > rows.json and --measured rows.json."
        )
    return gpu, model, notes


def _layer(group: LayerGroup, gpu: Gpu, model: TimeModel, decode: int, prefill: int) -> LayerAdvice:
    def phase(tokens: int) -> Phase | None:
        if not group.is_product:
            return None
        shape = group.rows, group.columns, tokens
        usable = [s for s in SCHEMES if gpu.rate(s.arithmetic) is not None] if group.eligible else [DENSE]
        took = {s.name: model.product(gpu, s, *shape) for s in usable}
        us = {name: time.us for name, time in took.items()}
        return Phase(tokens, intensity(DENSE, *shape), took["dense"].bound, us)

    dense = group.count * DENSE.weight_bytes(group.rows, group.columns)
    sparse = group.count * SPARSE.weight_bytes(group.rows, group.columns) if group.eligible else dense
    return LayerAdvice(
        name=group.name,
        count=group.count,
        rows=group.rows,
        columns=group.columns,
        kind=group.kind,
        eligible=group.eligible,
        reason=group.reason,
        padding=group.padding if group.eligible else (0, 0),
        dense_bytes=dense,
        sparse_bytes=sparse,
        prefill=phase(decode if group.is_head else prefill),
        decode=phase(decode),
    )
