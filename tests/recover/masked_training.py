"""A small pruned model and somebody's plain loop for it, which held masks are compared with bit for bit:
mask the gradients after the backward passes, clip, step, mask the weights."""

import torch
from torch import nn

import twofour

STEPS = 200


def small_model(seed=0):
    torch.manual_seed(seed)
    return twofour.prune_(nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 18)))


def masks_of(model):
    """What should be held, said in another way: two of four stay, nonzeros first, then those on the left."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            mask = torch.zeros(module.weight.shape, dtype=torch.bool)
            for row, values in enumerate(module.weight.tolist()):
                for start in range(0, len(values), 4):
                    group = values[start : start + 4]
                    for kept in sorted(range(len(group)), key=lambda i: (group[i] == 0, i))[:2]:
                        mask[row, start + kept] = True
            found[name] = mask
    return found


def require_zero(model, masks):
    for name, mask in masks.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        bits = weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()])
        assert not bits[~mask].any(), name  # no bit is set, so not even a sign


INPUTS = torch.randn(STEPS + 2, 8, 24, generator=torch.Generator().manual_seed(3))


def loss_of(model, step, micro=0):
    x = INPUTS[step + micro].to(model[0].bias.dtype)
    return (model(x) - 3 * x[:, :18].roll(1, 1)).square().mean()


def mask_gradients(model, masks):
    for name, mask in masks.items():
        gradient = model.get_parameter(f"{name}.weight").grad
        gradient.copy_(torch.where(mask, gradient, 0.0))


@torch.no_grad()
def mask_weights(model, masks):
    for name, mask in masks.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.copy_(torch.where(mask, weight, 0.0))


def equal(model, other):
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def matrices(parameters):
    return [p for p in parameters if p.dim() == 2]


def train(model, optimizer, steps=range(5)):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def require_moved(model, start, masks):
    """The kept weights are other numbers than at the start, but for a few that came back by rounding."""
    for name, mask in masks.items():
        new, old = (m.get_parameter(f"{name}.weight").detach()[mask] for m in (model, start))
        assert new.isfinite().all(), name
        assert (new != old).float().mean() > 0.95, name
