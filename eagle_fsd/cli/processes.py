"""Commands that several processes run together, with a target that is split over them.

Every process runs the whole command. The first one prints and keeps the files.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from eagle_fsd.evaluation.config import EvaluationRequest
from eagle_fsd.model.config import TENSOR_PARALLEL
from eagle_fsd.utils.options import OptionsError

T = TypeVar("T")


def check_single_process(command: str, loads_target: bool = True) -> None:
    """Reject a command that several processes run."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        advice = ". --device auto spreads a target over several GPUs" if loads_target else ""
        raise OptionsError(f"{command} requires a single process; got {processes}{advice}")


@contextmanager
def joined(device: str | None) -> Iterator[bool]:
    """Run a command in all processes if they share a target.

    Yield whether this process prints and keeps files. The output of the others is discarded.
    """
    if device != TENSOR_PARALLEL:
        yield True
        return
    import torch.distributed as dist

    from eagle_fsd.evaluation.processes import join_processes

    if join_processes():
        yield True
    else:
        logging.disable()
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield False
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def joined_evaluation(
    request: EvaluationRequest, command: str
) -> Iterator[tuple[EvaluationRequest, bool]]:
    """Run an evaluation in all processes if they share a target.

    Yield the request, and whether this process prints and keeps files. The others get a copy of the
    output folder, and no judge.
    """
    if request.device != TENSOR_PARALLEL:
        yield request, True
        return
    folder = request.output_folder(command)
    with joined(request.device) as is_first, TemporaryDirectory() as copied:
        paths = [path for path in folder.rglob("*") if path.is_file()] if is_first else []
        files = _broadcast({path.relative_to(folder): path.read_bytes() for path in paths})
        if not is_first:
            for name, content in files.items():
                path = Path(copied, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            request = request.without_judge().model_copy(update={"out": Path(copied)})
        yield request, is_first


def read_prompt(is_first: bool) -> str:
    """Return what the first process reads from standard input, in all processes."""
    return _broadcast(sys.stdin.read() if is_first else "")


def _broadcast(value: T) -> T:
    """Return the first process's value in all processes that have joined."""
    import torch.distributed as dist

    found = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]
