"""The layers of a model, found without its weights.

Three ways, the first that works:

1. `config.json` of a decoder whose layers follow from a few figures (`FAMILIES`): by arithmetic, in
   milliseconds. Importing torch and transformers takes longer than all the rest of `advise`.
2. Any other type that transformers knows: the model on the meta device, and `twofour.select`.
3. A type nobody knows: the names and shapes in the headers of its safetensors files.

Layers that differ only in the numbers of their names are one `LayerGroup`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from twofour.errors import InputError

#: Decoders with q, k, v, o and a gated MLP of three layers, all named as in Llama.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

#: Layers that get the same input, by the last part of their names: `fuse_` makes them one product.
FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

#: What says of which model a config is: transformers' two, timm's and diffusers'.
WHAT_MODEL = ("model_type", "architectures", "architecture", "_class_name")

#: What our Hopper kernels ask for: whole tiles of outputs, and positions that start at 16 bytes in every row.
ROW_MULTIPLE, COLUMN_MULTIPLE = 8, 128

#: Parts of names that embeddings have where only names are known.
EMBEDDINGS = ("embed", "wte", "wpe", "embeddings")


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind: their name with numbers starred, how many, and the matrix of each."""

    name: str
    count: int
    rows: int
    columns: int
    kind: str  # "linear", "conv1d", "conv2d", "expert", or the type of a module that is no product
    reason: str | None = None  # why it cannot or should not be 2:4; None: eligible
    is_head: bool = False  # multiplies the last token only

    @property
    def eligible(self) -> bool:
        return self.reason is None

    @property
    def is_product(self) -> bool:
        """A matrix product over all tokens, whose time can be told.

        A convolution's depends on the image, and an expert's on how many tokens are sent to it.
        """
        return self.kind in ("linear", "conv1d")

    @property
    def padding(self) -> tuple[int, int]:
        """Rows and columns of zeros that would make it fit for the fast kernels, which do not pad."""
        return -self.rows % ROW_MULTIPLE, -self.columns % COLUMN_MULTIPLE

    @property
    def weights(self) -> int:
        return self.count * self.rows * self.columns


@dataclass(frozen=True)
class Decoder:
    """What attention and the key-value cache of a decoder depend on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    def cache_bytes(self, batch: int, context: int) -> int:
        """Keys and values of all layers, in 16 bit."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2 * batch * context


@dataclass(frozen=True)
class Network:
    """A model as `advise` sees it."""

    name: str
    groups: tuple[LayerGroup, ...]
    decoder: Decoder | None
    parameters: int
    source: str  # where the layers are from
    untimed: int = 0  # weights that multiply in modules whose time is not known: convolutions, experts

    @property
    def timed(self) -> bool:
        """Whether most of what multiplies is in layers whose time is known."""
        return self.untimed < sum(group.weights for group in self.groups if group.is_product)

    def products(self, fused: bool) -> tuple[LayerGroup, ...]:
        """What is multiplied in one step: with `fused`, eligible layers with the same input as one."""
        groups = [group for group in self.groups if group.is_product]
        return tuple(fuse(groups)) if fused else tuple(groups)


