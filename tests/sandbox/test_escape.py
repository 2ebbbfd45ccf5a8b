"""Escape attempts that must fail; after each, the machine is unchanged."""

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.sandbox import ResourceLimits, cgroups
from paddock.sandbox.filesystem import unpack
from tests.sandbox.sandboxes import (
    BOTH,
    LATER,
    MIB,
    SMALL,
    eventually,
    execute,
    groups,
    in_sandbox,
    machine,
    running,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _the_machine_is_unchanged():
    before = machine()
    yield
    assert machine() == before


@pytest.fixture
def secret():
    """A world-readable file in a world-writable folder."""
    path = Path("/var/tmp", f"secret-{secrets.token_hex(8)}")
    path.write_text("the hidden tests")
    path.chmod(0o666)
    yield path
    path.unlink()


both = pytest.mark.parametrize("backend", BOTH)


@both
def test_files_outside_cannot_be_read(backend, secret):
    paths = [secret, Path.home() / ".bashrc", Path(__file__), Path("/proc/1/root") / secret.name]
    done = execute("; ".join(f"cat {path}" for path in paths), backend=backend)
    assert "hidden tests" not in done.stdout
    assert "_the_machine_stays" not in done.stdout
    assert done.code != 0


@both
def test_password_files_of_the_machine_are_not_visible(backend):
    done = execute("cat /etc/shadow /etc/ssh/* /etc/sudoers /etc/pip.conf", backend=backend)
    kept = [line for line in done.stdout.splitlines() if ":*:" not in line]
    assert kept == []


@both
def test_files_outside_cannot_be_written(backend, secret):
    done = execute(
        f"echo broken > {secret}; echo x > /usr/bin/ls; echo x > /etc/passwd; rm -f /usr/bin/true",
        backend=backend,
    )
    assert secret.read_text() == "the hidden tests"
    assert Path("/usr/bin/ls").stat().st_size > 100
    assert Path("/usr/bin/true").exists()
    assert "ead-only" in done.stderr


def test_a_writable_root_is_a_copy():
    command = "rm /usr/bin/true; echo x > /usr/bin/yes; touch /etc/mine; ls /usr/bin/true"
    done = execute(command, writable_root=True)
    assert done.code == 2  # it does not exist inside
    assert Path("/usr/bin/true").exists()
    assert Path("/usr/bin/yes").stat().st_size > 100
    assert not Path("/etc/mine").exists()


@both
def test_there_is_no_network(backend):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        server.settimeout(0.3)
        code = f"""
import socket
for host, port in (("127.0.0.1", {port}), ("192.0.2.1", 80), ("1.1.1.1", 53)):
    try:
        socket.create_connection((host, port), timeout=2)
        print("REACHED", host)
    except OSError as error:
        print(type(error).__name__)
"""

        async def work(box):
            return await box.exec([*box.python, "-c", code])

        done = in_sandbox(work, backend=backend)
        with pytest.raises(TimeoutError):
            server.accept()
    assert done.code == 0
    assert "REACHED" not in done.stdout


@both
def test_a_server_inside_is_reachable_from_inside(backend):
    code = "import socket; s=socket.create_server(('127.0.0.1', 80)); print('serving')"

    async def work(box):
        return await box.exec([*box.python, "-c", code])

    assert in_sandbox(work, backend=backend).stdout == "serving\n"


@both
def test_a_fork_bomb_stays_inside(backend):
    mark = f"bomb{secrets.token_hex(4)}"
    code = f"""
import os, sys
sys.argv[0] = "{mark}"
made = 0
try:
    for _ in range(500):
        if os.fork() == 0:
            import time; time.sleep(600)
        made += 1
except OSError:
    pass
print(made)
"""

    async def work(box):
        done = await box.exec([*box.python, "-c", code], timeout_s=20)
        assert len(running(mark)) <= SMALL.max_processes
        await box.kill()
        assert eventually(lambda: not running(mark))
        return done, await box.exec("echo alive")

    done, after = in_sandbox(work, backend=backend)
    assert 0 < int(done.stdout) < SMALL.max_processes
    assert after.stdout == "alive\n"
    assert running(mark) == []


@both
def test_a_memory_bomb_is_killed(backend):
    code = "x = []\nwhile True: x.append(bytearray(4 << 20))"

    async def work(box):
        done = await box.exec([*box.python, "-c", code], timeout_s=30)
        return done, await box.exec("echo alive")

    done, after = in_sandbox(work, backend=backend)
    assert not done.ok
    assert not done.timed_out
    assert done.out_of_memory
    assert after.stdout == "alive\n"


@both
def test_the_disk_limit_holds(backend):
    limits = ResourceLimits(memory_bytes=96 * MIB, disk_bytes=16 * MIB, max_file_bytes=64 * MIB)
    done = execute("head -c 40M /dev/zero > full; stat -c %s full", backend=backend, limits=limits)
    assert "No space left" in done.stderr
    assert int(done.stdout) <= 16 * MIB


@pytest.mark.parametrize("backend", LATER)
def test_every_writable_path_has_a_limit(backend):
    limits = ResourceLimits(memory_bytes=160 * MIB, disk_bytes=16 * MIB, max_file_bytes=512 * MIB)

    written = execute(
        "for place in $(awk '{print $2}' /proc/mounts) / /etc /var /dev; do"
        " touch $place/full && rm $place/full && echo $place; done",
        backend=backend,
        limits=limits,
    )
    places = {os.path.dirname(path + "/") for path in written.stdout.split()}
    assert len(places) >= 4
    # One sandbox each: a sandbox at its memory limit cannot run the next command.
    for place in places:
        done = execute(f"head -c 256M /dev/zero > {place}/full", backend=backend, limits=limits)
        assert not done.ok, place


def test_a_copied_root_has_a_limit_too():
    limits = ResourceLimits(memory_bytes=96 * MIB, disk_bytes=16 * MIB, max_file_bytes=64 * MIB)
    command = "for p in / /usr /tmp /root /dev/shm; do head -c 40M /dev/zero > $p/full; done"
    done = execute(command, limits=limits, writable_root=True)
    assert done.stderr.count("No space left") == 5


@pytest.mark.parametrize("backend", BOTH[1:])
def test_a_container_that_exceeds_its_layer_limit_is_killed(backend):
    limits = ResourceLimits(disk_bytes=16 * MIB, max_file_bytes=512 * MIB)

    async def work(box):
        for i in range(20):
            await box.exec(f"head -c 24M /dev/zero > full{i}; sleep 1")

    with pytest.raises(ValueError, match="16777216 bytes were written"):
        in_sandbox(work, backend=backend, limits=limits, writable_root=True)


@both
def test_the_file_size_limit_holds(backend):
    done = execute("head -c 12M /dev/zero > big; stat -c %s big", backend=backend)
    assert int(done.stdout) == SMALL.max_file_bytes


@both
def test_endless_output_is_truncated_in_bounded_memory(backend):
    done = execute("yes", backend=backend, timeout_s=3.0)
    assert done.timed_out
    assert done.stdout_cut
    assert not done.stderr_cut
    assert len(done.stdout) < SMALL.max_output_bytes + 100
    assert done.stdout.startswith("y\ny\n")
    assert "bytes left out" in done.stdout


@both
def test_endless_output_without_newlines_is_truncated_on_both_streams(backend):
    done = execute("head -c 1M /dev/zero | tr '\\0' x; echo end; echo e >&2", backend=backend)
    assert done.ok
    assert done.stdout_cut
    assert done.stdout.endswith("xend\n")
    assert done.stderr == "e\n"


@both
def test_background_processes_end_with_the_sandbox(backend):
    mark = f"left{secrets.token_hex(4)}"
    command = f"""bash -c 'exec -a {mark} sleep 600' & disown
        setsid nohup bash -c 'exec -a {mark} sleep 600' >/dev/null 2>&1 &
        sleep 0.3; echo started"""

    async def work(box):
        done = await box.exec(command)
        assert done.stdout == "started\n"  # the command does not wait for background processes
        assert eventually(lambda: len(running(mark)) == 2)

    in_sandbox(work, backend=backend)
    # An engine returns a moment before its processes are gone.
    assert running(mark) == [] if backend == "bwrap" else eventually(lambda: not running(mark))


@both
def test_killing_pid_1_or_all_processes_has_no_effect_outside(backend):
    async def work(box):
        await box.exec("kill -9 1; kill -TERM 1; kill -INT 1; kill -9 $PPID; true")
        await box.exec("kill -9 -1; true")
        return await box.exec("echo alive; ls /proc | grep -c '^[0-9]'")

    alive, count = in_sandbox(work, backend=backend).stdout.split()
    assert alive == "alive"
    assert int(count) < 12  # it sees only its own processes


@pytest.mark.parametrize("backend", BOTH[:1])
def test_pid_1_cannot_be_inspected(backend):
    done = execute("cat /proc/1/environ; head -c 1 /proc/1/mem; readlink /proc/1/exe /proc/1/fd/*")
    assert done.stdout == ""
    assert done.code != 0


@both
def test_a_symlink_out_of_the_workspace_is_not_followed(backend, secret, tmp_path):
    async def work(box):
        await box.exec(f"mkdir d; ln -s {secret} d/file; ln -s / d/root; echo mine > d/own")
        await box.exec("ln -s ../../../../../etc d/up; mkfifo d/pipe")
        with pytest.raises(FileNotFoundError):
            await box.read("d/file")
        await box.get("d", tmp_path / "out")

    in_sandbox(work, backend=backend)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"own"}
    assert secret.read_text() == "the hidden tests"


