"""Load a checkpoint without its bytes, to learn what transformers would miss in it.

Only transformers knows what becomes of the tensors in files: some have been renamed since, some are stacked
or cut, some are one with others, some are left out. So it is given tensors without memory under the names
and shapes in the files, loads them, and reports what it always reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed
from twofour.io.structure import architecture_of, skeleton


def rehearse(checkpoint: Checkpoint) -> list[tuple[str, str]] | None:
    """What does not fit between the files and the model of the config: of what, and a sentence about it.

    None where that cannot be told: transformers does not know the architecture, the config names none, or
    another library has quantized the weights. InputError where the config is of no model at all.
    """
    import transformers

    foreign = checkpoint.config.get("quantization_config") and not is_packed(checkpoint.config)
    architecture = architecture_of(checkpoint)
    if architecture is None or foreign:
        return None
    shapes = {
        name: torch.empty(info.shape, device="meta")
        for name, info in checkpoint.tensors.items()
        # Beside dense weights transformers does not know them; `load_causal_lm` puts them in itself.
        if is_packed(checkpoint.config) or not name.endswith((".lowrank_left", ".lowrank_right"))
    }
    try:
        with _silence():
            config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
            config.transformers_weights = None
            _, info = architecture.from_pretrained(
                None,
                config=config,
                state_dict=shapes,
                device_map="meta",
                ignore_mismatched_sizes=True,  # but tell about them
                output_loading_info=True,
            )
    except InputError as error:  # of our own quantizer
        return [(error.layer or "", str(error))]
    except ImportError:  # the model is made with a library that is not here
        return None
    except Exception:  # anything, from any model's code
        skeleton(checkpoint)  # says so, if config.json is at fault
        return None  # else it may be for want of bytes
    return [
        *((name, f"{name}: the model needs it, and the files lack it.") for name in info["missing_keys"]),
        *((name, f"{name}: the files hold it, and the model has none.") for name in info["unexpected_keys"]),
        *(
            (name, f"{name}: its shape is {list(found)}, and the model's {list(expected)}.")
            for name, found, expected in info["mismatched_keys"]
        ),
    ]


@contextmanager
def _silence() -> Iterator[None]:
    """transformers prints a report of its own."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
