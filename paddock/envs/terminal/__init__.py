"""Terminal environments: a shell in a sandbox, with generated tasks or tasks in Harbor's format.

taskset.py            environment `terminal`: generated tasks
harbor_taskset.py     environment `harbor`: a directory of Harbor tasks
env.py                one rollout with a shell
task.py               generated tasks: files, instruction, checks, solution
generate.py           task generator
subtasks_files.py     subtasks about files, text, permissions, logs, search, settings
subtasks_programs.py  subtasks about scripts, archives, git repositories
sandboxed_checks.py   program that runs inside: checks the state of a workspace
"""
