"""Documents: what is recognised, what is refused and why, what is an error."""

import json

import pytest

from twofour.errors import InputError
from twofour.report.documents import (
    Document,
    Refused,
    documents_beside,
    read_document,
    read_log,
    save_document,
)
from twofour.report.subject import read_subject, read_subjects

from .models_to_report import layer_names, products, recorded_model, score, write


def test_a_document_is_known_by_its_verb(tmp_path):
    found = read_document(write(tmp_path / "a.json", products()))
    assert isinstance(found, Document)
    assert found.verb == "bench"
    assert found.model is None
    assert found.machine["gpu"] == "NVIDIA H200"
    assert read_document(write(tmp_path / "b.json", score("./m", 3.0))).model == "./m"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"rows": []}, 'has no "verb"'),
        ({"verb": "astrology"}, '"astrology", which this version does not know'),
        ({"verb": "eval", "error": {"message": "x"}}, "failed eval"),
        ({"verb": "eval", "model": "m", "tokens": 1, "context": 1, "stride": 1}, "perplexity is missing"),
        (score("m", "seven"), "perplexity is not a number"),
        (score("m", True), "perplexity is not a number"),
        (score("m", 3.0, stride=0), "stride is not a number above 0"),
        (
            {"verb": "prune", "out": "m", "options": {}, "layers": {"a": {"shape": [1]}}},
            "shape is not a shape",
        ),
        ({"verb": "bench", "about": {}, "products": {}}, "its products is not a list"),
        ({"verb": "bench", "about": {}, "products": [{"rows": 1}]}, "in products[0] columns is missing"),
        ({"verb": "tune", "rows": [5]}, "rows[0] is not an object"),
        ({"verb": "sensitivity", "model": "m", "layers": {"a": {}}}, "in layers[a] loss_increase is missing"),
    ],
)
def test_what_is_not_understood_is_refused_with_a_reason(tmp_path, content, why):
    found = read_document(write(tmp_path / "x.json", content))
    assert isinstance(found, Refused)
    assert why in found.why
    assert found.source.endswith("x.json")


@pytest.mark.parametrize("text", ["{", "[]", "\x00", '{"verb": "eval"'])
def test_broken_json_is_an_error_that_names_the_file(tmp_path, text):
    directory = recorded_model(tmp_path / "m", layer_names())
    (directory / "reports").mkdir()
    (directory / "reports" / "broken.json").write_text(text)
    with pytest.raises(InputError, match=r"broken\.json"):
        read_subject(directory)


def test_a_broken_line_of_the_log_is_named(tmp_path):
    log = tmp_path / "recover.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n\n{"step": 2, "lo')
    with pytest.raises(InputError, match=r"recover\.jsonl, line 3"):
        read_log(log)
    log.write_text('{"loss": 2.0}\n')
    with pytest.raises(InputError, match=r"line 1: step is missing"):
        read_log(log)
    log.write_text('{"step": 1, "loss": NaN}\n')
    assert read_log(log)[0]["step"] == 1


def test_documents_go_to_the_model_they_name(tmp_path):
    one = recorded_model(tmp_path / "one", layer_names())
    two = recorded_model(tmp_path / "two", layer_names())
    extra = [
        write(tmp_path / "eval-two.json", score("elsewhere/two", 5.0)),
        write(tmp_path / "dense.json", score("elsewhere/dense", 4.0)),
        write(tmp_path / "bench.json", products()),
        write(
            tmp_path / "check.json",
            {"verb": "check", "directory": "three", "ok": True, "layers": [], "faults": []},
        ),
    ]
    subjects, refused = read_subjects([one, two], extra)
    own, others = subjects[1].scores()
    assert [s.perplexity for s in own] == [5.0]
    assert [s.perplexity for s in others] == [4.0]
    assert subjects[0].scores()[0] == []
    assert all(len(subject.of("bench")) == 1 for subject in subjects)
    assert [r.why for r in refused] == ["is about three, which is not on this page"]


def test_models_of_the_same_name_are_told_apart(tmp_path):
    first = recorded_model(tmp_path / "a" / "packed", layer_names())
    second = recorded_model(tmp_path / "b" / "packed", layer_names())
    whole = write(tmp_path / "exact.json", score(str(second), 5.0))
    vague = write(tmp_path / "vague.json", score("packed", 6.0))
    subjects, refused = read_subjects([first, second], [whole, vague])
    assert [subject.name for subject in subjects] == ["a/packed", "b/packed"]
    assert [s.perplexity for s in subjects[1].scores()[0]] == [5.0]
    assert len(refused) == 1
    assert "several models here could be" in refused[0].why


def test_a_directory_that_is_no_model(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_subject(tmp_path / "no")
    with pytest.raises(InputError, match=r"config\.json is missing"):
        read_subject(tmp_path)
    write(tmp_path / "config.json", {})
    write(tmp_path / "twofour.json", {"steps": [{"options": {}}]})
    with pytest.raises(InputError, match=r"twofour\.json: a step is not an object with a verb"):
        read_subject(tmp_path)


def test_a_real_packed_model(packed, pruned):
    subject = read_subject(packed)
    assert len(subject.layers) == 14
    assert subject.packed
    dense = read_subject(pruned)
    assert dense.stored_bytes == subject.dense_bytes  # what it would take dense, told by the packed one
    assert subject.stored_bytes < subject.dense_bytes
    assert len(subject.hashes["weights"]) == 64
    # One changed tensor changes the hash, through the checksums in the files.
    assert dense.hashes["weights"] != subject.hashes["weights"]
    record = json.loads((packed / "twofour.json").read_text())
    assert subject.errors("relative_error").keys() == record["steps"][0]["layers"].keys()


def test_saved_documents_are_numbered_and_found(tmp_path):
    first = save_document(tmp_path, score("m", 3.0))
    second = save_document(tmp_path, score("m", 4.0))
    other = save_document(tmp_path, products())
    assert [p.name for p in (first, second, other)] == ["eval-1.json", "eval-2.json", "bench-1.json"]
    assert json.loads(first.read_text()) == score("m", 3.0)  # not overwritten
    assert [d.verb for d in documents_beside(tmp_path)] == ["bench", "eval", "eval"]
    assert sorted(p.name for p in first.parent.iterdir()) == ["bench-1.json", "eval-1.json", "eval-2.json"]
