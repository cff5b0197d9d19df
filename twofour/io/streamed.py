"""A language model whose blocks are read from their files when it is their turn.

Calibration runs one block at a time, so there is no need to hold the others: a 70B model takes 140 GB as a
whole and 2 GB a block. The model is built without weights; what stands before the blocks (embeddings) is read
at once, a block when it is brought, and the one after it meanwhile, by another thread.

That works where the files hold the model's tensors as they are; experts are taken apart if the files have
them so. Where transformers makes tensors out of others while it loads (quantised weights), there is no
telling which of them a block needs, and `open_streamed` gives None: then the model is loaded as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate.blocks import find_blocks
from twofour.calibrate.experts import open_experts_
from twofour.io.checkpoint import Checkpoint
from twofour.io.structure import keys_in_files
from twofour.select import Layer

#: Floating-point dtypes that a checkpoint may hold and a model can be calibrated in.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StreamedBlocks:
    """The weights of the blocks, from the files of a checkpoint (`twofour.calibrate.blocks.Weights`)."""

    def __init__(self, checkpoint: Checkpoint, keys: list[dict[str, str]], dtype: torch.dtype) -> None:
        """`keys`: for each block the tensors in the files by their names in the block."""
        self._checkpoint, self._keys, self._dtype = checkpoint, keys, dtype
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="next block")
        self._next: tuple[int, Future[dict[str, Tensor]]] | None = None

    def bring(self, number: int, block: nn.Module, device: torch.device) -> None:
        if self._next is not None and self._next[0] == number:
            tensors = self._next[1].result()
        else:
            tensors = self._read(number, device)
        if number + 1 < len(self._keys):
            self._next = number + 1, self._reader.submit(self._read, number + 1, device)
        here = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        block.load_state_dict(here, strict=False, assign=True)
        block.to(device)  # buffers that are in no file

    def release(self, number: int, block: nn.Module) -> None:
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    empty = torch.empty_like(parameter, device="meta")
                    module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def _read(self, number: int, device: torch.device) -> dict[str, Tensor]:
        pinned = device.type == "cuda"
        return {
            name: _read(self._checkpoint, key, self._dtype, pinned)
            for name, key in self._keys[number].items()
        }


def _read(checkpoint: Checkpoint, key: str, dtype: torch.dtype, pinned: bool = False) -> Tensor:
    """A tensor in memory of its own: what `Checkpoint.read` gives is the file's, and read when it is used."""
    found = checkpoint.read(key)
    wanted = dtype if found.is_floating_point() else found.dtype
    return torch.empty(found.shape, dtype=wanted, pin_memory=pinned).copy_(found)


def open_streamed(
    checkpoint: Checkpoint, layers: Sequence[Layer], dtype: torch.dtype | None
) -> tuple[Any, Any, StreamedBlocks] | None:
    """The model without its blocks, its tokenizer, and who brings these; None if it must be loaded whole.

    Without `dtype` in the one that the config names.
    """
    import transformers
    from accelerate import init_empty_weights

    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.directory)
        dtype = dtype or getattr(config, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            return None
        tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint.directory)
        # Buffers are made for real: positions and masks are in no file.
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError):
        return None  # loading it whole will say what is wrong
    keys = _keys(model, checkpoint, layers)
    if keys is None and open_experts_(model):
        keys = _keys(model, checkpoint, layers)
    if keys is None:
        return None
    outside, of_blocks = keys
    tensors = {name: _read(checkpoint, key, dtype) for name, key in outside.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.eval(), tokenizer, StreamedBlocks(checkpoint, of_blocks, dtype)


def _keys(
    model: Any, checkpoint: Checkpoint, layers: Sequence[Layer]
) -> tuple[dict[str, str], list[dict[str, str]]] | None:
    """Where the files have what is outside the blocks, and each block; None if something is not as it is."""
    # Weights that are kept wider than the model, and corrections beside weights, are for the loader to know.
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return None
    if any(key.endswith(".lowrank_left") for key in checkpoint.tensors):
        return None
    prefix, blocks = find_blocks(model, layers)
    head = model.get_output_embeddings()
    head_name = next((name for name, module in model.named_modules() if module is head), None)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    key_of = keys_in_files(model, checkpoint.tensors)
    outside: dict[str, str] = {}
    inside: list[dict[str, str]] = [{} for _ in blocks]
    for name, tensor in model.state_dict().items():
        if head_name and name.startswith(f"{head_name}."):
            continue  # it never runs
        key = key_of(name)
        if key is None:
            if name in parameters:
                return None
            continue  # a buffer as the model makes it
        info = checkpoint.tensors[key]
        if info.shape != tuple(tensor.shape) or info.dtype not in DTYPES:
            return None
        if name.startswith(f"{prefix}."):
            number, _, own = name.removeprefix(f"{prefix}.").partition(".")
            inside[int(number)][own] = key
        else:
            outside[name] = key
    return outside, inside
