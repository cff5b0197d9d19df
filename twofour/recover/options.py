"""The settings of a recovery: what is trained against what, for how long, in which steps.

`batch` is the windows of one step over everything: all processes and all parts of an accumulated gradient. So
the outcome depends neither on how many GPUs there are nor on how a step was cut to fit into their memory.

What is `None` is chosen by the run from the model and the data: see `Recover.settled`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twofour.errors import InputError

if TYPE_CHECKING:
    from twofour.quantize.schemes import Scheme

#: For models that were pruned, and the one for those that are quantized.
RECIPES, SCALES = ("masked", "distill", "adaptive", "lora"), "scales"
SCHEDULES = ("cosine", "linear", "constant")
DTYPES = ("bf16", "fp32")

#: Settings that change how a run is done and not what comes out: a resumed run may have others.
ONLY_HOW = ("accumulate", "save_every", "checkpointing", "fsdp", "compile", "teacher_offload")

#: A window is at most so long unless asked: longer ones cost more and teach little that was lost.
LONGEST_WINDOW = 1024

#: A step moves a scale by about half a per cent of itself at most (benchmarks/LOG.md has others).
SCALES_RATE = 5e-3

#: Tokens of one step, unless asked. Few tokens in all want many small steps, many want large ones that fill
#: a GPU.
FEWEST_STEP_TOKENS, MOST_STEP_TOKENS, STEPS_AIMED_AT = 2048, 32768, 1000


@dataclass(frozen=True)
class Recover:
    """All settings. Rates and weights are for AdamW; `patience` counts evaluations, 0 is endless."""

    recipe: str | None = None  # None: distill where there is a teacher, else masked
    tokens: int = 10_000_000
    lr: float | None = None
    batch: int | None = None
    seqlen: int | None = None
    accumulate: int = 1
    warmup: float = 0.04  # share of the steps
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    kl_weight: float = 1.0
    task_weight: float = 0.1
    temperature: float = 1.0
    dtype: str | None = None  # None: bf16 on a GPU, fp32 on a CPU
    checkpointing: bool = False
    eval_every: int | None = None
    patience: int = 0
    save_every: int | None = None
    seed: int = 0
    fsdp: bool = False
    compile: bool = False
    teacher_offload: bool = False
    decay: float = 2e-4  # adaptive: how strongly pruned weights are drawn to zero
    until: float = 0.5  # adaptive: the share of the steps in which masks may move
    rank: int = 32  # lora
    alpha: float = 32.0  # lora
    scheme: str | None = None  # train as a later `quantize` to this scheme will round
    group: int | None = None  # of that scheme

    def __post_init__(self) -> None:
        self._require_one_of("recipe", (None, *RECIPES, SCALES))
        self._require_one_of("schedule", SCHEDULES)
        self._require_one_of("dtype", (None, *DTYPES))
        for name in ("tokens", "batch", "accumulate", "eval_every", "save_every", "rank"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"recover: {_shown(name)} must be at least 1, got {getattr(self, name)}.")
        if self.seqlen is not None and self.seqlen < 2:
            raise InputError(f"recover: a window of {self.seqlen} tokens has nothing to predict.")
        for name in ("lr", "temperature", "clip", "alpha"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"recover: {_shown(name)} must be a finite number above 0, got {value}.")
        for name in ("weight_decay", "kl_weight", "task_weight", "decay", "patience"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"recover: {_shown(name)} must be a finite number not below 0, got {value}.")
        for name in ("warmup", "until"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"recover: {_shown(name)} is a share of the steps, from 0 to 1.")
        if not self.until:
            raise InputError("recover: with until 0 the masks may never move.", hint="Take another recipe.")
        if not self.kl_weight + self.task_weight:
            raise InputError("recover: with kl-weight and task-weight both 0 there is nothing to learn.")
        if self.rounds_to is not None and self.recipe == "lora":
            raise InputError(
                "lora cannot train for a scheme: rounding moves every weight on its own, and a change of low "
                "rank cannot answer that.",
                hint="Take distill or masked. Or quantize, and train PEFT's adapters on the packed model.",
            )

    @property
    def rounds_to(self) -> Scheme | None:
        """The scheme whose rounding is in the loop."""
        if self.scheme is None:
            if self.group is not None:
                raise InputError("recover: a group is one of a scheme.", hint="Give --scheme int4 too.")
            return None
        from twofour.quantize.schemes import scheme_named  # not needed by those who only hold masks

        return scheme_named(self.scheme, self.group)

    @property
    def distills(self) -> bool:
        """Whether the teacher's logits are learnt from; `masked` may have a teacher that only writes text."""
        return self.recipe != "masked" and self.kl_weight > 0

    def settled(
        self, *, parameters: int, longest: int, has_teacher: bool, processes: int, quantized: bool = False
    ) -> Recover:
        """The settings with everything chosen that was left open. `quantized`: the model has codes."""
        recipe = self.recipe or (SCALES if quantized else "distill" if has_teacher else "masked")
        self._require_fitting(recipe, quantized)
        if recipe == "distill" and not has_teacher:
            raise InputError(
                "distill learns from a dense teacher, and there is none.",
                hint="Give it with --teacher DENSE, or take --recipe masked.",
            )
        seqlen = min(self.seqlen or LONGEST_WINDOW, longest)
        if self.seqlen is not None and self.seqlen > longest:
            raise InputError(f"the model takes {longest} tokens at most, not windows of {self.seqlen}.")
        together = self.accumulate * processes
        batch = self.batch
        if batch is None:
            step_tokens = min(max(self.tokens // STEPS_AIMED_AT, FEWEST_STEP_TOKENS), MOST_STEP_TOKENS)
            batch = 1 << round(math.log2(max(step_tokens / seqlen, 1)))
            batch += -batch % together
        elif batch % together:
            raise InputError(
                f"a batch of {batch} windows cannot be shared by {processes} processes in {self.accumulate} "
                "parts each.",
                hint=f"Give a --batch that is a multiple of {together}.",
            )
        lr = default_rate(parameters, recipe, batch * seqlen) if self.lr is None else self.lr
        settled = dataclasses.replace(self, recipe=recipe, lr=lr, batch=batch, seqlen=seqlen)
        return dataclasses.replace(
            settled,
            eval_every=self.eval_every or max(1, settled.steps // 10),
            save_every=self.save_every or max(1, settled.steps // 10),
        )

    def _require_fitting(self, recipe: str, quantized: bool) -> None:
        """Codes are not trained, and scales are there only beside codes."""
        if quantized and recipe != SCALES:
            raise InputError(
                f"the model is quantized, and {recipe} trains weights.",
                hint="Take --recipe scales, or recover the pruned model that it was made from (--scheme).",
            )
        if recipe == SCALES and not quantized:
            raise InputError(
                "the recipe scales is for quantized models, and this one is not.",
                hint="Quantize it first, or take another recipe.",
            )
        if quantized and self.scheme is not None:
            raise InputError("the model is quantized already.", hint="Leave out --scheme.")
        if quantized and self.fsdp:
            raise InputError(
                "the recipe scales trains too few numbers to share them out.", hint="Leave out --fsdp."
            )

    @property
    def steps(self) -> int:
        """Of settled settings."""
        assert self.batch is not None
        assert self.seqlen is not None
        return max(1, math.ceil(self.tokens / (self.batch * self.seqlen)))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0. A function of the step alone: nothing to save."""
        assert self.lr is not None
        warm = math.ceil(self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / (warm + 1)
        left = 1 - (step - warm) / max(1, self.steps - warm)
        if self.schedule == "cosine":
            return self.lr * (1 - math.cos(math.pi * left)) / 2
        return self.lr * (left if self.schedule == "linear" else 1.0)

    def outcome(self) -> dict[str, Any]:
        """The settings that the outcome depends on: a resumed run must have the same."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in ONLY_HOW}

    def _require_one_of(self, name: str, known: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in known:
            names = ", ".join(k for k in known if k)
            raise InputError(
                f"recover: there is no {name} {getattr(self, name)!r}.", hint=f"Choose one of: {names}."
            )


def default_rate(parameters: int, recipe: str, step_tokens: int) -> float:
    """3e-4 for a model of 15 million parameters and small steps, falling with the root of the model's size.

    Large steps have less noise in their gradients and bear a rate that grows with the root of their tokens:
    1e-3 at 32,768 for the same model. Measured on small models only: docs/accuracy.md. Adapters are few and
    start from nothing: 10 times it. The rate of scales is one of their logarithms: the same for all models.
    """
    if recipe == SCALES:
        return SCALES_RATE
    by_size = 3e-4 * math.sqrt(15e6 / max(parameters, 1))
    by_step = min(max(math.sqrt(step_tokens / FEWEST_STEP_TOKENS), 1.0), 10 / 3)
    rate = min(max(by_size * by_step, 2e-5), 2e-3)
    return 10 * rate if recipe == "lora" else rate


def _shown(name: str) -> str:
    return name.replace("_", "-")
