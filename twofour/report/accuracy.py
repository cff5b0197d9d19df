"""The sections about what pruning cost: perplexity, the error of each layer, sensitivity, recovery."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twofour.report.content import Figure, Item, Missing, Plot, Section, Table
from twofour.report.figures import NONE, count, is_number, number, percent, times
from twofour.report.layers import short_labels
from twofour.report.plots import Axis, Bar, Bars, Point, Scatter, Series, spread
from twofour.report.subject import Score, Subject, everyone, same_model
from twofour.words import alike, first_number

#: Layers without numbers in their names are shown as bars, the worst ones; the table has them all.
MOST_BARS = 30
#: Points of a curve; a longer log is thinned out, and the page says so.
MOST_POINTS = 300

#: By stage: what its errors are called, and what they are. Q is the weight that codes and scales stand for.
ERRORS = {
    "prune": {
        "output_error": (
            "Error of each layer's output",
            "share of the output lost on calibration text: ‖(W − W₂₄)·x‖² over ‖W·x‖²",
        ),
        "relative_error": ("Weight lost in each layer", "‖W − W₂₄‖ / ‖W‖"),
    },
    "quantize": {
        "output_error": (
            "Error that rounding adds to each layer's output",
            "share of the output lost on calibration text: ‖(W₂₄ − Q)·x‖² over ‖W₂₄·x‖²",
        ),
        "relative_error": ("Weight lost by rounding in each layer", "‖W₂₄ − Q‖ / ‖W₂₄‖"),
    },
}


def eval_command(subject: Subject, model: str | None = None) -> str:
    if model is None:
        against = shlex.quote(subject.dense_name or "DENSE")
        return f"twofour eval {subject.shell} --data TEXT --against {against} --save"
    # Of another model: it is kept beside this one all the same.
    return f"twofour eval {shlex.quote(model)} --data TEXT --json > {subject.shell}/reports/eval-dense.json"


def perplexity(subjects: Sequence[Subject]) -> Section:
    section = Section("perplexity", "Perplexity")
    rows = []
    by_protocol: dict[str, dict[str, tuple[Score, int]]] = {}
    gaps = []
    for colour, subject in enumerate(subjects, 1):
        own, others = subject.scores()
        if not own:
            gaps.append(Missing(subject.name, "perplexity on a text", eval_command(subject)))
        for score in own:
            dense = next((o for o in reversed(others) if o.protocol == score.protocol), None)
            ratio = None if dense is None else score.over(dense)
            rows.append(_score_row(subject.name, score, ratio))
            by_protocol.setdefault(score.words, {})[subject.name] = (score, colour)
            if dense is None:
                what = f"a dense model's perplexity over the same {score.words}"
                gaps.append(Missing(subject.name, what, eval_command(subject, subject.dense_name or "DENSE")))
        for score in others:
            row = _score_row(f"{Path(score.model).name} (to compare)", score, None)
            if row[:-1] not in [other[:-1] for other in rows]:  # the same figure in two files
                rows.append(row)
            by_protocol.setdefault(score.words, {})[Path(score.model).name] = (score, 0)
    if rows:
        plots = [
            Bars(
                f"Perplexity over {protocol}",
                "Lower is better.",
                [
                    (name, [Bar(s.perplexity, number(s.perplexity), colour)])
                    for name, (s, colour) in sorted(scores.items(), key=lambda item: item[1][1])
                    if is_number(s.perplexity)
                ],
            )
            for protocol, scores in by_protocol.items()
        ]
        columns = [
            "model",
            "perplexity",
            "over dense",
            "same top token",
            "KL, nats",
            "measured over",
            "source",
        ]
        words = ("measured over", "source")
        table = Table("Every perplexity", columns, rows, words=words)
        caption = "Lower is better. Only figures over the same tokens, windows and strides are compared."
        section.items.append(Figure("Perplexity", caption, plots, table))
    section.items += gaps
    return section


def _score_row(name: str, score: Score, ratio: float | None) -> list[str]:
    return [
        name,
        number(score.perplexity),
        times(ratio),
        percent(score.agreement),
        number(score.kl),
        score.words,
        score.source,
    ]


def tasks(subjects: Sequence[Subject]) -> Section:
    """What lm-eval found, where `eval` was asked for tasks. Most models have none, and that is no gap."""
    section = Section("tasks", "Tasks")
    rows: dict[tuple[str, ...], list[str]] = {}
    for document in {d.source: d for subject in subjects for d in subject.of("eval")}.values():
        told = document.content
        harness = told["harness"] if isinstance(told.get("harness"), dict) else {}
        seen = harness["examples"] if isinstance(harness.get("examples"), dict) else {}
        subject = next((s for s in subjects if same_model(told["model"], s)), None)
        name = subject.name if subject else f"{Path(told['model']).name} (to compare)"
        for task, metrics in told.get("tasks", {}).items():
            for key, value in metrics.items():
                metric, _, way = key.partition(",")  # lm-eval's keys are a metric and how the answer was read
                if not way or metric.endswith("_stderr") or not is_number(value):
                    continue
                error = metrics.get(f"{metric}_stderr,{way}")
                within = f"± {number(error)}" if is_number(error) else NONE
                examples = number(seen.get(task)) + (" (the first)" if harness.get("limit") else "")
                rows[name, task, key] = [name, task, key, number(value), within, examples, document.source]
    if rows:
        columns = ["model", "task", "metric", "value", "error", "examples", "source"]
        title = "By lm-eval, the latest of each"
        words = ("task", "metric", "source")
        section.items.append(Table(title, columns, list(rows.values()), words=words))
    return section


def layer_errors(subjects: Sequence[Subject]) -> Section:
    section = Section("layer-errors", "What pruning took from each layer")
    section.items += _errors_of("prune", subjects)
    joint = [s for s in subjects if (s.step("prune") or {}).get("options", {}).get("method") == "joint"]
    if joint:
        section.items.append(
            f"{everyone(joint)}: pruned and rounded in one sweep, so these are errors of both."
        )
    trained = [s for s in subjects if s.step("recover") and s.errors("relative_error")]
    if trained:
        section.items.append(
            f"These are errors of the pruning; recovery has changed the weights of {everyone(trained)} since."
        )
    for subject in subjects:
        if not subject.errors("relative_error"):
            command = f"twofour prune MODEL {subject.shell} --calib TEXT"
            section.items.append(
                Missing(subject.name, "errors of its layers (no record of pruning)", command)
            )
        elif not subject.errors("output_error"):
            command = "twofour prune MODEL OUT --method best --calib TEXT"
            what = "errors of its layers' outputs (it was pruned without text)"
            section.items.append(Missing(subject.name, what, command))
    return section


def rounding_errors(subjects: Sequence[Subject]) -> Section:
    """Of models that were pruned first and quantized then: a joint sweep has one error for both."""
    section = Section("rounding-errors", "What rounding took from each layer")
    section.items += _errors_of("quantize", subjects)
    for subject in subjects:
        step = subject.step("quantize")
        if step is None:
            continue
        options = step.get("options") or {}
        if teacher := options.get("teacher"):
            section.items.append(f"Outputs of {subject.name} follow {teacher}: their error is against that.")
        if any(later["verb"] == "recover" for later in subject.steps[subject.steps.index(step) + 1 :]):
            section.items.append(f"Training has moved the scales of {subject.name} since.")
        if subject.errors("relative_error", "quantize") and not subject.errors("output_error", "quantize"):
            command = f"twofour quantize MODEL OUT --scheme {options.get('scheme', 'S')} --calib TEXT"
            what = "errors of its layers' outputs (it was rounded without text)"
            section.items.append(Missing(subject.name, what, command))
    return section


def _errors_of(verb: str, subjects: Sequence[Subject]) -> list[Item]:
    figures: list[Item] = []
    for which, (title, meaning) in ERRORS[verb].items():
        by_model = {s.name: found for s in subjects if (found := s.errors(which, verb))}
        if by_model:
            sources = {s.name: s.made_by for s in subjects}
            figures.append(_by_layer(title, meaning, by_model, sources, [s.name for s in subjects]))
    return figures


def sensitivity(subjects: Sequence[Subject]) -> Section:
    section = Section("sensitivity", "Sensitivity of each layer")
    by_model: dict[str, dict[str, float]] = {}
    sources = {}
    for subject in subjects:
        for document in subject.of("sensitivity"):
            rows = document.content["layers"]
            found = {n: r["loss_increase"] for n, r in rows.items() if is_number(r["loss_increase"])}
            if found:
                by_model[subject.name] = found
                sources[subject.name] = document.source
    if by_model:
        meaning = "loss added when this layer alone is pruned, nats a token"
        section.items.append(
            _by_layer("Loss added by each layer", meaning, by_model, sources, [s.name for s in subjects])
        )
    if without := [subject for subject in subjects if subject.name not in by_model]:
        what = "loss added by each layer alone"
        command = (
            f"twofour sensitivity DENSE --calib TEXT --json > {without[0].shell}/reports/sensitivity.json"
        )
        section.items.append(Missing(everyone(without), what, command))
    return section


@dataclass
class _Line:
    """Values by layer, of one model or of several that have the same, such as before and after recovery."""

    name: str
    colour: int
    values: Mapping[str, float]


def _lines(by_model: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> list[_Line]:
    lines: list[_Line] = []
    for model, values in by_model.items():
        same = next((line for line in lines if line.values == values), None)
        if same is None:
            lines.append(_Line(model, order.index(model) + 1, values))
        else:  # drawn twice, the first would be hidden
            same.name += f" and {model}"
    return lines


def _by_layer(
    title: str,
    meaning: str,
    by_model: Mapping[str, Mapping[str, float]],
    sources: Mapping[str, str],
    order: Sequence[str],
) -> Figure:
    """A panel for each kind of layer, blocks from left to right, a series for each model."""
    names = list(dict.fromkeys(name for found in by_model.values() for name in found))
    labels = short_labels([alike(name) for name in names])
    lines = _lines(by_model, order)
    every = [value for found in by_model.values() for value in found.values()]
    low, high = min(0.0, *every), max(every)  # a layer's loss may fall
    by_kind: dict[str, list[str]] = {}
    for name in names:
        if first_number(name) is not None:
            by_kind.setdefault(alike(name), []).append(name)
    plots: list[Plot] = []
    for pattern, own in by_kind.items():
        series = []
        for line in lines:
            found = line.values
            points = [
                Point(first_number(n) or 0, found[n], f"{n}: {number(found[n])}") for n in own if n in found
            ]
            once = len({p.x for p in points}) == len(points)  # experts: several in a block
            series.append(Series(line.name, points, line.colour, line=once))
        values = [p.y for s in series for p in s.points]
        plots.append(
            Scatter(
                labels[pattern],
                f"{meaning}, {count(len(own), 'layer')}: {spread(values, 'values')}.",
                Axis("block", tight=True),
                Axis("share" if "lost" in meaning or "‖" in meaning else "nats", low=low, high=high),
                series,
                height=180,
            )
        )
    plain = [name for name in names if first_number(name) is None]
    if plain:
        worst = {name: max(found.get(name, 0.0) for found in by_model.values()) for name in plain}
        shown = sorted(plain, key=worst.__getitem__, reverse=True)[:MOST_BARS]
        groups = [
            (n, [Bar(x.values[n], number(x.values[n]), x.colour, x.name) for x in lines if n in x.values])
            for n in shown
        ]
        said = f"the {len(shown)} largest of {len(plain)}" if len(shown) < len(plain) else "all"
        plots.append(Bars(f"Layers ({said})", f"{meaning}.", groups))
    rows = [[name, *(number(found.get(name)) for found in by_model.values())] for name in names]
    table = Table(f"{title}: every layer", ["layer", *by_model], rows, folded=True, models=True)
    where = ", ".join(dict.fromkeys(sources[model] for model in by_model))
    caption = f"{meaning[0].upper()}{meaning[1:]}. All panels have the same scale. Source: {where}."
    legend = [(line.colour, line.name) for line in lines] if len(order) > 1 else []
    return Figure(title, caption, plots, table, legend, small=True)


def recovery(subjects: Sequence[Subject]) -> Section:
    section = Section("recovery", "Loss over recovery")
    curves: dict[str, tuple[str, list[Series]]] = {
        "loss": ("Training loss", []),
        "held_out_perplexity": ("Perplexity of held-out text", []),
    }
    rows = []
    thinned = []
    told = []
    for colour, subject in enumerate(subjects, 1):
        source = f"{subject.name}/recover.jsonl"
        if not subject.log:
            if subject.layers:
                command = (
                    f"twofour recover PRUNED {shlex.quote(f'{subject.directory}-recovered')} --data TEXT"
                )
                section.items.append(Missing(subject.name, "recovery: it was not fine-tuned", command))
            continue
        for key, (_, series) in curves.items():
            logged = [(e["step"], e[key]) for e in subject.log if is_number(e.get(key))]
            kept = _thin(logged)
            if len(kept) < len(logged):
                thinned.append(f"{len(kept)} of {len(logged):,} points of {subject.name} are drawn")
            points = [Point(step, v, f"step {step:,}: {number(v)}") for step, v in kept]
            if points:
                many = len(points) > 40
                series.append(Series(subject.name, points, colour, line=True, markers=not many))
            rows += [
                [subject.name, f"{step:,}", curves[key][0], number(value), source] for step, value in kept
            ]
        told.append(_told(subject))
    if rows:
        plots = [
            Scatter(
                title,
                "; ".join(f"{s.name}: {number(s.points[0].y)} to {number(s.points[-1].y)}" for s in series)
                + ".",
                Axis("step", tight=True),
                Axis("nats" if key == "loss" else "perplexity", zero=False),
                series,
            )
            for key, (title, series) in curves.items()
            if series
        ]
        table = Table(
            "The curves",
            ["model", "step", "what", "value", "source"],
            rows,
            words=("what", "source"),
            folded=True,
        )
        caption = " ".join([*filter(None, told), *(f"{words}." for words in thinned)])
        caption += " The training loss of distillation is not a perplexity's: compare it only with itself."
        legend = [(c, s.name) for c, s in enumerate(subjects, 1) if s.log] if len(subjects) > 1 else []
        section.items.insert(
            0, Figure("Loss over recovery", caption.strip(), plots, table, legend, small=True)
        )
    return section


def _told(subject: Subject) -> str:
    step = subject.step("recover") or {}
    held = step.get("held_out_perplexity")
    if not isinstance(held, dict):
        return ""
    seconds = step.get("seconds")
    recipe = (step.get("options") or {}).get("recipe", NONE)
    return (
        f"{subject.name}: {number(step.get('tokens'))} tokens by {recipe}, "
        f"{number(held.get('before'))} before and {number(held.get('after'))} after"
        + (f", {number(seconds)} s." if is_number(seconds) else ".")
    )


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them, evenly, with the first and the last."""
    if len(points) <= MOST_POINTS:
        return points
    step = (len(points) - 1) / (MOST_POINTS - 1)
    return [points[round(number * step)] for number in range(MOST_POINTS)]
