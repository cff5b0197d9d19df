"""A whole decoder, dense against packed: prefill and decode of a model with the shapes of Llama-3-8B.

The weights are random and made on the device, so no file is needed; times do not depend on what a model has
learned. One model is built and measured dense, then the same weights are pruned and measured again in each
sparse form. The logits of the pruned model before and after are compared. There is one model in memory at a
time, so its forms cannot take turns as products do (timing.in_turns).

    dense         what transformers gives
    dense_fused   the same with its norms and rotary embeddings as one kernel each, which fuse_ does for a
                  dense model as well
    torch24       every projection through PyTorch's own to_sparse_semi_structured
    twofour       packed: what from_pretrained gives
    fused         packed, then fuse_: q, k and v as one product, gate and up with the activation as another
    int8, fp8, …  the name of a scheme: packed codes of 8 or 4 bits, then fuse_. The codes are random and not
                  this model's weights rounded, so there is nothing to compare the logits with

    prefill  one forward of batch × tokens without a cache, logits of the last token only
    decode   one token for each of batch sequences, in a transformers StaticCache of `tokens` places that is
             full with it. Keys and values are random: attention takes as long over them as over real ones

A step of decode is replayed from a CUDA graph unless its case says otherwise, and leaves the cache as it
found it, so that it can be repeated. With a StaticCache transformers builds a mask, and with a mask it copies
the keys and values once for every query head that shares them ("sdpa", what a user gets). At large batches
that takes longer than all the products together. "grouped" is the same function without the mask, which in a
full cache hides nothing: what a serving engine's attention is like.

A model of the user's own is measured in the same way by `twofour.bench.model`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from twofour.bench.products import free, one_line
from twofour.bench.random_codes import random_codes
from twofour.bench.steps import CASES, Case, decode_step, prefill_step, random_tokens
from twofour.bench.timing import Times, time_cpu, time_eager, time_graph
from twofour.errors import InputError
from twofour.nn import Memory, fuse_, packed_layers, set_memory, unfuse_
from twofour.nn.quantized import put_quantized_
from twofour.progress import OnProgress, silent
from twofour.quantize.schemes import SCHEMES, Scheme
from twofour.select import select

CONTENDERS = ("dense", "dense_fused", "torch24", "twofour", "fused")

#: What may be asked for as well, after the others in their order.
WITH_SCHEMES = (*CONTENDERS, *SCHEMES)

#: Without a GPU: PyTorch's own form and cuSPARSELt need one.
CPU_CONTENDERS = ("dense", "dense_fused", "twofour", "fused")

#: What a row's time is compared with, and what the ratio is called.
BASELINES = {"dense": "times_dense", "dense_fused": "times_dense_fused"}

#: Llama-3-8B, but for the number of layers.
LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}

#: Tokens of the text whose logits are compared.
COMPARED_TOKENS = 64

#: The name that transformers knows attention without a mask by.
GROUPED = "twofour_bench_grouped"


@torch.no_grad()
def run_end_to_end(
    layers: int = 32,
    device: torch.device | str = "cuda",
    contenders: Sequence[str] | None = None,
    *,
    cases: Sequence[Case] = CASES,
    shape: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    on_progress: OnProgress = silent,
    into: list[dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Measure every case dense and packed: one row each. `shape` overrides parts of Llama-3-8B's.

    `times_dense` is the median of dense over that of the row, `times_dense_fused` that of dense_fused.
    `resident_share` is what the tensors of the packed layers take over what they took dense. A case that
    raises gives a row with "error", and a contender that cannot be made one for each case. Rows are added to
    the list `into` as they come, so that they are not lost if the run is stopped.
    """
    device = torch.device(device)
    contenders = contenders or (CONTENDERS if device.type == "cuda" else CPU_CONTENDERS)
    if unknown := [c for c in contenders if c not in WITH_SCHEMES]:
        raise InputError(f"no contender {unknown[0]!r}.", hint=f"Choose from: {', '.join(WITH_SCHEMES)}.")
    model = build_model(layers, device, dtype, shape, seed)
    stages = Stages(model, seed)
    board = Board(cases, len(contenders), device, seed, on_progress, into)
    for contender in WITH_SCHEMES:
        if contender not in contenders:
            continue
        facts: dict[str, Any] = {"layers": layers}
        failed = None
        board.tell(f"making {contender}")
        try:
            facts |= stages.advance(contender)
        except Exception as error:  # PyTorch's own form refuses some shapes
            failed = one_line(error)
        board.measure(model, contender, facts, failed)
    board.tell("done")
    return board.rows


