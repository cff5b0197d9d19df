"""A model over several processes: the same on each (DDP, through Accelerate), or in parts (FSDP2).

Accelerate's own FSDP2 is for accelerators only, so `fully_shard` is called here; it is the same call. It
works on CPUs with gloo too, which is how it is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from twofour.calibrate import parallel
from twofour.calibrate.blocks import find_blocks
from twofour.errors import InputError, TwoFourError
from twofour.select import Layer


def device_for(model: nn.Module) -> torch.device:
    """Where the model is trained: where it is or, with several processes, where Accelerate puts this one."""
    if not parallel.active():
        return next(model.parameters()).device
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available()).device


def replicate(model: nn.Module) -> nn.Module:
    """The model in DDP, or the model itself where there is one process."""
    if not parallel.active():
        return model
    from accelerate import Accelerator

    # Autocast is ours: Accelerate's would widen all logits to float32.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    prepared = accelerator.prepare_model(model)
    if not isinstance(prepared, nn.parallel.DistributedDataParallel):
        # Each process would train for itself, and nobody would notice.
        raise TwoFourError(
            f"Accelerate was set up for {accelerator.distributed_type} before, not for these "
            f"{parallel.processes()} processes.",
            hint="Start with torchrun or accelerate launch, and make no Accelerator before.",
        )
    return prepared


def shard_(model: nn.Module, layers: Sequence[Layer], device: torch.device, narrow: bool) -> None:
    """Each process keeps its part of every block. `narrow`: gathered and computed in bfloat16."""
    if not parallel.active():
        raise InputError(
            "--fsdp is for several processes.",
            hint="Start it with torchrun --nproc-per-node N -m twofour recover …",
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (parallel.processes(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if narrow else {})}
    for block in find_blocks(model, layers)[1]:
        fully_shard(block, **options)
    fully_shard(model, **options)


def is_sharded_model(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")


def without_sync(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients of all but the last part of an accumulated step stay where they are."""
    if is_sharded_model(model):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()
    if last or not isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext()
    return model.no_sync()


def offload_teacher_(teacher: nn.Module, device: torch.device) -> None:
    """Leave the weights in the CPU's memory; each layer comes to the device for its turn."""
    from accelerate import cpu_offload

    cpu_offload(teacher, execution_device=device)
