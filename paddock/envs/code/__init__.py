"""Code: functions to write, and hidden tests that run in a sandbox.

rows.py      the layouts of HumanEval and MBPP
generate.py  small functions of so many steps
verifier.py  a program against its tests
sandboxed.py  two programs for inside: one runs an answer, one its tests
channel.py   our end of the lines to them
taskset.py   the worlds `code` and `code-file`
"""
