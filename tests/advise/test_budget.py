"""Which layers stay dense: the knapsack against trying everything, and plans for a real checkpoint."""

import itertools
import random

import pytest
from safetensors.torch import load_file, save_file

from twofour.advise import budget as room
from twofour.advise.budget import Budget, Frontier, Times, Work, plan, read_budget, together
from twofour.advise.gpus import find_gpu
from twofour.advise.layers import read_network
from twofour.advise.model import shipped
from twofour.advise.schemes import DENSE, SPARSE
from twofour.advise.sensitivity import measure
from twofour.advise.steps import Workload, step_time
from twofour.errors import InputError
from twofour.io.checkpoint import Checkpoint
from twofour.io.prune_calibrated import CalibrationOptions
from twofour.io.structure import checkpoint_layers
from twofour.select import Layer


@pytest.mark.parametrize("seed", range(8))
def test_frontier_against_every_choice(seed):
    draw = random.Random(seed)
    groups = [
        [(draw.uniform(-0.3, 1), draw.choice([0.0, draw.random()])) for _ in range(draw.choice([1, 1, 3]))]
        for _ in range(7)
    ]
    front = Frontier(groups)
    every = [
        (sum(saved for saved, _ in taken), sum(loss for _, loss in taken))
        for taken in itertools.product(*([(0.0, 0.0), *group] for group in groups))
    ]
    assert list(front.saved) == sorted(front.saved)
    assert list(front.losses) == sorted(front.losses)
    for point in range(len(front)):
        pairs = [groups[group][pair] for group, pair in front.chosen(point).items()]
        assert sum(saved for saved, _ in pairs) == pytest.approx(front.saved[point])
        assert sum(loss for _, loss in pairs) == pytest.approx(front.losses[point])
        least = min(loss for saved, loss in every if saved >= front.saved[point] - 1e-12)
        assert front.losses[point] == pytest.approx(least)
    assert front.saved[-1] == pytest.approx(max(saved for saved, _ in every))


def test_a_long_frontier_is_thinned_and_stays_close(monkeypatch):
    draw = random.Random(0)
    groups = [[(draw.random(), draw.random())] for _ in range(16)]
    exact = Frontier(groups)
    monkeypatch.setattr(room, "POINTS", 60)
    thin = Frontier(groups)
    assert len(thin) <= 61 < len(exact)
    assert thin.saved[-1] == pytest.approx(exact.saved[-1])
    for share in (0.25, 0.5, 0.75):
        needed = share * exact.saved[-1]
        best, near = (f.losses[f.saved >= needed].min() for f in (exact, thin))
        assert best <= near + 1e-12
        assert near <= 1.15 * best


def test_what_nobody_can_gain_from_stays_dense():
    front = Frontier([[(-1.0, 0.0)], [(0.0, 0.0)], [(1.0, 5.0)]])
    assert front.chosen(len(front) - 1) == {2: 0}


def test_fused_layers_are_one_unit():
    def layer(name, columns=64):
        return Layer(name, "linear", (64, columns))

    names = ["q_proj", "o_proj", "k_proj", "v_proj"]
    layers = [layer(f"b.{block}.attn.{name}") for block in (0, 1) for name in names]
    layers += [layer("b.0.mlp.gate_proj"), layer("b.0.mlp.up_proj"), layer("b.0.mlp.down_proj", 128)]
    units = [[x.name.rpartition(".")[2] for x in unit] for unit in together(layers)]
    attention = [["q_proj", "k_proj", "v_proj"], ["o_proj"]]
    assert units == [*attention, *attention, ["gate_proj", "up_proj"], ["down_proj"]]


def layers_of(dense, **which):
    return list(checkpoint_layers(Checkpoint(dense), **which).by_tensor.values())