@both
def test_writing_through_a_symlink_stays_inside(backend, secret):
    async def work(box):
        await box.exec(f"ln -s {secret.parent} out")
        await box.put(b"overwritten", f"out/{secret.name}")

    in_sandbox(work, backend=backend)
    assert secret.read_text() == "the hidden tests"


@both
def test_a_forged_archive_is_rejected(backend, tmp_path):
    forge = """
import io, sys, tarfile
with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
    for name in ("../escaped", "/tmp/escaped", "d/../../escaped", "d/fine"):
        entry = tarfile.TarInfo(name); entry.size = 3
        archive.addfile(entry, io.BytesIO(b"bad"))
"""

    async def work(box):
        program = f"#!{box.python[0]}\n{forge}".encode()
        await box.put(program, "/opt/tar")
        await box.exec("chmod +x /opt/tar")
        captured = await box.capture(["/opt/tar"], max_bytes=MIB)
        return captured.stdout

    unpack(in_sandbox(work, backend=backend), "d", tmp_path / "out", MIB)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "fine"]


@both
def test_setuid_gives_no_privileges(backend):
    command = """cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id
        su -s /bin/sh nobody -c /tmp/id 2>/dev/null || true
        grep -c NoNewPrivs:.1 /proc/self/status; mknod /tmp/disk b 8 0 && echo DEVICE
        mount -t tmpfs none /mnt && echo MOUNTED; chroot / true"""
    done = execute(command, backend=backend)
    assert "euid=0" not in done.stdout
    assert "DEVICE" not in done.stdout
    assert "MOUNTED" not in done.stdout
    assert "1\n" in done.stdout


