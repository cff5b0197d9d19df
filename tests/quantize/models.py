"""What the tests of rounding by blocks share."""

from torch import nn


class TwoBlocks(nn.Module):
    """An embedding of so many words, then two blocks of a class."""

    def __init__(self, block, words, size):
        super().__init__()
        self.embed = nn.Embedding(words, size)
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, tokens, use_cache=False):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x
