"""Masks under torch.compile."""

import torch

import twofour

from .masked_training import loss_of, masks_of, matrices, require_zero, small_model


def graph_breaks(compiled, *arguments):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled(*arguments)
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def test_a_compiled_step_of_adamw():
    """torch breaks the graph at AdamW's step by itself; masks add no break."""
    held, dense = small_model(), small_model()
    masks = masks_of(held)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (held, dense)]
    twofour.hold_masks(held).attach(optimizers[0])
    breaks = []
    for model, optimizer in zip((held, dense), optimizers, strict=True):

        @torch.compile(backend="aot_eager")
        def train_step(step, model=model, optimizer=optimizer):
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        breaks.append(graph_breaks(train_step, 0))
        for step in range(1, 4):
            with torch.no_grad():
                model[0].weight[~masks["0"]] = 1.0  # so that the compiled step has something to undo
            train_step(step)
            if model is held:
                require_zero(held, masks)
                assert not optimizer.state[model[0].weight]["exp_avg"][~masks["0"]].any()
    assert breaks[0] == breaks[1]


def test_a_step_compiled_into_one_graph():
    model = small_model()
    eager = small_model()
    masks = masks_of(model)
    optimizers = [torch.optim.Muon(matrices(m.parameters()), lr=0.01) for m in (model, eager)]
    twofour.hold_masks(model).attach(optimizers[0])
    twofour.hold_masks(eager).attach(optimizers[1])
    compiled = torch.compile(optimizers[0].step, fullgraph=True, backend="aot_eager")
    for step in range(4):
        for m, take in ((model, compiled), (eager, optimizers[1].step)):
            m.zero_grad()
            loss_of(m, step).backward()
            take()
        require_zero(model, masks)
    torch.testing.assert_close(model[0].weight, eager[0].weight, atol=1e-3, rtol=1e-2)  # bf16 inside


def test_a_compiled_model_is_held_by_its_own_names():
    compiled = torch.compile(small_model(), backend="eager")
    masks = twofour.hold_masks(compiled)
    assert [layer.name for layer in masks.layers] == ["0", "2"]
