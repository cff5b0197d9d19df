"""Recover a pruned checkpoint on disk: train it, and write it with the weights that evaluated best.

While it runs, everything is in `.OUT.recover/` beside the target: the state, the best weights, what the
teacher wrote, the log. OUT appears when it is whole.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from twofour.calibrate import parallel
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.format import is_packed, made_by, scheme_of
from twofour.io.load import load_causal_lm
from twofour.io.pack import layers_to_pack
from twofour.io.prune_calibrated import DTYPES, checkpoint_dtype
from twofour.io.record import add_step, last_step, summary
from twofour.io.stream import require_sound, rewrite
from twofour.io.structure import keys_in_files
from twofour.io.workplace import beside, describe_run, disk_full, empty, held, require_same_run, run_of
from twofour.io.writer import CheckpointWriter, require_new
from twofour.pattern import check_pattern, require_finite
from twofour.progress import OnProgress, silent
from twofour.recover.data import SELF, read_data
from twofour.recover.losses import perplexity
from twofour.recover.options import Recover
from twofour.recover.state import Position, Store
from twofour.recover.train import diverged, settle, train_
from twofour.select import Layer

LOG = "recover.jsonl"


def recover_checkpoint(
    source: str | Path,
    out: str | Path,
    data: Sequence[str | Path],
    teacher: str | Path | None = None,
    options: Recover | None = None,
    *,
    eval_data: str | Path | None = None,
    resume: bool = False,
    on_progress: OnProgress = silent,
) -> dict[str, Any]:
    """Write a recovered copy of a pruned checkpoint, still in dense form, and return the record of the step.

    Without `teacher` it is the model that the record of the pruning names, if that is still there.
    """
    options = options or Recover()
    checkpoint = Checkpoint(source)
    require_new(Path(out))
    if is_packed(checkpoint.config) and scheme_of(checkpoint.config["quantization_config"]) is None:
        raise InputError(
            f"{source} is packed, and packed weights are not trained.",
            hint="Recover the pruned checkpoint that it was made from, then pack.",
        )
    if any(key.endswith(".lowrank_left") for key in checkpoint.tensors):
        raise InputError(
            f"{source} was pruned with --lowrank, and its corrections fit the weights as they are.",
            hint="Recover one that was pruned without.",
        )
    if teacher is None and options.recipe != "masked":
        teacher = recorded_teacher(checkpoint)
    work = beside(Path(out), "recover")
    described = {
        "source": str(checkpoint.directory.absolute()),
        "data": [str(path) for path in data],
        "teacher": None if teacher is None else str(Path(teacher).absolute()),
        "eval_data": None if eval_data is None else str(eval_data),
    }
    with _workplace(work, Path(out)):
        if parallel.is_first():
            require_sound(checkpoint, on_progress)
        final, settings, frozen = _trained(
            *(checkpoint, data, teacher, options, work, Path(out), described, eval_data, resume, on_progress)
        )
        step = {
            "verb": "recover",
            "options": dataclasses.asdict(settings) | described,
            **_told(final[1], settings),
            "frozen": frozen,
        }
        parallel.wait()  # all have read how it went: the first takes the directory away
        if parallel.is_first() and (final[1].best_step or final[1].stopped != "diverged"):
            _write(checkpoint, Path(out), final[0], step)
            shutil.copyfile(work / LOG, Path(out) / LOG)
            shutil.rmtree(work)
        parallel.wait()
    if final[1].stopped == "diverged":
        if parallel.is_first():
            shutil.rmtree(work, ignore_errors=True)
        raise diverged(final[1])
    return step


def _trained(
    checkpoint: Checkpoint,
    data: Sequence[str | Path],
    teacher: str | Path | None,
    options: Recover,
    work: Path,
    out: Path,
    described: dict[str, Any],
    eval_data: str | Path | None,
    resume: bool,
    on_progress: OnProgress,
) -> tuple[tuple[Path, Position], Recover, list[str]]:
    """The file with the final weights and how the run went, the settings, and what was not trained."""
    layers = [layer.name.replace("[", "[[]") for layer in _masked_layers(checkpoint).values()]
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    # A model that is sharded need not fit on one GPU, so it starts on the CPU.
    start = "cpu" if options.fsdp else device
    model, tokenizer = load_causal_lm(checkpoint.directory, start, torch.float32)
    dense = _load_teacher(teacher, tokenizer, "cpu" if options.teacher_offload else start)
    settings = settle(model, dense, options)
    made_of: list[Any] = [text for text in data if str(text) != SELF]
    made_of += [] if teacher is None else [Checkpoint(teacher)]
    run = run_of(settings.outcome() | described, checkpoint, *made_of)
    if resume and _has_work(work):
        require_same_run(work, run)
    store = Store(work)

    def begin() -> None:
        if parallel.is_first():
            if not resume:
                empty(work)
            describe_run(work, run, out)
        parallel.wait()

    keys = tensor_names(model, checkpoint)
    frozen = sorted(name for name, p in model.named_parameters() if name not in keys and p.requires_grad)
    final = store.final() if resume else None
    if final is None:
        assert settings.seqlen is not None
        if dense is not None and SELF in map(str, data) and dense.device != torch.device(device):
            dense.to(device)  # to write; it is sharded or offloaded after that
        windows, held_out = read_data(
            *(data, tokenizer),
            length=settings.seqlen,
            tokens=settings.tokens,
            seed=settings.seed,
            teacher=dense,
            work=work,
            eval_data=eval_data,
            begin=begin,
            on_progress=on_progress,
        )
        position = train_(
            *(model, windows, held_out, dense, settings, store),
            include=layers,
            frozen=frozen,
            stored={name: checkpoint_dtype(checkpoint, found[0]) for name, found in keys.items()},
            resume=resume,
            on_progress=on_progress,
        )
        trained = {n: p for n, p in model.named_parameters() if n in keys}
        store.save_final({key: trained[name] for name in trained for key in keys[name]}, position)
        final = store.final()
        assert final is not None
    return final, settings, frozen


def _masked_layers(checkpoint: Checkpoint) -> dict[str, Layer]:
    """The 2:4 layers by the tensors that hold their weights; codes, which do not change, need none."""
    return {} if is_packed(checkpoint.config) else layers_to_pack(checkpoint, (), ()).by_tensor


def _write(checkpoint: Checkpoint, out: Path, trained: Path, step: dict[str, Any]) -> None:
    layers = _masked_layers(checkpoint)
    with safe_open(trained, framework="pt") as file:
        new = set(file.keys())

        def place(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
            if name not in new:
                return {name: tensor}, {}
            weight = file.get_tensor(name).to(checkpoint_dtype(checkpoint, name))
            require_finite(weight, name)
            if name in layers and not check_pattern(layers[name].to_matrix(weight)).legal:
                raise AssertionError(f"{name}: recovery broke 2:4")
            return {name: weight}, {}

        def finish(writer: CheckpointWriter, notes: dict[str, Any]) -> None:
            record = add_step(checkpoint.record, step)
            config = checkpoint.config
            if is_packed(config):
                config = made_by(config, summary(record))
            writer.finish(config, record, copy_from=checkpoint.directory)

        rewrite(checkpoint, out, place, step["options"], finish)


def _told(position: Position, settings: Recover) -> dict[str, Any]:
    """How a run went, in figures."""
    assert settings.batch is not None
    assert settings.seqlen is not None
    return {
        "steps": position.step,
        "tokens": position.step * settings.batch * settings.seqlen,
        "best_step": position.best_step,
        "held_out_loss": {"before": position.before, "after": position.best},
        "held_out_perplexity": {"before": perplexity(position.before), "after": perplexity(position.best)},
        "stopped": position.stopped or None,
        "seconds": round(position.seconds, 2),
    }


def tensor_names(model: Any, checkpoint: Checkpoint) -> dict[str, list[str]]:
    """For each parameter the tensors of the files that hold it: several, where tied ones were stored twice.

    One that transformers made out of something else cannot be written back, and is missing here.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, list[str]] = {}
    key_of = keys_in_files(model, checkpoint.tensors)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = key_of(name)
        info = None if key is None else checkpoint.tensors[key]
        if info is not None and info.shape == tuple(parameter.shape) and info.dtype in DTYPES:
            found.setdefault(first[id(parameter)], []).append(info.name)
    return found


