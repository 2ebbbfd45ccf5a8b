"""The `paddock` command line: typer functions, tables and progress displays.

What a command does is in `paddock.launch` and `paddock.bench`; torch and the servers are imported
inside the function that needs them, so that `paddock --help` is quick.

__main__.py     the table of commands
bench.py        paddock bench: speed of serving, training and kernels
chat.py         paddock chat: a chat in the terminal
dash.py         paddock dash: runs in a browser
describe.py     tables of paddock model describe
distill.py      paddock distill: on-policy distillation
doctor.py       paddock doctor: what is installed and what is missing
env.py          paddock env: list, show, try and check environments
errors.py       errors for the user in one line
eval.py         paddock eval: a model in environments
gateway.py      paddock gateway: sessions for agents
look.py         paddock look: a network traced on one text
model.py        paddock model: describe, check and convert
quantize.py     paddock quantize: integer weights
report.py       paddock report: a page of a run, or of several
rl.py           paddock rl: reinforcement learning
rl_progress.py  progress of an RL run
run.py          paddock run: a pipeline
sample.py       paddock sample: rejection sampling
serve.py        paddock serve: a model over HTTP
options.py      options that several commands share
tables.py       tables for terminals and pipes
train.py        paddock train: one stage of training
"""