class Board:
    """The rows of one run: every contender in every case, each with its ratio to the baselines before it."""

    def __init__(
        self,
        cases: Sequence[Case],
        contenders: int,
        device: torch.device,
        seed: int = 0,
        on_progress: OnProgress = silent,
        rows: list[dict[str, Any]] | None = None,
    ) -> None:
        self.cases, self.device, self.seed = cases, device, seed
        self.total = len(cases) * contenders
        self.on_progress = on_progress
        self.rows: list[dict[str, Any]] = [] if rows is None else rows
        self._took: dict[tuple[str, Case], float] = {}

    def tell(self, label: str) -> None:
        self.on_progress(len(self.rows), self.total, label)

    def measure(self, model: Any, contender: str, facts: dict[str, Any], failed: str | None = None) -> None:
        """A row for each case. `failed` says why there is no such contender: then the rows say it too."""
        for case in self.cases:
            self.tell(f"{contender}, {case.what} {case.batch}×{case.tokens}")
            row: dict[str, Any] = {"contender": contender, **facts}
            if failed:
                row |= _unmeasured(case, self.device) | {"error": failed}
            else:
                row |= _measure(model, case, self.seed)
            if row["ms"]:
                self._took[contender, case] = row["ms"]["p50"]
            for baseline, ratio in BASELINES.items():
                known = row["ms"] and (baseline, case) in self._took
                row[ratio] = self._took[baseline, case] / row["ms"]["p50"] if known else None
            self.rows.append(row)
            free(self.device)


def build_model(
    layers: int, device: torch.device, dtype: torch.dtype, shape: dict[str, Any] | None = None, seed: int = 0
) -> Any:
    """A Llama with random weights on the device, scaled so that a projection keeps the size of its input."""
    from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # No mask is known under this name, so transformers makes none.
    AttentionInterface.register(GROUPED, sdpa_attention_forward)
    settings = LLAMA_3_8B | {"num_hidden_layers": layers} | (shape or {})
    config = LlamaConfig(**settings, initializer_range=settings["hidden_size"] ** -0.5)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


class Stages:
    """One model on its way from dense through the sparse forms, and what each costs and changes."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.seed = model, seed
        self.tokens = random_tokens(model, 1, COMPARED_TOKENS, seed + 1)
        self.layers = select(model).layers
        self.dense_bytes = sum(model.get_parameter(f"{layer.name}.weight").nbytes for layer in self.layers)
        self.before: Tensor | None = None  # logits of the pruned model
        self.kept: dict[str, torch.nn.Parameter] = {}  # dense weights while PyTorch's form is in their place

    def advance(self, to: str) -> dict[str, Any]:
        if to in BASELINES:
            take_form(self.model, to)
            return {}
        if to in SCHEMES:
            self._put_codes(SCHEMES[to])
            return packed_facts(self.model, self.dense_bytes)
        if self.before is None:
            unfuse_(self.model)
            self._prune()
        if to == "torch24":
            return {"dense_bytes": self.dense_bytes, **self._facts(self._with_torch())}
        if not packed_layers(self.model):
            self._pack()
        take_form(self.model, to)
        return self._facts(self._logits()) | packed_facts(self.model, self.dense_bytes)

    def _logits(self) -> Tensor:
        logits: Tensor = self.model(self.tokens, use_cache=False).logits.float()
        return logits

    def _prune(self) -> None:
        from twofour.prune.model import prune_

        prune_(self.model)
        self.before = self._logits()

    def _with_torch(self) -> Tensor:
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Sparse

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in prototype stage"
            for name in (layer.name for layer in self.layers):
                weight = self.kept[name] = self.model.get_submodule(name).weight
                sparse = torch.nn.Parameter(Sparse.from_dense(weight.detach()), requires_grad=False)
                self.model.get_submodule(name).weight = sparse
        return self._logits()

    def _pack(self) -> None:
        from twofour.io.pack import pack_

        for name, weight in self.kept.items():  # back from PyTorch's form
            self.model.get_submodule(name).weight = weight
        self.kept = {}
        # One block at a time: packing all at once holds both forms of the whole model.
        for block in range(self.model.config.num_hidden_layers):
            pack_(self.model, include=[f"model.layers.{block}.*"], memory=self._memory)

    def _put_codes(self, scheme: Scheme) -> None:
        """Codes in the place of the layers, whatever form these have."""
        unfuse_(self.model)
        self.kept = {}
        random = torch.Generator(self.model.device).manual_seed(self.seed)
        for layer in self.layers:
            codes = random_codes(layer.rows, layer.columns, scheme, self.model.dtype, random)
            put_quantized_(self.model, {layer: codes}, scheme, self._memory)
        fuse_(self.model)
        free(self.model.device)

    @property
    def _memory(self) -> Memory:
        """On a CPU "auto" would keep the dense weights as well."""
        return "auto" if self.model.device.type == "cuda" else "small"

    def _facts(self, after: Tensor) -> dict[str, Any]:
        before = self.before
        assert before is not None
        return {
            "logits_max_relative_error": float((after - before).abs().max() / before.abs().max()),
            "logits_relative_error": float((after - before).norm() / before.norm()),
            "logits_same_best": float((after.argmax(-1) == before.argmax(-1)).float().mean()),
        }


def take_form(model: Any, contender: str) -> None:
    """From the form before it to this one; a packed model must be packed already. "fast" is model.py's."""
    if contender in ("dense_fused", "fused", "fast"):
        fuse_(model)
    if contender == "fast":
        set_memory(model, "fast")
    free(model.device)


