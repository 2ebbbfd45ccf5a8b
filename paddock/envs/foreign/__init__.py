"""Environments that live in another Python, whose packages clash with ours.

interpreter.py  that Python: one that is named, or a virtual environment made once
process.py   its process: calls and results as JSON lines
messages.py  chat messages as the OpenAI API writes them
verifiers_bridge.py  the program that runs there: tasksets of verifiers
verifiers_taskset.py  environment `verifiers`
"""
