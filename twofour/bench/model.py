"""One model of the user's, dense against 2:4: times, memory, size, perplexity, and what both write.

The directory may be packed, pruned (2:4 weights stored dense) or dense. What is compared depends on it:

    DIR      2:4                                     dense
    packed   as it is                                --against, or the model that its record was pruned from;
    pruned   packed in memory                        if that is gone: DIR's own weights with their zeros
    dense    pruned by magnitude in memory, for its  DIR itself
             times: what it predicts means nothing

A time does not depend on what a weight is, so zeros in a dense weight are a fair baseline; what the dense
model predicted is then not known, and said to be so. Times come from the steps of `bench.end_to_end`; on a
CPU "twofour" unpacks its weights in every call (memory="small") and "fast" keeps them dense as well.

The models are in memory together only while their predictions are compared, never while they are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from twofour.bench.end_to_end import Board, Case, packed_facts, take_form, tensor_bytes
from twofour.bench.generations import PROMPTS, same_beginning, write_on
from twofour.bench.perplexity import evaluate, require_same_words
from twofour.bench.products import free, one_line
from twofour.calibrate.experts import stack_experts_
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed, packed_modules, scheme_of
from twofour.io.load import load_causal_lm
from twofour.io.pack import layers_to_pack, lowrank_bytes, pack_
from twofour.io.record import last_step
from twofour.io.recover import recorded_teacher
from twofour.io.structure import name_variants
from twofour.nn import SparseConv2d, packed_layers, set_memory, unfuse_
from twofour.nn.lowrank import LowRank
from twofour.pattern import check_pattern
from twofour.progress import OnProgress, silent
from twofour.prune.model import prune_

Form = Literal["packed", "pruned", "dense"]

GPU_CONTENDERS = ("dense", "dense_fused", "twofour", "fused", "fast")
#: There is no kernel to fuse into on a CPU.
CPU_CONTENDERS = ("dense", "twofour", "fast")

GPU_BATCHES, CPU_BATCHES = (1, 4, 16), (1, 4)
GPU_PROMPT, CPU_PROMPT = 512, 128

NO_GPU = (
    "There is no GPU here, and a CPU has no Sparse Tensor Cores: 2:4 saves memory on it, not time. "
    "The times are for orientation only."
)
ZEROS = (
    "The dense model is not there: the times of dense are those of this model's own weights with their "
    "zeros, which is fair, but what it predicted before pruning is not known. Name it with --against."
)
MAGNITUDE = (
    "The model is dense: for the times of 2:4 it was pruned by magnitude in memory. What that predicts means "
    "nothing and was not measured; see twofour prune."
)


@dataclass(frozen=True)
class Dense:
    """What the model is compared with, and how it was found."""

    directory: Path | None
    found: Literal["given", "record", "unpacked", "itself"]


@torch.no_grad()
def run_model(
    directory: str | Path,
    against: str | Path | None = None,
    *,
    data: str | Path | None = None,
    max_tokens: int | None = None,
    batches: Sequence[int] | None = None,
    prompt: int | None = None,
    generate: int = 64,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Measure a causal language model against its dense one; what `twofour bench DIR --json` prints.

    `data` is a text for the perplexity. `prompt` and `generate` are the tokens of a request.
    """
    from twofour.calibrate.text import read_documents

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    checkpoint = Checkpoint(directory)
    require_causal_lm(checkpoint)
    documents = read_documents(Path(data)) if data is not None else None
    form = form_of(checkpoint)
    scheme = scheme_of(checkpoint.config["quantization_config"]) if form == "packed" else None
    dense = _find_dense(checkpoint, form, against)
    notes = [] if gpu else [NO_GPU]
    notes += [ZEROS] * (dense.found == "unpacked") + [MAGNITUDE] * (form == "dense")
    batches = batches or (GPU_BATCHES if gpu else CPU_BATCHES)
    prompt = prompt or (GPU_PROMPT if gpu else CPU_PROMPT)
    cases = _cases(checkpoint, batches, prompt, generate, gpu, notes)
    contenders = GPU_CONTENDERS if gpu else CPU_CONTENDERS
    board = Board(cases, len(contenders), device, on_progress=on_progress)
    found: dict[str, Any] = {}

    def compare(sparse: Any, other: Any, tokenizer: Any) -> None:
        found.update(_accuracy(sparse, other, tokenizer, documents, max_tokens, generate, board.tell))

    board.tell("loading the dense model")
    model, tokenizer = _load_dense(checkpoint, form, dense)
    memory = {"dense": tensor_bytes(model)}
    for contender in contenders[: contenders.index("twofour")]:
        _measure(board, model, contender, {})
    unfuse_(model)
    if dense.found == "itself":
        compare(None, model, tokenizer)
    if dense.found in ("itself", "unpacked"):
        model = None
        free(device)
    board.tell("loading the 2:4 model")
    sparse, tokenizer = _load_sparse(checkpoint, form)
    if form != "dense":
        compare(sparse, model, tokenizer)
    model = None
    if not gpu:  # only now: what the text was read with may be as large as it likes
        set_memory(sparse, "small")
    free(device)
    memory["sparse"] = tensor_bytes(sparse)
    for contender in contenders[contenders.index("twofour") :]:
        _measure(board, sparse, contender, None)
    board.tell("done")
    perplexity = found.pop("perplexity")
    return {
        "model": str(directory),
        "form": form,
        "scheme": None if scheme is None else scheme.as_config(),
        "dense": {"model": None if dense.directory is None else str(dense.directory), "found": dense.found},
        "dtype": str(sparse.dtype).removeprefix("torch."),
        "notes": notes,
        "prompt": cases[0].tokens,
        "generate": generate,
        "end_to_end": board.rows,
        "requests": requests_of(board.rows, generate),
        "sizes": {
            "dense": {"disk_bytes": _dense_disk(checkpoint, dense), "memory_bytes": memory["dense"]},
            # A dense directory has no 2:4 form on the disk yet, nor has a pruned one.
            "sparse": {
                "disk_bytes": checkpoint.nbytes if form == "packed" else None,
                "memory_bytes": memory["sparse"],
            },
        },
        "perplexity": perplexity and {"data": str(data), **perplexity},
        **found,
    }


