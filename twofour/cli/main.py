"""The command: its verbs, and how errors become one sentence and an exit status.

0 done; 1 the work failed or a check found a fault; 2 the command line or the input was wrong; 130 Ctrl-C.
With `--json` standard output is one JSON document and nothing else, for errors too. Everything that is
not the result goes to standard error. Verbs import what is heavy inside their functions, so that `--help`
and shell completion answer at once.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from twofour.cli import (
    advise,
    bench,
    check,
    demo,
    doctor,
    eval,
    pack,
    prune,
    quantize,
    recover,
    report,
    sensitivity,
    tune,
)
from twofour.cli.output import print_error
from twofour.errors import TwoFourError
from twofour.version import __version__

app = typer.Typer(
    name="twofour",
    help="2:4 structured sparsity: prune a model, pack it, check it, run it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twofour {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    pass


VERBS = (
    advise,
    sensitivity,
    prune,
    recover,
    quantize,
    pack,
    check,
    eval,
    bench,
    tune,
    report,
    demo,
    doctor,
)


def _interruptible(command: Callable[..., Any]) -> Callable[..., Any]:
    """Typer makes a status of Ctrl-C, which tells nobody, and nobody could tell it from `bench`'s own."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            raise typer.Abort from None

    return run


for verb in VERBS:
    app.command(verb.__name__.rpartition(".")[2], epilog=verb.EXAMPLE)(_interruptible(verb.command))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in arguments
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: other libraries' bars
    try:
        # Not standalone: typer would otherwise end the process itself.
        status = app(arguments, prog_name="twofour", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except TwoFourError as error:
        print_error(error.args[0], as_json=as_json, layer=error.layer)
        return error.exit_status
    except typer.Exit as end:
        return end.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print_error(_stopped(arguments), as_json=as_json)
        return 130
    except Exception as error:
        usage = _usage_error(error)
        if usage is None:
            raise
        print_error(usage, as_json=as_json)
        return 2


def _stopped(arguments: list[str]) -> str:
    asked = next((word for word in arguments if not word.startswith("-")), "")
    commands = {verb.__name__.rpartition(".")[2]: verb.command for verb in VERBS}
    resumes = asked in commands and "resume" in inspect.signature(commands[asked]).parameters
    return "stopped. The same command with --resume goes on." if resumes else "stopped."


def _usage_error(error: Exception) -> str | None:
    """The words of a wrong command line; None if the error is something else."""
    words = getattr(error, "format_message", None)  # click's, wherever typer keeps it
    if words is None:
        return None
    context = getattr(error, "ctx", None)
    hint = f" See `{context.command_path} --help`." if context is not None else ""
    return f"{words().rstrip('.')}.{hint}"


def run() -> None:
    status = main()
    if "WORLD_SIZE" in os.environ:  # torchrun's
        from twofour.calibrate.parallel import leave

        leave(status)
    sys.exit(status)