@pytest.mark.parametrize("work", [Work("H200"), Work("L4", batch=16, prompt=100, generate=7)])
def test_times_add_up_to_those_of_advise(dense, work):
    times = Times(dense, layers_of(dense), work)
    network, gpu = read_network(dense), find_gpu(work.gpu)

    def request(scheme):
        steps = (
            (1, Workload(work.batch, work.prompt, work.prompt, graph=True)),
            (work.generate, Workload(work.batch, 1, work.prompt + work.generate // 2, graph=True)),
        )
        return sum(count * step_time(network, gpu, shipped(), scheme, True, step).ms for count, step in steps)

    everything = {name for unit in times.units for name in unit.names}
    assert len(everything) == 14
    assert times.dense_ms == pytest.approx(request(DENSE))
    assert times.speed(everything) == pytest.approx(request(DENSE) / request(SPARSE))
    assert times.speed(()) == 1
    # Without its down_proj a gated MLP has the activation outside of its product.
    gate_up = {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}
    down = {"model.layers.0.mlp.down_proj"}
    saved = {len(x): 1 - 1 / times.speed(x) for x in (gate_up, down, gate_up | down)}
    assert saved[3] > saved[2] + saved[1]
    assert times.speed({"model.layers.0.mlp.gate_proj"}) == 1  # half a unit is none


def test_a_layer_that_is_excluded_leaves_its_unit(dense):
    times = Times(dense, layers_of(dense, exclude=["*.k_proj"]), Work("H200"))
    assert frozenset({f"model.layers.1.self_attn.{x}_proj" for x in "qv"}) in {u.names for u in times.units}


def test_reading_a_budget():
    assert read_budget("ppl=1.05x") == Budget("ppl", 1.05)
    assert read_budget(" speed=2") == Budget("speed", 2)
    assert str(read_budget("speed=1.30x")) == "speed=1.3x"
    for wrong in ("1.3x", "speed", "speed=", "speed=fast", "loss=1.1x", "ppl=-2x", "ppl=1.05xx"):
        with pytest.raises(InputError, match="ppl=1.05x or speed=1.3x"):
            read_budget(wrong)
    for low in ("speed=1x", "ppl=0.9x", "speed=0"):
        with pytest.raises(InputError, match="above 1x"):
            read_budget(low)


@pytest.fixture
def calibration(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 40)
    return CalibrationOptions(text, samples=8, seqlen=32)


@pytest.fixture
def sure(dense):
    """A model that is sure of what it says, and as good as can be at text that it has written itself."""
    tensors = load_file(dense / "model.safetensors")
    tensors["lm_head.weight"] *= 12
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    return dense, CalibrationOptions("self", samples=32, seqlen=32)


def test_least_loss_for_a_speed(dense, calibration):
    times = Times(dense, layers_of(dense), Work("H200"))
    everything = {name for unit in times.units for name in unit.names}
    goal = 1 + (times.speed(everything) - 1) / 2
    found = plan(dense, Budget("speed", goal), calibration, "wanda", work=Work("H200"))
    assert goal <= found.speed < found.speed_all
    sparse = everything - set(found.dense)
    assert found.loss_told == pytest.approx(sum(found.sensitivity[name] for name in sparse))
    assert found.kept[found.dense[0]] == f"kept dense by the budget speed={goal:g}x"
    # Against every choice of whole units.
    for count in range(len(times.units)):
        for units in itertools.combinations(times.units, count):
            names = set().union(*(unit.names for unit in units))
            if times.speed(names) >= goal:
                assert sum(found.sensitivity[name] for name in names) >= found.loss_told - 1e-12


def test_most_speed_within_a_loss(sure):
    dense, calibration = sure
    all_of_it = plan(dense, Budget("ppl", 100), calibration, "magnitude", work=Work("H200"))
    assert all_of_it.perplexity <= 100
    assert all_of_it.speed >= all_of_it.speed_all - 1e-9
    factor = 1 + (all_of_it.perplexity - 1) / 2
    assert factor > 1
    found = plan(dense, Budget("ppl", factor), calibration, "magnitude", work=Work("H200"))
    assert found.perplexity <= factor
    assert 1 < found.speed < all_of_it.speed
    assert plan(dense, Budget("ppl", factor), calibration, "magnitude", work=Work("H200")) == found


def test_a_layer_that_seems_to_help_costs_nothing_but_pays_for_no_other(sure, calibration):
    """Of a model that is sure and wrong, pruning takes some of the sureness, and the loss falls."""
    dense, _ = sure
    layers = measure(dense, calibration, "magnitude").sensitivity.layers
    assert (
        min(layer.loss_increase for layer in layers.values())
        < 0
        < sum(layer.divergence for layer in layers.values())
    )
    found = plan(dense, Budget("speed", 1.05), calibration, "magnitude", work=Work("H200"))
    assert found.sensitivity == {name: max(0.0, layer.loss_increase) for name, layer in layers.items()}


def test_a_loss_that_no_layer_keeps_within(sure):
    with pytest.raises(InputError, match="least sensitive layers alone raises the perplexity"):
        plan(sure[0], Budget("ppl", 1 + 1e-9), sure[1], "magnitude", work=Work("H200"))


def test_budgets_that_cannot_be_met(dense, calibration):
    with pytest.raises(InputError, match="even all layers in 2:4 give only 1.* on the H200 at batch 1"):
        plan(dense, Budget("speed", 3), calibration, "wanda", work=Work("H200"))
    with pytest.raises(InputError, match="batch is 0"):
        plan(dense, Budget("speed", 1.1), calibration, work=Work(batch=0))
    with pytest.raises(InputError, match="generate is -1"):
        plan(dense, Budget("speed", 1.1), calibration, work=Work(generate=-1))
    with pytest.raises(InputError, match="Known are"):
        plan(dense, Budget("speed", 1.1), calibration, work=Work("H2000"))
