"""One model of the page: everything its directory and the documents say about it, and nothing else.

Read without the weights: only the headers of the safetensors files are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from twofour.errors import InputError
from twofour.io.checkpoint import CONFIG, RECORD, Checkpoint, read_json, read_record
from twofour.io.format import is_packed, packed_modules, scheme_of
from twofour.io.record import last_step
from twofour.quantize.schemes import Scheme
from twofour.report.documents import (
    LOG,
    Document,
    Refused,
    documents_beside,
    read_document,
    read_log,
    wrong_figures,
)
from twofour.report.figures import is_number

#: Steps that come from the record, or from a document where there is no record of them.
STAGES = ("prune", "recover", "quantize", "pack")

#: Documents about a machine rather than a model: they hold for every model on the page. So does one of
#: `bench` that names no model.
OF_A_MACHINE = ("tune", "doctor")


@dataclass(frozen=True)
class Score:
    """A perplexity, with what it may be compared by."""

    model: str
    perplexity: float
    tokens: int
    protocol: tuple[Any, ...]  # data, context, stride, tokens: only equal ones are comparable
    agreement: float | None
    kl: float | None
    source: str

    def over(self, dense: Score) -> float | None:
        """How many times the dense model's, where both are figures."""
        fit = is_number(self.perplexity) and is_number(dense.perplexity) and dense.perplexity > 0
        return self.perplexity / dense.perplexity if fit else None

    @property
    def words(self) -> str:
        data, context, stride, tokens = self.protocol
        return f"{tokens:,} tokens of {data}, windows of {context}, {stride} apart"


