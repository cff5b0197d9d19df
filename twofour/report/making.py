"""The sections about the thing itself: its size, its words, how it was made, and what is not known."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twofour.report.content import Figure, Item, Missing, Passage, Section, Step, Table
from twofour.report.documents import REPORTS, Refused
from twofour.report.figures import NONE, count, duration, is_number, number, percent, size, times
from twofour.report.plots import Bar, Bars
from twofour.report.speed import whole_model_command
from twofour.report.subject import Subject, everyone, same_model
from twofour.report.verdict import quality_of, speed_of

#: Tables by layer are shown elsewhere on the page; the record of a step would be mostly them.
BY_LAYER = ("layers", "left", "blocks")

#: Options of each stage's command line, as they are called in the record.
FLAGS: dict[str, tuple[str, ...]] = {
    "prune": ("method", "calib", "samples", "seqlen", "seed", "lowrank", "scheme", "group"),
    "recover": (
        *("teacher", "tokens", "recipe", "lr", "batch", "seqlen", "accumulate", "warmup", "schedule"),
        *("weight_decay", "clip", "kl_weight", "task_weight", "temperature", "dtype", "eval_data"),
        *(
            "eval_every",
            "patience",
            "save_every",
            "decay",
            "until",
            "rank",
            "alpha",
            "scheme",
            "group",
            "seed",
        ),
    ),
    "quantize": ("scheme", "group", "rounding", "teacher", "calib", "samples", "seqlen", "seed"),
    "pack": (),
}
SWITCHES = ("checkpointing", "fsdp", "compile", "teacher_offload", "tune", "permute")


def sizes(subjects: Sequence[Subject]) -> Section:
    section = Section("size", "Size and memory")
    rows = []
    groups = []
    gaps: list[Item] = []
    for colour, subject in enumerate(subjects, 1):
        stored, dense, layers = subject.stored_bytes, subject.dense_bytes, subject.layer_bytes()
        if stored is None:
            section.items.append(f"{subject.name}: its weights could not be looked at. {subject.no_weights}")
            continue
        share = stored / dense if dense else None
        both = f"{size(layers[0])} → {size(layers[1])} ({percent(layers[1] / layers[0])})" if layers else NONE
        known = [size(dense), size(stored), percent(share), both]
        rows.append([subject.name, subject.form, *known, "headers of its files"])
        if is_number(dense):
            bars = [Bar(dense, size(dense), 0, "dense"), Bar(stored, size(stored), colour, subject.form)]
            groups.append((subject.name, bars))
        if subject.layers and not subject.packed:
            command = f"twofour pack {subject.shell} {shlex.quote(f'{subject.directory}-packed')}"
            gaps.append(Missing(subject.name, "its size packed: it is still stored dense", command))
    if rows:
        columns = ["model", "form", "as dense", "on disk", "share", "its 2:4 layers", "source"]
        table = Table("Bytes", columns, rows, words=("form", "source"))
        caption = (
            "Of all tensors. Of a dense layer's 16 bits a weight, a packed one takes 9, in 8 bits 5, in 4 "
            "bits 3 and its scales; the rest is as before."
        )
        plot = Bars("Bytes of all tensors", "Dense, and as it is stored.", groups)
        section.items.append(Figure("Size on disk", caption, [plot], table, [(0, "dense")]))
    section.items += gaps
    memory = []
    for document in {d.source: d for s in subjects for d in s.of("bench")}.values():
        for index, row in enumerate(document.content.get("end_to_end") or []):
            if is_number(row.get("peak_bytes")) or (document.model and is_number(row.get("model_bytes"))):
                case = f"{row['what']} {row['batch']}×{row['tokens']}, {row['mode']}"
                figures = [
                    size(row.get("model_bytes")),
                    size(row.get("peak_bytes")),
                    percent(row.get("resident_share")),
                ]
                memory.append([case, row["contender"], *figures, f"{document.source}, end_to_end[{index}]"])
    if memory:
        columns = ["case", "contender", "model", "peak", "2:4 layers over dense", "source"]
        title = "Memory of the model that was measured end to end (its peak is known on a GPU only)"
        section.items.append(Table(title, columns, memory, words=("contender", "source"), folded=True))
    elif sparse := [subject for subject in subjects if subject.layers]:
        section.items.append(Missing(everyone(sparse), "memory", whole_model_command(sparse[0])))
    return section


def generations(subjects: Sequence[Subject]) -> Section:
    """The same prompt, continued by every model that has a document of it."""
    section = Section("generations", "The same prompt, continued")
    by_prompt: dict[str, dict[str, tuple[str, str]]] = {}
    for subject in subjects:
        for document in subject.of("generate"):
            told = document.content
            mine = same_model(told["model"], subject)
            name = subject.name if mine else f"{Path(told['model']).name} (to compare)"
            by_prompt.setdefault(told["prompt"], {})[name] = (told["text"], document.source)
        for document in subject.of("bench"):
            dense = document.content.get("dense")
            compared = dense.get("model") if isinstance(dense, dict) else None
            for written in document.content.get("generations") or []:
                texts = by_prompt.setdefault(written["prompt"], {})
                for key, model in (("dense", compared), ("sparse", document.model)):
                    if isinstance(written.get(key), str) and isinstance(model, str):
                        mine = same_model(model, subject)
                        name = subject.name if mine else f"{Path(model).name} (to compare)"
                        texts[name] = (written[key], document.source)
        for document in subject.of("demo"):
            told = document.content
            texts = by_prompt.setdefault(told["prompt"], {})
            texts[f"{Path(told['dense']).name} (to compare)"] = (told["dense_text"], document.source)
            texts[subject.name] = (told["packed_text"], document.source)
    for prompt, texts in by_prompt.items():
        rows = [[name, text, source] for name, (text, source) in texts.items()]
        table = Table(f"“{prompt}” …", ["model", "continues", "source"], rows, words=("continues", "source"))
        section.items.append(table)
    have = {name for texts in by_prompt.values() for name in texts}
    for subject in subjects:
        if subject.name not in have:
            command = f'twofour report {subject.shell} --generate "PROMPT"'
            section.items.append(Missing(subject.name, "what it writes", command))
    return section


def advice(subjects: Sequence[Subject]) -> Section:
    """What `advise` said beforehand."""
    section = Section("advice", "What was expected")
    documents = {d.source: d for subject in subjects for d in subject.of("advise")}
    for document in documents.values():
        told = document.content
        rows = [
            [
                form["name"] + ("" if form.get("measured", True) else " (not measured)"),
                duration(form["prefill_ms"]),
                times(form.get("prefill_x")),
                duration(form["decode_ms"]),
                times(form.get("decode_x")),
                size(form["weight_bytes"]),
            ]
            for form in told["forms"]
        ]
        named = told.get("gpu")
        gpu = named.get("name", NONE) if isinstance(named, dict) else str(named or NONE)
        load = f"batch {told.get('batch', NONE)}, prompt {told.get('prompt', NONE)}"
        said = [told["verdict"], told.get("instead")]
        section.items.append(" ".join(part for part in said if isinstance(part, str)))
        columns = ["form", "prefill", "prefill over dense", "decode step", "decode over dense", "weights"]
        title = f"Predicted by advise for {told.get('model', NONE)} on {gpu}, {load} ({document.source})"
        section.items.append(Table(title, columns, rows))
    if not documents and subjects:
        command = f"twofour advise {subjects[0].shell} --save"
        section.items.append(Missing(everyone(subjects), "what a time model expects of it", command))
    return section


def how_made(subjects: Sequence[Subject]) -> Section:
    section = Section("made", "How it was made")
    section.items.append("The commands as the record tells them; what it does not tell is in capitals.")
    for subject in subjects:
        section.items += _steps(subject)
        if not subject.steps:
            command = f"twofour prune MODEL {subject.shell}"
            section.items.append(Missing(subject.name, "how it was made: there is no twofour.json", command))
        hashes = [[name, value] for name, value in subject.hashes.items()]
        title = f"{subject.name}: SHA-256"
        section.items.append(Table(title, ["what", "hash"], hashes, words=("hash",)))
        if "weights" not in subject.hashes:
            why = subject.no_weights or "its files carry no checksums, as those that twofour writes do"
            section.items.append(f"{subject.name}: no hash of the weights, for {why.rstrip('.')}.")
    documents = {d.source: d for subject in subjects for d in subject.documents}
    if documents:
        rows = [
            [
                d.source,
                d.verb,
                str(d.machine.get("gpu") or d.machine.get("machine") or NONE),
                str(d.machine.get("date", NONE)),
                d.sha256,
            ]
            for d in documents.values()
        ]
        columns = ["document", "verb", "machine", "date", "SHA-256"]
        section.items.append(
            Table("Documents on this page", columns, rows, words=tuple(columns), folded=True)
        )
    return section


def _steps(subject: Subject) -> list[Item]:
    shown: list[Item] = []
    for order, step in enumerate(subject.steps, 1):
        title = f"{subject.name}, step {order}: {step['verb']}"
        versions = f"twofour {step.get('twofour', NONE)}, torch {step.get('torch', NONE)}"
        about = f"{versions}, {step.get('date', NONE)}; source: {step.get('from', subject.made_by)}"
        shown.append(Step(title, command_of(step, subject, order), about))
        told = {key: value for key, value in step.items() if key not in (*BY_LAYER, "from")}
        for key in BY_LAYER:
            if isinstance(step.get(key), dict):
                told[key] = f"{len(step[key])}, in {subject.made_by}"
        text = json.dumps(told, indent=2, ensure_ascii=False, default=str)
        shown.append(Passage(f"Every option of step {order}", text, folded=True))
    return shown


def command_of(step: dict[str, Any], subject: Subject, order: int) -> str:
    """The command that repeats a step, as far as the record tells."""
    options = step.get("options") or {}
    verb = str(step["verb"])
    if verb not in FLAGS:
        return f"twofour {verb} …"
    source = step.get("source") or options.get("source") or "MODEL"
    # The last step made this directory; where the others wrote to is not recorded.
    last = subject.directory if order == len(subject.steps) else "OUT"
    words = ["twofour", verb, str(source), str(step.get("out", last))]
    if verb == "recover":
        for path in options.get("data") or ["TEXT"]:
            words += ["--data", str(path)]
    for key in FLAGS[verb]:
        if options.get(key) is not None:
            words += [f"--{key.replace('_', '-')}", str(options[key])]
    words += [f"--{key.replace('_', '-')}" for key in SWITCHES if options.get(key) is True]
    if verb == "quantize" and "smooth" in options:  # its default depends on the scheme; `prune` has only that
        words.append("--smooth" if options["smooth"] else "--no-smooth")
    return shlex.join(words)


def not_known(subjects: Sequence[Subject], gaps: Sequence[Missing], refused: Sequence[Refused]) -> Section:
    """All gaps in one place, with the commands, and the files that were not understood."""
    section = Section("missing", "What was not measured")
    if gaps:
        lacking = [f"{s.shell}/{REPORTS}" for s in subjects if not (s.directory / REPORTS).is_dir()]
        if lacking:
            about = "Documents are looked for there; a shell does not make it for you."
            section.items.append(Step("Before these commands", f"mkdir -p {' '.join(lacking)}", about))
        rows = [[gap.model, gap.what, gap.command] for gap in gaps]
        columns = ["model", "not measured", "the command that does"]
        section.items.append(
            Table(count(len(rows), "gap"), columns, rows, words=tuple(columns), code=columns[2:])
        )
    else:
        section.items.append("Nothing that this page knows of.")
    if refused:
        rows = [[Path(x.source).name if len(x.source) > 60 else x.source, x.why] for x in refused]
        columns = ["file", "why"]
        section.items.append(Table("Files that were not understood", columns, rows, words=tuple(columns)))
    return section


def facts(subjects: Sequence[Subject]) -> Table:
    """The models beside each other, a column each: on a phone one model then needs no scrolling."""
    told: dict[str, dict[str, str]] = {}
    for subject in subjects:
        for what, words in _facts(subject).items():
            told.setdefault(what, {})[subject.name] = words
    rows = [[what, *(words.get(s.name, NONE) for s in subjects)] for what, words in told.items()]
    return Table("At a glance", ["", *(s.name for s in subjects)], rows, models=True)


def _facts(subject: Subject) -> dict[str, str]:
    speed, quality = speed_of(subject), quality_of(subject)
    prune, recover = subject.step("prune") or {}, subject.step("recover") or {}
    found = {
        "pruned by": str((prune.get("options") or {}).get("method", NONE)),
        "recovered by": str((recover.get("options") or {}).get("recipe", NONE)),
        "2:4 layers": f"{len(subject.layers):,}",
        "form": subject.form,
        "size": size(subject.stored_bytes),
        "size as dense": size(subject.dense_bytes),
        "perplexity": number(quality.own.perplexity) if quality else NONE,
        "perplexity over dense": times(quality.ratio) if quality else NONE,
    }
    for tokens, ratio in speed.ratios if speed else ():
        found[f"speed of its layers over dense, {count(tokens, 'token')}"] = times(ratio)
    return found
