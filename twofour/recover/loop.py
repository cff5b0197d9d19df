"""The loop: steps, looks at the losses, evaluations, states saved.

On a GPU nothing in a step waits for it: losses stay there until they are read, every so many steps. Weights
and their moments are float32 whatever the products are computed in, and are rounded once, at the end: a step
is often smaller than what bfloat16 can tell apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.examples import evaluating
from twofour.errors import InputError
from twofour.progress import OnProgress
from twofour.recover.beside import RUNS_BESIDE, Beside
from twofour.recover.data import Windows
from twofour.recover.losses import next_tokens, perplexity, recovery_loss, summed_task_loss
from twofour.recover.masks import reshard
from twofour.recover.options import SCALES, Recover
from twofour.recover.recipes import recipe_for
from twofour.recover.spread import device_for, offload_teacher_, replicate, shard_, without_sync
from twofour.recover.state import Position, Store, named_buffers

#: Steps between two looks at the losses, each of which waits for the GPU.
LOG_EVERY = 10

BETAS = (0.9, 0.95)


class Trainer:
    """A model with all that trains it. Made of a model on its device or, to be sharded, on the CPU."""

    def __init__(
        self,
        model: Any,
        windows: Windows,
        held_out: Tensor,
        teacher: Any,
        options: Recover,
        store: Store,
        include: Sequence[str],
        exclude: Sequence[str],
        frozen: Sequence[str],
        stored: Mapping[str, torch.dtype],
    ) -> None:
        self.options, self.store, self.model = options, store, model
        self.device = device_for(model)
        self.narrow = options.dtype == "bf16" or (options.dtype is None and self.device.type == "cuda")
        # transformers refuses to convert or move a quantized model; ours have layers that know how.
        nn.Module.float(model).train()
        torch.manual_seed(options.seed)  # for what a recipe draws, the same in every process
        self.recipe = recipe_for(model, options, stored, include, exclude)
        for name, parameter in model.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
        if options.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if options.fsdp:
            shard_(model, self.recipe.layers, self.device, self.narrow)
            runner: nn.Module = model
        else:
            nn.Module.to(model, self.device)
            runner = replicate(model)
        self.parallel_model = runner
        # A compiler leaves out roundings of 16 bit in between, and what a weight is stored as has its codes.
        rounds = options.scheme is not None or options.recipe == SCALES
        exact: Any = {"options": {"emulate_precision_casts": True}} if rounds else {}
        self.forward: Any = torch.compile(runner, **exact) if options.compile else runner
        self.teacher = self._teacher(teacher)
        # One whose weights are fetched layer by layer has streams of its own to do that in.
        alone = not (options.teacher_offload or options.fsdp)
        self.beside = Beside(self.device, wanted=RUNS_BESIDE and alone and self.teacher is not None)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise InputError("no parameter of the model can be trained.")
        self.optimizer = torch.optim.AdamW(
            list(self.parameters.values()),
            lr=options.rate(0),
            betas=BETAS,
            weight_decay=options.weight_decay,
            fused=self.device.type in ("cuda", "cpu"),
        )
        self.windows = windows.to(self.device)
        self.held_out = held_out

    def _teacher(self, teacher: Any) -> Any:
        if teacher is None or not self.options.distills:
            return None
        if self.options.teacher_offload:
            offload_teacher_(teacher, self.device)
        elif self.options.fsdp:
            shard_(teacher, self.recipe.layers, self.device, narrow=False)
        elif teacher.device != self.device:  # one that is quantized may refuse to be moved, even to its place
            teacher.to(self.device)
        return torch.compile(teacher) if self.options.compile else teacher

    def run(self, saves: bool, resume: bool, on_progress: OnProgress) -> Position:
        found = self.store.position() if resume else None
        position = found or Position()
        self.store.forget_notes_after(position.step if found else -1)
        if found:
            if position.settled:
                self.recipe.settle()
            self.store.restore(self.parameters, self._buffers(), self.optimizer)
        self.recipe.attach(self.optimizer)
        if position.before is None:
            position.before = position.last = self.evaluate()
            if not math.isfinite(position.before):
                raise InputError(
                    "the model gives NaN or infinity before it is trained: there is nothing to recover.",
                    hint="`twofour check` tells which of its weights are not finite.",
                )
            self._judge(position)
            self._note(position, "evaluation", held_out_loss=position.last)
        clock = Clock(self.options, position)
        summed = torch.zeros((), device=self.device)
        looked_at = position.step
        steps = self.options.steps
        while position.step < steps and not position.stopped:
            summed += self.step(position.step)
            position.step += 1
            evaluates = position.step % self.options.eval_every == 0 or position.step == steps  # type: ignore[operator]
            saves_now = saves and position.step % self.options.save_every == 0 and position.step < steps  # type: ignore[operator]
            # The first step's loss is that of the start: what "diverged" is measured against.
            if position.step in (1, steps) or position.step % LOG_EVERY == 0 or evaluates or saves_now:
                loss = float(parallel.mean_(summed)) / (position.step - looked_at)
                looked_at = position.step
                summed.zero_()
                self._look(position, loss, clock)
                if evaluates and position.stopped != "diverged":
                    position.last = self.evaluate()
                    self._judge(position)
                    self._note(position, "evaluation", held_out_loss=position.last)
                on_progress(position.step, steps, clock.label(position, loss))
            if saves_now and not position.stopped:
                position.settled, position.seconds = self.recipe.settled, clock.seconds()
                self.store.save(position, self.parameters, self._buffers(), self.optimizer)
        position.seconds = clock.seconds()
        return position

    def step(self, step: int) -> Tensor:
        """One step of the optimizer. The mean loss of this process's windows, on the device."""
        options = self.options
        progress = step / options.steps
        # Dropout, where a model has it, is a function of the step as well.
        torch.manual_seed((options.seed * 1_000_003 + step) * 1_009 + parallel.rank())
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate(step)
        assert options.batch is not None
        batch = self.windows.batch(options.seed, step, options.batch)
        mine = batch.view(options.accumulate, parallel.processes(), -1, self.windows.length)[
            :, parallel.rank()
        ]
        total = torch.zeros((), device=self.device)
        for number, tokens in enumerate(mine):
            with without_sync(self.parallel_model, last=number == options.accumulate - 1):
                loss = self.loss(tokens) / options.accumulate
                loss.backward()
            total += loss.detach()
        self.recipe.before_clip(progress)
        nn.utils.clip_grad_norm_(self.parameters.values(), options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recipe.after_step((step + 1) / options.steps)
        return total

    def loss(self, tokens: Tensor) -> Tensor:
        beliefs = None if self.teacher is None else self.beside.begin(lambda: self._predictions(tokens))
        with self._autocast():
            logits = self.forward(input_ids=tokens, use_cache=False).logits
        with self.beside.joined():
            return recovery_loss(
                *(logits, next_tokens(tokens), beliefs),
                task=self.options.task_weight if beliefs is not None else 1.0,
                kl=self.options.kl_weight,
                temperature=self.options.temperature,
            )

    @torch.no_grad()
    def _predictions(self, tokens: Tensor) -> Tensor:
        # A teacher of 16 bit computes in its own dtype, one of 32 in the student's.
        with self._autocast(next(self.teacher.parameters()).dtype == torch.float32):
            logits: Tensor = self.teacher(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss of the held-out windows, each process taking its share."""
        assert self.options.batch is not None
        rows = max(1, self.options.batch // self.options.accumulate // parallel.processes())
        whole = rows * parallel.processes()
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        with evaluating(self.model):
            for start in range(0, len(self.held_out), whole):
                first = start + rows * parallel.rank()
                mine = self.held_out[first : first + rows]
                counts = bool(len(mine))  # all processes must run the model, even one without windows left
                tokens = (mine if counts else self.held_out[:1]).to(self.device)
                with self._autocast():
                    logits = self.parallel_model(input_ids=tokens, use_cache=False).logits
                if counts:
                    total[0] += summed_task_loss(logits, next_tokens(tokens))
                    total[1] += tokens[:, 1:].numel()
        parallel.sum_(total)
        reshard(self.model)
        return float(total[0] / total[1])

    def restore_best(self, position: Position) -> None:
        """The weights that evaluated best or, where none were evaluated as 2:4, those of the start."""
        if position.best_step != position.step or position.best is None:
            self.store.restore_best(position.best_step, self.parameters)

    def finish(self) -> None:
        """Leave a plain 2:4 model."""
        self.recipe.finish()
        if self.options.checkpointing:
            self.model.gradient_checkpointing_disable()
        self.model.zero_grad(set_to_none=True)

    def _look(self, position: Position, loss: float, clock: Clock) -> None:
        """At the training's loss: log it, and stop if it is out of hand."""
        if position.first_loss is None:
            position.first_loss = loss
        self._note(
            position, "train", loss=loss, lr=self.options.rate(position.step - 1), **clock.speed(position)
        )
        if _out_of_hand(loss, position.first_loss):
            position.stopped = "diverged"

    def _judge(self, position: Position) -> None:
        """Keep the weights if they are the best so far; stop if they have not been for long."""
        assert position.last is not None
        assert position.before is not None
        if _out_of_hand(position.last, position.before):
            position.stopped = "diverged"
        elif not self.recipe.settled:  # masks still move: these weights are not 2:4 yet
            if not position.step:
                self.store.save_best(0, self.parameters)
        elif position.best is None or position.last < position.best:
            position.best, position.best_step, position.stale = position.last, position.step, 0
            self.store.save_best(position.step, self.parameters)
        else:
            position.stale += 1
            if self.options.patience and position.stale >= self.options.patience:
                position.stopped = "early"

    def _note(self, position: Position, what: str, **figures: float) -> None:
        if (held_out := figures.get("held_out_loss")) is not None:
            figures["held_out_perplexity"] = perplexity(held_out)
        shown = {key: round(value, 8) for key, value in {**figures, **self.recipe.notes()}.items()}
        self.store.note({"step": position.step, "what": what, **shown})

    def _autocast(self, wanted: bool = True) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow and wanted)

    def _buffers(self) -> dict[str, Tensor]:
        return named_buffers(self.model, dict(self.model.named_parameters()))


def _out_of_hand(loss: float, first: float) -> bool:
    """A loss may rise a little at first, and a KL that starts near 0 to many times that; but not by this."""
    return not math.isfinite(loss) or loss > 2 * first + 3


class Clock:
    """Speed and time left, counted from where this process began."""

    def __init__(self, options: Recover, position: Position) -> None:
        self.options = options
        self.start, self.first, self.before = time.monotonic(), position.step, position.seconds

    def seconds(self) -> float:
        return self.before + time.monotonic() - self.start

    def speed(self, position: Position) -> dict[str, float]:
        assert self.options.batch is not None
        assert self.options.seqlen is not None
        passed = max(time.monotonic() - self.start, 1e-9)
        tokens = (position.step - self.first) * self.options.batch * self.options.seqlen
        return {"tokens_per_second": round(tokens / passed, 1), "seconds": round(self.seconds(), 2)}

    def label(self, position: Position, loss: float) -> str:
        """The time left is in every progress line already."""
        speed = self.speed(position)["tokens_per_second"]
        return f"loss {loss:.3f}, held-out perplexity {perplexity(position.last):.2f}, {speed:,.0f} tokens/s"
