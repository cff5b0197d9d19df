"""Save a packed model from memory."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from twofour.errors import InputError
from twofour.io.checkpoint import CONFIG, RECORD, read_json
from twofour.io.format import SENTENCE, packed_config, stub
from twofour.io.record import add_step
from twofour.io.workplace import empty
from twofour.io.writer import CheckpointWriter, publish, write_json
from twofour.nn.convert import common_scheme, packed_layers, stored_layers
from twofour.nn.lowrank import lowrank_layers


def save(model: nn.Module, out: str | Path) -> None:
    """Write a packed model to a new directory, whole or not at all.

    A transformers model is written with its config, so that `from_pretrained` loads it; any other module
    as tensors plus the list of packed layers, for `twofour.load(out, model=...)`.
    """
    packed = packed_layers(model)
    if not packed:
        raise InputError("the model has no packed layer.", hint="Call twofour.pack_(model) first.")
    for name, module in packed.items():
        module.validate(name)
    shapes, scheme = stored_layers(model), common_scheme(model)
    verb = "pack" if scheme is None else "quantize"
    step = {
        "verb": verb,
        "options": {} if scheme is None else {"scheme": scheme.name, "group": scheme.group},
        "layers": {name: {"shape": list(shape)} for name, shape in shapes.items()},
    }
    if not hasattr(model, "save_pretrained"):
        with CheckpointWriter(out, 1, run={"verb": "save"}) as writer:
            writer.write_shard(1, {**model.state_dict(), **stub(shapes)}, notes={})
            writer.finish(
                packed_config(
                    {}, shapes, [verb], {n: m.rank for n, m in lowrank_layers(model).items()}, scheme
                ),
                add_step({}, step),
            )
        return
    with CheckpointWriter(out, 1, run={"verb": "save"}) as writer:
        # transformers writes the files; the sentence is ours to add, since save_pretrained drops it.
        empty(writer.staging)
        model.save_pretrained(writer.staging)  # type: ignore[operator]
        config = read_json(writer.staging / CONFIG)
        write_json(writer.staging / CONFIG, {**config, "transformers_weights": SENTENCE})
        write_json(writer.staging / RECORD, add_step({}, step))
        publish(writer.staging, writer.out)
