"""Other machines for tests: network namespaces with one link each to this one."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from shutil import which

ADDRESS = "10.231.0.1"  # of this machine, as the others see it


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    return done.stdout


def why_no_hosts() -> str:
    """Why this machine cannot have network namespaces; empty if it can."""
    if which("ip") is None:
        return "the command ip is missing: apt-get install iproute2"
    try:
        with hosts(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces need root: {error.stderr.strip()}"


class Host:
    """A machine with its own network, and programs that run there."""

    def __init__(self, number: int) -> None:
        self.name = f"paddock-{os.getpid()}-{number}"
        self.link = f"pdk{os.getpid() % 10**7}{number}"
        self._inner, self._net = f"{self.link}i", f"10.231.{number + 1}"
        self._running: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", self._inner)
        ip("link", "set", self._inner, "netns", self.name)
        ip("addr", "add", f"{self._net}.1/24", "dev", self.link)
        ip("link", "set", self.link, "up")
        ip("-n", self.name, "addr", "add", f"{self._net}.2/24", "dev", self._inner)
        ip("-n", self.name, "link", "set", self._inner, "up")
        ip("-n", self.name, "route", "add", "default", "via", f"{self._net}.1")

    def start(self, *command: str) -> None:
        words = ["ip", "netns", "exec", self.name, *command]
        self._running.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))

    def cut(self) -> None:
        """Nothing passes any more, in either direction; connections are not told."""
        ip("link", "set", self.link, "down")

    def restore(self) -> None:
        ip("link", "set", self.link, "up")

    def crash(self) -> None:
        """The machine is gone, with no word to whom it was connected."""
        self.cut()
        self._kill()

    def close(self) -> None:
        self._kill()
        with suppress(subprocess.CalledProcessError):
            ip("link", "del", self.link)
        with suppress(subprocess.CalledProcessError):
            ip("netns", "del", self.name)

    def _kill(self) -> None:
        with suppress(subprocess.CalledProcessError):
            for pid in ip("netns", "pids", self.name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for process in self._running:
            process.kill()
            process.wait()
        self._running.clear()


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many other machines, which reach this one at ADDRESS."""
    made = [Host(number) for number in range(count)]
    with suppress(subprocess.CalledProcessError):  # left by a test that was killed
        ip("addr", "add", f"{ADDRESS}/32", "dev", "lo")
    try:
        for host in made:
            host.open()
        yield made
    finally:
        for host in made:
            host.close()
        with suppress(subprocess.CalledProcessError):
            ip("addr", "del", f"{ADDRESS}/32", "dev", "lo")
