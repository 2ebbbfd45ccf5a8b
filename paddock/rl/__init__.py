"""Episodes into weights: credit, losses, the learner and what feeds it.

advantage.py  how much better than expected an attempt was
alerts.py     what a person should look at while a run goes on
collect.py    rollouts into batches while the trainer works
credit.py     from the attempts of a group to samples
distill.py    teachers from earlier stages
learn.py      the one loop
learner.py    the weights that learn
loss.py       policy losses, token by token
objective.py  the loss that settings ask for
queue.py      where a learner takes its batches from
reward.py     what an attempt earned, as training counts it
settings.py   what an RL run is made of
stages.py     what each stage is by default
tally.py      which groups are worth training on, and how all of them did
"""
