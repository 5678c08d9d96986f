"""Runs a program it reads from standard input, under limits; started by ``sandbox.py``.

Standard library only: it runs as a script in an isolated interpreter. The limits are the operating
system's (processor time, memory, file size) and an audit hook, which Python code cannot
take off again: no network, no other processes, no foreign code, no writing but in the working
folder. This keeps a language model's mistakes from doing harm; against somebody who means harm, run
the whole evaluation in a container.
"""

import os
import shutil
import subprocess
import sys
import types

try:
    import resource
except ImportError:  # not on Windows; the time limit and the audit hook remain
    resource = None
try:
    import _posixsubprocess
    import posix
except ImportError:
    posix = None

#: Exit status of a program that did what it may not.
STOPPED = 77
#: Opening a folder for a file without a name in it.
NAMELESS = getattr(os, "O_TMPFILE", 0)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
#: Audit events that are refused whatever their arguments.
REFUSED = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.startfile",
    "os.chdir",  # names are judged against the folder it began in
    "os.kill",
    "pty.",
    "signal.pthread_kill",
    "webbrowser.",
    "ftplib.",
    "http.client.",
    "smtplib.",
    "urllib.",
    "sqlite3.",
)
#: Audit events whose paths must lie in the working folder: the places of the paths.
PATHS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.link": (0, 1),
    "os.symlink": (0, 1),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
    "shutil.copytree": (1,),
}
#: Functions that begin programs or make files without an audit event.
UNAUDITED = [(os, "mkfifo"), (os, "mknod"), (subprocess, "_fork_exec")]
if posix is not None:
    UNAUDITED += [(posix, "mkfifo"), (posix, "mknod"), (_posixsubprocess, "fork_exec")]


def limit(seconds, megabytes):
    """The operating system's limits on this process."""
    if resource is None:
        return
    memory = megabytes << 20
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))


def guard(folder):
    """Refuse what a program has no business doing."""
    inside = os.path.realpath(folder) + os.sep
    real, join, fspath, fsdecode = os.path.realpath, os.path.join, os.fspath, os.fsdecode
    isdir = os.path.isdir

    def foreign(path):
        if isinstance(path, int):
            return False
        return not (real(join(folder, fsdecode(fspath(path)))) + os.sep).startswith(inside)

    def stop(reason):
        # Not an exception: an answer that catches it would go on.
        os.write(2, f"{reason} is not allowed here\n".encode())
        os._exit(STOPPED)

    def hook(event, arguments):
        if event.startswith("ctypes."):
            raise ImportError("ctypes is not allowed here")  # libraries try, and do without
        if event.startswith(REFUSED):
            stop(event)
        if event == "open":
            path, mode, flags = arguments
            writes = bool(flags & WRITING) if isinstance(flags, int) else False
            writes = writes or (isinstance(mode, str) and any(sign in mode for sign in "wax+"))
            if writes and foreign(path):
                stop(f"writing {path!r}")
            nameless = NAMELESS and isinstance(flags, int) and flags & NAMELESS == NAMELESS
            # open(), which has a mode, gives no folder; tempfile uses it with an opener.
            harmless = nameless or (mode is not None and not foreign(path))
            if not isinstance(path, int) and isdir(path) and not harmless:
                stop(f"opening the folder {path!r}")  # names could be told relative to it
        for place in PATHS.get(event, ()):
            if foreign(arguments[place]):
                stop(f"{event} of {arguments[place]!r}")

    # What raises no event.
    for module, name in UNAUDITED:
        if hasattr(module, name):
            setattr(module, name, lambda *_, name=name, **__: stop(name))
    shutil._use_fd_functions = False  # rmtree would open folders
    sys.addaudithook(hook)


def main():
    seconds, megabytes, word = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]
    program = sys.stdin.read()
    limit(seconds, megabytes)
    guard(os.getcwd())
    # Not "__main__": what an answer does as a program of its own is not asked for.
    module = sys.modules["answer"] = types.ModuleType("answer")
    exec(compile(program, "<answer>", "exec"), module.__dict__)
    # Only a program that came to its end gets here; one that exits before its tests does not.
    sys.__stdout__.write(word)


if __name__ == "__main__":
    main()
