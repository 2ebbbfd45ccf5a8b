"""System-call filter (seccomp) of every sandbox.

Bubblewrap sandboxes load a BPF program, containers get a profile in the engines' format. Both deny
debugging of other processes, namespaces and mounts, io_uring, kernel keyrings, socket families
other than Unix, IPv4, IPv6 and routing netlink, and administration of the machine. The setting
`allow_syscalls` of a sandbox lifts single denials.

The container profile is an allow-list: the engines' default profile without what is denied here.
The BPF program is a deny-list; numbers above the newest known call, and with them the x32 ABI,
return ENOSYS, and a process of a foreign architecture is killed.
"""

import functools
import json
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paddock.sandbox.sandbox import SandboxError, SyscallGroup

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

EPERM, ENOSYS, EPROTONOSUPPORT, EAFNOSUPPORT = 1, 38, 93, 97
LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF operations
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the kernel's seccomp_data
NEWEST = 466  # removexattrat; new calls have the same number on every architecture
MACHINES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}  # table column, audit architecture

# Name and numbers on x86_64 and aarch64, by the group that allows them.
GROUPS: dict[SyscallGroup, str] = {
    "ptrace": "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271,"
    " process_madvise 440 440, kcmp 312 272, pidfd_getfd 438 438",
    "namespaces": "setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41,"
    " open_tree 428 428, move_mount 429 429, fsopen 430 430, fsconfig 431 431, fsmount 432 432,"
    " fspick 433 433, mount_setattr 442 442, clone3 435 435",
    "io_uring": "io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427",
    "keys": "add_key 248 217, request_key 249 218, keyctl 250 219",
    "bpf": "bpf 321 280",
    "perf": "perf_event_open 298 241",
    "userfaultfd": "userfaultfd 323 282",
}
# Denied always.
NEVER = (
    "_sysctl 156 -, acct 163 89, afs_syscall 183 -, clock_settime 227 112, create_module 174 -,"
    " delete_module 176 106, fanotify_init 300 262, finit_module 313 273, get_kernel_syms 177 -,"
    " getpmsg 181 -, init_module 175 105, ioperm 173 -, iopl 172 -, kexec_file_load 320 294,"
    " kexec_load 246 104, lookup_dcookie 212 18, migrate_pages 256 238, move_pages 279 239,"
    " nfsservctl 180 42, open_by_handle_at 304 265, putpmsg 182 -, query_module 178 -,"
    " quotactl 179 60, quotactl_fd 443 443, reboot 169 142, security 185 -, setdomainname 171 162,"
    " sethostname 170 161, settimeofday 164 170, swapoff 168 225, swapon 167 224, sysfs 139 -,"
    " syslog 103 116, tuxcall 184 -, uselib 134 -, ustat 136 -, vhangup 153 58, vmsplice 278 75,"
    " vserver 236 -"
)
# Denied with ENOSYS: callers then fall back to an older call, while EPERM would be an error.
ENOSYS_CALLS = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register")
# Calls that are allowed or denied by their arguments.
CLONE, UNSHARE, SOCKET, SOCKETPAIR, PERSONALITY, IOCTL = (
    (56, 220), (272, 97), (41, 198), (53, 199), (135, 92), (16, 29),
)  # fmt: skip
NEW_NAMESPACES, NEW_TIME = (
    0x7E020000,
    0x80,
)  # in clone's flags the latter bit belongs to the exit signal
NETLINK = 16
FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
MORE_FAMILIES: dict[SyscallGroup, int] = {"packet": 17, "alg": 38, "vsock": 40}
# NETLINK_ROUTE (used by getaddrinfo), SOCK_DIAG, KOBJECT_UEVENT.
NETLINK_PROTOCOLS = (0, 4, 15)
PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)  # PER_LINUX variants, and the query
FAKED_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI and TIOCLINUX: inject input into a terminal
# Allowed unconditionally by the engines' default profile and not denied above.
ALLOWED = """
    _llseek _newselect accept accept4 access adjtimex alarm arch_prctl bind brk capget capset chdir
    chmod chown chown32 chroot clock_adjtime clock_adjtime64 clock_getres clock_getres_time64
    clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect
    copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old
    epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit
    exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod
    fchmodat fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork
    fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64
    futex futex_time64 futimesat get_mempolicy get_robust_list get_thread_area getcpu getcwd
    getdents getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32
    getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid
    getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
    gettimeofday getuid getuid32 getxattr inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch io_cancel io_destroy io_getevents io_setup io_submit ioctl ioprio_get
    ioprio_set ipc kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown
    lchown32 lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat
    lstat64 madvise mbind membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat
    mlock mlock2 mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap msgctl
    msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat
    open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
    pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease
    pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read readahead readdir readlink readlinkat
    readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr rename
    renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64
    rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr
    sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select
    semctl semget semop semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg
    sendto set_mempolicy set_robust_list set_thread_area set_tid_address setfsgid setfsgid32
    setfsuid setfsuid32 setgid setgid32 setgroups setgroups32 setitimer setpgid setpriority
    setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit
    setsid setsockopt setuid setuid32 setxattr shmat shmctl shmdt shmget shutdown sigaction
    sigaltstack signal signalfd signalfd4 sigpending sigprocmask sigreturn sigsuspend splice stat
    stat64 statfs statfs64 statx symlink symlinkat sync sync_file_range sync_file_range2 syncfs
    syscall sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime
    timer_gettime64 timer_settime timer_settime64 timerfd timerfd_create timerfd_gettime
    timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit
    umask uname unlink unlinkat utime utimensat utimensat_time64 utimes vfork wait4 waitid waitpid
    write writev
"""


