"""Tasks into token-exact episodes: sessions that own their tokens, and who samples for them.

atif.py          a session in the format in which agents' runs are exchanged
blocking.py      who blocks the event loop
carry.py         replies that break off and are gone on with
client.py        who is asked for tokens: the seam to engines
concurrency.py   how many attempts run at once
connections.py   many requests at once over connections that are used again
context.py       what of a long conversation a policy is shown
episode.py       one attempt at a task: a world, a session, an engine
fleet.py         several replicas as one, heartbeats, retries
flight.py        a group on its way, and an attempt that ends in time
gateway.py       the HTTP face of sessions, in three dialects
group.py         the attempts at one problem that are compared with each other
health.py        whether a task is worth its share
live.py          sessions that agents talk to, and their rules
lockstep.py      everybody's next request at once, for the same bits twice
match.py         when a conversation counts as the one that was recorded
mix.py           the shares of tasks over time
orchestrator.py  which groups are issued, which attempts run, how each group ends
quota.py         what goes into the next batch, within the bound on staleness
remote.py        servers far away, over SGLang's /generate
router.py        which rank a session is served by
runner.py        the attempts that run
schedule.py      which task comes next, and what chance an attempt has
service.py       tasks that live elsewhere, over HTTP
session.py       one agent's conversation, in the tokens that were really seen and sampled
settings.py      how rollouts are paced, and what a task may use up
tree.py          the tokens of a session, turn by turn
"""
