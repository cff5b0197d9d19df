"""Which layers to leave dense: the least loss for a speed, or the most speed within a loss.

Every layer that stays dense keeps its loss away (sensitivity.py) and costs the time that it would have saved
(the time model of `advise`). Times add up over layers, and so, nearly, do small losses: that is a knapsack.
It is solved for every amount of time at once (`Frontier`), because the answer for a loss needs a walk along
it: the loss of many layers together is more than their sum, so there it is measured, one forward pass over
the text for each choice looked at.

q, k and v stay together, and so do gate and up: `fuse_` makes one product of them. With one left dense the
others would be a smaller product and the dense one another launch, which is what the time model knows least
about. A block's activation runs inside a product's kernel only if gate, up and down all are 2:4, so the
choices of a gated MLP are weighed as one group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twofour.advise.advice import machine_and_times
from twofour.advise.layers import FUSED_NAMES, read_network
from twofour.advise.schemes import DENSE, SPARSE, Scheme
from twofour.advise.sensitivity import Measured, measure
from twofour.advise.steps import Step, Workload, step_time
from twofour.errors import InputError
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.progress import OnProgress, silent
from twofour.prune import Method
from twofour.select import Layer

#: Points that a frontier keeps. Below that it is exact; above, one for each so many parts of the time.
POINTS = 4000

#: Points of the frontier that a loss is looked for on: a bisection of them takes seven measurements.
STEPS = 128

#: The layers of a gated MLP that must all be 2:4 for its activation to be in a product's kernel.
GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Budget:
    """`ppl`: perplexity at most so many times the dense model's. `speed`: at least so many times as fast."""

    kind: Literal["ppl", "speed"]
    factor: float

    def __str__(self) -> str:
        return f"{self.kind}={self.factor:g}x"


def read_budget(text: str) -> Budget:
    """
    >>> read_budget("speed=1.3x")
    Budget(kind='speed', factor=1.3)
    """
    found = re.fullmatch(r"(ppl|speed)=(\d+(?:\.\d*)?|\.\d+)[x×]?", text.strip())
    if found is None:
        raise InputError(f"no budget {text!r}.", hint="Write it as ppl=1.05x or speed=1.3x.")
    factor = float(found[2])
    if not 1 < factor < math.inf:
        raise InputError(f"the budget {text!r} must be above 1x, which is the dense model.")
    return Budget("ppl" if found[1] == "ppl" else "speed", factor)


@dataclass(frozen=True)
class Work:
    """What the model is used for, as `advise` has it."""

    gpu: str | None = None
    batch: int = 1
    prompt: int = 2048
    generate: int = 256


@dataclass(frozen=True)
class Choice:
    """Layers that become 2:4 together, and the milliseconds of a request that this saves."""

    names: frozenset[str]
    saved_ms: float


