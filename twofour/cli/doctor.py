"""`twofour doctor`"""

from __future__ import annotations

from twofour.cli.output import Json, bold, print_json, say, table

EXAMPLE = "Example: [bold]twofour doctor[/]"


def command(json: Json = False) -> None:
    """What this machine can run, and why not the rest."""
    from twofour.kernels.doctor import examine

    found = examine()
    if json:
        print_json({"verb": "doctor", **found})
        return
    table("Versions", ("what", "version"), found["versions"].items())
    gpus = [(g["name"], g["capability"], "yes" if g["sparse_tensor_cores"] else "no") for g in found["gpus"]]
    if gpus:
        table("GPUs", ("name", "compute capability", "Sparse Tensor Cores"), gpus)
    else:
        say(f"No GPU: {found['no_gpu']}.")
    for backend in found["backends"]:
        state = ("runs", "green") if backend["runs"] else ("does not run", "yellow")
        say("backend ", bold(backend["name"]), " ", state, f": {backend['why']}")