def require_causal_lm(checkpoint: Checkpoint) -> None:
    """Refuse what cannot be prefilled and decoded, and what has no tokenizer, before anything is loaded."""
    from transformers import AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    config = checkpoint.config
    named = (config.get("architectures") or [CAUSAL.get(config.get("model_type"))])[0]
    known = {name for names in CAUSAL.values() for name in ([names] if isinstance(names, str) else names)}
    if named not in known and not str(named).endswith(("ForCausalLM", "LMHeadModel")):
        kind = named or config.get("model_type") or "model of no known type"
        raise InputError(
            f"{checkpoint.directory} is a {kind}, not a causal language model: it has no prefill and decode "
            "to measure.",
            hint="Products of its layers' shapes: twofour tune DIR.",
        )
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    why = (
        "" if any((checkpoint.directory / file).exists() for file in files) else "none of its files is there"
    )
    try:
        if not why:
            AutoTokenizer.from_pretrained(checkpoint.directory)
    except Exception as error:  # whatever a damaged file makes transformers raise
        why = one_line(error)
    if why:
        raise InputError(
            f"{checkpoint.directory} has no tokenizer that transformers can read ({why.rstrip('.')}).",
            hint="Copy tokenizer.json and tokenizer_config.json of the dense model there.",
        )


def form_of(checkpoint: Checkpoint) -> Form:
    if is_packed(checkpoint.config):
        packed_modules(checkpoint.config["quantization_config"])  # its errors before anything is loaded
        return "packed"
    if last_step(checkpoint.record, "prune") is not None:
        return "pruned"
    layers = layers_to_pack(checkpoint, (), ()).by_tensor.items()  # from elsewhere: look at the weights
    legal = (check_pattern(layer.to_matrix(checkpoint.read(key))).over == 0 for key, layer in layers)
    return "pruned" if all(legal) else "dense"


