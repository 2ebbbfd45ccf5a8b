"""Task folders for tests."""

from pathlib import Path

from paddock.envs.harbor import HarborSettings
from paddock.sandbox import ResourceLimits, SandboxSettings

MIB = 1 << 20
LIMITS = ResourceLimits(memory_bytes=256 * MIB, disk_bytes=64 * MIB, max_processes=128)
SETTINGS = HarborSettings(sandbox=SandboxSettings(limits=LIMITS), allow_internet_in_build=False)
DOCKERFILE = "FROM debian:12\nWORKDIR /app\nCOPY start.txt .\nRUN echo built > built.txt\n"
TEST = """#!/bin/bash
cat > /dev/null
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
exit 3
"""


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def simple(folder: Path, **changes: str) -> Path:
    """A task whose answer is 42. Changes are files, with `__` for `/` and `_DOT_` for a dot."""
    texts = {
        "task.toml": 'version = "1.0"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 30\n',
        "instruction.md": "Write 42 into answer.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/start.txt": "start\n",
        "tests/test.sh": TEST,
        "tests/hidden.txt": "the answer that is expected is 42\n",
        "solution/solve.sh": "#!/bin/bash\necho 42 > answer.txt\n",
    }
    renamed = {name.replace("__", "/").replace("_DOT_", "."): t for name, t in changes.items()}
    return write(folder, texts | renamed)


STEPS_TOML = """
multi_step_reward_strategy = "mean"
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
"""


def in_steps(folder: Path, **changes: str) -> Path:
    check = (
        "#!/bin/bash\n[ -e {0}.txt ] && r=1 || r=0\n"
        'echo "{{\\"{0}\\": $r, \\"reward\\": $r}}" > /logs/verifier/reward.json\n'
    )
    texts = {
        "task.toml": STEPS_TOML,
        "environment/Dockerfile": "FROM x\nWORKDIR /app\n",
        "tests/shared.txt": "shared between steps, and hidden\n",
        "steps/one/instruction.md": "Make one.txt.\n",
        "steps/one/tests/test.sh": check.format("one"),
        "steps/one/solution/solve.sh": "touch one.txt\n",
        "steps/two/instruction.md": "Make two.txt.\n",
        "steps/two/tests/test.sh": check.format("two"),
        "steps/two/solution/solve.sh": "test -e prepared && touch two.txt\n",
        "steps/two/workdir/setup.sh": "touch prepared\n",
    }
    renamed = {name.replace("__", "/").replace("_DOT_", "."): t for name, t in changes.items()}
    return write(folder, texts | renamed)
