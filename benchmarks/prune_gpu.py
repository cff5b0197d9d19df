"""Time and memory of one-shot pruning on a GPU: one decoder block, or a whole model of many.

Usage: python benchmarks/prune_gpu.py [--block | --model] [options]; --help has them.

--block: a decoder block of transformers with random weights, of the shape of Llama-3-8B. The inputs of its
seven layers from 128 windows of 2048 states, the layers by each method, and the pass after them. The states
are of low rank with some noise and channels of very different size, so that no Gram matrix is trivial. Beside
the methods a textbook SparseGPT: column after column, every layer with a Gram matrix of its own.

--model: a checkpoint of such blocks with random weights is written to a temporary directory (twice its size
and the pruned blocks must fit there), then pruned by `twofour prune` in a process of its own.

Rows go to standard output as one JSON document, and to the file `--json`. Random weights are fine for time
and memory; the errors in the rows only show that the methods do their work. `--tiny` shrinks all shapes: a
smoke run for any machine.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from twofour.bench.timing import about
from twofour.calibrate.blocks import GPU_TOKENS, Block, Call, Shelf, pass_through
from twofour.calibrate.observe import observe
from twofour.calibrate.statistics import Gram
from twofour.pattern import check_pattern
from twofour.prune import method_named, prune_block
from twofour.prune.hessian import relative_output_error
from twofour.select import Layer, select
from twofour.version import __version__

METHODS = ("sparsegpt", "wanda", "admm")

#: Llama-3-8B, and something to try the script with.
SHAPE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}

#: Runs the command line and notes the peaks of the process, which only it knows.
CHILD = """
import json, resource, sys, time
start = time.perf_counter()
from twofour.cli.main import main
status = main(sys.argv[2:])
import torch
gpu = torch.cuda.is_available()
peaks = {
    "seconds": time.perf_counter() - start,
    "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
    "reserved_gpu_gb": torch.cuda.max_memory_reserved() / 1e9 if gpu else None,
    "peak_ram_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
}
open(sys.argv[1], "w").write(json.dumps(peaks))
sys.exit(status)
"""


class Clock:
    """Seconds by name, the device idle at both ends of each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = round(time.perf_counter() - start, 4)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def config_of(given: argparse.Namespace, layers: int) -> transformers.LlamaConfig:
    shape = TINY if given.tiny else SHAPE
    return transformers.LlamaConfig(
        **shape,
        num_hidden_layers=layers,
        vocab_size=2048 if given.tiny else 128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


# One block


def states(samples: int, length: int, hidden: int, device: torch.device) -> Iterator[Tensor]:
    """Windows of states, in batches: of low rank with some noise, channels of very different size."""
    random = torch.Generator(device).manual_seed(0)
    rank = hidden // 8
    mix = torch.randn(rank, hidden, generator=random, device=device) / rank**0.5
    size = torch.randn(hidden, generator=random, device=device).mul(0.7).exp()
    batch = max(1, GPU_TOKENS // length)
    for start in range(0, samples, batch):
        count = min(batch, samples - start)
        signal = torch.randn(count, length, rank, generator=random, device=device) @ mix
        noise = torch.randn(count, length, hidden, generator=random, device=device)
        yield ((signal + 0.3 * noise) * size).bfloat16()


def calls_of(
    config: Any, samples: int, length: int, device: torch.device, put: Callable[[Tensor], Tensor]
) -> list[Call]:
    positions = torch.arange(length, device=device)[None]
    rotary = LlamaRotaryEmbedding(config).to(device)
    found = []
    for x in states(samples, length, config.hidden_size, device):
        named = {"attention_mask": None, "position_embeddings": rotary(x, positions)}
        found.append(Call(put(x), (), named))
    return found


def block_of(config: Any, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    with device:
        block = LlamaDecoderLayer(config, 0).bfloat16()
    for parameter in block.parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(std=0.02)
    return block.eval()


@torch.no_grad()
def run_method(
    name: str, config: Any, samples: int, length: int, device: torch.device, states_on_cpu: bool
) -> dict[str, Any]:
    """One block by one of our methods, as `run_blocks` does it."""
    block = block_of(config, device)
    layers = list(select(block).layers)
    full = [Layer(f"block.{layer.name}", layer.kind, layer.shape) for layer in layers]
    nbytes = samples * length * config.hidden_size * 2
    shelf = Shelf(device, (1 << 60) if states_on_cpu else nbytes)
    calls = calls_of(config, samples, length, device, shelf.put)
    shelf.settle()
    reset_peak(device)
    clock = Clock(device)
    with clock("all"):
        with clock("hessians"):
            grams = observe(block, full, "block.", calls, shelf)
        with clock("layers"):
            turn = Block(0, "block", block, full, grams, calls, [], device)
            notes, _ = prune_block(turn, method_named(name))
        with clock("after"):
            pass_through(block, calls, shelf)
    for layer in layers:
        assert check_pattern(block.get_parameter(f"{layer.name}.weight")).legal
    return {
        "method": name,
        "seconds": clock.seconds,
        "layer_seconds": {x.name.removeprefix("block."): notes[x]["seconds"] for x in full},
        "output_error": {x.name.removeprefix("block."): round(notes[x]["output_error"], 5) for x in full},
        "states": "on the device" if shelf.resident else "on the CPU",
        "peak_gpu_gb": peak(device),
    }


@torch.no_grad()
def run_textbook(config: Any, samples: int, length: int, device: torch.device) -> dict[str, Any]:
    """The same by SparseGPT as published, written plainly: what one gets without trying."""
    block = block_of(config, device)
    modules = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    calls = calls_of(config, samples, length, device, lambda x: x)
    reset_peak(device)
    clock = Clock(device)
    hessians = {
        name: torch.zeros(module.in_features, module.in_features, device=device)
        for name, module in modules.items()
    }
    seen = 0
    layer_clock, errors = Clock(device), {}
    with clock("hessians"):

        def count(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                for window in args[0]:
                    x = window.float()
                    hessians[name] += x.t() @ x

            return hook

        hooks = [m.register_forward_pre_hook(count(name)) for name, m in modules.items()]
        for call in calls:
            call.through(block, device)
            seen += call.states.shape[0] * call.states.shape[1]
        for hook in hooks:
            hook.remove()
    with clock("layers"):
        for name, module in modules.items():
            hessian = hessians.pop(name).div_(seen)
            with layer_clock(name):
                new = textbook(module.weight.float(), hessian)
            gram = Gram(1)
            gram.mean = hessian
            errors[name] = round(relative_output_error(module.weight, new, gram), 5)
            module.weight.copy_(new)
            del hessian, gram, new
    clock.seconds["layers"] = round(sum(layer_clock.seconds.values()), 4)  # without measuring their errors
    with clock("after"):
        for call in calls:
            call.states = call.through(block, device)
    clock.seconds["all"] = round(sum(clock.seconds.values()), 4)
    return {
        "method": "textbook sparsegpt",
        "seconds": clock.seconds,
        "layer_seconds": layer_clock.seconds,
        "output_error": errors,
        "states": "on the device",
        "peak_gpu_gb": peak(device),
    }


def textbook(weight: Tensor, hessian: Tensor, width: int = 128, damping: float = 0.01) -> Tensor:
    """Column after column: choose for every four, take out, let all further right make up for it."""
    weight = weight.clone()
    damped = hessian.clone()
    damped.diagonal().add_(damping * damped.diagonal().mean())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    for start in range(0, weight.shape[1], width):
        stop = min(start + width, weight.shape[1])
        panel = weight[:, start:stop].clone()
        corner = upper[start:stop, start:stop]
        errors = torch.zeros_like(panel)
        for j in range(stop - start):
            if j % 4 == 0:
                score = (panel[:, j : j + 4] / corner.diagonal()[j : j + 4]) ** 2
                out = torch.zeros_like(score, dtype=torch.bool)
                out.scatter_(1, score.topk(2, dim=1, largest=False).indices, True)
            new = panel[:, j].masked_fill(out[:, j % 4], 0.0)
            error = (panel[:, j] - new) / corner[j, j]
            panel[:, j:] -= error[:, None] * corner[j, j:]
            panel[:, j] = new
            errors[:, j] = error
        weight[:, start:stop] = panel
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return weight


def bench_block(given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    config = config_of(given, 1)
    samples, length = given.samples, given.seqlen
    rows = []
    for name in given.methods:
        # The first run compiles and loads: on one batch of windows, and its time is in the row.
        start = time.perf_counter()
        few = max(1, GPU_TOKENS // length)
        if name == "textbook":
            run_textbook(config, min(few, samples), length, device)
        else:
            run_method(name, config, min(few, samples), length, device, given.states_on_cpu)
        warm_up = round(time.perf_counter() - start, 2)
        tidy(device)
        if name == "textbook":
            row = run_textbook(config, samples, length, device)
        else:
            row = run_method(name, config, samples, length, device, given.states_on_cpu)
        tidy(device)
        shape = TINY if given.tiny else SHAPE
        rows.append(
            {"what": "block", **row, "warm_up_seconds": warm_up, "windows": [samples, length], **shape}
        )
        print(f"{row['method']}: {row['seconds']}, {row['peak_gpu_gb']} GB", file=sys.stderr, flush=True)
    return rows


def tidy(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> float | None:
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 3) if device.type == "cuda" else None


# A whole model


def write_model(directory: Path, given: argparse.Namespace, layers: int, device: torch.device) -> None:
    """A checkpoint of random weights, a shard for each block, with a tokenizer of made-up words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = config_of(given, layers)
    config.architectures = ["LlamaForCausalLM"]
    directory.mkdir()
    config.save_pretrained(directory)
    with torch.device("meta"):
        skeleton = transformers.LlamaForCausalLM(config)
    shards: dict[str, list[str]] = {}
    for name, _ in skeleton.named_parameters():
        number = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        shards.setdefault(f"model-{number:05d}-of-{layers:05d}.safetensors", []).append(name)
    random = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for file, names in shards.items():
        tensors = {}
        for name in names:
            shape = skeleton.get_parameter(name).shape
            if len(shape) == 1:
                new = torch.ones(shape, dtype=torch.bfloat16)
            else:
                new = torch.empty(shape, dtype=torch.bfloat16, device=device)
                new = new.normal_(std=0.02, generator=random).cpu()
            tensors[name] = new
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, config.vocab_size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)


def write_text(path: Path, vocabulary: int, count: int) -> None:
    """Words of which some are frequent and most are rare, as in any language."""
    random = torch.Generator().manual_seed(0)
    rank = (vocabulary - 3) ** torch.rand(count, generator=random)
    words = [f"w{3 + int(r) % (vocabulary - 3)}" for r in rank.tolist()]
    lines = [json.dumps({"text": " ".join(words[i : i + 5000])}) for i in range(0, count, 5000)]
    path.write_text("\n".join(lines) + "\n")


def bench_model(given: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    rows = []
    for name in given.methods:
        if name == "textbook":
            continue
        with tempfile.TemporaryDirectory(dir=given.directory) as temporary:
            base = Path(temporary)
            start = time.perf_counter()
            write_model(base / "dense", given, given.layers, device)
            tidy(device)
            written = time.perf_counter() - start
            text = base / "text.jsonl"
            write_text(text, config_of(given, 1).vocab_size, max(400_000, 4 * given.seqlen))
            row = prune_model(name, base, text, given)
            size = sum(file.stat().st_size for file in (base / "dense").glob("*.safetensors"))
        shape = TINY if given.tiny else SHAPE
        about_run = {"layers": given.layers, "windows": [given.samples, given.seqlen], **shape}
        row |= {"checkpoint_gb": round(size / 1e9, 2), "checkpoint_written_in": round(written, 1)}
        rows.append({"what": "model", "method": name, **row, **about_run})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def prune_model(name: str, base: Path, text: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The command in a process of its own: its time, its peaks, and when each block was on disk."""
    arguments = ["prune", base / "dense", base / "pruned", "--method", name, "--calib", text]
    arguments += ["--samples", given.samples, "--seqlen", given.seqlen, "--json"]
    command = [sys.executable, "-c", CHILD, base / "peaks.json", *arguments]
    done: list[float] = []
    start = time.perf_counter()
    with (base / "out.json").open("wb") as out:
        process = subprocess.Popen([str(part) for part in command], stdout=out, env={**os.environ})
        watcher = threading.Thread(target=watch, args=(process, base / ".pruned.blocks", start, done))
        watcher.start()
        status = process.wait()
        watcher.join()
    seconds = time.perf_counter() - start
    if status:
        raise SystemExit(f"twofour prune failed with status {status}")
    record = json.loads((base / "out.json").read_text())
    per_block: dict[str, float] = {}
    for layer, note in record["layers"].items():
        block = ".".join(layer.split(".")[:3])
        per_block[block] = per_block.get(block, 0.0) + note["seconds"]
    between = [round(b - a, 2) for a, b in itertools.pairwise(done)]
    peaks = json.loads((base / "peaks.json").read_text())
    return {
        "seconds": round(seconds, 2),
        "until_first_block": round(done[0], 2) if done else None,
        "until_last_block": round(done[-1], 2) if done else None,
        "seconds_per_block": round(sum(between) / len(between), 3) if between else None,
        "seconds_between_blocks": between,
        "layers_only_seconds": {block: round(s, 3) for block, s in per_block.items()},
        **{
            key: value if value is None else round(value, 3)
            for key, value in peaks.items()
            if key != "seconds"
        },
    }


def watch(process: subprocess.Popen[bytes], work: Path, start: float, done: list[float]) -> None:
    """Note when a further file of a finished block is there."""
    while process.poll() is None:
        found = len(list(work.glob("block-*.safetensors"))) if work.exists() else 0
        while len(done) < found:
            done.append(time.perf_counter() - start)
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--block", action="store_true", help="one decoder block (the default)")
    what.add_argument("--model", action="store_true", help="a whole checkpoint, by the command")
    parser.add_argument("--layers", type=int, default=32, help="blocks of the model")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="default: all and textbook for --block, else sparsegpt"
    )
    parser.add_argument("--states-on-cpu", action="store_true", help="--block: as if they did not fit")
    parser.add_argument("--directory", help="where the temporary directory is made")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a smoke run")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    given = parser.parse_args()
    if given.methods is None:
        given.methods = ["sparsegpt"] if given.model else [*METHODS, "textbook"]
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = (bench_model if given.model else bench_block)(given, device)
    machine = {**about(device), "twofour": __version__, "transformers": transformers.__version__}
    document = json.dumps([{**row, **machine} for row in rows], indent=1)
    print(document)
    if given.json:
        given.json.write_text(document + "\n")


if __name__ == "__main__":
    main()
