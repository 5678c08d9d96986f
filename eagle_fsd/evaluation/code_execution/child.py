"""Run an answer's code, or the tests that check it; the child processes of ``execution.py``.

``child.py answer UID SECONDS MEGABYTES THREADS`` executes an answer and calls its function on
request. It reads requests from standard input and writes replies to standard output.

``child.py checker UID SECONDS MEGABYTES THREADS REPLIES REQUESTS`` executes the tests. It reads the
job from standard input and writes the verdict to standard output. The last two arguments are the
descriptors of the pipes from and to the answer.

A message is one line that holds a Python literal, see :func:`encode`. Whatever an answer sends, the
checker obtains built-in objects, whose comparisons the answer cannot change. This script uses the
standard library only.
"""

import builtins
import cmath
import os
import resource
import sys
import types
from ast import literal_eval
from contextlib import suppress

#: Maximum length of a reply, in characters.
MAX_REPLY = 1 << 24
#: Maximum length of the reason of a failure, in characters.
MAX_REASON = 300


class AnswerError(BaseException):
    """The answer did not return a value; not an Exception, so that tests do not catch it."""


def restrict(uid, seconds, megabytes, threads):
    """Change the user id unless it is 0, and limit this process and its descendants.

    ``threads`` limits all threads of the user; 0 is no limit.
    """
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, megabytes << 20),
        (resource.RLIMIT_FSIZE, 1 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        # macOS refuses limits below what a process has reserved at its start.
        if kind != resource.RLIMIT_AS or sys.platform != "darwin":
            resource.setrlimit(kind, (value, value))
    if threads:
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))


def detach_standard_streams():
    """Redirect the standard streams to the null device, and return what were stdin and stdout."""
    source = os.fdopen(os.dup(0), encoding="ascii")
    sink = os.fdopen(os.dup(1), "w", encoding="ascii", errors="backslashreplace")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    return source, sink


def encode(value):
    """Write a value as a literal for :func:`ast.literal_eval`, in one line of ASCII.

    Instances of subclasses of built-in types become plain, and other numbers floats if these are
    equal. Raises an exception for a value without a literal, such as a list that contains itself.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return hex(value)  # unlike decimal digits, their number is not limited
    if isinstance(value, float):
        if value != value:
            raise ValueError("nan has no literal")
        return float.__repr__(value).replace("inf", "1e999")
    if isinstance(value, complex):
        if not cmath.isfinite(value):
            raise ValueError("complex numbers that are not finite have no literal")
        return complex.__repr__(value)
    if isinstance(value, str):
        return ascii(str.__str__(value))
    if isinstance(value, (bytes, bytearray)):
        return repr(bytes(value))
    if isinstance(value, dict):
        pairs = [f"{encode(key)}: {encode(item)}" for key, item in value.items()]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(encode, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(f"{encode(item)}, " for item in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(encode, value)) + "}" if value else "set()"
    if hasattr(value, "as_integer_ratio") and float(value) == value:
        return encode(float(value))
    raise TypeError(f"{type(value).__name__} has no literal")


def write_line(file, line):
    """Write a line and flush it."""
    file.write(line + "\n")
    file.flush()


def run_answer(requests, replies):
    """Execute an answer, then call its function once per request.

    The first request is ``(code, name of the function)``, each further one ``(arguments, keyword
    arguments)``. Replies are ``("ready", None)``, then ``("value", value)`` or ``("error", (name of
    the class or of its first built-in base, message))``.
    """
    write_line(replies, encode(("ready", None)))
    # The name is not "__main__", so that main guards do not run.
    module = sys.modules["answer"] = types.ModuleType("answer")
    function = None
    for request in requests:
        try:
            if function is None:
                code, name = literal_eval(request)
                exec(compile(code, "<answer>", "exec"), module.__dict__)
                function, value = module.__dict__[name], None
            else:
                args, kwargs = literal_eval(request)
                value = function(*args, **kwargs)
            reply = encode(("value", value))
        except BaseException as error:
            known = [item for item in type(error).__mro__ if item.__module__ == "builtins"]
            reply = encode(("error", (known[0].__name__, str(error)[:MAX_REASON])))
        write_line(replies, reply)


def receive(replies):
    """Read the kind and the content of a reply, or raise AnswerError if it is not valid."""
    try:
        line = replies.readline(MAX_REPLY)
        if not line:
            raise AnswerError("the process of the answer ended")
        kind, content = literal_eval(line)
    except Exception as error:
        raise AnswerError(f"invalid reply: {type(error).__name__}") from error
    return kind, content


def make_error(kind, reason):
    """Return an exception of a type, or of its first base that needs no more than a message."""
    for base in kind.__mro__:
        with suppress(TypeError):  # UnicodeDecodeError, for example, has five arguments
            return base(reason)


def run_tests(job, replies, requests):
    """Execute the tests of a job, ``(code, tests, name)``; raise exceptions of code and tests."""
    code, tests, name = job

    def request(*message):
        write_line(requests, encode(message))
        kind, content = receive(replies)
        if kind == "value":
            return content
        error, reason = content
        known = getattr(builtins, error, None)
        if isinstance(known, type) and issubclass(known, Exception):
            raise make_error(known, reason)  # tests may expect it
        raise AnswerError(f"{error}: {reason}")

    def candidate(*args, **kwargs):
        return request(args, kwargs)

    request(code, name)
    namespace = {"__name__": "tests"}
    exec(compile(tests, "<tests>", "exec"), namespace)
    namespace[name] = candidate
    namespace["check"](candidate)


def run_checker(job, verdict, replies, requests):
    """Execute the tests of a job and write the verdict.

    This is a line ``started``, then a line ``passed``, ``failed`` or ``no answer`` (its process did
    not start), then the reason.
    """
    write_line(verdict, "started")
    outcome, reason = "no answer", ""
    try:
        receive(replies)
        outcome = "failed"
        run_tests(literal_eval(job.read()), replies, requests)
        outcome = "passed"
    except AnswerError as error:
        reason = str(error)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
    write_line(verdict, f"{outcome}\n{reason[:MAX_REASON]}")
    os._exit(0)  # threads of the tests may still run


def main():
    """Run an answer or a checker, see the module's docstring."""
    role, uid, seconds, megabytes, threads, *descriptors = sys.argv[1:]
    del sys.argv[1:]
    restrict(int(uid), int(seconds), int(megabytes), int(threads))
    source, sink = detach_standard_streams()
    if role == "answer":
        run_answer(source, sink)
    else:
        replies = os.fdopen(int(descriptors[0]), encoding="ascii")
        requests = os.fdopen(int(descriptors[1]), "w", encoding="ascii")
        run_checker(source, sink, replies, requests)


if __name__ == "__main__":
    main()