@pytest.mark.parametrize("backend", BOTH[:1])
def test_root_inside_is_unprivileged_outside(backend):
    mark = f"owner{secrets.token_hex(4)}"

    async def work(box):
        sleeper = await box.spawn(["bash", "-c", f"exec -a {mark} sleep 60"])
        assert eventually(lambda: running(mark))
        (pid,) = running(mark)
        owner = Path(f"/proc/{pid}").stat().st_uid
        await sleeper.kill()
        return owner, (await box.exec("id -u")).stdout

    owner, inside = in_sandbox(work, backend=backend)
    assert inside == "0\n"
    assert owner != 0
    assert owner == os.getuid() or owner >= 0x7000_0000


@both
def test_no_further_namespaces_can_be_created(backend):
    command = "unshare -Ur true; unshare -n true; mount -o remount,rw /usr; umount /proc"
    done = execute(command, backend=backend)
    assert done.code != 0
    assert len(done.stderr.splitlines()) >= 4


ORPHAN = """
import asyncio, sys
from paddock.sandbox import SandboxSettings, open_sandbox

async def begin():
    box = open_sandbox(SandboxSettings(backend=sys.argv[1]))
    await box.start()
    await box.exec(f"setsid bash -c 'exec -a {sys.argv[2]} sleep 600' >/dev/null 2>&1 &")
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(begin())
"""


@both
def test_a_sandbox_ends_with_its_creator(backend):
    """Even if the creator is killed and cannot clean up."""
    mark = f"orphan{secrets.token_hex(4)}"
    maker = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, backend, mark], stdout=subprocess.PIPE, cwd=ROOT
    )
    with maker:
        assert maker.stdout.readline() == b"started\n"
        assert eventually(lambda: running(mark))
        maker.kill()
    assert eventually(lambda: not running(mark))

    def swept():  # cleanup at the start of the next process
        for parent in cgroups.find_cgroup_parents():
            cgroups._remove_stale(parent.folder)
        return groups(maker.pid) == []

    assert eventually(swept)
