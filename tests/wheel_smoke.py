"""Run by `make wheel-test` with the Python of an environment that has only the installed wheel."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    import torch

    start = time.perf_counter()
    import twofour

    seconds = time.perf_counter() - start
    assert "site-packages" in twofour.__file__, f"not the installed package: {twofour.__file__}"
    assert seconds < 0.5, f"import twofour takes {seconds:.2f} s on top of torch"
    assert "transformers" not in sys.modules, "importing twofour imported transformers"
    assert not torch.cuda.is_initialized(), "importing twofour touched the GPU"

    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        LlamaForCausalLM(config).save_pretrained(base / "dense")
        for verb in (
            ["prune", "dense", "pruned"],
            ["pack", "pruned", "packed"],
            ["check", "packed"],
            ["doctor"],
        ):
            subprocess.run(["twofour", *verb], cwd=base, check=True, stdout=subprocess.DEVNULL)
        tokens = torch.arange(8)[None]
        ours = AutoModelForCausalLM.from_pretrained(base / "packed")(tokens).logits
        assert torch.equal(ours, AutoModelForCausalLM.from_pretrained(base / "pruned")(tokens).logits)
    print(f"the wheel works: twofour {twofour.__version__}, imported in {seconds * 1000:.0f} ms")


if __name__ == "__main__":
    main()