class Times:
    """Time on the GPU of one request (prefill and decode), by which layers are 2:4."""

    def __init__(self, model: str | Path, layers: Sequence[Layer], work: Work) -> None:
        for name, value, least in (("batch", work.batch, 1), ("seq", work.prompt, 1)):
            if value < least:
                raise InputError(f"{name} is {value}, and must be at least {least}.")
        if work.generate < 0:
            raise InputError(f"generate is {work.generate}, and must be at least 0.")
        self.gpu, self._model, self.notes = machine_and_times(work.gpu, None)
        network = read_network(model)
        if not network.timed:
            raise InputError(
                "most of this model is in modules whose time is not known, so a budget cannot be kept.",
                hint="Name the layers to leave dense with --keep-dense.",
            )
        # Python's time is not in it: a model that is served fast runs from CUDA graphs or torch.compile.
        self._steps = (
            (1, Workload(work.batch, work.prompt, work.prompt, graph=True)),
            (work.generate, Workload(work.batch, 1, work.prompt + work.generate // 2, graph=True)),
        )

        def step(scheme: Scheme, of: Workload) -> Step:
            return step_time(network, self.gpu, self._model, scheme, fused=True, work=of)

        self.dense_ms = sum(times * step(DENSE, of).ms for times, of in self._steps)
        gained = sum(
            times * (step(DENSE, of).elementwise_ms - step(SPARSE, of).elementwise_ms)
            for times, of in self._steps
        )
        activation_ms = gained / network.decoder.layers if network.decoder is not None else 0.0
        self.units = [
            Choice(frozenset(layer.name for layer in unit), self._saved(unit)) for unit in together(layers)
        ]
        self.groups = _grouped(self.units, activation_ms)

    def _saved(self, unit: Sequence[Layer]) -> float:
        if any(layer.kind == "conv2d" for layer in unit):
            return 0.0  # its time depends on the image and is not known
        rows, columns = sum(layer.rows for layer in unit), unit[0].columns
        saved = 0.0
        for times, of in self._steps:
            tokens = of.batch * of.tokens
            dense = sum(
                self._model.product(self.gpu, DENSE, layer.rows, columns, tokens).us for layer in unit
            )
            sparse = self._model.product(self.gpu, SPARSE, rows, columns, tokens).us
            gap = self._model.rest.gap_us if of.tokens == 1 else 0.0
            saved += times * (dense - sparse - gap) / 1e3
        return saved

    def speed(self, sparse: Collection[str]) -> float:
        """How many times as fast as dense with these layers in 2:4. Units count only if they are whole."""
        saved = 0.0
        for group in self.groups:
            fits = [choice for choice in group if choice.names <= set(sparse)]
            saved += max(fits, key=lambda choice: len(choice.names)).saved_ms if fits else 0.0
        return self.dense_ms / (self.dense_ms - saved)


def together(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Layers in their order, those that `fuse_` makes one product in one list."""
    units: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        parent, _, last = layer.name.rpartition(".")
        names = next((names for names in FUSED_NAMES if last in names), None)
        key = (layer.name,) if names is None else (parent, names, layer.columns)
        units.setdefault(key, []).append(layer)
    return list(units.values())


def _grouped(units: Sequence[Choice], activation_ms: float) -> list[list[Choice]]:
    """Units as groups whose times do not depend on each other: choices of which at most one is taken.

    A group is one unit, or the units of a gated MLP: each subset of them, all of them with the activation.
    """
    by_mlp: dict[str, list[Choice]] = {}
    for unit in units:
        first = min(unit.names)
        parent, _, last = first.rpartition(".")
        by_mlp.setdefault(parent if last in GATED else first, []).append(unit)
    groups = []
    for members in by_mlp.values():
        whole = {name.rpartition(".")[2] for unit in members for name in unit.names} == set(GATED)
        group = []
        for count in range(1, len(members) + 1):
            for some in combinations(members, count):
                extra = activation_ms if whole and count == len(members) else 0.0
                names = frozenset().union(*(unit.names for unit in some))
                group.append(Choice(names, sum(unit.saved_ms for unit in some) + extra))
        groups.append(group)
    return groups


class Frontier:
    """For every amount saved, the choice with the least loss: points in rising order of both.

    Each group offers pairs (saved, loss), of which one or none is taken. A point is what no other choice
    beats in one of the two without losing in the other. Groups are added one after another, and what is
    beaten is dropped. If more than POINTS are left they are thinned out, to the least loss in each of POINTS
    equal parts of the amount.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[float, float]]]) -> None:
        self.saved, self.losses = np.zeros(1), np.zeros(1)
        self._history: list[tuple[np.ndarray, np.ndarray]] = []
        total = sum(max([0.0, *(saved for saved, _ in group)]) for group in groups)
        for group in groups:
            # What saves nothing is not offered: dense is as fast and loses nothing.
            offers = [(0.0, 0.0, -1)]
            offers += [(saved, loss, i) for i, (saved, loss) in enumerate(group) if saved > 0]
            count = len(self.saved)
            both = np.concatenate([self.saved + saved for saved, _, _ in offers])
            lost = np.concatenate([self.losses + loss for _, loss, _ in offers])
            kept = _undominated(both, lost, total)
            self.saved, self.losses = both[kept], lost[kept]
            taken = np.array([i for _, _, i in offers], dtype=np.int16)[kept // count]
            self._history.append(((kept % count).astype(np.int32), taken))

    def __len__(self) -> int:
        return len(self.saved)

    def chosen(self, point: int) -> dict[int, int]:
        """Which of its pairs each group gives, for the groups that give one."""
        found = {}
        for number in range(len(self._history) - 1, -1, -1):
            before, taken = self._history[number]
            if taken[point] >= 0:
                found[number] = int(taken[point])
            point = int(before[point])
        return found


def _undominated(saved: np.ndarray, losses: np.ndarray, total: float) -> np.ndarray:
    """Indices of the points to keep, in rising order of what they save."""
    order = np.lexsort((losses, -saved))  # most saved first, of equals the least loss first
    best = np.minimum.accumulate(losses[order])
    order = order[np.concatenate([[True], losses[order][1:] < best[:-1]])][::-1]
    if len(order) <= POINTS:
        return order
    part = np.minimum((saved[order] / total * POINTS).astype(np.int64), POINTS - 1)
    first = np.concatenate([[True], part[1:] != part[:-1]])
    first[-1] = True  # the most that can be saved is a choice too
    return order[first]


@dataclass(frozen=True)
class Plan:
    """What a budget comes to. Losses in nats a token, on text of the calibration file."""

    budget: str
    gpu: str
    batch: int
    seq: int
    generate: int
    speed: float  # × dense, told by the time model
    speed_all: float  # with every layer pruned
    loss_told: float  # sum over the pruned layers
    loss_increase: float  # of all of them together, measured before blocks are tuned or inputs follow
    perplexity: float  # × dense, the same loss
    perplexity_all: float
    sensitivity: dict[str, float]  # loss told for each layer alone
    calibration: dict[str, Any]
    dense: tuple[str, ...]  # layers that stay
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kept(self) -> dict[str, str]:
        """Layers that stay dense, and why, as the record has it."""
        return dict.fromkeys(self.dense, f"kept dense by the budget {self.budget}")


def plan(
    model: str | Path,
    budget: Budget,
    calibration: CalibrationOptions,
    method: str | Method | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    work: Work | None = None,
    *,
    on_progress: OnProgress = silent,
) -> Plan:
    """Choose the layers of a checkpoint that stay dense, for pruning it with this method and text."""
    work = work or Work()
    times = Times(model, _layers(model, include, exclude), work)  # first: it may be refused at once
    most = _most(times)
    where = f"on the {times.gpu.name} at batch {work.batch}, {work.prompt} + {work.generate} tokens"
    if most <= 1 or (budget.kind == "speed" and most < budget.factor):
        raise InputError(
            f"even all layers in 2:4 give only {most:.3f} times dense's speed {where}: "
            f"the budget {budget} cannot be met.",
            hint="twofour advise shows where the time goes.",
        )
    measured = measure(model, calibration, method, include, exclude, on_progress=on_progress)
    # A layer that seems to lower the loss costs nothing, but pays for no other: together they would not.
    losses = {name: max(0.0, layer.loss_increase) for name, layer in measured.sensitivity.layers.items()}
    return choose(budget, times, measured, losses, work)


def choose(budget: Budget, times: Times, measured: Measured, losses: dict[str, float], work: Work) -> Plan:
    """The plan for losses of single layers; `measured` says what they are together."""
    groups = times.groups
    front = Frontier(
        [[(choice.saved_ms, sum(losses[n] for n in choice.names)) for choice in group] for group in groups]
    )

    def names(point: int) -> set[str]:
        taken = (groups[group][choice].names for group, choice in front.chosen(point).items())
        return set().union(*taken)

    if budget.kind == "speed":
        needed = times.dense_ms * (1 - 1 / budget.factor)
        point = min(int(np.searchsorted(front.saved, needed)), len(front) - 1)  # rounding, at the very end
        sparse = names(point)
        increase = measured.loss_increase(sparse)
    else:
        sparse, increase = _within(math.log(budget.factor), front, names, measured, budget)
    everything = list(losses)
    own = measured.sensitivity
    return Plan(
        budget=str(budget),
        gpu=times.gpu.name,
        batch=work.batch,
        seq=work.prompt,
        generate=work.generate,
        speed=times.speed(sparse),
        speed_all=times.speed(everything),
        loss_told=sum(losses[name] for name in sparse),
        loss_increase=increase,
        perplexity=math.exp(min(increase, 700)),
        perplexity_all=math.exp(min(measured.loss_increase(everything), 700)),
        sensitivity=losses,
        calibration={
            key: getattr(own, key) for key in ("calib", "method", "samples", "scored", "seqlen", "seed")
        },
        dense=tuple(name for name in everything if name not in sparse),
        notes=tuple(times.notes),
    )


def _within(
    limit: float, front: Frontier, names: Callable[[int], set[str]], measured: Measured, budget: Budget
) -> tuple[set[str], float]:
    """The point that saves most with a measured loss within the limit, by bisection."""
    points = sorted({round(i * (len(front) - 1) / STEPS) for i in range(1, STEPS + 1)} - {0})
    best: tuple[set[str], float] | None = None
    low, high = 0, len(points) - 1
    middle = high  # perhaps all of them fit
    while low <= high:
        sparse = names(points[middle])
        increase = measured.loss_increase(sparse)
        if increase <= limit:
            best, low = (sparse, increase), middle + 1
        else:
            high = middle - 1
        middle = (low + high) // 2
    if best is None:
        least = math.exp(min(increase, 700))
        raise InputError(
            f"pruning the least sensitive layers alone raises the perplexity {least:.4f} times, "
            f"so the budget {budget} cannot be met.",
            hint="Allow more, or choose a better --method.",
        )
    return best


def _most(times: Times) -> float:
    """× dense, with 2:4 wherever it helps."""
    saved = sum(max([0.0, *(choice.saved_ms for choice in group)]) for group in times.groups)
    return times.dense_ms / (times.dense_ms - saved)


def _layers(model: str | Path, include: Sequence[str], exclude: Sequence[str]) -> list[Layer]:
    from twofour.io.checkpoint import Checkpoint
    from twofour.io.structure import checkpoint_layers

    return list(checkpoint_layers(Checkpoint(model), include, exclude).by_tensor.values())
