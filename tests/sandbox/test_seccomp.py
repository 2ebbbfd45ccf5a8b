"""Seccomp filter: denied calls, programs that must work, calls a task may request."""

import json
from pathlib import Path

import pytest

from benchmarks.attack_sandbox import CALLS, PROBE, REFUSED
from paddock.sandbox import ResourceLimits, seccomp
from tests.sandbox.sandboxes import BOTH, BWRAP, in_sandbox

both = pytest.mark.parametrize("backend", BOTH)
DEFAULT = Path("/usr/share/containers/seccomp.json")
ROOMY = ResourceLimits(memory_bytes=256 << 20, disk_bytes=64 << 20, max_processes=64)


def probe(backend, probes, **settings):
    async def work(box):
        done = await box.exec([*box.python, "-c", PROBE, json.dumps(probes)])
        assert done.ok, done
        return json.loads(done.stdout)

    return in_sandbox(work, backend=backend, **settings)


x86 = pytest.mark.skipif(seccomp.platform.machine() != "x86_64", reason="numbers of x86_64")


@x86
@both
def test_dangerous_system_calls_are_denied(backend):
    found = probe(backend, CALLS)
    assert {name: expected for name, expected in found.items() if expected not in REFUSED} == {}
    assert found["clone3"] == found["io_uring"] == found["a call newer than known"] == "ENOSYS"


ALLOWED = {
    "ptrace": ("traceme", 101, 0, 0, 0, 0),
    "io_uring": ("a missing argument", 425, 8, 0),
    "vsock": ("no such transport", 41, 40, 1, 0),
    "keys": ("no such key", 250, 0, 0x7FFFFFF0, 0),
}


@x86
@both
def test_a_task_gets_only_the_calls_it_requests(backend):
    found = probe(
        backend, [*ALLOWED.values(), ("unshare user", 272, 0x10000000)], allow_syscalls=(*ALLOWED,)
    )
    assert found.pop("unshare user") in ("EPERM", "ENOSYS")
    assert found["traceme"] == "done"
    assert found["a missing argument"] == "EFAULT"
    assert found["no such transport"] in ("done", "EAFNOSUPPORT", "ENODEV")


WORKS = """
set -e
cat > a.c <<'END'
#include <stdio.h>
int main(void) { printf("compiled\\n"); return 0; }
END
if command -v cc >/dev/null; then cc a.c -o a; ./a; else echo compiled; fi
if command -v git >/dev/null; then git init -q r; git -C r -c user.name=a -c user.email=a@b \
commit -q --allow-empty -m first; git -C r log --format=%s; else echo first; fi
$PYTHON - <<'END'
import multiprocessing, os, socket, subprocess, tempfile, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
left, right = socket.socketpair(); left.send(b"pair"); print(right.recv(4).decode())
server = socket.create_server(("127.0.0.1", 0))
print(socket.getaddrinfo("127.0.0.1", server.getsockname()[1])[0][4][0])
print(len(socket.if_nameindex()) > 0)
END
"""


@both
def test_compilers_git_threads_and_servers_work(backend):
    async def work(box):
        return await box.exec(WORKS, env={"PYTHON": box.python[0]})

    done = in_sandbox(work, backend=backend, limits=ROOMY)
    expected = ["compiled", "first", "thread", "child", "[1, 2]", "pair", "127.0.0.1", "True"]
    assert done.stdout.splitlines() == expected, done.stderr


@pytest.mark.parametrize("backend", BWRAP)
def test_a_debugger_works_if_the_task_requests_it(backend):
    async def work(box):
        return await box.exec("command -v gdb && gdb -batch -ex run -ex bt --args true")

    done = in_sandbox(work, allow_syscalls=("ptrace",), limits=ROOMY)
    if not done.stdout:
        pytest.skip("no gdb here")
    assert "exited normally" in done.stdout


@pytest.mark.parametrize("backend", BWRAP)
def test_nested_sandboxes_work_if_the_task_requests_namespaces(backend):
    async def work(box):
        return (await box.exec("unshare -Ur id -u")).stdout

    assert in_sandbox(work) == ""
    assert in_sandbox(work, allow_syscalls=("namespaces",)) == "0\n"


@pytest.mark.skipif(not DEFAULT.exists(), reason="no default profile to compare with")
def test_a_container_is_denied_at_least_what_its_engine_denies():
    default = json.loads(DEFAULT.read_text())["syscalls"]
    allowed = {name for rule in default if "ALLOW" in rule["action"] for name in rule["names"]}
    ours = {
        name
        for rule in seccomp.container_profile(())["syscalls"]
        if "ALLOW" in rule["action"]
        for name in rule["names"]
    }
    assert ours <= allowed


def test_deny_list_and_allow_list_agree():
    """No call of the deny list is in the allow list."""
    allowed = set(seccomp.ALLOWED.split())
    for column in (0, 1):
        for table in (*seccomp.GROUPS.values(), seccomp.NEVER):
            assert not {name for name, _ in seccomp._calls(table, column)} & allowed


def test_an_unknown_architecture_is_rejected_by_name():
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.bpf_program((), "riscv64")
    assert seccomp.bpf_program(("everything",), "riscv64") == b""
