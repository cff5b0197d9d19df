"""One layer to prune: weights, and the Gram matrix of inputs that are as correlated as a model's are."""

import torch

from twofour.calibrate.statistics import Gram
from twofour.prune.admm import ADMM
from twofour.prune.ria import RIA
from twofour.prune.sparsegpt import SparseGPT
from twofour.prune.wanda import Wanda

METHODS = [Wanda(), RIA(), SparseGPT(), SparseGPT(pairs=False), ADMM()]


UPDATING = [SparseGPT(), SparseGPT(pairs=False), ADMM()]


SEEDS = range(8)


def problem(seed=0, rows=8, columns=32, tokens=256):
    """Weights, and inputs that live near a low-dimensional space, with channels of very different size."""
    random = torch.Generator().manual_seed(seed)
    rank = max(1, columns // 4)
    mix = torch.randn(rank, columns, generator=random) / rank**0.5
    x = torch.randn(tokens, rank, generator=random) @ mix + 0.3 * torch.randn(
        tokens, columns, generator=random
    )
    x = x * torch.randn(columns, generator=random).mul(0.7).exp()
    return torch.randn(rows, columns, generator=random), gram_of(x)


def gram_of(x):
    inputs = Gram(x.shape[1])
    inputs.add(x)
    return inputs


def identity(columns):
    return gram_of(torch.eye(columns))
