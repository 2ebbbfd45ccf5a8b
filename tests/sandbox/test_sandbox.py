import asyncio
import os

import pytest

from paddock.sandbox import (
    SandboxError,
    SandboxSettings,
    delete_snapshot,
    open_sandbox,
)
from tests.sandbox.sandboxes import BOTH, BWRAP, SMALL, execute, in_sandbox, machine

both = pytest.mark.parametrize("backend", BOTH)
only_bwrap = pytest.mark.parametrize("backend", BWRAP)
UNISOLATED = {"backend": "unisolated", "allow_unisolated": True}


@both
def test_a_command_gets_its_working_folder_variables_and_input(backend):
    async def work(box):
        first = await box.exec("pwd; echo $A; cat", env={"A": "x y"}, stdin=b"in\n")
        second = await box.exec(["printf", "%s|", "a b", "*"], cwd="/tmp")
        return first, second, await box.exec("pwd >&2; exit 7", cwd="/usr")

    first, second, third = in_sandbox(work, backend=backend)
    assert (first.stdout, first.code) == ("/workspace\nx y\nin\n", 0)
    assert second.stdout == "a b|*|"
    assert (third.stdout, third.stderr, third.code) == ("", "/usr\n", 7)


@both
def test_a_command_may_run_as_another_user(backend):
    async def work(box):
        ids = [await box.exec("id -u; id -g; echo $HOME", user=who) for who in ("nobody", 7, None)]
        return [done.stdout.split() for done in ids], await box.exec("true", user="nobodyelse")

    ids, unknown = in_sandbox(work, backend=backend)
    assert ids[0][0] == "65534"
    assert ids[1][0] == "7"
    assert ids[2][:2] == ["0", "0"]
    assert not unknown.ok


@both
def test_a_command_that_times_out_is_killed_with_its_children(backend):
    async def work(box):
        done = await box.exec("sleep 77 & sleep 78 | sleep 79; echo never", timeout_s=0.7)
        left = await box.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        return done, left

    done, left = in_sandbox(work, backend=backend)
    assert done.timed_out
    assert "never" not in done.stdout
    assert not any(f"sleep {n}" in left.stdout for n in (77, 78, 79))


@both
def test_a_signal_is_reported_as_a_shell_exit_code(backend):
    assert execute("kill -TERM $$", backend=backend).code == 128 + 15


@both
def test_a_missing_program_is_an_exit_code_of_the_command(backend):
    done = execute(["no-such-program"], backend=backend)
    assert done.code in (126, 127)
    assert "no-such-program" in done.stderr + done.stdout


@both
def test_files_and_folders_are_copied_unchanged(backend, tmp_path):
    source = tmp_path / "in"
    (source / "deep").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "run.sh").chmod(0o755)
    (source / "deep" / "data").write_bytes(bytes(range(256)) * 1000)
    os.symlink("run.sh", source / "link")

    async def work(box):
        await box.put(source, "/workspace/out")
        await box.put(b"over", "out/deep/more")
        ran = await box.exec("./link && rm run.sh", cwd="/workspace/out")
        await box.get("out", tmp_path / "back")
        await box.get("/workspace/out/deep/more", tmp_path / "single")
        return ran.stdout, await box.read("out/deep/data")

    ran, data = in_sandbox(work, backend=backend)
    assert ran == "ran\n"
    assert data == (source / "deep" / "data").read_bytes()
    assert (tmp_path / "back" / "deep" / "data").read_bytes() == data
    assert not (tmp_path / "back" / "run.sh").exists()
    assert (tmp_path / "single").read_bytes() == b"over"


@only_bwrap
def test_a_too_large_or_missing_file_raises(backend, tmp_path):
    async def work(box):
        await box.exec("head -c 2M /dev/zero > big; mkfifo pipe; ln -s /dev/zero endless")
        with pytest.raises(SandboxError, match="more than 1000 bytes"):
            await box.read("big", max_bytes=1000)
        with pytest.raises(SandboxError, match="more than 1000 bytes"):
            await box.get("big", tmp_path / "big", max_bytes=1000)
        for name in ("missing", "pipe", "endless"):
            with pytest.raises(FileNotFoundError):
                await box.read(name)
        with pytest.raises(FileNotFoundError):
            await box.get("missing", tmp_path / "missing")

    in_sandbox(work)


