"""8 and 4 bits on top of 2:4: perplexity of each scheme and rounding, and of the 16-bit 2:4 model.

Usage: python benchmarks/quantize.py MODEL CALIBRATION EVALUATION [options]; --help has them.

MODEL is a directory, or a .gguf file, whose weights had fewer bits already: rows then say so. It is pruned
once by each of `--methods` and kept as it is stored, in its own 16-bit type. Every row quantizes that, on
other windows of the same text (the next seed), as `twofour quantize` does by default,
through files as `twofour quantize` does, loads the result with from_pretrained and scores it; the joint
rows start from MODEL itself, as `twofour prune --scheme` does, so their masks are their own. Calibration
and evaluation are those of benchmarks/oneshot.py, scored in float32 on `--device`; the work itself takes a
GPU if there is one. Rows are printed as they come, and added to the file `--out` in place of older ones of
the same. Each has its perplexity over that of the 16-bit 2:4 model of the same masks, the joint rows over
that of sparsegpt's; rows with a teacher keep the masks and round towards MODEL. Perplexity moves by luck
as well, so with `--divergence` rows also say how far the predictions are from those of that 16-bit model,
or of the teacher, in nats a token (KL).

With `--train TOKENS` there are rows of `twofour recover` too, on CALIBRATION, with MODEL as the teacher:
"scales" trains what was quantized, "trained" trains the pruned model with the rounding in the loop
(`--scheme`) and rounds it to the nearest, over a 16-bit model of the same masks that was trained as long.
In "itself" rows the scales are trained towards the 16-bit 2:4 model and nothing else (`--rate`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from oneshot import add_row, perplexity, windows_of

import twofour
from twofour.demo import from_gguf
from twofour.io.check import check
from twofour.io.checkpoint import Checkpoint
from twofour.io.prune import prune_checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.quantize import QuantizeOptions, quantize_checkpoint
from twofour.io.record import last_step
from twofour.io.recover import recover_checkpoint
from twofour.quantize import Rounding
from twofour.recover import Recover

#: Scheme, group, rounding, and what else: those of the default set first, then the ones of `--all`.
ROWS: tuple[tuple[str, int | None, str, str], ...] = (
    ("int8", None, "nearest", ""),
    ("int8", None, "compensated", ""),
    ("fp8", None, "nearest", ""),
    ("fp8", None, "compensated", ""),
    ("fp8", None, "compensated", "tune"),
    ("fp8", None, "compensated", "teacher"),
    ("fp8", None, "compensated", "teacher tune"),
    ("int4", 128, "nearest", ""),
    ("int4", 128, "compensated", ""),
    ("int4", 128, "compensated", "tune"),
    ("int4", 128, "compensated", "teacher"),
    ("int4", 128, "compensated", "teacher tune"),
    ("int4", 128, "joint", ""),
    ("int4", 128, "joint", "tune"),
)
MORE: tuple[tuple[str, int | None, str, str], ...] = (
    ("int8", None, "nearest", "smooth"),
    ("int8", None, "compensated", "smooth"),
    ("int8", None, "compensated", "tune"),
    ("int8", None, "compensated", "teacher smooth"),
    ("int8-weight", None, "compensated", ""),
    ("fp8-weight", None, "compensated", ""),
    ("int4", 64, "compensated", ""),
    ("int4", 32, "nearest", ""),
    ("int4", 32, "compensated", ""),
    ("int8", None, "joint", ""),
    ("fp8", None, "joint", ""),
)

#: Those of `--train`.
TRAINED: tuple[tuple[str, int | None, Rounding, str], ...] = (
    ("int8", None, "compensated", "smooth itself"),
    ("fp8", None, "compensated", "itself"),
    ("int4", 128, "compensated", "itself"),
    ("fp8", None, "nearest", "trained"),
    ("int4", 128, "nearest", "trained"),
    ("int8", None, "compensated", "smooth scales"),
    ("fp8", None, "compensated", "scales"),
    ("int4", 128, "compensated", "scales"),
)

SAME = (
    *("model", "method", "scheme", "group", "rounding", "smooth", "tune", "teacher"),
    *("recovered", "trained_on", "calibration", "rounded_on", "evaluation", "device"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("evaluation", type=Path)
    parser.add_argument(
        "--methods", nargs="+", default=["sparsegpt"], help="whose masks; joint rows need none"
    )
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--round-samples", type=int, help="windows for rounding; default: as for pruning")
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--windows", type=int, default=None, help="score only the first so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="scores here"
    )
    parser.add_argument("--name", help="what the rows call the model; default: its directory's name")
    parser.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        help="rows with such names: 'fp8 *', 'int4 128 compensated', '* joint tune'",
    )
    parser.add_argument("--divergence", action="store_true", help="from the 16-bit model, in nats a token")
    parser.add_argument("--all", action="store_true", help="more rows: smoothing, other groups, weights only")
    parser.add_argument("--train", type=int, help="tokens for the rows of `recover`, in steps of 4 windows")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the rows that learn from 16 bit")
    parser.add_argument("--work", type=Path, help="keep the checkpoints here; the pruned ones are used again")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        run(given, given.work or Path(temporary))


def run(given: argparse.Namespace, work: Path) -> None:
    source = given.model
    if source.suffix == ".gguf":
        source = work / "dense"
        if not source.exists():
            from_gguf(given.model, source)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    scored = windows_of(tokenizer, given.evaluation, given.context, given.windows)
    rounded_on = given.round_samples or given.samples
    calibration, others = (
        CalibrationOptions(given.calibration, samples, given.seqlen, seed)
        for samples, seed in ((given.samples, given.seed), (rounded_on, given.seed + 1))
    )
    device = torch.device(given.device)
    named = {
        "model": given.name or given.model.resolve().stem,
        **({"weights": "from a GGUF of fewer bits"} if given.model.suffix == ".gguf" else {}),
    }
    about = {
        "calibration": f"{given.samples}x{given.seqlen} of {given.calibration.name}, seed {given.seed}",
        "rounded_on": f"{rounded_on}x{given.seqlen}, seed {given.seed + 1}"
        if rounded_on != given.samples
        else f"seed {given.seed + 1}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "twofour": twofour.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }

    def load(directory: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return model.eval().to(device)

    def measure(directory: Path, over: float | None, beside: Path | None = None, **what: Any) -> float:
        """Score it, also by its divergence from the model `beside`."""
        model = load(directory)
        value, count = perplexity(model, scored)
        evaluated = f"{len(scored)} windows of at most {given.context}, {count} tokens"
        found = {"perplexity": round(value, 4)} | ({"over_16_bit": round(value / over, 4)} if over else {})
        if beside and given.divergence:
            key = "divergence" if beside.name.startswith("pruned-") else "divergence_from_teacher"
            found[key] = round(divergence(model, load(beside), scored), 6)
        row = {**named, **what, **found, "evaluation": f"{evaluated} of {given.evaluation.name}", **about}
        print(json.dumps(row), flush=True)
        if given.out:
            add_row(given.out, row, SAME)
        return value

    def quantized(out: Path, source: Path, options: QuantizeOptions) -> dict[str, Any]:
        """Make it, unless it is there, prove 2:4, and say how large it is and how long it took."""
        start = time.perf_counter()
        # Nearest without text: what there is for those who have none.
        text = None if options.rounding == "nearest" and not options.smooth else others
        if not out.exists():
            quantize_checkpoint(source, out, options, calibration=text)
        seconds = time.perf_counter() - start
        report = check(out)
        if not report.ok:
            sys.exit(f"{out}: {report.faults[0]}")
        stored, dense = (
            sum(getattr(layer, what) for layer in report.layers) for what in ("stored_bytes", "dense_bytes")
        )
        sizes = {"bytes": stored, "share_of_dense_16_bit": round(stored / dense, 4)}
        return {**sizes, "seconds": round(seconds, 1)}

    def wanted(*parts: object) -> str | None:
        """The name of a row, if it is asked for."""
        name = " ".join(str(part) for part in parts if part)
        return name if any(fnmatch(name, pattern) for pattern in given.only) else None

    plain = {
        "scheme": "16 bit",
        "group": None,
        "rounding": None,
        "smooth": False,
        "tune": False,
        "teacher": False,
    }
    base: dict[str, float] = {}
    for method in given.methods:
        pruned = work / f"pruned-{method}"
        start = time.perf_counter()
        if not pruned.exists():
            prune_checkpoint(source, pruned, method, calibration=calibration)
        seconds = round(time.perf_counter() - start, 1)
        base[method] = measure(pruned, None, method=method, **plain, seconds=seconds)
    for scheme, group, rounding, extra in (*ROWS, *(MORE if given.all else ())):
        if not (name := wanted(scheme, group, rounding, extra)):
            continue
        how: Any = rounding
        extras = extra.split()
        teacher = source if "teacher" in extras else None
        options = QuantizeOptions(scheme, group, how, "smooth" in extras, "tune" in extras, teacher)
        joint = rounding == "joint"
        for method in ["joint"] if joint else given.methods:
            if method == "best" and teacher is not None and not options.tune:
                continue  # `quantize` refuses it: such a model was tuned towards the teacher before
            out = work / f"{method} {name}".replace(" ", "-")
            made = quantized(out, source if joint else work / f"pruned-{method}", options)
            what = {"scheme": scheme, "group": group, "rounding": rounding}
            what |= {"smooth": options.smooth, "tune": options.tune, "teacher": teacher is not None}
            # Over the two steps' 16-bit model: of sparsegpt, whose sweep the joint one is, if it was run.
            over = base.get("sparsegpt", next(iter(base.values()))) if joint else base[method]
            # Other masks are another model.
            beside = None if joint else teacher or work / f"pruned-{method}"
            measure(out, over, beside, method=method, **what, **made)

    def recovered(out: Path, start: Path, teacher: Path = source, **others: Any) -> float:
        """Train it, unless it is there, and say how long that took."""
        if not out.exists():
            options = Recover(tokens=given.train, batch=4, seqlen=given.seqlen, **others)
            recover_checkpoint(start, out, [given.calibration], teacher, options)
        return float((last_step(Checkpoint(out).record, "recover") or {})["seconds"])

    for method in given.methods if given.train else ():
        pruned = work / f"pruned-{method}"
        training = {"method": method, "teacher": True, "trained_on": given.train}
        against = {"scales": base[method], "itself": base[method]}
        for scheme, group, rounding, extra in TRAINED:
            if not (name := wanted(scheme, group, rounding, extra)):
                continue
            *extras, how = extra.split()
            if how not in against:  # what the same training gives in 16 bit
                seconds = recovered(plainly := work / f"{method}-trained", pruned)
                what = {**plain, **training, "recovered": how, "seconds": seconds}
                against[how] = measure(plainly, base[method], source, **what)
            out = work / f"{method} {name}".replace(" ", "-")
            options = QuantizeOptions(scheme, group, rounding, "smooth" in extras)
            beside = source
            if how == "trained":
                start = work / f"{method}-trained-for-{scheme}"
                seconds = recovered(start, pruned, scheme=scheme)
                made = {**quantized(out, start, options), "seconds": seconds}
            else:
                start = out.with_name(out.name.removesuffix(f"-{how}"))
                made = quantized(start, pruned, options)
                if how == "itself":
                    beside = pruned
                    made["seconds"] = recovered(out, start, pruned, lr=given.rate, task_weight=0.0)
                else:
                    made["seconds"] = recovered(out, start)
            what = {"scheme": scheme, "group": group, "rounding": rounding, "recovered": how}
            what |= training | {"smooth": options.smooth, "tune": False, "teacher": how != "itself"}
            measure(out, against[how], beside, **what, **made)


@torch.no_grad()
def divergence(model: Any, reference: Any, windows: list[list[int]]) -> float:
    """The mean over all tokens of KL(reference ‖ model), in nats."""
    total, count = 0.0, 0
    for window in windows:
        tokens = torch.tensor([window], device=model.device)
        found, wanted = (
            m(tokens, use_cache=False).logits[0, :-1].log_softmax(-1) for m in (model, reference)
        )
        total += float(torch.nn.functional.kl_div(found, wanted, reduction="sum", log_target=True))
        count += len(found)
    return total / count


if __name__ == "__main__":
    main()