@dataclass
class Subject:
    directory: Path
    name: str
    config: dict[str, Any]
    record: dict[str, Any]
    documents: list[Document] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    log: list[dict[str, Any]] = field(default_factory=list)
    stored_bytes: int | None = None
    no_weights: str | None = None  # why the weights could not be looked at
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def shell(self) -> str:
        """Its directory as a shell takes it."""
        return shlex.quote(str(self.directory))

    @property
    def packed(self) -> bool:
        return is_packed(self.config)

    @property
    def form(self) -> str:
        """What its 2:4 layers are stored as."""
        if not self.packed:
            return "stored dense"
        scheme = self.scheme
        return f"packed {self.sparse}{f', groups of {scheme.group}' if scheme and scheme.group else ''}"

    @property
    def scheme(self) -> Scheme | None:
        """How its 2:4 layers are quantized; None: they are not."""
        return scheme_of(self.config["quantization_config"]) if self.packed else None

    @property
    def sparse(self) -> str:
        """What stands beside "dense": its 2:4 layers, and their scheme if they have one."""
        return f"2:4 {self.scheme.name}" if self.scheme else "2:4"

    @property
    def steps(self) -> list[dict[str, Any]]:
        """How it was made: the record, and where it lacks a stage, what the stage printed."""
        steps = list(self.record.get("steps", []))
        there = {step["verb"] for step in steps}
        for document in self.documents:
            if document.verb in STAGES and document.verb not in there:
                steps.append({**document.content, "from": document.source})
        return steps

    def step(self, verb: str) -> dict[str, Any] | None:
        return last_step({"steps": self.steps}, verb)

    @property
    def made_by(self) -> str:
        """Where the stage's figures stand."""
        return f"{self.name}/{RECORD}"

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The 2:4 layers with their dense shapes."""
        for verb in ("pack", "quantize", "prune"):
            found = (self.step(verb) or {}).get("layers")
            if isinstance(found, dict) and found:
                return {name: tuple(note["shape"]) for name, note in found.items() if "shape" in note}
        if self.packed:
            return packed_modules(self.config["quantization_config"])
        for document in self.of("check"):
            if document.content["ok"]:
                return {row["name"]: tuple(row["shape"]) for row in document.content["layers"]}
        return {}

    def errors(self, which: str, verb: str = "prune") -> dict[str, float]:
        """What a stage cost by layer: `relative_error` of the weight, `output_error` of its products."""
        notes = (self.step(verb) or {}).get("layers") or {}
        return {name: note[which] for name, note in notes.items() if is_number(note.get(which))}

    def of(self, verb: str) -> list[Document]:
        return [document for document in self.documents if document.verb == verb]

    @property
    def dense_name(self) -> str | None:
        """The model it was pruned from, where the record says so."""
        for verb, key in (("prune", "source"), ("recover", "teacher")):
            step = self.step(verb) or {}
            found = step.get(key) or (step.get("options") or {}).get(key)
            if isinstance(found, str):
                return found
        demos = self.of("demo")
        return demos[0].content["dense"] if demos else None

    def layer_bytes(self) -> tuple[float, float] | None:
        """Of the 2:4 layers: as dense, and packed."""
        packing = self.step("pack") or self.step("quantize") or {}
        dense, packed = packing.get("dense_bytes"), packing.get("packed_bytes")
        if is_number(dense) and is_number(packed) and dense > 0:
            return dense, packed
        for document in self.of("check") if self.packed else []:
            layers = document.content["layers"]
            return sum(x["dense_bytes"] for x in layers), sum(x["stored_bytes"] for x in layers)
        return None

    @property
    def dense_bytes(self) -> float | None:
        """Of the whole model if its 2:4 layers were stored dense."""
        if self.stored_bytes is None or not self.packed:
            return self.stored_bytes
        both = self.layer_bytes()
        return None if both is None else self.stored_bytes - both[1] + both[0]

    def scores(self) -> tuple[list[Score], list[Score]]:
        """Perplexities of this model, and of others that were measured to compare it with."""
        own: list[Score] = []
        others: list[Score] = []
        for document in self.documents:
            if document.verb in ("eval", "bench"):
                for model, found in _results(document.content):
                    mine = same_model(model, self)
                    (own if mine else others).append(_score(model, document, found))
            elif document.verb == "demo":
                for key, there in (("dense", others), ("packed", own)):
                    if is_score(result := document.content.get(f"{key}_eval")):
                        there.append(
                            _score(document.content[key], document, {"data": "the demo's text", **result})
                        )
        return own, others


def _results(content: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The perplexities in a document of eval or bench, by the model that each is of."""
    alone: dict[str, Any] = {
        "agreement": None,
        "kl": None,
    }  # those of the 2:4 model say nothing about the dense one
    if content["verb"] == "eval":
        found = [(content["model"], content)]
        if isinstance(content.get("against"), str):
            other = {**content, **alone, "perplexity": content.get("against_perplexity")}
            found += [(content["against"], other)] if is_score(other) else []
        return found
    both, dense = content.get("perplexity"), content.get("dense")
    if not isinstance(both, dict) or not isinstance(dense, dict):
        return []
    every = [
        (content.get("model"), {**both, "perplexity": both.get("sparse")}),
        (dense.get("model"), {**both, **alone, "perplexity": both.get("dense")}),
    ]
    return [(model, result) for model, result in every if isinstance(model, str) and is_score(result)]


def is_score(result: Any) -> TypeGuard[dict[str, Any]]:
    keys = ("perplexity", "tokens", "context", "stride")
    return isinstance(result, dict) and all(is_number(result.get(key)) for key in keys)


def _score(model: str, document: Document, result: dict[str, Any]) -> Score:
    data = Path(str(result.get("data", "a text that is not named"))).name
    return Score(
        model=model,
        perplexity=result["perplexity"],
        tokens=result["tokens"],
        protocol=(data, result["context"], result["stride"], result["tokens"]),
        agreement=result.get("agreement"),
        kl=result.get("kl"),
        source=document.source,
    )