def unavailable_reason() -> str | None:
    """Why no filter can be used on this machine; None if it can."""
    if platform.machine() not in MACHINES:
        supported = " and ".join(MACHINES)
        return f"machine must be {supported}, got {platform.machine()}"
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except OSError:
        actions = []
    return None if "errno" in actions else "this kernel was built without seccomp filters"


def _calls(table: str, column: int) -> Iterator[tuple[str, int]]:
    for row in table.split(","):
        name, *numbers = row.split()
        if numbers[column] != "-":
            yield name, int(numbers[column])


def _errno(name: str) -> int:
    """The error that a denied call returns."""
    return ENOSYS if name in ENOSYS_CALLS else EPERM


@functools.cache
def bpf_program(allow: tuple[SyscallGroup, ...], machine: str = platform.machine()) -> bytes:
    """The BPF program of a bubblewrap sandbox; empty if "everything" is allowed.

    Raises SandboxError on an unsupported machine.
    """
    if "everything" in allow:
        return b""
    if machine not in MACHINES:
        raise SandboxError(
            f"no system-call filter for {machine}; to run without one: "
            "allow_syscalls = ['everything']"
        )
    column, audit = MACHINES[machine]
    rows: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        *[(EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL)],
        (LOAD, 0, 0, NUMBER),
        *[(GREATER, 0, 1, NEWEST), (RETURN, 0, 0, ERRNO | ENOSYS)],
    ]
    denied = [table for name, table in GROUPS.items() if name not in allow]
    for table in (*denied, NEVER):
        for name, number in _calls(table, column):
            rows += _if_equal(number, [_error(_errno(name))])
    for call, block in _conditions(allow):
        rows += _if_equal(call[column], block)
    return b"".join(struct.pack("=HBBI", *row) for row in [*rows, (RETURN, 0, 0, ALLOW)])


