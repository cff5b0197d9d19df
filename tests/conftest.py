"""Models to test on: small ones made here, and the real ones of ../shared where they are."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

# Tests run side by side, one on each core: threads of their own would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_model():
    def find(name: str) -> Path:
        path = SHARED / "models" / name
        if not path.exists():
            pytest.skip(f"{name} is not here")
        return path

    return find


@pytest.fixture(scope="session")
def _dense(tmp_path_factory) -> Path:
    """A Llama with random weights, a real tokenizer and widths that are multiples of 4 but not of 8."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    directory = tmp_path_factory.mktemp("models") / "dense"
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{chr(c): c - 29 for c in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def _packed(_dense, tmp_path_factory) -> Path:
    from twofour.io.pack import pack_checkpoint
    from twofour.io.prune import prune_checkpoint

    base = tmp_path_factory.mktemp("packed")
    prune_checkpoint(_dense, base / "pruned")
    pack_checkpoint(base / "pruned", base / "packed")
    return base


@pytest.fixture
def dense(_dense, tmp_path) -> Path:
    """A dense checkpoint that the test may damage."""
    return Path(shutil.copytree(_dense, tmp_path / "dense"))


@pytest.fixture
def pruned(_packed, tmp_path) -> Path:
    return Path(shutil.copytree(_packed / "pruned", tmp_path / "pruned"))


@pytest.fixture
def packed(_packed, tmp_path) -> Path:
    return Path(shutil.copytree(_packed / "packed", tmp_path / "packed"))


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def twofour(capsys):
    """The command, run in this process: exit status, standard output, standard error."""
    from twofour.cli.main import main

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        status = main([str(a) for a in arguments])
        return Ran(status, *capsys.readouterr())

    return run
