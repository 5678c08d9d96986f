"""Start processes in a sandbox of bubblewrap (https://github.com/containers/bubblewrap).

Such a process sees a read-only file system that holds the Python interpreter, its standard library
and the shared libraries of both. It has no network, its own process ids and ``/proc``, no variables
of the caller's environment but ``LD_LIBRARY_PATH``, and no rights beyond those of an unprivileged
user. It cannot start other processes or open sockets other than Unix sockets (``seccomp.py``
filters system calls). ``child.py`` adds the limits on memory, CPU time and threads. Root's threads
are not limited in number, so it changes to an unprivileged user first.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from eagle_fsd.evaluation.code_execution.seccomp import syscall_filter
from eagle_fsd.utils.text import one_line

_CHILD = Path(__file__).with_name("child.py")
#: The path of ``child.py`` in the sandbox.
_INSIDE = "/child.py"
#: User ids for root's sandboxes, which systemd reserves for temporary use. Each sandbox takes one
#: at random, because threads are counted by user.
_USER_IDS = range(61184, 65520)
#: Maximum number of threads in a sandbox, including bubblewrap's process unless it is root's.
MAX_THREADS = 8
_LIBRARY = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)


class SandboxError(OSError):
    """The sandbox is not available, or a process in it did not start."""


@functools.cache
def bubblewrap_command() -> tuple[str, ...]:
    """Return a command line of a sandbox, up to ``--seccomp`` and the program."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise FileNotFoundError("the command bwrap is not installed")
    paths, packages = _interpreter_files(), f"{_standard_library()}/site-packages"
    # Created explicitly, because bubblewrap makes missing parents of a mount private to root.
    folders = sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"})
    command = (
        *(bwrap, "--die-with-parent", "--cap-drop", "ALL"),
        *("--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts"),
        "--unshare-cgroup-try",
        *(word for folder in (*folders, "/dev") for word in ("--dir", folder)),
        *(word for path in paths for word in ("--ro-bind", path, path)),
        *(("--tmpfs", packages, "--remount-ro", packages) if os.path.isdir(packages) else ()),
        *("--ro-bind", str(_CHILD), _INSIDE),
        *("--dev-bind", os.devnull, os.devnull),
        *("--proc", "/proc", "--remount-ro", "/", "--chdir", "/"),
    )
    if os.getuid() == 0:  # for the change of the user id in child.py
        return (*command, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    return (*command, "--unshare-user")


def _interpreter_files() -> list[str]:
    """Return the paths of the interpreter, its standard library and their shared libraries."""
    interpreter, library = _interpreter(), _standard_library()
    # There is no display, and Tk requires many libraries.
    modules = [
        str(path)
        for path in Path(library, "lib-dynload").glob("*.so")
        if not path.name.startswith("_tkinter")
    ]
    listing = subprocess.run(["ldd", interpreter, *modules], capture_output=True, text=True)
    found = {path for path in _LIBRARY.findall(listing.stdout) if not path.startswith(library)}
    cache = "/etc/ld.so.cache"  # where the loader finds libraries outside its default folders
    return [interpreter, library, *sorted(found), *([cache] if os.path.exists(cache) else [])]


def _interpreter() -> str:
    """Return the path of the interpreter outside any virtual environment."""
    return os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]


def _standard_library() -> str:
    """Return the folder where this interpreter finds its standard library."""
    prefix = os.path.realpath(sys.base_prefix)
    return sysconfig.get_path("stdlib", vars={"installed_base": prefix})


@contextlib.contextmanager
def start_child(
    role: str,
    limits: tuple[int, int],
    sandboxed: bool,
    stdin: int | IO[bytes],
    stdout: int | IO[bytes],
    stderr: int = subprocess.DEVNULL,
    descriptors: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``child.py`` in a process, and kill it and its descendants in the end.

    ``limits`` are CPU seconds and, except on macOS, MiB of address space. Without a sandbox, only
    these and limits on files apply, and descendants that have changed their process group survive.
    ``descriptors`` are inherited and passed as the last arguments.
    """
    uid, threads, inherited = 0, 0, list(descriptors)
    with contextlib.ExitStack() as stack:
        prefix, script = [_interpreter()], str(_CHILD)
        if sandboxed:
            command = bubblewrap_command()
            filter_file = stack.enter_context(tempfile.TemporaryFile())
            filter_file.write(syscall_filter())
            filter_file.seek(0)
            inherited.append(filter_file.fileno())
            prefix, script = [*command, "--seccomp", str(filter_file.fileno()), *prefix], _INSIDE
            uid = random.choice(_USER_IDS) if os.getuid() == 0 else 0
            threads = MAX_THREADS
        arguments = (role, *map(str, (uid, *limits, threads, *descriptors)))
        libraries = os.environ.get("LD_LIBRARY_PATH")  # where some interpreters find their own
        process = subprocess.Popen(
            [*prefix, "-I", "-S", script, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={"LD_LIBRARY_PATH": libraries} if libraries else {},
            pass_fds=inherited,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@functools.cache
def check_sandbox() -> None:
    """Raise a SandboxError with a one-line message if no process can be started in the sandbox."""
    pipe = subprocess.PIPE
    try:
        with start_child(
            "answer",
            limits=(10, 512),
            sandboxed=True,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
        ) as process:
            _, errors = process.communicate(timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxError(f"bubblewrap is not available: {one_line(error)}") from error
    if process.returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise SandboxError(f"bubblewrap is not available: {one_line(' '.join(lines[-3:]))}")