def _error(number: int) -> Instruction:
    return RETURN, 0, 0, ERRNO | number


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument, which is all that the kernel uses of an int."""
    return LOAD, 0, 0, ARGUMENTS + 8 * index


def _if_equal(value: int, block: list[Instruction]) -> list[Instruction]:
    """Run a block, which must end with a return, for this value only."""
    return [(EQUAL, 0, len(block), value), *block]


def _allow_if_in(values: Iterable[int]) -> list[Instruction]:
    return [row for value in values for row in _if_equal(value, [(RETURN, 0, 0, ALLOW)])]


def _conditions(
    allow: tuple[SyscallGroup, ...],
) -> Iterator[tuple[tuple[int, int], list[Instruction]]]:
    """Calls with the block that decides by their arguments; each block ends with a return."""
    allowed: Instruction = (RETURN, 0, 0, ALLOW)
    if "namespaces" not in allow:
        for call, flags in ((CLONE, NEW_NAMESPACES), (UNSHARE, NEW_NAMESPACES | NEW_TIME)):
            yield call, [_argument(0), (ANY_BIT, 0, 1, flags), _error(EPERM), allowed]
    netlink = [_argument(2), *_allow_if_in(NETLINK_PROTOCOLS), _error(EPROTONOSUPPORT)]
    families = [_argument(0), *_allow_if_in(_families(allow))]
    families += _if_equal(NETLINK, [allowed] if "netlink" in allow else netlink)
    for call in (SOCKET, SOCKETPAIR):
        yield call, [*families, _error(EAFNOSUPPORT)]
    if "ptrace" not in allow:  # debuggers disable address-space randomization
        yield PERSONALITY, [_argument(0), *_allow_if_in(PERSONALITIES), _error(EPERM)]
    denied = [row for value in FAKED_INPUT for row in _if_equal(value, [_error(EPERM)])]
    yield IOCTL, [_argument(1), *denied, allowed]


def _families(allow: tuple[SyscallGroup, ...]) -> list[int]:
    return [*FAMILIES, *(number for name, number in MORE_FAMILIES.items() if name in allow)]


def container_profile(allow: tuple[SyscallGroup, ...]) -> dict[str, Any]:
    """The filter as a profile for container engines.

    It has no rule for terminal input injection, because our containers have no terminal.
    """
    names = ALLOWED.split()
    denied = [name for name, _ in _calls(NEVER, 0)]
    for group, table in GROUPS.items():
        (names if group in allow else denied).extend(name for name, _ in _calls(table, 0))
    rules = [_rule(names)]
    for error in (EPERM, ENOSYS):
        rules.append(_rule([name for name in denied if _errno(name) == error], error=error))
    if "namespaces" in allow:
        rules.append(_rule(["clone", "unshare"]))
    else:
        for name, flags in (("clone", NEW_NAMESPACES), ("unshare", NEW_NAMESPACES | NEW_TIME)):
            rules.append(_rule([name], (0, "MASKED_EQ", flags, 0)))
    sockets = ["socket", "socketpair"]
    rules += [_rule(sockets, (0, "EQ", family, 0)) for family in _families(allow)]
    if "netlink" in allow:
        rules.append(_rule(sockets, (0, "EQ", NETLINK, 0)))
    else:
        for protocol in NETLINK_PROTOCOLS:
            rules.append(_rule(sockets, (0, "EQ", NETLINK, 0), (2, "EQ", protocol, 0)))
    if "ptrace" in allow:
        rules.append(_rule(["personality"]))
    else:
        rules += [_rule(["personality"], (0, "EQ", value, 0)) for value in PERSONALITIES]
    machine = platform.machine()
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": ENOSYS,
        "architectures": [f"SCMP_ARCH_{machine.upper()}"] if machine in MACHINES else [],
        "syscalls": rules,
    }


def _rule(
    names: list[str], *args: tuple[int, str, int, int], error: int | None = None
) -> dict[str, Any]:
    """A rule of a profile. `args`: argument index, comparison, value and second value."""
    conditions = [
        {"index": index, "op": f"SCMP_CMP_{op}", "value": value, "valueTwo": second}
        for index, op, value, second in args
    ]
    rule: dict[str, Any] = {"names": names, "action": "SCMP_ACT_ALLOW", "args": conditions}
    return rule if error is None else {**rule, "action": "SCMP_ACT_ERRNO", "errnoRet": error}


def profile_file(allow: tuple[SyscallGroup, ...], cache: Path) -> str:
    """Path of the profile for an engine; "unconfined" if "everything" is allowed."""
    if "everything" in allow:
        return "unconfined"
    text = json.dumps(container_profile(allow))
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = cache / f"seccomp-{'-'.join(sorted(set(allow))) or 'default'}.json"
    if not file.is_file() or file.read_text() != text:
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.rename(file)
    return str(file)
