"""Sections about accuracy, as data: what their plots are given."""

from twofour.report.accuracy import sensitivity, tasks
from twofour.report.content import Figure, Table
from twofour.report.documents import Document, Refused, read_document
from twofour.report.making import command_of
from twofour.report.plots import Scatter
from twofour.report.subject import read_subject
from twofour.report.times import products_of

from .models_to_report import layer_names, products, recorded_model, score, write


def test_panels_share_a_scale_that_has_room_for_a_loss_that_falls(tmp_path):
    shapes = layer_names()
    names = list(shapes)
    directory = recorded_model(tmp_path / "m", shapes)
    (directory / "reports").mkdir()
    layers = {name: {"loss_increase": 0.01} for name in names} | {names[0]: {"loss_increase": -0.002}}
    write(directory / "reports" / "sensitivity.json", {"verb": "sensitivity", "model": "m", "layers": layers})
    figure = next(item for item in sensitivity([read_subject(directory)]).items if isinstance(item, Figure))
    panels = [plot for plot in figure.plots if isinstance(plot, Scatter)]
    assert len(panels) > 1
    assert {(plot.y.low, plot.y.high) for plot in panels} == {(-0.002, 0.01)}


def test_tasks_of_lm_eval_are_a_table(tmp_path):
    directory = recorded_model(tmp_path / "m", layer_names())
    found = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.7123, "acc_stderr,none": 0.0451}}
    harness = {"examples": {"arc_easy": 100}, "limit": 100}
    assert tasks([read_subject(directory)]).items == []
    write(directory / "reports" / "eval-1.json", score("m", 9.0, tasks={"arc_easy": {"acc,none": 0.5}}))
    write(directory / "reports" / "eval-2.json", score("m", 9.0, tasks=found, harness=harness))
    write(directory / "reports" / "eval-dense.json", score("dense", 8.0, tasks=found, harness=None))
    (table,) = tasks([read_subject(directory)]).items
    assert isinstance(table, Table)
    assert [row[:6] for row in table.rows] == [
        ["m", "arc_easy", "acc,none", "0.712", "± 0.0451", "100 (the first)"],
        ["dense (to compare)", "arc_easy", "acc,none", "0.712", "± 0.0451", "–"],
    ]
    assert table.rows[0][-1].endswith("eval-2.json")  # the later one counts
    write(directory / "reports" / "eval-3.json", score("m", 9.0, tasks={"arc_easy": 0.7}))
    assert isinstance(read_document(directory / "reports" / "eval-3.json"), Refused)


def test_products_of_8_and_4_bits_are_not_taken_for_those_of_16(tmp_path):
    document = products()
    others = [
        {**row, "scheme": scheme, "graph_ms": {"p50": 1e-6}}
        for scheme in ("fp8", "int4")
        for row in document["products"]
    ]
    both = products() | {"products": document["products"] + others}
    want, got = (products_of([Document("bench", d, "here")]) for d in (document, both))
    assert want
    assert got == want
    row = {"n": 64, "k": 64, "tokens": 1, "dense_ms": 0.02, "times_dense": 2.0}
    tuned = {"rows": [row | {"scheme": None}, row | {"scheme": "int4", "times_dense": 4.0}]}
    assert [p.ratio for p in products_of([Document("tune", tuned, "here")])] == [2.0]


def test_commands_have_the_options_of_a_joint_pruning(tmp_path):
    subject = read_subject(recorded_model(tmp_path / "m", layer_names()))
    options = {"method": "joint", "scheme": "int4", "group": 64, "tune": True, "calib": "c4.jsonl"}
    told = command_of({"verb": "prune", "options": options, "source": "./dense"}, subject, 1)
    assert told.endswith("--method joint --calib c4.jsonl --scheme int4 --group 64 --tune")
    told = command_of({"verb": "prune", "options": {"method": "admm", "permute": True}}, subject, 1)
    assert told.endswith("--method admm --permute")
    for smooth, flag in ((True, "--smooth"), (False, "--no-smooth")):
        options = {"scheme": "int8", "smooth": smooth}
        assert flag in command_of({"verb": "quantize", "options": options}, subject, 1).split()
        assert "smooth" not in command_of({"verb": "prune", "options": options}, subject, 1)
