"""The list of commands, and the conversion of errors to messages and exit statuses."""

from __future__ import annotations

import io
import logging
import os
import sys

from cyclopts import CycloptsError
from pydantic import ValidationError
from safetensors import SafetensorError

from eagle_fsd import __version__
from eagle_fsd.cli import export, serve, train
from eagle_fsd.cli.bench import bench
from eagle_fsd.cli.calibrate import calibrate
from eagle_fsd.cli.chat import chat
from eagle_fsd.cli.console import fail
from eagle_fsd.cli.demo import demo
from eagle_fsd.cli.doctor import doctor
from eagle_fsd.cli.evaluate import evaluate
from eagle_fsd.cli.generate import generate
from eagle_fsd.cli.lm_eval import lm_eval
from eagle_fsd.cli.parsing import root_command, usage_message
from eagle_fsd.cli.sweep import sweep
from eagle_fsd.cli.tune import tune
from eagle_fsd.train.training_folder import TrainingError
from eagle_fsd.utils.errors import is_out_of_memory
from eagle_fsd.utils.options import OptionsError, validation_message
from eagle_fsd.utils.text import one_line

#: Exit status after Ctrl-C: 128 plus the signal's number, as in shells.
INTERRUPTED = 130

#: Description of the program in its help.
DESCRIPTION = "Fuzzy speculative decoding with draft trees of EAGLE heads, draft models or n-grams."

app = root_command("eagle-fsd", DESCRIPTION, __version__)
app.add(demo, generate, chat, serve.app, evaluate, sweep, tune, calibrate)
app.add(train.app, export.app, bench, doctor, lm_eval)


def main() -> None:
    """Run the command that ``sys.argv`` names.

    Exit status: 0 on success, 2 for a usage error, 130 after Ctrl-C, and 1 for any other error.
    Expected errors are printed as one line on standard error, unexpected ones as a traceback.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):  # replace characters that its encoding lacks
        sys.stdout.reconfigure(errors="replace")
    # transformers and huggingface_hub read these when a command imports them.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    words = sys.argv[1:]
    # Otherwise, any word that follows would be taken for the option's value.
    words = [
        "--compile=true" if word == "--compile" and after not in ("auto", "true", "false") else word
        for word, after in zip(words, [*words[1:], ""], strict=False)
    ]
    try:
        app(words)
    except (CycloptsError, OptionsError) as error:
        command = " ".join(("eagle-fsd", *app.parse_commands(words)[0]))
        fail(f"{usage_message(error)} (see {command} --help)", 2)
    except KeyboardInterrupt:
        fail("stopped", INTERRUPTED)
    except ValidationError as error:
        fail(validation_message(error), 1)
    except (ValueError, FloatingPointError, OSError, TrainingError, SafetensorError) as error:
        fail(error, 1)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # Torch's own message is about its allocator.
        details = f" ({one_line(error)})" if isinstance(error, MemoryError) and str(error) else ""
        advice = "reduce the batch or the number of tokens, or use a smaller model or dtype"
        fail(f"out of memory{details}; {advice}", 1)
