"""A whole decoder, dense against packed: prefill and decode of a model with the shapes of Llama-3-8B.

The weights are random and made on the device, so no file is needed; times do not depend on what a model has
learned. One model is built and measured dense, then the same weights are pruned and measured again in each
sparse form. The logits of the pruned model before and after are compared.

    dense         what transformers gives
    dense_fused   the same with its norms as one kernel each, which fuse_ does for a dense model as well
    torch24       every projection through PyTorch's own to_sparse_semi_structured
    twofour       packed: what from_pretrained gives
    fused         packed, then fuse_: q, k and v as one product, gate and up with the activation as another
    fast          fused, with cuSPARSELt's positions beside ours (memory="fast")

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
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from twofour.bench.products import free, one_line
from twofour.bench.timing import Times, time_cpu, time_eager, time_graph
from twofour.errors import InputError
from twofour.nn import Memory, fuse_, packed_layers, set_memory, unfuse_
from twofour.progress import OnProgress, silent

CONTENDERS = ("dense", "dense_fused", "torch24", "twofour", "fused", "fast")

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


@dataclass(frozen=True)
class Case:
    what: Literal["prefill", "decode"]
    batch: int
    tokens: int  # prefill: of each sequence; decode: places in the cache, the new token's included
    graph: bool = False
    attention: Literal["sdpa", "grouped"] | None = "sdpa"  # None: as the model was loaded


CASES = (
    Case("prefill", 1, 2048),
    Case("prefill", 4, 2048),
    Case("decode", 1, 1024),
    *(Case("decode", batch, 1024, graph=True) for batch in (1, 16, 64)),
    *(Case("decode", batch, 1024, graph=True, attention="grouped") for batch in (1, 16, 64)),
)


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
) -> list[dict[str, Any]]:
    """Measure every case dense and packed: one row each. `shape` overrides parts of Llama-3-8B's.

    `times_dense` is the median of dense over that of the row, `times_dense_fused` that of dense_fused.
    `resident_share` is what the tensors of the packed layers take over what they took dense. A case that
    raises gives a row with "error", and a contender that cannot be made one for each case.
    """
    device = torch.device(device)
    contenders = contenders or (CONTENDERS if device.type == "cuda" else CPU_CONTENDERS)
    if unknown := [c for c in contenders if c not in CONTENDERS]:
        raise InputError(f"no contender {unknown[0]!r}.", hint=f"Choose from: {', '.join(CONTENDERS)}.")
    model = build_model(layers, device, dtype, shape, seed)
    stages = Stages(model, seed)
    board = Board(cases, len(contenders), device, seed, on_progress)
    for contender in CONTENDERS:
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
    ) -> None:
        self.cases, self.device, self.seed = cases, device, seed
        self.total = len(cases) * contenders
        self.on_progress = on_progress
        self.rows: list[dict[str, Any]] = []
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
        self.model = model
        self.tokens = _tokens(model, 1, COMPARED_TOKENS, seed + 1)
        self.dense_bytes = 0
        self.before: Tensor | None = None  # logits of the pruned model
        self.names: list[str] = []
        self.kept: dict[str, torch.nn.Parameter] = {}  # dense weights while PyTorch's form is in their place

    def advance(self, to: str) -> dict[str, Any]:
        if to in BASELINES:
            take_form(self.model, to)
            return {}
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
        from twofour.select import select

        prune_(self.model)
        self.names = [layer.name for layer in select(self.model).layers]
        self.dense_bytes = sum(self.model.get_parameter(f"{name}.weight").nbytes for name in self.names)
        self.before = self._logits()

    def _with_torch(self) -> Tensor:
        from torch.sparse import SparseSemiStructuredTensorCUSPARSELT as Sparse

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "in prototype stage"
            for name in self.names:
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
            # "auto" would keep the dense weights as well on a CPU.
            memory: Memory = "auto" if self.model.device.type == "cuda" else "small"
            pack_(self.model, include=[f"model.layers.{block}.*"], memory=memory)

    def _facts(self, after: Tensor) -> dict[str, Any]:
        before = self.before
        assert before is not None
        return {
            "logits_max_relative_error": float((after - before).abs().max() / before.abs().max()),
            "logits_relative_error": float((after - before).norm() / before.norm()),
            "logits_same_best": float((after.argmax(-1) == before.argmax(-1)).float().mean()),
        }


def take_form(model: Any, contender: str) -> None:
    """From the form before it in CONTENDERS to this one; a packed model must be packed already."""
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


def prefill_step(model: Any, case: Case, seed: int = 0) -> Callable[[], Tensor]:
    tokens = _tokens(model, case.batch, case.tokens, seed)

    def step() -> Tensor:
        logits: Tensor = model(tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    return step


def decode_step(model: Any, case: Case, seed: int = 0) -> Callable[[], Tensor]:
    """One token after tokens - 1 others. All it reads has a fixed address, as a graph needs."""
    from transformers import StaticCache

    config, device = model.config.get_text_config(decoder=True), model.device
    tokens = _tokens(model, case.batch, 1, seed)
    position = torch.full((case.batch, 1), case.tokens - 1, device=device)
    cache = StaticCache(config=config, max_cache_len=case.tokens)
    queries = config.num_attention_heads
    heads = (
        getattr(config, "num_key_value_heads", None) or queries,
        getattr(config, "head_dim", None) or config.hidden_size // queries,
    )
    cache.early_initialization(case.batch, *heads, dtype=model.dtype, device=device)
    random = torch.Generator(device).manual_seed(seed)
    for layer in cache.layers:
        layer.keys.normal_(generator=random)
        layer.values.normal_(generator=random)
        layer.cumulative_length.fill_(case.tokens - 1)
    sliding = [layer for layer in cache.layers if hasattr(layer, "cumulative_length_int")]
    # A sliding window that is full rolls its places and counts no further on the device.
    lengths = [x.cumulative_length for x in cache.layers if case.tokens <= x.max_cache_len]

    def step() -> Tensor:
        for layer in sliding:
            layer.cumulative_length_int = case.tokens - 1
        out = model(tokens, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # Every layer counted the new token; one kernel takes it back, inside the graph.
        if lengths:
            torch._foreach_sub_(lengths, 1)
        logits: Tensor = out.logits
        return logits

    return step


def _tokens(model: Any, batch: int, tokens: int, seed: int) -> Tensor:
    random = torch.Generator(model.device).manual_seed(seed)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (batch, tokens), device=model.device, generator=random)
