"""Processes that ``torchrun`` or ``accelerate launch`` started."""

from __future__ import annotations

from datetime import timedelta

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

#: How long a process may wait for the others to finish.
PROCESS_TIMEOUT = timedelta(days=7)


def start_processes() -> PartialState:
    """Return the state of this process and the others that share the work.

    Without CUDA, or if ``ACCELERATE_USE_CPU`` is true, they communicate and compute on CPUs.
    """
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return PartialState(cpu=on_cpu, timeout=PROCESS_TIMEOUT)