def packed_facts(model: torch.nn.Module, dense_bytes: int) -> dict[str, Any]:
    """How many layers are packed, and what their tensors take beside what they took dense."""
    resident = resident_bytes(model)
    return {
        "packed_layers": len(packed_layers(model)),
        "resident_bytes": resident,
        "dense_bytes": dense_bytes,
        "resident_share": resident / dense_bytes if dense_bytes else None,
    }


def resident_bytes(model: torch.nn.Module) -> int:
    return sum(_bytes_beside_bias(module) for module in packed_layers(model).values())


def _bytes_beside_bias(module: torch.nn.Module) -> int:
    """All tensors a layer holds, so also a dense copy or a repacked form that a backend keeps."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return _storage_bytes(tensor for name, tensor in named if name != "bias")


def tensor_bytes(model: torch.nn.Module) -> int:
    """All that a model's tensors take, tied ones once."""
    return _storage_bytes((*model.parameters(), *model.buffers()))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    # By storage: the values may lie inside the form that a backend keeps.
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _unmeasured(case: Case, device: torch.device) -> dict[str, Any]:
    mode = "cpu" if device.type != "cuda" else "graph" if case.graph else "eager"
    row: dict[str, Any] = {"what": case.what, "batch": case.batch, "tokens": case.tokens, "mode": mode}
    return row | {"attention": case.attention, "ms": None, "tokens_per_s": None, "peak_bytes": None}


def _measure(model: Any, case: Case, seed: int) -> dict[str, Any]:
    device = model.device
    gpu = device.type == "cuda"
    row = _unmeasured(case, device)
    if case.attention is None:
        row["attention"] = getattr(model.config, "_attn_implementation", None)
    else:
        model.set_attn_implementation(GROUPED if case.attention == "grouped" else "sdpa")
    free(device)
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    row["model_bytes"] = torch.cuda.memory_allocated(device) if gpu else tensor_bytes(model)
    try:
        step = (prefill_step if case.what == "prefill" else decode_step)(model, case, seed)
        if not bool(step().isfinite().all()):
            raise FloatingPointError("the logits are not finite")
        row["ms"] = times = _time(step, row["mode"])
    except Exception as error:
        row["error"] = one_line(error)
        return row
    new = case.batch * (case.tokens if case.what == "prefill" else 1)
    row["tokens_per_s"] = new / times["p50"] * 1e3
    row["peak_bytes"] = torch.cuda.max_memory_allocated(device) if gpu else None
    return row


def _time(step: Callable[[], Tensor], mode: str) -> Times:
    if mode == "graph":
        return time_graph([step])
    return time_eager(step, repeats=30, seconds=5.0) if mode == "eager" else time_cpu(step)
