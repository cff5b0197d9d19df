"""Where a run stands, on disk: so that it can be killed at any moment and go on to the same result.

One file has all that a step depends on: the trained parameters, the masks, the optimizer's moments and, in
its header, the position. It is written beside and renamed, so there is always a whole one. Random numbers and
the order of the data are functions of the seed and the step, and the learning rate of the step: none need be
kept.

The best weights so far have a file of their own, named by their step. The position says which it is; one of a
step that the position has not reached is of a run that was killed in between, and is not looked at.

Everything is stored whole, whoever holds which part of it: a state of two processes goes on in one, and back.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from twofour.calibrate import parallel
from twofour.errors import InputError
from twofour.recover.mask_tensor import is_sharded

_STATE = "state.safetensors"
_FINAL = "final.safetensors"
_LOG = "recover.jsonl"


@dataclass
class Position:
    """How far a run is, and what it has found so far. Losses are of the held-out windows."""

    step: int = 0  # steps done
    before: float | None = None
    best: float | None = None
    best_step: int = 0
    last: float | None = None
    stale: int = 0  # evaluations since the best one
    first_loss: float | None = None  # of training
    settled: bool = True  # the masks are fixed (with `adaptive`: from its freeze on)
    stopped: str = ""  # why before the last step: "early" or "diverged"
    seconds: float = 0.0


class Store:
    """The directory of a run. All processes call; the first one writes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def log(self) -> Path:
        return self.directory / _LOG

    def has_state(self) -> bool:
        return (self.directory / _STATE).exists() or (self.directory / _FINAL).exists()

    def save(
        self,
        position: Position,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: Optimizer,
    ) -> None:
        tensors = {f"model/{name}": tensor for name, tensor in (*parameters.items(), *buffers.items())}
        for name, parameter in parameters.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
        self._write(_STATE, tensors, dataclasses.asdict(position))
        if parallel.is_first():
            for file in self.directory.glob("best-*.safetensors"):
                if file != self._best(position.best_step):
                    file.unlink()
        parallel.wait()

    def position(self) -> Position | None:
        """That of the state, if there is one."""
        found = _header(self.directory / _STATE)
        return None if found is None else Position(**found)

    @torch.no_grad()
    def restore(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], optimizer: Optimizer
    ) -> None:
        """Put the state into what is there already: a model of the same kind, and its new optimizer."""
        with _opened(self.directory / _STATE) as file:
            keys = set(file.keys())
            for name, tensor in (*parameters.items(), *buffers.items()):
                if f"model/{name}" not in keys:
                    raise InputError(
                        "the run to resume was of another model: it has nothing of this name.",
                        layer=name,
                        hint="Leave out --resume to start anew.",
                    )
                _copy_whole_(tensor, file.get_tensor(f"model/{name}"))
            names = {id(parameter): name for name, parameter in parameters.items()}
            state: dict[int, dict[str, Tensor]] = {}
            number = 0
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    prefix = f"optimizer/{names[id(parameter)]}/"
                    own = {
                        key.removeprefix(prefix): file.get_tensor(key)
                        for key in keys
                        if key.startswith(prefix)
                    }
                    if own:
                        state[number] = {key: _placed_like(value, parameter) for key, value in own.items()}
                    number += 1
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def save_best(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        self._write(self._best(step).name, parameters, {})

    @torch.no_grad()
    def restore_best(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        with _opened(self._best(step)) as file:
            for name, parameter in parameters.items():
                _copy_whole_(parameter, file.get_tensor(name))

    def save_final(self, parameters: Mapping[str, Tensor], position: Position) -> None:
        """What the run gave. Writing the checkpoint may still fail (a full disk): no need to train again."""
        self._write(_FINAL, parameters, dataclasses.asdict(position))

    def final(self) -> tuple[Path, Position] | None:
        found = _header(self.directory / _FINAL)
        return None if found is None else (self.directory / _FINAL, Position(**found))

    def note(self, entry: dict[str, Any]) -> None:
        """A line of the log."""
        if parallel.is_first():
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")

    def forget_notes_after(self, step: int) -> None:
        """What a killed run logged after its last state will be done, and logged, again."""
        if parallel.is_first() and self.log.exists():
            kept = []
            for line in self.log.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except json.JSONDecodeError:
                    continue  # cut off in the middle
            partial = self.directory / f"{_LOG}.partial"
            partial.write_text("".join(kept), encoding="utf-8")
            partial.replace(self.log)

    def _best(self, step: int) -> Path:
        return self.directory / f"best-{step:08d}.safetensors"

    def _write(self, name: str, tensors: Mapping[str, Tensor], header: dict[str, Any]) -> None:
        here: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            whole = tensor.full_tensor().detach() if is_sharded(tensor) else tensor.detach()
            if parallel.is_first():
                here[key] = whole.cpu().contiguous()
        if parallel.is_first():
            partial = self.directory / f"{name}.partial"
            save_file(here, partial, metadata={"position": json.dumps(header)})
            partial.replace(self.directory / name)
        parallel.wait()


def named_buffers(model: torch.nn.Module, parameters: Iterable[str]) -> dict[str, Tensor]:
    """The buffers that belong to the model's state, masks among them, as they are (not copies)."""
    kept = set(model.state_dict()) - set(parameters)
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the run to resume cannot be read: {path.name} ({error}).", hint="Leave out --resume."
        ) from error


def _header(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    with _opened(path) as file:
        header: dict[str, Any] = json.loads((file.metadata() or {})["position"])
        return header


def _copy_whole_(target: Tensor, whole: Tensor) -> None:
    """Fill a tensor, or this process's part of it, from the whole."""
    if target.shape != whole.shape:
        raise InputError(
            f"the run to resume was of another model: {list(whole.shape)} for {list(target.shape)}."
        )
    target.copy_(_placed_like(whole, target))


def _placed_like(whole: Tensor, target: Tensor) -> Tensor:
    if not is_sharded(target) or whole.shape != target.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every process has read the whole, so nothing need be sent.
    return distribute_tensor(
        whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )
