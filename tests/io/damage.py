"""How tests damage a checkpoint, and what must come of it."""

import hashlib
import json

from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
LAYER = "model.layers.1.mlp.down_proj"


def digest(directory):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(directory.iterdir())}


def edit_config(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_tensors(directory, change):
    """Change tensors and store them without checksums, as a forger would."""
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


def flip_a_bit(path, offset_from_end=1000):
    content = bytearray(path.read_bytes())
    content[-offset_from_end] ^= 1
    path.write_bytes(bytes(content))


def one_sentence(ran, *words):
    """An error on standard error that holds these words, and no traceback."""
    assert "Traceback" not in ran.err
    line = ran.err.strip().splitlines()[-1]
    for word in words:
        assert word in line, line
    return line
