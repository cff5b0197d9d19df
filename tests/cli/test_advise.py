"""`twofour advise` as a user runs it."""

import json
import os
import subprocess
import sys

import pytest

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_for_people(twofour, llama):
    ran = twofour("advise", llama, "--gpu", "H200", "--batch", 16, "--seq", 512, "--generate", 64)
    assert ran.status == 0
    assert ran.out.startswith("Worth it for prefill ")
    assert "16 × 512 tokens, then 64 each" in ran.out
    assert "Layers of model.layers.*" in ran.out
    assert "mlp.gate_proj ×32" in ran.out
    assert "Left alone: lm_head (linear: an output head)" in ran.out
    assert "dense int8 *" in ran.out
    assert "Measured nowhere: dense int8" in ran.err


def test_json_is_one_document(twofour, llama):
    ran = twofour("advise", llama / "config.json", "--gpu", "l40s", "--no-fused", "--eager", "--json")
    assert ran.json["verb"] == "advise"
    assert ran.json["gpu"]["name"] == "L40S"
    assert (ran.json["fused"], ran.json["graph"]) == (False, False)
    assert {form["name"] for form in ran.json["forms"]} >= {"dense", "2:4", "dense fp8", "2:4 int4"}
    layer = ran.json["layers"][0]
    assert layer["name"] == "model.layers.*.self_attn.q_proj"
    assert layer["decode"]["bound"] in ("launch", "bytes", "arithmetic")
    assert set(layer["decode"]["us"]) == {form["name"] for form in ran.json["forms"]}


def test_a_checkpoint(twofour, dense):
    ran = twofour("advise", dense, "--gpu", "H200", "--json")
    assert ran.status == 0
    assert sum(layer["count"] for layer in ran.json["layers"] if layer["eligible"]) == 14


def test_mistakes(twofour, llama, tmp_path):
    ran = twofour("advise", llama, "--gpu", "H2000")
    assert ran.status == 2
    assert "Known are: A100 40GB SXM" in ran.err
    ran = twofour("advise", tmp_path / "no", "--gpu", "H200")
    assert ran.status == 2
    assert "does not exist" in ran.err
    assert twofour("advise", llama, "--gpu", "H200", "--dtype", "int3").status == 2
    for option, value in (("--batch", 0), ("--seq", 0), ("--generate", -1)):
        ran = twofour("advise", llama, option, value)
        assert ran.status == 2
        assert f"'{option}'" in ran.err
    assert twofour("advise", llama, "--gpu", "H200", "--measured", tmp_path / "no.json").status == 2


def test_own_measurement_changes_the_answer(twofour, llama):
    from twofour.advise.gpus import find_gpu
    from twofour.advise.model import shipped
    from twofour.advise.products import product_time
    from twofour.advise.schemes import DENSE, SPARSE

    rows = []
    for scheme, contender, slower in ((DENSE, "dense", 1.0), (SPARSE, "twofour", 3.0)):
        for shape in ((4096, 4096), (28672, 4096)):
            for tokens in (1, 64, 4096):
                us = slower * product_time(shipped().curve(scheme), find_gpu("L4"), scheme, *shape, tokens).us
                row = {"rows": shape[0], "columns": shape[1], "tokens": tokens, "contender": contender}
                rows.append(row | {"graph_ms": {"p50": us / 1e3}})
    path = llama / "rows.json"
    path.write_text(json.dumps({"about": {"gpu": "NVIDIA L4"}, "products": rows}))
    told = twofour("advise", llama, "--gpu", "L4", "--json").json
    assert told["verdict"].startswith("Worth it")
    told = twofour("advise", llama, "--measured", path, "--json").json
    assert told["verdict"].startswith("Not worth it for speed")


def test_as_a_process_without_torch(llama):
    """The whole command, from the shell: importing torch alone would take longer."""
    code = "import sys; from twofour.cli.main import main; status = main(sys.argv[1:]);"
    code += "print('torch' in sys.modules, file=sys.stderr); sys.exit(status)"
    command = [sys.executable, "-c", code, "advise", llama, "--gpu", "H200", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TERM": "dumb"})
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["batch"] == 1
    assert ran.stderr.strip() == "False"
