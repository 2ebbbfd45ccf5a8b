"""Code environments: functions to write, scored by hidden unit tests in a sandbox.

taskset.py    environments `code` and `code-file`
generate.py   generated functions of a number of steps
rows.py       rows of HumanEval and MBPP files
verifier.py   runs a completion against its hidden tests
channel.py    JSON-lines connection to a program in a sandbox
sandboxed.py  programs that run inside: one serves the completion, one runs the tests
"""