def fuse(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Groups in their order, those that `fuse_` would make one product taken together."""
    left = list(groups)
    made: list[LayerGroup] = []
    while left:
        first = left.pop(0)
        parent, _, last = first.name.rpartition(".")
        names = next((names for names in FUSED_NAMES if last in names), ())
        same = [
            other
            for other in left
            if other.name.rpartition(".")[0] == parent
            and other.name.rpartition(".")[2] in names
            and (other.count, other.columns, other.eligible) == (first.count, first.columns, True)
        ]
        if not first.eligible or not same:
            made.append(first)
            continue
        left = [group for group in left if group not in same]
        together = [first, *same]
        name = f"{parent}." + "+".join(group.name.rpartition(".")[2] for group in together)
        made.append(replace(first, name=name, rows=sum(group.rows for group in together)))
    return made


def read_network(model: str | Path | Mapping[str, Any]) -> Network:
    """The layers of a checkpoint directory, a config.json, or a config given as a mapping."""
    if isinstance(model, Mapping):
        config, directory, name = dict(model), None, str(model.get("model_type", "model"))
    else:
        from_file = Path(model).is_file()
        directory = Path(model).parent if from_file else Path(model)
        if not directory.is_dir():
            raise InputError(
                f"{directory} does not exist.", hint="Give a model directory or the path of a config.json."
            )
        config, name = _read_config(Path(model) if from_file else directory / "config.json"), str(model)
    if not any(key in config for key in WHAT_MODEL):
        raise InputError(
            f"{name} is no config of a model: it does not say what model it is ({WHAT_MODEL[0]}).",
            hint="Give a model directory or the path of its config.json.",
        )
    figures = _text_config(config)
    network = _by_arithmetic(name, config) or _by_transformers(name, config)
    if network is None and directory is not None and any(directory.glob("*.safetensors*")):
        network = _by_headers(name, directory)
    if network is None:
        kind = config.get("model_type")
        raise InputError(
            f"transformers cannot build the model that {name} describes (model_type {kind!r}).",
            hint="Give a directory with its safetensors files: their headers say what layers there are.",
        )
    return replace(network, decoder=network.decoder or _decoder(figures))


def alike(name: str) -> str:
    """
    >>> alike("model.layers.12.mlp.down_proj")
    'model.layers.*.mlp.down_proj'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)


