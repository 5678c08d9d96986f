"""The system call filter of the sandbox, as classic BPF instructions.

bubblewrap installs the filter before it starts a program. The filter denies what the other limits
do not cover: further processes (which could outlive their parent; threads are allowed), new user
namespaces (their owner may mount file systems without a size limit), System V IPC (its memory is
limited only if attached), kernel keyrings (inherited from the caller), tracing, and sockets other
than Unix sockets (a network namespace need not cover AF_VSOCK, which reaches the host of a virtual
machine; io_uring could open them unseen). perf_event_open, bpf and userfaultfd, which programs do
not need, are denied too. The filter has the same structure as the examples of seccomp(2).
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

#: ``AUDIT_ARCH_*`` of linux/audit.h, in the order of the numbers below.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: Numbers of the denied system calls on x86-64 and on AArch64; None where there is no such call.
_DENIED: dict[str, tuple[int, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKET, _SOCKETPAIR = (41, 198), (53, 199)
#: First system call of the x32 ABI, which x86-64 kernels may offer besides their own.
_X32_CALLS = 0x40000000
_CLONE_THREAD = 0x00010000

# Opcodes of linux/bpf_common.h: load a word, jump if equal, greater or equal, or any bit is set,
# and return.
_LOAD, _JEQ, _JGE, _JSET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# Offsets in struct seccomp_data; the last one is the lower half of the first argument.
_CALL, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
# Actions of linux/seccomp.h; ERRNO is combined with an error number.
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000


def syscall_filter() -> bytes:
    """Return the filter for this machine, as an array of ``struct sock_filter``."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(f"there is no system call filter for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    denied = [numbers[column] for numbers in _DENIED.values()]
    deny = _instruction(_RETURN, _ERRNO | errno.EPERM)
    return b"".join(
        [
            _instruction(_LOAD, _ARCHITECTURE),
            _instruction(_JEQ, _ARCHITECTURES[machine], 1, 0),
            _instruction(_RETURN, _KILL_PROCESS),
            _instruction(_LOAD, _CALL),
            _instruction(_JGE, _X32_CALLS, 0, 1),
            deny,
            *(_instruction(_JEQ, call, 0, 1) + deny for call in denied if call is not None),
            # The flags of clone3 are in memory, which a filter cannot read. The C library falls
            # back to clone where clone3 does not exist.
            _instruction(_JEQ, _CLONE3[column], 0, 1),
            _instruction(_RETURN, _ERRNO | errno.ENOSYS),
            _instruction(_JEQ, _SOCKET[column], 1, 0),
            _instruction(_JEQ, _SOCKETPAIR[column], 0, 4),
            _instruction(_LOAD, _ARGUMENT),
            _instruction(_JEQ, socket.AF_UNIX, 0, 1),
            _instruction(_RETURN, _ALLOW),
            deny,
            _instruction(_JEQ, _CLONE[column], 0, 3),
            _instruction(_LOAD, _ARGUMENT),
            # Threads only; for these, the kernel itself refuses new user namespaces.
            _instruction(_JSET, _CLONE_THREAD, 1, 0),
            deny,
            _instruction(_RETURN, _ALLOW),
        ]
    )


def _instruction(opcode: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode a ``struct sock_filter``; jumps are relative to the next instruction."""
    return struct.pack("=HBBI", opcode, if_true, if_false, value)