def recorded_teacher(checkpoint: Checkpoint) -> str | None:
    """The dense model that this one was pruned from, where the record names it and it is still there."""
    source = (last_step(checkpoint.record, "prune") or {}).get("source")
    return source if isinstance(source, str) and (Path(source) / "config.json").exists() else None


def _load_teacher(teacher: str | Path | None, tokenizer: Any, device: str) -> Any:
    if teacher is None:
        return None
    # On a GPU in the dtype of its checkpoint. A CPU is slower in 16 bit, unless it only stores it.
    model, other = load_causal_lm(teacher, device, "auto" if torch.cuda.is_available() else None)
    if other.get_vocab() != tokenizer.get_vocab():
        raise InputError(
            f"the tokenizer of the teacher {teacher} is another one than the model's: the same numbers are "
            "other words to it.",
            hint="Give the dense model that this one was pruned from.",
        )
    return model


@contextmanager
def _workplace(work: Path, out: Path) -> Iterator[None]:
    """The directory of a run. After an error it stays only if there is something to go on from."""
    with ExitStack() as stack:
        if parallel.is_first():
            stack.enter_context(held(work, out))
        parallel.wait()
        try:
            yield
        except Exception as error:
            if parallel.is_first() and not _has_work(work):
                shutil.rmtree(work, ignore_errors=True)
            if full := disk_full(error, out):
                raise full from error
            raise


def _has_work(work: Path) -> bool:
    """Whether there is something that a later run could go on from."""
    return Store(work).has_state() or any(work.glob("written-*.safetensors"))
