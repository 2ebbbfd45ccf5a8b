"""What the kernel refuses inside, what still works, and what a task may ask for."""

import json
from pathlib import Path

import pytest

from benchmarks.attack_sandbox import CALLS, PROBE, REFUSED
from paddock.sandbox import ResourceLimits, seccomp
from tests.sandbox.sandboxes import BOTH, BWRAP, in_box

both = pytest.mark.parametrize("backend", BOTH)
DEFAULT = Path("/usr/share/containers/seccomp.json")
ROOMY = ResourceLimits(memory_bytes=256 << 20, disk_bytes=64 << 20, max_processes=64)


def probe(backend, attempts, **settings):
    async def work(box):
        done = await box.exec([*box.python, "-c", PROBE, json.dumps(attempts)])
        assert done.ok, done
        return json.loads(done.stdout)

    return in_box(work, backend=backend, **settings)


x86 = pytest.mark.skipif(seccomp.platform.machine() != "x86_64", reason="numbers of x86_64")


@x86
@both
def test_the_kernel_refuses_what_nobody_needs_inside(backend):
    found = probe(backend, CALLS)
    assert {name: said for name, said in found.items() if said not in REFUSED} == {}
    assert found["clone3"] == found["io_uring"] == found["a call newer than known"] == "ENOSYS"


ALLOWED = {
    "ptrace": ("traceme", 101, 0, 0, 0, 0),
    "io_uring": ("a missing argument", 425, 8, 0),
    "vsock": ("no such transport", 41, 40, 1, 0),
    "keys": ("no such key", 250, 0, 0x7FFFFFF0, 0),
}


@x86
@both
def test_a_task_gets_what_it_names_and_no_more(backend):
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

    done = in_box(work, backend=backend, limits=ROOMY)
    said = ["compiled", "first", "thread", "child", "[1, 2]", "pair", "127.0.0.1", "True"]
    assert done.stdout.splitlines() == said, done.stderr


@pytest.mark.parametrize("backend", BWRAP)
def test_a_debugger_works_where_a_task_names_it(backend):
    async def work(box):
        return await box.exec("command -v gdb && gdb -batch -ex run -ex bt --args true")

    done = in_box(work, allow_syscalls=("ptrace",), limits=ROOMY)
    if not done.stdout:
        pytest.skip("no gdb here")
    assert "exited normally" in done.stdout


@pytest.mark.parametrize("backend", BWRAP)
def test_sandboxes_inside_need_namespaces_and_get_them_by_name(backend):
    async def work(box):
        return (await box.exec("unshare -Ur id -u")).stdout

    assert in_box(work) == ""
    assert in_box(work, allow_syscalls=("namespaces",)) == "0\n"


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


def test_both_forms_deny_the_same():
    """What the list of denied calls names, the list of allowed ones does not."""
    allowed = set(seccomp.ALLOWED.split())
    for column in (0, 1):
        for table in (*seccomp.GROUPS.values(), seccomp.NEVER):
            assert not {name for name, _ in seccomp._calls(table, column)} & allowed


def test_an_unknown_machine_is_refused_by_name():
    with pytest.raises(ValueError, match="riscv64"):
        seccomp.bpf_program((), "riscv64")
    assert seccomp.bpf_program(("everything",), "riscv64") == b""