def _find_dense(checkpoint: Checkpoint, form: Form, against: str | Path | None) -> Dense:
    if form == "dense":
        if against is not None:
            raise InputError(
                f"{checkpoint.directory} is dense itself: there is nothing to compare with --against.",
                hint="Give the pruned or packed model, and this one as --against.",
            )
        return Dense(checkpoint.directory, "itself")
    if against is None:
        recorded = recorded_teacher(checkpoint)
        return Dense(Path(recorded), "record") if recorded else Dense(None, "unpacked")
    other = Checkpoint(against)
    require_causal_lm(other)
    if is_packed(other.config):
        raise InputError(f"{against} is packed: --against takes a dense model.")
    return Dense(other.directory, "given")


def _cases(
    checkpoint: Checkpoint, batches: Sequence[int], prompt: int, generate: int, gpu: bool, notes: list[str]
) -> list[Case]:
    """Prefill of the prompt, and the last step of decode, when the cache holds the whole request."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    length = prompt + generate
    if limit and length > limit:
        prompt, length = min(prompt, limit), limit
        notes.append(f"The model takes {limit} tokens: prompts have {prompt}, and the cache {length} places.")
    cases = []
    for batch in batches:
        cases.append(Case("prefill", batch, prompt, attention=None))
        cases += [
            Case("decode", batch, length, graph, None) for graph in ((False, True) if gpu else (False,))
        ]
    return cases


def _load_dense(checkpoint: Checkpoint, form: Form, dense: Dense) -> tuple[Any, Any]:
    if dense.directory is None:
        model, tokenizer = _load_sparse(checkpoint, form)
        return unpack_(model), tokenizer
    # A mixture as transformers runs it: experts that are taken apart run slower.
    model, tokenizer = load_causal_lm(dense.directory, open_experts=False)
    if dense.found != "itself":
        from transformers import AutoTokenizer

        own = AutoTokenizer.from_pretrained(checkpoint.directory)
        require_same_words(own, tokenizer, checkpoint.directory, dense.directory)
    return model, tokenizer


def _load_sparse(checkpoint: Checkpoint, form: Form) -> tuple[Any, Any]:
    model, tokenizer = load_causal_lm(checkpoint.directory)
    if form == "dense":
        pack_(prune_(model))
    elif form == "pruned":
        here = dict(model.named_modules())
        names = [layer.name for layer in layers_to_pack(checkpoint, (), ()).by_tensor.values()]
        there = [next((n for n in name_variants(model, name) if n in here), name) for name in names]
        pack_(model, include=[name.replace("[", "[[]") for name in there])
    return model.requires_grad_(False), tokenizer


def unpack_(model: Any) -> Any:
    """Every packed layer as a plain one with the same weights, zeros and all. In place.

    Experts become one tensor again, so that they run as they do in a dense model.
    """
    for name, module in packed_layers(model).items():
        if isinstance(module, SparseConv2d):
            raise InputError("a convolution is not unpacked here.", layer=name)
        weight = module.unpacked(model.dtype)
        if isinstance(module, LowRank):  # into the weight: the same function in one product
            weight = weight + module.lowrank_left @ module.lowrank_right
        rows, columns = weight.shape
        plain = torch.nn.Linear(columns, rows, module.bias is not None, device="meta", dtype=weight.dtype)
        plain.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        if module.bias is not None:
            plain.bias = module.bias
        model.set_submodule(name, plain.eval())
    stack_experts_(model)
    return model


def _measure(board: Board, model: Any, contender: str, facts: dict[str, Any] | None) -> None:
    """The rows of a form; of a packed one (no facts given) with what its packed layers take."""
    failed = None
    try:
        take_form(model, contender)
    except Exception as error:  # a model that cannot be fused is measured as it is
        failed = one_line(error)
    if facts is None:
        dense = sum(
            m.layer.rows * m.layer.columns * model.dtype.itemsize for m in packed_layers(model).values()
        )
        facts = packed_facts(model, dense)
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    board.measure(model, contender, {"layers": layers, **facts}, failed)


def _accuracy(
    sparse: Any,
    dense: Any,
    tokenizer: Any,
    documents: Sequence[str] | None,
    max_tokens: int | None,
    generate: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Perplexity, agreement and texts of the models that are there; None for what is not known."""
    tell("writing")
    written = [
        {who: write_on(model, tokenizer, prompt, generate) for who, model in _there(sparse, dense).items()}
        for prompt in PROMPTS
    ]
    generations = []
    for prompt, tokens in zip(PROMPTS, written, strict=True):
        texts = {who: tokenizer.decode(own, skip_special_tokens=True) for who, own in tokens.items()}
        entry = {"prompt": prompt, "dense": texts.get("dense"), "sparse": texts.get("sparse")}
        both = len(tokens) == 2
        entry["same_tokens"] = same_beginning(tokens["dense"], tokens["sparse"]) if both else None
        generations.append(entry)
    scored = None
    if documents is not None:
        scored = evaluate(
            *(dense if sparse is None else sparse, tokenizer, documents),
            max_tokens=max_tokens,
            against=dense if sparse is not None else None,
            on_progress=lambda done, total, label: tell(f"{100 * done // total} % of the text, {label}"),
        )
    perplexity = None
    if scored is not None:
        perplexity = asdict(scored)
        own, other = perplexity.pop("perplexity"), perplexity.pop("against_perplexity")
        perplexity |= {"sparse": None, "dense": own} if sparse is None else {"sparse": own, "dense": other}
    agreement = None
    if sparse is not None and dense is not None:
        tell("comparing predictions")
        over = "the text" if scored is not None else "prompts and what dense wrote after them"
        if scored is None:
            by_dense = [f"{entry['prompt']}{entry['dense']}" for entry in generations]
            scored = evaluate(sparse, tokenizer, by_dense, against=dense)
        agreement = {"share": scored.agreement, "kl": scored.kl, "tokens": scored.tokens, "over": over}
    return {"perplexity": perplexity, "agreement": agreement, "generations": generations}


