"""The front door: one verb a file, and nothing heavy loaded before a verb needs it.

__main__.py  the table of verbs
chat.py      the verb that chats with a model in the terminal
describe.py  what a network weighs and costs, in tables or JSON
doctor.py    the verb that says what this machine offers
engines.py   a model's folder as engines that are ready to answer
errors.py    what the user must change, in one line
model.py     the verb that describes, checks and converts models
numbers.py   numbers as people read and write them
report.py    the verb that makes a page of a run, or of several
serve.py     the verb that serves a model over HTTP
tables.py    tables that read well on a terminal and in a pipe
track.py     where a run's numbers go besides its journal
train.py     the verb that trains one stage of a base model
"""
