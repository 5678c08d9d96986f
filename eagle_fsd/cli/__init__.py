"""The command line: ``eagle-fsd`` and its sub-commands, a module each."""

from __future__ import annotations

import logging
import sys

import typer
from typer.exceptions import TyperException

from eagle_fsd.cli.bench import bench
from eagle_fsd.cli.calibrate import calibrate
from eagle_fsd.cli.chat import chat
from eagle_fsd.cli.console import fail
from eagle_fsd.cli.demo import demo
from eagle_fsd.cli.evaluate import MethodsCommand, evaluate
from eagle_fsd.cli.generate import generate
from eagle_fsd.cli.serve import app as serve_app
from eagle_fsd.cli.sweep import GridCommand, sweep
from eagle_fsd.cli.train import app as train_app
from eagle_fsd.train.run_folder import TrainingError

#: Exit status after Ctrl-C: 128 and the signal's number, as shells have it.
INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Fuzzy speculative decoding with EAGLE-2 draft trees.",
)
app.command()(generate)
app.command()(chat)
app.command()(demo)
app.command(cls=GridCommand)(bench)
app.command(cls=MethodsCommand)(evaluate)
app.command(cls=GridCommand)(sweep)
app.command(cls=GridCommand)(calibrate)
app.add_typer(train_app, name="train")
app.add_typer(serve_app, name="serve")


def main() -> None:
    """Run the command; whatever is expected to go wrong is one line on standard error.

    Status 0 on success, 2 for a usage error, 1 otherwise.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        status = app(prog_name="eagle-fsd", standalone_mode=False)
    except TyperException as error:
        fail(f"{error.format_message()} (see eagle-fsd --help)", error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        fail("stopped", INTERRUPTED)
    except (ValueError, FloatingPointError, OSError, TrainingError) as error:
        fail(str(error), 1)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        fail("out of memory: decode fewer at once, or a smaller model or dtype", 1)
    if status == INTERRUPTED:  # typer's own answer to Ctrl-C
        fail("stopped", INTERRUPTED)
    raise SystemExit(status or 0)


def out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory or the machine's did not suffice."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported for this
        or "DefaultCPUAllocator: can't allocate memory" in str(error)
        or "DefaultCPUAllocator: not enough memory" in str(error)
    )
