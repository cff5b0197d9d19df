"""`bench DIR` and `tune DIR` on a GPU: graphs, peak memory, and the GPU's name. Run by `make test-gpu`."""

import shutil

import pytest
import torch

from twofour.bench.model import GPU_CONTENDERS, run_model
from twofour.io.pack import pack_checkpoint
from twofour.io.prune import prune_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def packed_16bit(_dense, tmp_path):
    """A packed Llama in bfloat16, of widths that the kernels take."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    for file in _dense.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "dense")
    prune_checkpoint(tmp_path / "dense", tmp_path / "pruned")
    pack_checkpoint(tmp_path / "pruned", tmp_path / "packed")
    return tmp_path / "packed"


def test_every_form_runs_eager_and_from_graphs(packed_16bit):
    found = run_model(packed_16bit, batches=(1, 2), prompt=16, generate=8)
    rows = found["end_to_end"]
    assert [row["error"] for row in rows if "error" in row] == []
    assert {row["contender"] for row in rows} == set(GPU_CONTENDERS)
    assert {(row["what"], row["mode"]) for row in rows} == {
        ("prefill", "eager"),
        ("decode", "eager"),
        ("decode", "graph"),
    }
    assert all(row["peak_bytes"] > row["model_bytes"] > 0 for row in rows)
    assert found["dtype"] == "bfloat16"
    assert found["notes"] == []
    shares = {row["contender"]: row["resident_share"] for row in rows if "resident_share" in row}
    assert shares["twofour"] == pytest.approx(9 / 16, abs=0.07)  # 10/16 with cuSPARSELt's positions
    assert found["agreement"]["share"] > 0


def test_tune_names_its_gpu(twofour, packed_16bit, tmp_path, monkeypatch):
    monkeypatch.setenv("TWOFOUR_CACHE", str(tmp_path / "cache"))
    ran = twofour("tune", packed_16bit, "--tokens", "1", "--json", "--save")
    assert ran.status == 0, ran.err
    assert ran.json["about"]["gpu"] == torch.cuda.get_device_name()
    assert (packed_16bit / "reports" / "tune-1.json").exists()
