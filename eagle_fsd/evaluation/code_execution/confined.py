"""Execute a program from standard input under restrictions; the child process of ``sandbox.py``.

This script runs in an isolated interpreter and uses the standard library only. The operating system
limits CPU time, memory and file size. An audit hook, which Python code cannot remove, denies
network access, child processes, ctypes and writes outside the working folder. This guards against
a language model's mistakes, not against an attacker: to run malicious code, put the whole
evaluation in a container.
"""

import os
import shutil
import subprocess
import sys
import types

try:
    import resource
except ImportError:  # Windows; the wall-clock limit and the audit hook still apply
    resource = None  # type: ignore[assignment]
try:
    import _posixsubprocess
    import posix
except ImportError:
    posix = None  # type: ignore[assignment]

#: Exit status of a program that attempted a denied operation.
DENIED_STATUS = 77
#: Flag that creates an anonymous file in a folder; 0 where it is not supported.
O_TMPFILE = getattr(os, "O_TMPFILE", 0)
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
#: Prefixes of audit events that are always denied.
DENIED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "os.startfile",
    "os.chdir",  # relative paths are resolved against the initial folder
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
#: Audit events whose paths must be inside the working folder, and the indices of the paths.
PATH_ARGUMENTS = {
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
#: Functions that start programs or create files without raising an audit event.
UNAUDITED_FUNCTIONS = [(os, "mkfifo"), (os, "mknod"), (subprocess, "_fork_exec")]
if posix is not None:
    UNAUDITED_FUNCTIONS += [
        (posix, "mkfifo"),
        (posix, "mknod"),
        (_posixsubprocess, "fork_exec"),
    ]


def set_limits(seconds, megabytes):
    """Limit the resources of this process.

    Args:
        seconds: Maximum CPU time.
        megabytes: Maximum address space in MiB.
    """
    if resource is None:
        return
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(kind, (value, value))


def install_audit_hook(folder):
    """Exit on operations that a program must not perform.

    Args:
        folder: The folder in which the program may write.
    """
    inside = os.path.realpath(folder) + os.sep
    # Bound here because the program may replace the modules' attributes.
    realpath, join, fspath, fsdecode = os.path.realpath, os.path.join, os.fspath, os.fsdecode
    isdir = os.path.isdir

    def is_outside(path):
        if isinstance(path, int):
            return False
        return not (realpath(join(folder, fsdecode(fspath(path)))) + os.sep).startswith(inside)

    def deny(operation):
        # Exit instead of raising an exception, which the program could catch.
        os.write(2, f"{operation} is not allowed here\n".encode())
        os._exit(DENIED_STATUS)

    def hook(event, arguments):
        if event.startswith("ctypes."):
            raise ImportError("ctypes is not allowed here")  # libraries have fallbacks for this
        if event.startswith(DENIED_EVENTS):
            deny(event)
        if event == "open":
            path, mode, flags = arguments
            flags = flags if isinstance(flags, int) else 0
            writes = flags & WRITE_FLAGS or (isinstance(mode, str) and set("wax+") & set(mode))
            if writes and is_outside(path):
                deny(f"writing {path!r}")
            # A folder's descriptor would allow relative names. os.open() has no mode; open() has
            # one, and the tempfile module opens folders with it through an opener.
            anonymous = O_TMPFILE and flags & O_TMPFILE == O_TMPFILE
            allowed = anonymous or (mode is not None and not is_outside(path))
            if not isinstance(path, int) and isdir(path) and not allowed:
                deny(f"opening the folder {path!r}")
        for index in PATH_ARGUMENTS.get(event, ()):
            if is_outside(arguments[index]):
                deny(f"{event} of {arguments[index]!r}")

    for module, name in UNAUDITED_FUNCTIONS:
        if hasattr(module, name):
            setattr(module, name, lambda *_, name=name, **__: deny(name))
    shutil._use_fd_functions = False  # otherwise rmtree() opens folders
    sys.addaudithook(hook)


def main():
    """Execute the program.

    The command-line arguments are the limits (seconds, megabytes) and a token to print on
    completion.
    """
    seconds, megabytes, token = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    del sys.argv[1:]
    program = sys.stdin.read()
    set_limits(seconds, megabytes)
    install_audit_hook(os.getcwd())
    # The name is not "__main__", so that main guards in an answer do not run.
    module = sys.modules["answer"] = types.ModuleType("answer")
    exec(compile(program, "<answer>", "exec"), module.__dict__)
    # Programs that exit before their tests have run do not get here.
    sys.__stdout__.write(token)


if __name__ == "__main__":
    main()
