"""A real shell in a sandbox: tasks of folders, and small ones made by chance.

check_inside.py       a program: what holds of a workspace
env.py                an attempt with a shell
families.py           goals about files, text, permissions, logs, search, settings
families_programs.py  goals about scripts, archives, repositories
folders.py            harbor: the tasks of a folder
generate.py           puzzles of chance
puzzle.py             what a small task is
world.py              terminal: small tasks made by chance
"""