@both
@pytest.mark.parametrize("copied", [False, True])
def test_sandboxes_start_from_a_snapshot(backend, copied):
    async def work(box):
        await box.exec("echo first > a; chmod 741 a; ln -s /nowhere l; sleep 600 & echo x")
        if copied:
            await box.exec("rm /usr/bin/yes; echo mine > /etc/mine")
        return await box.snapshot()

    settings = {"backend": backend, "writable_root": copied}
    snapshot = in_sandbox(work, **settings)
    look = "cat a; stat -c %a a; readlink l; ls /usr/bin/yes; cat /etc/mine; echo other > a"
    try:
        for _ in range(2):  # writes of one are not visible to the other

            async def again(box):
                return await box.exec(look)

            done = in_sandbox(again, base=(snapshot,), **settings)
            wanted = "first\n741\n/nowhere\n"
            # In a container without an image the programs are this machine's, read-only.
            wanted += "" if copied and backend == "bwrap" else "/usr/bin/yes\n"
            assert done.stdout == wanted + ("mine\n" if copied else "")
    finally:
        delete_snapshot(snapshot)


@only_bwrap
def test_snapshots_can_be_stacked(backend):
    async def first(box):
        await box.exec("echo 1 > a; echo 1 > b; mkdir d; echo 1 > d/x")
        return await box.snapshot()

    async def second(box):
        await box.exec("echo 2 > b; rm -r d; mkdir d")
        return await box.snapshot()

    async def third(box):
        return await box.exec("cat a b; ls d")

    below = in_sandbox(first, writable_root=True)
    above = in_sandbox(second, writable_root=True, base=(below,))
    try:
        done = in_sandbox(third, writable_root=True, base=(above, below))
        assert done.stdout == "1\n2\n"
    finally:
        delete_snapshot(below)
        delete_snapshot(above)


@both
def test_pooled_sandboxes_are_used_once_and_concurrently(backend):
    async def work():
        box = open_sandbox(SandboxSettings(backend=backend, limits=SMALL))
        with pytest.raises(SandboxError, match="not"):
            await box.exec("true")
        await box.start()
        with pytest.raises(SandboxError, match="already started"):
            await box.start()
        done = await asyncio.gather(*(box.exec(f"sleep 0.2; echo {i}") for i in range(4)))
        await box.close()
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec("true")
        return [each.stdout.strip() for each in done]

    assert asyncio.run(work()) == ["0", "1", "2", "3"]


@only_bwrap
def test_a_dead_sandbox_raises(backend):
    async def work(box):
        command = asyncio.create_task(box.exec("sleep 60"))
        await asyncio.sleep(0.3)
        box._process.kill()
        with pytest.raises(SandboxError, match="died"):
            await command

    in_sandbox(work)


@only_bwrap
def test_a_sandbox_that_cannot_start_raises_with_the_reason_and_leaves_nothing(backend, tmp_path):
    before = machine()
    with pytest.raises(SandboxError, match="nowhere"):
        execute("true", read_only_mounts=(str(tmp_path / "nowhere"),))
    with pytest.raises(SandboxError, match=r"did not start within 0.001 s"):
        execute("true", start_timeout_s=0.001)
    assert machine() == before


@only_bwrap
def test_read_only_folders_can_be_read_and_not_written(backend, tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "shown").write_text("see\n")
    done = execute(f"cat {tmp_path}/shown; touch {tmp_path}/x", read_only_mounts=(str(tmp_path),))
    assert done.stdout == "see\n"
    assert not (tmp_path / "x").exists()


@both
def test_no_descriptor_leaks_into_the_sandbox(backend):
    done = execute("for f in /proc/self/fd/*; do readlink $f; done; true", backend=backend)
    kept = [row for row in done.stdout.split() if not row.startswith(("pipe:", "/proc/"))]
    assert [row for row in kept if row.startswith("/") and row != "/dev/null"] == []


@only_bwrap
def test_empty_files_do_not_exhaust_memory(backend):
    code = """
count = 0
try:
    while True:
        open(f"f{count}", "w").close()
        count += 1
except OSError as error:
    print(error.errno, count <= 6144)  # of a disk of 24 MiB
"""

    async def work(box):
        done = await box.exec([*box.python, "-c", code])
        return done, await box.exec("echo alive")

    done, after = in_sandbox(work, backend=backend)
    assert done.stdout == "28 True\n"
    assert after.stdout == "alive\n"