def _read_config(path: Path) -> dict[str, Any]:
    # Not io.checkpoint's reader: importing it costs a second (torch), which the first way does not have.
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path} is missing.", hint="Give a Hugging Face style model directory or a config.json."
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} holds a {type(config).__name__}, not a JSON object.")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def _decoder(config: Mapping[str, Any]) -> Decoder | None:
    """The figures under whatever name the config has them; None if one is missing."""

    def figure(*names: str) -> int | None:
        found = (config.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and value > 0), None)

    layers, hidden = figure("num_hidden_layers", "n_layer", "num_layers"), figure("hidden_size", "n_embd")
    heads = figure("num_attention_heads", "n_head")
    if layers is None or hidden is None or heads is None:
        return None
    intermediate = figure("intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    kv_heads, head_dim = figure("num_key_value_heads") or heads, figure("head_dim") or hidden // heads
    return Decoder(layers, hidden, intermediate, heads, kv_heads, head_dim)


def _by_arithmetic(name: str, config: Mapping[str, Any]) -> Network | None:
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if config.get("model_type") not in FAMILIES or not all(isinstance(config.get(n), int) for n in needed):
        return None
    if not all(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        return None  # another head, or none
    if config["model_type"] == "qwen3" and not config.get("head_dim"):
        return None  # its default is not hidden / heads
    decoder = _decoder(config)
    if decoder is None:
        return None
    hidden, count, vocabulary = decoder.hidden, decoder.layers, int(config["vocab_size"])
    wide, narrow = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    shapes = {
        "self_attn.q_proj": (wide, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, wide),
        "mlp.gate_proj": (decoder.intermediate, hidden),
        "mlp.up_proj": (decoder.intermediate, hidden),
        "mlp.down_proj": (hidden, decoder.intermediate),
    }
    groups = [
        LayerGroup(f"model.layers.*.{part}", count, rows, columns, "linear", _too_small(rows, columns))
        for part, (rows, columns) in shapes.items()
    ]
    tied = bool(config.get("tie_word_embeddings", False))
    why = "shares its weight with model.embed_tokens" if tied else "an output head"
    groups.append(LayerGroup("lm_head", 1, vocabulary, hidden, "linear", why, is_head=True))
    norms = (2 * count + 1) * hidden
    parameters = sum(g.weights for g in groups) + norms + (0 if tied else vocabulary * hidden)
    return Network(name, tuple(groups), decoder, parameters, "config.json")


def _too_small(rows: int, columns: int) -> str | None:
    smallest = 16  # twofour.select.SMALLEST_SIDE, whose import would cost torch's; a test compares them
    side = min(rows, columns)
    if side >= smallest:
        return None
    return f"too small: {side} channels on one side, and below {smallest} there is nothing to gain"


class _Described(NamedTuple):
    """As much of a Checkpoint as `skeleton` looks at: it need not have weights."""

    directory: Path
    config: dict[str, Any]


def _by_transformers(name: str, config: dict[str, Any]) -> Network | None:
    from twofour.calibrate.experts import open_experts_
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.structure import skeleton
    from twofour.select import as_layer, select

    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            model = skeleton(cast(Checkpoint, _Described(Path(scratch), config)))
        except Exception:  # whatever a model's own code raises, its headers may still do
            return None
    open_experts_(model)
    found = select(model)
    modules = dict(model.named_modules())
    groups: list[LayerGroup] = []
    for layer in found.layers:
        kind = "expert" if _is_expert(layer.name) else layer.kind
        groups.append(LayerGroup(layer.name, 1, layer.rows, layer.columns, kind))
    for left in found.left:
        as_product = as_layer(left.name, modules[left.name])
        if isinstance(as_product, str):
            groups.append(LayerGroup(left.name, 1, 0, 0, left.type, left.reason))
            continue
        last_only = left.reason == "an output head" or modules[left.name] is _head(model)
        rows, columns = as_product.rows, as_product.columns
        kind = "expert" if _is_expert(left.name) else as_product.kind
        groups.append(LayerGroup(left.name, 1, rows, columns, kind, left.reason, is_head=last_only))
    order = {module: number for number, module in enumerate(modules)}
    groups.sort(key=lambda group: order[group.name])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    untimed = sum(
        sum(p.numel() for p in modules[group.name].parameters(recurse=False) if p.dim() > 1)
        for group in groups
        if not group.is_product and not group.kind.endswith("Embedding")
    )
    return Network(name, _grouped(groups), None, parameters, "transformers", untimed)


def _head(model: Any) -> Any:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None


def _by_headers(name: str, directory: Path) -> Network:
    from twofour.io.checkpoint import Checkpoint
    from twofour.select import HEADS, ROUTERS

    groups: list[LayerGroup] = []
    tensors = Checkpoint(directory).tensors
    for tensor in tensors.values():
        module, _, own = tensor.name.rpartition(".")
        if own != "weight" or len(tensor.shape) != 2:
            continue
        last = module.rpartition(".")[2]
        reason = _too_small(*tensor.shape)
        if any(part in last for part in EMBEDDINGS):
            groups.append(LayerGroup(module, 1, *tensor.shape, "embedding", "an embedding, by its name"))
            continue
        if last in HEADS:
            reason = "an output head"
        elif last in ROUTERS:
            reason = "an expert router"
        head = last in HEADS
        kind = "expert" if _is_expert(module) else "linear"
        groups.append(LayerGroup(module, 1, *tensor.shape, kind, reason, is_head=head))
    count = sum(_size(tensor.shape) for tensor in tensors.values())
    untimed = sum(_size(tensor.shape) for tensor in tensors.values() if len(tensor.shape) > 2)
    untimed += sum(group.weights for group in groups if group.kind == "expert")
    return Network(name, _grouped(groups), None, count, "safetensors headers", untimed)


def _is_expert(name: str) -> bool:
    """One of many that a router sends tokens to. Shared experts, which see them all, are called otherwise."""
    return "experts" in name.split(".")


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def _grouped(groups: Iterable[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Layers that differ only in their numbers as one, in the order of the first of each."""
    together: dict[LayerGroup, int] = {}
    for group in groups:
        key = replace(group, name=alike(group.name), count=0)
        together[key] = together.get(key, 0) + group.count
    return tuple(replace(key, count=count) for key, count in together.items())