def read_subject(directory: str | Path) -> Subject:
    """What the directory itself holds. InputError if it is no model directory."""
    directory = Path(directory)
    if not directory.is_dir():
        what = "is a file, not a directory" if directory.exists() else "does not exist"
        raise InputError(f"{directory} {what}.", hint="Give a Hugging Face style model directory.")
    config = read_json(directory / CONFIG)
    path = directory / RECORD
    record = read_record(directory)
    if why := next(filter(None, map(wrong_figures, record.get("steps", []))), None):
        raise InputError(f"{path}: {why}.")
    name = directory.resolve().name
    subject = Subject(directory, name, config, record, log=read_log(directory / LOG))
    for document in documents_beside(directory):
        if isinstance(document, Refused):
            subject.refused.append(document)
        elif (
            document.verb in ("bench", "check") and document.model and not same_model(document.model, subject)
        ):
            why = f"is a {document.verb} of {document.model}, which is not the model it lies beside"
            subject.refused.append(Refused(document.source, why))
        else:
            subject.documents.append(document)
    subject.hashes[CONFIG] = _sha256(directory / CONFIG)
    if path.exists():
        subject.hashes[RECORD] = _sha256(path)
    try:
        checkpoint = Checkpoint(directory)
        subject.stored_bytes = checkpoint.nbytes
    except InputError as error:
        subject.no_weights = str(error)
        return subject
    with contextlib.suppress(InputError):  # `twofour check` is the one to complain
        sums = [checkpoint.checksums(file) for file in checkpoint.files]
        if sums and all(sums):
            subject.hashes["weights"] = _digest(sums)
    return subject


def read_subjects(
    directories: Sequence[str | Path], extra: Sequence[str | Path] = ()
) -> tuple[list[Subject], list[Refused]]:
    """The models, each with the documents that are about it, and what could not be placed."""
    places = [Path(directory).resolve() for directory in directories]
    if twice := [given for given, place in zip(directories, places, strict=True) if places.count(place) > 1]:
        raise InputError(f"{twice[0]} is given twice.", hint="Compare different models.")
    subjects = [read_subject(directory) for directory in directories]
    _tell_apart(subjects)
    refused = [refusal for subject in subjects for refusal in subject.refused]
    for path in extra:
        document = read_document(Path(path))
        if isinstance(document, Refused):
            refused.append(document)
            continue
        if document.model is None or document.verb in OF_A_MACHINE:
            for subject in subjects:
                subject.documents.append(document)
            continue
        own = [s for s in subjects if _is_at(document.model, s)] or [
            s for s in subjects if same_model(document.model, s)
        ]
        if len(own) > 1:
            refused.append(
                Refused(document.source, f"is about {document.model}, which several models here could be")
            )
        elif own:
            own[0].documents.append(document)
        elif document.verb in (
            "advise",
            "eval",
            "generate",
        ):  # of a model to compare with, the dense one most likely
            for subject in subjects:
                subject.documents.append(document)
        else:
            refused.append(Refused(document.source, f"is about {document.model}, which is not on this page"))
    return subjects, refused


def everyone(subjects: Sequence[Subject]) -> str:
    """Their names in a sentence."""
    *first, last = [subject.name for subject in subjects]
    return f"{', '.join(first)} and {last}" if first else last


def same_model(named: str, subject: Subject) -> bool:
    """Whether a command meant this model. By its last name too: models move, and paths are relative."""
    return _is_at(named, subject) or Path(named).name == subject.directory.resolve().name


def _is_at(named: str, subject: Subject) -> bool:
    return Path(named).resolve() == subject.directory.resolve()


def _tell_apart(subjects: Sequence[Subject]) -> None:
    """Directories of the same name get their parents' too."""
    seen = [subject.name for subject in subjects]
    for number, subject in enumerate(subjects):
        if seen.count(subject.name) > 1:
            longer = f"{subject.directory.resolve().parent.name}/{subject.name}"
            taken = any(longer == other.name for other in subjects if other is not subject)
            subject.name = f"{longer} ({number + 1})" if taken else longer


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(sums: list[dict[str, str]]) -> str:
    """One hash for all tensors, from the checksums that their files carry: the same however it is sharded."""
    every = {name: value for part in sums for name, value in part.items()}
    return hashlib.sha256("".join(f"{n} {every[n]}\n" for n in sorted(every)).encode()).hexdigest()
