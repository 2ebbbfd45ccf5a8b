"""A real shell in a sandbox: tasks of folders, and small ones made by chance.

sandboxed_checks.py   a program: what holds of a workspace
env.py                an attempt with a shell
subtasks_files.py     goals about files, text, permissions, logs, search, settings
subtasks_programs.py  goals about scripts, archives, repositories
harbor_taskset.py     harbor: the tasks of a folder
generate.py           puzzles of chance
task.py               what a small task is
taskset.py            terminal: small tasks made by chance
"""
