"""Small machines of one's own, used once and thrown away, in which anything may be run.

box.py            what a sandbox is, and what it may use up
bwrap.py          by bubblewrap
cgroups.py        limits of whole sandboxes
changes.py        what a container has changed
channel.py        our end of the line to a runner
choose.py         which sandbox this machine can give
container.py      by a container engine
engine.py         a container engine's command line
files.py          files into a sandbox and out of it
keep.py           which changes a snapshot holds
kernel.py         system calls that Python does not offer
launch.py         a program: what is done before bubblewrap takes over
layers.py         layers of isolation, and what is lost without one
pool.py           sandboxes started before they are needed
processes.py      a program's part: how processes inside begin and end
python.py         a Python interpreter that stays
python_inside.py  a program: that interpreter, inside
runner.py         a program: the first process inside
running.py        what sandboxes with a runner have in common
seccomp.py        what the kernel refuses to the code inside
shell.py          a shell that stays
system.py         which parts of this machine are seen inside
unisolated.py     none at all, for who insists
"""

from paddock.envs.sandbox.box import (
    ExecResult,
    Limits,
    Permission,
    Process,
    Sandbox,
    SandboxError,
    SandboxSettings,
    Snapshot,
)
from paddock.envs.sandbox.choose import chosen, forget, open_sandbox
from paddock.envs.sandbox.keep import Keep
from paddock.envs.sandbox.pool import Pool
from paddock.envs.sandbox.python import PythonReply, PythonSession
from paddock.envs.sandbox.shell import ShellReply, ShellSession

__all__ = [
    "ExecResult",
    "Keep",
    "Limits",
    "Permission",
    "Pool",
    "Process",
    "PythonReply",
    "PythonSession",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "ShellReply",
    "ShellSession",
    "Snapshot",
    "chosen",
    "forget",
    "open_sandbox",
]
