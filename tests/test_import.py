"""Importing the package is cheap: no torch, no transformers, no GPU."""

import subprocess
import sys

import twofour

LIGHT = """
import sys, time
start = time.perf_counter()
import twofour
seconds = time.perf_counter() - start
heavy = {"torch", "transformers", "numpy", "safetensors"} & set(sys.modules)
print(seconds < 0.5, sorted(heavy))
"""


def test_import_is_light():
    ran = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert ran.stdout.split(maxsplit=1) == ["True", "[]\n"]


def test_public_names_are_few_and_there():
    names = [name for name in twofour.__all__ if not name.startswith("_")]
    assert len([name for name in names if not name.endswith("Error")]) <= 12  # verbs
    assert all(getattr(twofour, name) is not None for name in names)
    assert set(names) <= set(dir(twofour))


def test_transformers_still_imports_when_the_import_is_repeated():
    code = "import twofour, importlib; importlib.reload(twofour); import transformers.quantizers.auto as a;"
    code += "print('twofour' in a.AUTO_QUANTIZER_MAPPING)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "True", ran.stderr
