"""Commands that two processes run together, on the CPU and on one thread each."""

from __future__ import annotations

import os
import subprocess
import sys

LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: Seconds until a process counts as hung.
TIMEOUT = 600


def run_two(*words: object, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a file, or ``-m`` and a module, with its arguments in two processes."""
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*LAUNCHER, *map(str, words)],
        env={**os.environ, **environment, **variables},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
