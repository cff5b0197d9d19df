"""Sections about accuracy, as data: what their plots are given."""

from twofour.report.accuracy import sensitivity
from twofour.report.content import Figure
from twofour.report.plots import Scatter
from twofour.report.subject import read_subject

from .models_to_report import layer_names, recorded_model, write


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
