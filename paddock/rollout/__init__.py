"""Tasks into token-exact episodes: sessions that own their tokens, and who samples for them.

atif.py          a session in the format in which agents' runs are exchanged
watchdog.py      who blocks the event loop
continuation.py  replies that break off and are gone on with
client.py        who is asked for tokens: the seam to engines
concurrency.py   how many attempts run at once
connections.py   many requests at once over connections that are used again
context_management.py  what of a long conversation a policy is shown
worker.py        one attempt at a task: a world, a session, an engine
replica_pool.py  several replicas as one, heartbeats, retries
in_flight.py     a group on its way, and an attempt that ends in time
gateway.py       the HTTP face of sessions, in three dialects
group.py         the attempts at one problem that are compared with each other
task_health.py   whether a task is worth its share
session_manager.py  sessions that agents talk to, and their rules
deterministic.py  everybody's next request at once, for the same bits twice
prefix_matcher.py  when a conversation counts as the one that was recorded
task_mixture.py  the shares of tasks over time
orchestrator.py  which groups are issued, which attempts run, how each group ends
batch_composer.py  what goes into the next batch, within the bound on staleness
sglang_client.py  servers far away, over SGLang's /generate
session_router.py  which rank a session is served by
executor.py      the attempts that run
task_schedule.py  which task comes next, and what chance an attempt has
task_service.py  tasks that live elsewhere, over HTTP
session.py       one agent's conversation, in the tokens that were really seen and sampled
settings.py      how rollouts are paced, and what a task may use up
session_tree.py  the tokens of a session, turn by turn
"""

from paddock.rollout import sglang_client
from paddock.rollout.batch_composer import BatchIncomplete
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    InProcessClient,
)
from paddock.rollout.concurrency import AdaptiveConcurrencyLimit, EngineLoad
from paddock.rollout.deterministic import DeterministicClient, RequestBarrier
from paddock.rollout.executor import LongRunningRollout
from paddock.rollout.group import RolloutFn, RolloutGroup, TaskSpec
from paddock.rollout.in_flight import CANCEL_GRACE_S, failed_trajectory
from paddock.rollout.orchestrator import LogEvent, Orchestrator
from paddock.rollout.replica_pool import Replica, ReplicaPool, ReplicaPoolSettings
from paddock.rollout.session import PRESERVED
from paddock.rollout.settings import NonNegativeWeight, RolloutSettings, TaskSettings
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_schedule import RolloutSpec
from paddock.rollout.watchdog import EventLoopWatchdog
from paddock.rollout.worker import RolloutWorker

__all__ = [
    "CANCEL_GRACE_S",
    "PRESERVED",
    "AdaptiveConcurrencyLimit",
    "BatchIncomplete",
    "DeterministicClient",
    "EngineLoad",
    "EngineUnavailableError",
    "EventLoopWatchdog",
    "InProcessClient",
    "InferenceClient",
    "InferenceRequest",
    "LogEvent",
    "LongRunningRollout",
    "NonNegativeWeight",
    "Orchestrator",
    "Replica",
    "ReplicaPool",
    "ReplicaPoolSettings",
    "RequestBarrier",
    "RolloutFn",
    "RolloutGroup",
    "RolloutSettings",
    "RolloutSpec",
    "RolloutWorker",
    "RunAbortedError",
    "TaskSettings",
    "TaskSpec",
    "failed_trajectory",
    "sglang_client",
]
