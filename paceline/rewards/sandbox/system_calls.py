"""Which system calls programs may make: the kernel's numbers, and the filter that a jail puts on its program."""

from __future__ import annotations

import errno
import os
import struct

__all__ = ["ARCHITECTURES", "call_numbers", "filter_code"]

ALL_NAMESPACES = 0x20000 | 0x2000000 | 0x4000000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
AF_UNIX, SOCK_STREAM, SOCK_KIND = 1, 1, 0xF

# Calls that are refused, or that the jail needs itself; numbers from 424 on are the same everywhere. Of sockets there
# are pairs of streams only, which asyncio needs, with buffers of the usual size; `sendmsg` could pass descriptors on.
ARCHITECTURES = {
    "x86_64": (0xC000003E, {
        "clone": 56, "prlimit64": 302, "pivot_root": 155, "capset": 126,
        "socket": 41, "socketpair": 53, "sendmsg": 46, "sendmmsg": 307, "setsockopt": 54,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "mount": 165, "umount2": 166, "chroot": 161, "unshare": 272, "setns": 308,
        "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323,
        "shmget": 29, "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240, "memfd_create": 319,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "fanotify_init": 300, "inotify_init": 253,
        "inotify_init1": 294, "io_setup": 206, "vmsplice": 278,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
        "reboot": 169, "swapon": 167, "swapoff": 168, "syslog": 103, "quotactl": 179, "acct": 163,
        "settimeofday": 164, "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "sethostname": 170,
        "setdomainname": 171, "personality": 135, "mbind": 237, "set_mempolicy": 238, "migrate_pages": 256,
        "move_pages": 279, "ioperm": 173, "iopl": 172, "modify_ldt": 154, "uselib": 134, "lookup_dcookie": 212,
    }),
    "aarch64": (0xC00000B7, {
        "clone": 220, "prlimit64": 261, "pivot_root": 41, "capset": 91,
        "socket": 198, "socketpair": 199, "sendmsg": 211, "sendmmsg": 269, "setsockopt": 208,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "mount": 40, "umount2": 39, "chroot": 51, "unshare": 97, "setns": 268,
        "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "shmget": 194, "shmat": 196, "msgget": 186, "semget": 190, "mq_open": 180, "memfd_create": 279,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "fanotify_init": 262, "inotify_init1": 26, "io_setup": 0,
        "vmsplice": 75,
        "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
        "reboot": 142, "swapon": 224, "swapoff": 225, "syslog": 116, "quotactl": 60, "acct": 89,
        "settimeofday": 170, "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266, "sethostname": 161,
        "setdomainname": 162, "personality": 92, "mbind": 235, "set_mempolicy": 237, "migrate_pages": 238,
        "move_pages": 239, "lookup_dcookie": 18,
    }),
}  # fmt: skip
NEW_CALLS = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448,
    "set_mempolicy_home_node": 450, "open_tree_attr": 467,
}  # fmt: skip
ABSENT = ("clone3", "memfd_create", "io_uring_setup")
"""Answered as by a kernel that does not have them, so that callers take another way."""


def call_numbers() -> dict[str, int]:
    """Numbers of system calls on this machine. Raises a KeyError if there is no filter for its architecture."""
    return {**ARCHITECTURES[os.uname().machine][1], **NEW_CALLS}


def filter_code() -> bytes:
    """The filter of this machine, a program of the kernel's packet filter."""
    return b"".join(struct.pack("=HBBI", *line) for line in _instructions())


def _instructions() -> list[tuple[int, int, int, int]]:
    """(operation, steps if true, steps if false, operand)"""
    load, equal, greater_equal, any_bit, both, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    token = ARCHITECTURES[os.uname().machine][0]

    def refuse(number: int) -> tuple[int, int, int, int]:
        return (give, 0, 0, 0x00050000 | number)

    def argument(index: int) -> tuple[int, int, int, int]:
        return (load, 0, 0, 16 + 8 * index)  # the lower half: both architectures are little-endian

    own_ways = {
        "clone": [argument(0), (any_bit, 0, 1, ALL_NAMESPACES), refuse(errno.EPERM)],
        "socketpair": [
            argument(0), (equal, 1, 0, AF_UNIX), refuse(errno.EPERM),
            argument(1), (both, 0, 0, SOCK_KIND), (equal, 1, 0, SOCK_STREAM), refuse(errno.EPERM),
        ],
        "prlimit64": [argument(0), (equal, 1, 0, 0), refuse(errno.EPERM)],
    }  # fmt: skip
    lines = [(load, 0, 0, 4), (equal, 1, 0, token), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(greater_equal, 0, 1, 0x40000000), (give, 0, 0, kill)]  # the x32 interface has other numbers
    for name, number in call_numbers().items():
        if name in own_ways:
            body = [*own_ways[name], (give, 0, 0, allow)]
        else:
            body = [refuse(errno.ENOSYS if name in ABSENT else errno.EPERM)]
        lines += [(equal, 0, len(body), number), *body]
    return [*lines, (give, 0, 0, allow)]
