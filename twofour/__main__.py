"""`python -m twofour`: the command, also under torchrun and accelerate, or where it is not on the path."""

from twofour.cli.main import run

run()
