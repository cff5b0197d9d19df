"""Load a packed checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from twofour.calibrate.experts import open_experts_
from twofour.errors import InputError, TwoFourError
from twofour.io.checkpoint import CONFIG, Checkpoint
from twofour.io.format import is_packed, lowrank_ranks, packed_modules, scheme_of, stub
from twofour.io.structure import (
    architecture_name,
    architecture_of,
    name_variants,
    renaming,
    said,
    skeleton,
)
from twofour.nn.convert import packed_layers, set_memory, swap_
from twofour.nn.lowrank import add_lowrank_, empty_lowrank_
from twofour.nn.modules import Memory
from twofour.select import as_layer


def load(
    directory: str | Path, model: nn.Module | None = None, *, memory: Memory = "auto", **from_pretrained: Any
) -> nn.Module:
    """The model of a packed checkpoint, ready to run.

    Without `model`, what `config.json` describes, through transformers (further arguments go to its
    `from_pretrained`: dtype, device_map). With `model`, that module: its layers are replaced by packed
    ones and filled from the files.
    """
    checkpoint = Checkpoint(directory)
    if not is_packed(checkpoint.config):
        raise InputError(f"{directory} is not a packed twofour checkpoint.", hint="See twofour pack.")
    modules = packed_modules(checkpoint.config["quantization_config"])
    if model is None:
        model = _by_transformers(checkpoint, from_pretrained)
        return set_memory(model, memory) if memory != "auto" else model
    if from_pretrained:
        raise InputError(
            f"{sorted(from_pretrained)} go to from_pretrained, which is not called for a model given."
        )
    if any(name not in dict(model.named_modules()) for name in modules):
        open_experts_(model)
    here = dict(model.named_modules())
    layers = []
    for name, shape in modules.items():
        layer = as_layer(name, here[name]) if name in here else "not in the model given"
        if isinstance(layer, str):
            raise InputError(f"the checkpoint packs this module, but it is {layer}.", layer=name)
        if layer.shape != shape:
            raise InputError(
                f"the checkpoint's shape is {list(shape)}, the model's {list(layer.shape)}.", layer=name
            )
        layers.append(layer)
    tensors = {key: checkpoint.read(key) for key in checkpoint.tensors if key not in stub(modules)}
    before = {layer.name: model.get_submodule(layer.name) for layer in layers}
    swap_(model, layers, memory, scheme_of(checkpoint.config["quantization_config"]))
    for name, rank in lowrank_ranks(checkpoint.config["quantization_config"]).items():
        empty_lowrank_(model.get_submodule(name), rank, name)
    try:
        _add_tied(model, tensors)
        _require_fitting(model.state_dict(), tensors, directory)
    except InputError:
        for name, module in before.items():
            model.set_submodule(name, module)
        raise
    model.load_state_dict(tensors)
    for name, module in packed_layers(model).items():
        module.validate(name)
    return model


def _by_transformers(checkpoint: Checkpoint, options: dict[str, Any]) -> nn.Module:
    """The model of the class that config.json names."""
    import transformers

    directory, name = checkpoint.directory, architecture_name(checkpoint)
    architecture = architecture_of(checkpoint)
    if architecture is None and name is not None:  # another class would have no head
        raise InputError(
            f"{directory / CONFIG} names the architecture {name!r}, which transformers does not know.",
            hint="Correct the name, or give twofour.load the model.",
        )
    with _as_input_errors(checkpoint, "transformers cannot load {}"):
        model, info = (architecture or transformers.AutoModel).from_pretrained(
            directory, **{**options, "output_loading_info": True}
        )
    _require_loaded(info, directory)
    return cast(nn.Module, model)


@contextmanager
def _as_input_errors(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    """Whatever transformers raises about a checkpoint as a sentence, about config.json if that is wrong."""
    try:
        yield
    except TwoFourError:
        raise
    except Exception as error:  # a value that fits nothing can fail as anything, anywhere in a model's code
        skeleton(checkpoint)
        raise InputError(f"{what.format(checkpoint.directory)}: {said(error)}.") from error


def _require_loaded(info: dict[str, Any], directory: str | Path) -> None:
    """Refuse weights that were in no file or did not fit: transformers makes them up and only warns."""
    wrong = [f"its files lack {name}" for name in sorted(info["missing_keys"])]
    wrong += [
        f"{name} is {list(found)} in its files and {list(expected)} by its config"
        for name, found, expected in sorted(info["mismatched_keys"])
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        raise InputError(
            f"{directory} is not whole: {wrong[0]}{more}.",
            hint="Copy it again; `twofour check` lists all that is wrong.",
        )


def _add_tied(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Under every name that the model has for a tensor what the files hold under one of them, as they do."""
    here = model.state_dict(keep_vars=True)
    in_files = {id(here[name]): tensor for name, tensor in tensors.items() if name in here}
    for name, own in here.items():
        if name not in tensors and id(own) in in_files:
            tensors[name] = in_files[id(own)]


def _require_fitting(here: dict[str, Tensor], tensors: dict[str, Tensor], directory: str | Path) -> None:
    """Refuse files that lack a tensor of the model, have one that it has not, or one of another shape."""
    hint = "Give the model that was saved there, built with the same settings."
    for name in sorted(here.keys() ^ tensors.keys()):
        lacks, has = ("the files lack", "the model has") if name in here else ("the model lacks", "they have")
        raise InputError(f"{directory} does not fit the model given: {lacks} {name}, which {has}.", hint=hint)
    for name, tensor in tensors.items():
        if tensor.shape != here[name].shape:
            raise InputError(
                f"{directory} does not fit the model given: {name} is {list(tensor.shape)} there and "
                f"{list(here[name].shape)} in the model.",
                hint=hint,
            )


def load_causal_lm(
    directory: str | Path, device: str | None = None, dtype: Any = None, *, open_experts: bool = True
) -> tuple[Any, Any]:
    """A causal language model, packed or dense, and its tokenizer.

    Unless told otherwise on a GPU, if there is one, in the dtype of the checkpoint; on a CPU in float32,
    where 16 bit is slower and no more exact. Experts that are stored as one tensor are taken apart, for work
    on single layers; `open_experts=False` leaves them as transformers has them, which runs faster.
    """
    import torch
    import transformers

    checkpoint = Checkpoint(directory)  # its errors are clearer than transformers'
    if is_packed(checkpoint.config):
        packed_modules(checkpoint.config["quantization_config"])
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("auto" if device == "cuda" else torch.float32)
    with _as_input_errors(checkpoint, "transformers cannot load {} as a causal language model"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            device_map=device,
            ignore_mismatched_sizes=True,  # to name them below
            output_loading_info=True,
        )
    _require_loaded(info, directory)
    if not is_packed(checkpoint.config):
        corrected = any(key.endswith(".lowrank_left") for key in checkpoint.tensors)
        if open_experts or corrected:  # a correction is beside the layer of one expert
            open_experts_(model)
        _restore_lowrank(model, checkpoint)
    return model.eval(), tokenizer


def _restore_lowrank(model: Any, checkpoint: Checkpoint) -> None:
    """What `prune --lowrank` put beside dense weights, and transformers does not know."""
    here = dict(model.named_modules())
    renamed = renaming(model)
    for key in checkpoint.tensors:
        base, _, what = key.rpartition(".")
        if what == "lowrank_left":
            inside = renamed(key).removesuffix(f".{what}")
            name = next((n for n in name_variants(model, inside) if n in here), None)
            if name is not None:
                left, right = (checkpoint.read(f"{base}.lowrank_{side}") for side in ("left", "right"))
                add_lowrank_(here[name], left, right, name)
