"""The front door: one verb a file, and nothing heavy loaded before a verb needs it.

__main__.py  the table of verbs
bench.py     the verb that measures speed
bench_cases.py    what each kernel is timed on
bench_kernels.py  kernels against their plain forms
bench_prepare.py  what the preparing of a latent layer is timed on
bench_serve.py    how fast an engine or a server answers
chat.py      the verb that chats with a model in the terminal
dash.py      the verb that shows run folders in a browser
describe.py  what a network weighs and costs, in tables or JSON
distill.py   the verb that brings back what later stages forgot
dry.py       what a plan would do, checked without doing it
doctor.py    the verb that says what this machine offers
ending.py    an event loop that ends in time, and a process that does
engines.py   a model's folder as engines that are ready to answer
env.py       the verb that lists worlds, shows one, plays in it, and checks tasks
errors.py    what the user must change, in one line
eval.py      the verb that measures a model in worlds
forecast.py  how long a plan will take on this machine
harvest.py   a file of dialogues that only grows
look.py      the verb that writes down where a network looks
model.py     the verb that describes, checks and converts models
units.py     numbers as people read and write them
plan.py      stages in order, and what of them is done
quantize.py  the verb that makes a model small
quantize_text.py  the text a network is calibrated and measured with
report.py    the verb that makes a page of a run, or of several
rl.py        the verb that trains by reinforcement
rl_engines.py  who samples for an RL run, and who teaches it
rl_feed.py   what a learner is fed with
rl_gauge.py  how engines fare in an RL run, as rows
rl_progress.py  an RL run as it goes
run.py       the verb that runs a whole plan
sample.py    the verb that samples answers and keeps those that a world accepts
serve.py     the verb that serves a model over HTTP
sockets.py   where a server listens
skills.py    what a model can do, measured
tables.py    tables that read well on a terminal and in a pipe
track.py     where a run's numbers go besides its journal
train.py     the verb that trains one stage of a base model
"""
