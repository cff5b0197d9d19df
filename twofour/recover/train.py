"""`recover_`: train a 2:4 language model, so that it wins back what pruning lost, and stays 2:4.

The published recipe (arXiv 2104.08378) trains on with fixed masks. For language models most is won by
learning from the dense model's predictions, so with a teacher that is the default.

    every step     windows of (seed, step) → student, teacher → loss → gradients → clip → AdamW → masks hold
    now and then   losses are read and logged; the held-out windows are evaluated and the best weights kept;
                   the state is saved

Here is what surrounds the loop; the loop itself is in `loop.py`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from twofour.calibrate import parallel
from twofour.calibrate.examples import evaluating
from twofour.calibrate.windows import require_vocabulary
from twofour.errors import InputError, TwoFourError
from twofour.progress import OnProgress, silent
from twofour.recover.data import MOST_HELD_OUT, Windows
from twofour.recover.loop import Trainer
from twofour.recover.losses import perplexity
from twofour.recover.options import Recover
from twofour.recover.scales import quantized_layers
from twofour.recover.spread import is_sharded_model
from twofour.recover.state import Position, Store

Model = TypeVar("Model", bound=nn.Module)


def recover_(
    model: Model,
    windows: Tensor,
    teacher: Any = None,
    options: Recover | None = None,
    *,
    held_out: Tensor | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    on_progress: OnProgress = silent,
) -> Model:
    """Train a 2:4 causal language model in place; it comes back 2:4, with the weights that evaluated best.

        twofour.recover_(model, windows, teacher=dense, options=Recover(tokens=1_000_000))

    `windows` are token ids [count, length] to train on, `held_out` others to evaluate on; without them a
    twentieth of the windows is held out. With a `teacher`, the dense model, its predictions are learnt.
    """
    if held_out is None:
        count = min(max(len(windows) // 20, 1), MOST_HELD_OUT)
        windows, held_out = windows[:-count], windows[-count:]
    data = Windows.of(windows)
    settings = options or Recover()
    if settings.seqlen not in (None, data.length):
        raise InputError(f"the windows have {data.length} tokens, and seqlen is {settings.seqlen}.")
    settings = dataclasses.replace(settings, seqlen=data.length)
    with parallel.group_of_torchrun(), tempfile.TemporaryDirectory() as own:
        store = Store(Path(parallel.of_first(own)))
        position = train_(
            *(model, data, held_out, teacher, settle(model, teacher, settings), store),
            include=include,
            exclude=exclude,
            saves=False,
            on_progress=on_progress,
        )
        parallel.wait()
    if position.stopped == "diverged":
        raise diverged(position)
    return model


def settle(model: Any, teacher: Any, options: Recover) -> Recover:
    """The settings with all that was left open, and with a teacher that fits."""
    config = model.config.get_text_config()
    if teacher is not None:
        student, other = config.vocab_size, teacher.config.get_text_config().vocab_size
        if student != other:
            raise InputError(
                f"the teacher has a vocabulary of {other} tokens, and the model one of {student}: their "
                "predictions cannot be compared.",
                hint="Give the dense model that this one was pruned from.",
            )
    return options.settled(
        parameters=sum(p.numel() for p in model.parameters()),
        longest=getattr(config, "max_position_embeddings", None) or 1 << 30,
        has_teacher=teacher is not None,
        processes=parallel.processes(),
        quantized=bool(quantized_layers(model)),
    )


def diverged(position: Position) -> TwoFourError:
    kept = (
        f"The weights of step {position.best_step} were kept, with a held-out perplexity of "
        f"{perplexity(position.best):.2f}."
        if position.best_step
        else "There was nothing better than the start to keep."
    )
    return TwoFourError(
        f"the loss diverged at step {position.step}. {kept}", hint="Lower --lr, or lengthen --warmup."
    )


def train_(
    model: nn.Module,
    windows: Windows,
    held_out: Tensor,
    teacher: Any,
    options: Recover,
    store: Store,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    frozen: Sequence[str] = (),
    stored: Mapping[str, torch.dtype] | None = None,
    saves: bool = True,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> Position:
    """Train with settled options. The model ends with the best weights, plain and 2:4, in its own dtypes.

    `frozen` are parameters that are not trained. `stored` are the dtypes that parameters will be stored in,
    where those are not the model's. `saves`: the state, for `resume`. After an error the model
    is plain and 2:4 as well, with the weights it had then.
    """
    for tokens in (windows.tokens, held_out):
        require_vocabulary(tokens, model)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    training = model.training
    with ExitStack() as stack:
        stack.enter_context(_memory_errors(options))
        stack.enter_context(_own_random_numbers())
        stack.enter_context(_tensor_cores())
        stack.callback(_give_back, model, dtypes, training)
        if teacher is not None:
            stack.enter_context(evaluating(teacher))
        trainer = Trainer(
            *(model, windows, held_out, teacher, options, store, include, exclude, frozen),
            stored={**dtypes, **(stored or {})},
        )
        try:
            position = trainer.run(saves, resume, on_progress)
            trainer.restore_best(position)
        finally:
            trainer.finish()
    return position


def _give_back(model: nn.Module, dtypes: dict[str, torch.dtype], training: bool) -> None:
    model.train(training)
    if not is_sharded_model(model):
        for name, module in quantized_layers(model).items():  # which keep more than their parameters
            module.to(dtypes[f"{name}.weight_scale"])
        for name, parameter in model.named_parameters():
            if name in dtypes:
                parameter.data = parameter.data.to(dtypes[name])


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Leave the caller's random numbers as they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextmanager
def _tensor_cores() -> Iterator[None]:
    """TF32 for what is float32: plenty beside the bfloat16 of everything else."""
    before = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _memory_errors(options: Recover) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU's has no class of its own
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise TwoFourError(
                f"out of memory with {options.batch} windows of {options.seqlen} tokens a step, in "
                f"{options.accumulate} part{'s' * (options.accumulate > 1)}.",
                hint="Raise --accumulate (the result stays the same), add --checkpointing or "
                "--teacher-offload, or lower --batch or --seqlen.",
            ) from error
        raise
