"""A program that runs many tasks, each in many ways, in one sandbox.

    python3 batch_inside.py TASKS.json

reads [{files, setup, checks, tries: [[command, ...], ...]}, ...] and prints for each task the
outcome of each try. `sandboxed_checks` must be in the same folder.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile


def run(commands, folder):
    for command in commands:
        words = ["bash", "-c", command]
        subprocess.run(words, cwd=folder, capture_output=True, timeout=20, check=False)


def outcome(task, base, commands):
    import sandboxed_checks

    folder = tempfile.mkdtemp()
    shutil.copytree(base, folder, symlinks=True, dirs_exist_ok=True)
    run(commands, folder)
    os.chdir(folder)
    held = all(sandboxed_checks.check_expectation(check) for check in task["checks"])
    os.chdir("/")
    shutil.rmtree(folder, ignore_errors=True)
    return held


def outcomes(task):
    base = tempfile.mkdtemp()
    for file in task["files"]:
        path = os.path.join(base, file["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as out:
            out.write(file["text"])
        os.chmod(path, file["mode"])
    if task["setup"]:
        subprocess.run(["bash", "-ec", task["setup"]], cwd=base, check=True)
    found = [outcome(task, base, commands) for commands in task["tries"]]
    shutil.rmtree(base)
    return found


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        sys.stdout.write(json.dumps([outcomes(task) for task in json.load(file)]))
