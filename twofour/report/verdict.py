"""The verdict: one sentence from what was measured. What was not measured is not in it."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.report.figures import count, is_number, number, size, times
from twofour.report.layers import kinds_of
from twofour.report.subject import Score, Subject
from twofour.report.times import by_machine, matched, products_of, telling, whole_model

#: Perplexity over dense: up to the first it is as good as dense, up to the second a loss one can live with.
CLOSE, BEARABLE = 1.03, 1.25
#: Less than this over dense is within what two runs differ by.
FASTER = 1.03


@dataclass(frozen=True)
class Speed:
    """How much faster the 2:4 layers are than dense ones, at a few tokens and at many."""

    ratios: tuple[tuple[int, float], ...]  # tokens, dense over 2:4
    whole: bool  # of all layers together; else the median of those that were measured
    gpu: str
    source: str


@dataclass(frozen=True)
class WholeSpeed:
    """How much faster the model itself is than dense, as `bench DIR` measured it on a GPU."""

    ratios: tuple[tuple[str, float], ...]  # what, dense over the best 2:4 form
    gpu: str


@dataclass(frozen=True)
class Quality:
    own: Score
    dense: Score | None

    @property
    def ratio(self) -> float | None:
        return None if self.dense is None else self.own.over(self.dense)


def speed_of(subject: Subject) -> Speed | None:
    machines = by_machine(products_of(subject.documents, subject.scheme)).values()
    own = (matched(kinds_of(subject.layers), products) for products in machines)
    found = next((kinds for kinds in own if kinds), {})
    ratios = []
    whole = True
    for tokens in telling({p.tokens for ps in found.values() for p in ps}):
        every = whole_model(found, len(subject.layers), tokens)
        if every is None:
            whole = False
            some = sorted(p.ratio for ps in found.values() for p in ps if p.tokens == tokens)
            ratios.append((tokens, some[len(some) // 2]))
        else:
            ratios.append((tokens, every[0] / every[1]))
    if not ratios:
        return None
    first = next(iter(found.values()))[0]
    return Speed(tuple(ratios), whole, first.gpu, first.source.partition(",")[0])


def whole_speed_of(subject: Subject) -> WholeSpeed | None:
    """Decode of the smallest batch and prefill of the largest, in the best form; the last document counts."""
    for document in reversed(subject.of("bench")):
        gpu = document.machine.get("gpu")
        if not document.model or not gpu:  # on a CPU 2:4 saves no time, and nothing is said of it
            continue
        best: dict[tuple[str, int], float] = {}
        for row in document.content.get("end_to_end") or []:
            ratio, place = row.get("times_dense"), (row["what"], row["batch"])
            if not row["contender"].startswith("dense") and is_number(ratio):
                best[place] = max(ratio, best.get(place, 0.0))
        decode = min((batch for what, batch in best if what == "decode"), default=None)
        prefill = max((batch for what, batch in best if what == "prefill"), default=None)
        found = [(what, batch) for what, batch in (("decode", decode), ("prefill", prefill)) if batch]
        if found:
            return WholeSpeed(tuple((f"in {w} at batch {b}", best[w, b]) for w, b in found), str(gpu))
    return None


def quality_of(subject: Subject) -> Quality | None:
    """The model's last score, beside a dense one of the same protocol if there is one."""
    own, others = subject.scores()
    for score in reversed(own):
        dense = [other for other in others if other.protocol == score.protocol]
        if dense:
            return Quality(score, dense[-1])
    return Quality(own[-1], None) if own else None


def verdict(subject: Subject) -> str:
    if not subject.layers:
        return f"{subject.name} is dense: nothing of it is 2:4 yet."
    whole, quality = whole_speed_of(subject), quality_of(subject)
    speed = None if whole else speed_of(subject)
    parts = [part for part in (_size(subject), _whole(whole), _speed(speed), _quality(quality)) if part]
    if not parts:
        return f"{subject.name} has {count(len(subject.layers), 'layer')} in 2:4; nothing was measured yet."
    unknown = [
        what
        for what, known in (("its speed on a GPU", whole or speed), ("its accuracy", quality))
        if known is None
    ]
    verb = "was" if len(unknown) == 1 else "were"
    tail = f"; {' and '.join(unknown)} {verb} not measured" if unknown else ""
    return f"{_judgement(subject, whole or speed, quality)}: {', '.join(parts)}{tail}."


def _judgement(subject: Subject, speed: Speed | WholeSpeed | None, quality: Quality | None) -> str:
    gains = ["smaller"] if subject.packed else []
    if speed is not None:
        best = max(ratio for _, ratio in speed.ratios)
        worst = min(ratio for _, ratio in speed.ratios)
        if worst >= FASTER:
            gains.append("faster")
        elif best >= FASTER:
            gains.append("faster at some sizes")
        else:
            gains.append("no faster")
    gain = " and ".join(gains) or "2:4"
    ratio = quality.ratio if quality else None
    if ratio is None:
        return f"{subject.name} is {gain}"
    if ratio <= CLOSE:
        return f"{subject.name} is {gain}, and as good as dense"
    if ratio <= BEARABLE:
        return f"{subject.name} is {gain}, at some loss"
    return f"{subject.name} is {gain}, but lost too much to be used as it is"


def _size(subject: Subject) -> str | None:
    dense, stored, layers = subject.dense_bytes, subject.stored_bytes, subject.layer_bytes()
    if not subject.packed:
        return None
    if dense and stored:
        return f"{size(stored)} instead of {size(dense)}"
    return f"its 2:4 layers take {size(layers[1])} instead of {size(layers[0])}" if layers else None


def _speed(speed: Speed | None) -> str | None:
    if speed is None:
        return None
    first, last = speed.ratios[0], speed.ratios[-1]
    what = "its 2:4 layers together run" if speed.whole else "its measured layers run"
    words = f"{what} {times(first[1])} dense at {count(first[0], 'token')}"
    if last != first:
        words += f" and {times(last[1])} at {last[0]:,}"
    return f"{words} on {speed.gpu}"


def _whole(whole: WholeSpeed | None) -> str | None:
    if whole is None:
        return None
    return f"it runs {' and '.join(f'{times(r)} dense {what}' for what, r in whole.ratios)} on {whole.gpu}"


def _quality(quality: Quality | None) -> str | None:
    if quality is None:
        return None
    words = f"perplexity {number(quality.own.perplexity)}"
    if quality.dense is None:
        return f"{words} (no dense model to compare with)"
    return f"{words} against {number(quality.dense.perplexity)} dense ({times(quality.ratio)})"
