"""Code: functions to write, and hidden tests that run in a sandbox.

files.py     the layouts of HumanEval and MBPP
generate.py  small functions of so many steps
grade.py     a program against its tests
inside.py    two programs for inside: one runs an answer, one its tests
talk.py      our end of the lines to them
world.py     the worlds `code` and `code-file`
"""