def _there(sparse: Any, dense: Any) -> dict[str, Any]:
    return {who: model for who, model in (("dense", dense), ("sparse", sparse)) if model is not None}


def requests_of(rows: Sequence[dict[str, Any]], generate: int) -> list[dict[str, Any]]:
    """A whole request by batch and contender: the prompt, then `generate` steps of decode.

    Steps count as the last and longest one; from a CUDA graph where there is one.
    """
    took: dict[tuple[int, str], dict[str, float]] = {}
    for row in rows:  # a graph's row comes after the eager one and takes its place
        if row["ms"]:
            took.setdefault((row["batch"], row["contender"]), {})[row["what"]] = row["ms"]["p50"]
    whole = {key: ms["prefill"] + generate * ms["decode"] for key, ms in took.items() if len(ms) == 2}
    return [
        {
            "batch": batch,
            "contender": contender,
            "ms": ms,
            "times_dense": whole[batch, "dense"] / ms if (batch, "dense") in whole else None,
            "tokens_per_s": 1e3 * batch * generate / ms,
        }
        for (batch, contender), ms in sorted(whole.items(), key=lambda item: item[0][0])
    ]


def _dense_disk(checkpoint: Checkpoint, dense: Dense) -> int | None:
    """Bytes of the dense model's tensors in its files, or what they were, from the packed ones."""
    if dense.directory is not None:
        return Checkpoint(dense.directory).nbytes
    if not is_packed(checkpoint.config):
        return checkpoint.nbytes
    total = checkpoint.nbytes
    for name, shape in packed_modules(checkpoint.config["quantization_config"]).items():
        if f"{name}.weight_scale" in checkpoint.tensors:
            return None  # what it was before it was quantized is not known
        values, meta = (checkpoint.tensors[f"{name}.weight_{part}"] for part in ("values", "meta"))
        width = values.nbytes // (values.shape[0] * values.shape[1])
        count = 1
        for side in shape:
            count *= side
        total += count * width - values.nbytes - meta.nbytes - lowrank_bytes(checkpoint, name)
    return total
