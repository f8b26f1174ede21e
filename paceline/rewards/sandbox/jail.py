"""Builds the jail of one program and watches over it. `local.py` starts this file as a script of its own.

It imports the standard library only, and reads what to do (`marshal`, standard input) before anything else:

    this process     makes the namespaces, maps users, waits
      keeper         process 1 inside: mounts, drops every privilege, starts the program, enforces time and memory
        program      limits, no new privileges, system call filter, then the Python interpreter

Inside there are new user, process, mount, network, IPC, host name and cgroup namespaces. The file system is made of
nothing but the interpreter and system libraries, read-only, four devices, and an empty /tmp; there is no /proc. When
the keeper ends, for whatever reason, the kernel kills every process inside. It ends when the program does, at a limit,
and when the other end of the status socket closes. A program can neither signal it (process 1), nor read its memory.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import select
import signal
import struct
import sys
import time

TICK_SECONDS = 0.05
NICE_SECONDS = 0.5
"""A program that has used so much CPU time gives way to others, somewhat."""
NICE = 5
INSIDE_ID = 1000
"""The user and group that programs see."""
FIRST_OUTSIDE_ID, NOBODY = 0x70000000, 65534
"""What they are outside, where root starts them: each another one, since the kernel counts many things by user. (Root's
processes are exempt from the limit on their number.) `nobody` in a container that has no such ids."""
SOCKET_BYTES = 256 << 10
"""What a socket may hold."""

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 0x1, 0x2, 0x4, 0x8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522

CALLS: dict[str, int] = {}
"""Numbers of system calls; the one who starts us knows them."""

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


class JailError(Exception):
    """What could not be done, and why."""


def check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise JailError(f"{what}: {os.strerror(number)} ({errno.errorcode.get(number, number)})")
    return result


def system_call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char], what: str | None = None) -> int:
    converted = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return check(libc.syscall(ctypes.c_long(CALLS[name]), *converted), what or name)


def prctl(option: int, *args: int) -> int:
    padded = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    return libc.prctl(ctypes.c_int(option), *padded)


# -- outside ----------------------------------------------------------------------------------------------------------


def main() -> None:
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    os.umask(0o022)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)  # for process 1 inside, default means: ignored
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        with open(0, "rb", closefd=False) as file:
            spec = marshal.load(file)
        CALLS.update(spec["calls"])
        if os.getppid() != spec["parent"]:
            os._exit(1)
        os.setsid()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the program goes, not the trainer
        keeper = start_keeper(spec, status)
    except Exception as error:
        report(status, {"failed": str(error)})
        os._exit(1)
    for descriptor in (0, 1, 2, status):
        os.close(descriptor)
    os.waitpid(keeper, 0)  # returns when the last process inside is gone
    os._exit(0)


def start_keeper(spec: dict, status: int) -> int:
    go_read, go_write = os.pipe()
    pid = system_call("clone", ALL_NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0, what="making namespaces")
    if pid == 0:
        os.close(go_write)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.read(go_read, 1) != b"1":  # the outer process failed, and has said why
            os._exit(1)
        os.close(go_read)
        keep(spec, status)
    os.close(go_read)
    try:
        map_users(pid)
    except OSError as error:
        os.close(go_write)
        raise JailError(f"mapping users into the namespace: {error}") from error
    os.write(go_write, b"1")
    os.close(go_write)
    return pid


def map_users(pid: int) -> None:
    root = os.geteuid() == 0
    outside = outside_id(pid) if root else NOBODY
    if not root:
        write(f"/proc/{pid}/setgroups", "deny")
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        # Root builds the jail as itself (the interpreter may be in a folder that only root may enter), then leaves.
        lines = f"0 {own} 1\n{INSIDE_ID} {outside} 1" if root else f"{INSIDE_ID} {own} 1"
        write(f"/proc/{pid}/{kind}_map", lines)


def outside_id(pid: int) -> int:
    """A user and group that no other jail has, if there are so many here."""
    wanted = FIRST_OUTSIDE_ID + pid
    for kind in ("uid", "gid"):
        with open(f"/proc/self/{kind}_map") as file:
            ranges = [[int(number) for number in line.split()] for line in file]
        if not any(first <= wanted < first + count for first, _, count in ranges):
            return NOBODY
    return wanted


def write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def report(status: int, message: dict) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import
        os.write(status, marshal.dumps(message))
    except OSError:
        pass


# -- inside: process 1 ------------------------------------------------------------------------------------------------


def keep(spec: dict, status: int) -> None:
    """Never returns."""
    try:
        proc = build(spec)
        drop_privileges()
        stdin = os.memfd_create("stdin")
        view = memoryview(spec["stdin"])
        while view:
            view = view[os.write(stdin, view) :]
        os.lseek(stdin, 0, os.SEEK_SET)
        started = time.monotonic()
        failure_read, failure_write = os.pipe()
        program = os.fork()
        if program == 0:
            become_program(spec, stdin, failure_write)
        os.close(failure_write)
        os.close(stdin)
        failure = os.read(failure_read, 4096)  # empty once the interpreter was started
        if failure:
            raise JailError(failure.decode())
        for descriptor in (0, 1, 2):
            os.close(descriptor)
        outcome = watch(spec, status, program, proc, started)
    except Exception as error:
        report(status, {"failed": str(error)})
        os._exit(1)
    outcome["seconds"] = time.monotonic() - started
    report(status, outcome)
    os._exit(0)


def build(spec: dict) -> int:
    """Make the file system and go into it. Gives a descriptor of the /proc that only this process has."""
    libc.sethostname(b"sandbox", 7)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    base = "/tmp"
    mount("tmpfs", base, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={len(spec['code']) + (1 << 20)},nr_inodes=1024")
    os.chdir(base)
    os.mkdir("old")
    system_call("pivot_root", b".", b"old")
    os.chdir("/")

    os.mkdir("/tmp")
    size = spec["limits"]["disk_bytes"]
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={size},nr_inodes=4096")
    for source in spec["binds"]:
        bind(source, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)
    for link, target in spec["links"]:
        os.makedirs(os.path.dirname(link), exist_ok=True)
        if not os.path.lexists(link):
            os.symlink(target, link)
    for hidden in spec["hidden"]:
        mount("tmpfs", hidden, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=555,size=4096,nr_inodes=1")
        set_attributes(hidden, MOUNT_ATTR_RDONLY)
    for device in ("null", "zero", "random", "urandom"):
        bind(f"/dev/{device}", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC)
    os.mkdir("/program")
    with open(spec["script"], "wb") as file:
        file.write(spec["code"])
    os.chmod(spec["script"], 0o444)

    os.mkdir("/own_proc")
    mount("proc", "/own_proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    proc = os.open("/own_proc", os.O_RDONLY | os.O_DIRECTORY)
    for folder in ("/own_proc", "/old"):  # the descriptor outlives the mount
        check(libc.umount2(folder.encode(), MNT_DETACH), f"unmounting {folder}")
        os.rmdir(folder)
    set_attributes("/", MOUNT_ATTR_RDONLY, recursive=False)
    return proc


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    code = libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check(code, f"mounting {kind or source or 'nothing'} at {target}")


def bind(source: str, attributes: int) -> None:
    """Show a file or folder of the old file system at its own path."""
    old = f"/old{source}"
    if os.path.isdir(old):
        os.makedirs(source, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(source), exist_ok=True)
        os.close(os.open(source, os.O_WRONLY | os.O_CREAT, 0o444))
    mount(old, source, None, MS_BIND | MS_REC)
    set_attributes(source, attributes)


def set_attributes(path: str, attributes: int, recursive: bool = True) -> None:
    structure = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0), 32)
    flags = AT_RECURSIVE if recursive else 0
    system_call("mount_setattr", AT_FDCWD, path.encode(), flags, structure, 32, what=f"making {path} read-only")


def drop_privileges() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    capability = 0
    while prctl(PR_CAPBSET_DROP, capability) == 0:
        capability += 1
    if os.geteuid() == 0:
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), 8)
    system_call("capset", header, ctypes.create_string_buffer(24))
    if os.geteuid() != INSIDE_ID or os.getegid() != INSIDE_ID:
        raise JailError(f"could not become user {INSIDE_ID}")
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "giving up new privileges")
    check(prctl(PR_SET_DUMPABLE, 0), "closing the keeper's memory")
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user forgets it


def watch(spec: dict, status: int, program: int, proc: int, started: float) -> dict:
    """Wait for the end of the program, or for the first reason to end it."""
    limits = spec["limits"]
    handle = os.pidfd_open(program)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(status, select.POLLIN)  # nobody sends: readable means closed
    scan = Scan(proc, limits["num_open_files"])
    while True:
        ready = [descriptor for descriptor, _ in poll.poll(TICK_SECONDS * 1000)]
        if status in ready:
            os._exit(0)
        # Processes whose parents are gone become ours.
        while True:
            try:
                pid, code, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return {"reason": "lost", "exit_code": None}
            if pid == program:
                return {"exit_code": os.waitstatus_to_exitcode(code), "cpu_seconds": usage.ru_utime + usage.ru_stime}
            if pid == 0:
                break
        scan.update()
        if scan.takes_more_than(limits["memory_bytes"]):
            return {"reason": "memory", "exit_code": None}
        elapsed = time.monotonic() - started
        if elapsed - scan.waited_seconds > limits["wall_seconds"] or elapsed > limits["latest_seconds"]:
            return {"reason": "timeout", "exit_code": None}


class Scan:
    """What all processes inside, but the keeper, take."""

    def __init__(self, proc: int, num_open_files: int) -> None:
        self.proc = proc
        self.num_open_files = num_open_files
        self.pids: list[int] = []
        self.waited_seconds = 0.0
        self._waited: dict[int, int] = {}
        self._nice: set[int] = set()

    def update(self) -> None:
        self.pids = [int(name) for name in os.listdir(self.proc) if name.isdigit() and name != "1"]
        longest = 0
        for pid in self.pids:
            fields = self._read(pid, "schedstat").split()
            if len(fields) < 2:
                continue
            ran, waited = int(fields[0]), int(fields[1])
            longest = max(longest, waited - self._waited.get(pid, 0))
            self._waited[pid] = waited
            if ran > NICE_SECONDS * 1e9 and pid not in self._nice:
                self._nice.add(pid)
                self._give_way(pid)
        self.waited_seconds += longest / 1e9

    def _give_way(self, pid: int) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, pid, NICE)
            # Where the kernel groups processes by session, only the group's value counts against other programs.
            descriptor = os.open(f"{pid}/autogroup", os.O_WRONLY, dir_fd=self.proc)
        except OSError:
            return
        try:
            os.write(descriptor, str(NICE).encode())
        except OSError:
            pass
        finally:
            os.close(descriptor)

    def takes_more_than(self, limit: int) -> bool:
        """Whether the memory of all processes is above the limit, twice in a row: they are read one after the other, so
        if some end meanwhile, pages that they shared count again in those read later."""
        return self._memory_bytes(limit) > limit and self._memory_bytes(limit) > limit

    def _memory_bytes(self, enough: int) -> int:
        """Resident memory and buffers of sockets. Above `enough`, pages that processes share are counted once."""
        page = resource.getpagesize()
        statm = [self._read(pid, "statm").split() for pid in self.pids]
        sockets = self._num_sockets() * SOCKET_BYTES
        resident = sum(int(fields[1]) * page for fields in statm if len(fields) > 1)
        if resident + sockets <= enough:
            return resident + sockets
        return sum(self._share(pid, page) for pid in self.pids) + sockets

    def _num_sockets(self) -> int:
        found: set[str] = set()
        hidden = 0
        for pid in self.pids:
            try:
                folder = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self.proc)
            except PermissionError:  # it shows nobody what it has open; one that has ended has nothing
                hidden += self.num_open_files * self._is_alive(pid)
                continue
            except OSError:
                continue
            try:
                found.update(os.readlink(name, dir_fd=folder) for name in os.listdir(folder))
            except OSError:  # closed since
                pass
            finally:
                os.close(folder)
        return sum(name.startswith("socket:") for name in found) + hidden

    def _is_alive(self, pid: int) -> bool:
        """False for one that has ended and was not waited for: its parent may do that much later."""
        return self._read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])

    def _share(self, pid: int, page: int) -> int:
        for line in self._read(pid, "smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        # Its memory can't be told apart, or it has ended since: what it holds now, which is then nothing.
        statm = self._read(pid, "statm").split()
        return int(statm[1]) * page if len(statm) > 1 else 0

    def _read(self, pid: int, name: str) -> str:
        try:
            descriptor = os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=self.proc)
        except OSError:
            return ""
        try:
            return os.read(descriptor, 4096).decode()
        except OSError:
            return ""
        finally:
            os.close(descriptor)


# -- inside: the program ----------------------------------------------------------------------------------------------


def become_program(spec: dict, stdin: int, failure: int) -> None:
    """Never returns."""
    try:
        os.setsid()  # signals to "my group" must not reach anybody outside
        os.dup2(stdin, 0)
        os.chdir("/tmp")
        limits = spec["limits"]
        for kind, soft, hard in (
            (resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1),
            (resource.RLIMIT_AS, limits["memory_bytes"], limits["memory_bytes"]),
            (resource.RLIMIT_NPROC, limits["num_processes"] + 1, limits["num_processes"] + 1),  # and the keeper
            (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, limits["num_open_files"], limits["num_open_files"]),
            (resource.RLIMIT_STACK, 8 << 20, 8 << 20),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_MSGQUEUE, 0, 0),
            (resource.RLIMIT_SIGPENDING, 256, 256),
        ):
            resource.setrlimit(kind, (soft, hard))
        prctl(PR_SET_DUMPABLE, 1)
        filter_system_calls(spec["filter"])
        os.execve(spec["python"], [spec["python"], "-s", "-P", "-B", spec["script"]], spec["environment"])
    except BaseException as error:
        os.write(failure, str(error).encode()[:4000])
    os._exit(127)


def filter_system_calls(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    holder = ctypes.create_string_buffer(program, len(program))
    check(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(holder)), "filtering system calls")


if __name__ == "__main__":
    main()
