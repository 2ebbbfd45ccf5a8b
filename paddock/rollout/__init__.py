"""Rollouts: sessions with exact token ids, inference clients, orchestration of tasks and groups.

agent_routes.py        routes for agents: task, tools, user, end; rollouts to take
agent_verdicts.py      verdicts of their rollouts, also by callback or posted
agents.py              rollouts by agents in other processes
atif.py                ATIF export of a session
batch_composer.py      batch composition under bounded staleness and task ratios
client.py              inference client: token-in-token-out interface to engines
concurrency.py         adaptive concurrency limit
context_management.py  which messages of a long conversation are in the prompt
continuation.py        continuation of interrupted completions
deterministic.py       deterministic mode: barrier for requests
executor.py            runs rollouts up to a concurrency limit
gateway.py             HTTP gateway: sessions for agents, in three API dialects
gateway_access.py      who may use a route of the gateway
gateway_requests.py    bodies of its own routes
group.py               groups of rollouts that share a baseline
in_flight.py           groups in flight, rollout timeouts
orchestrator.py        issues groups, runs rollouts, records outcomes
prefix_matcher.py      when a conversation equals the recorded one
prompt_weights.py      prompts drawn by their running pass rate
replica_pool.py        several engine replicas as one: health checks, retries
rollout_queue.py       workers that ask for rollouts, and rollouts that wait for one
session.py             one agent's conversation as token ids
session_manager.py     open sessions of the gateway, and their configuration
session_router.py      session-affine routing to replicas
session_tree.py        token ids of a session as a tree of turns
settings.py            rollout settings
sglang_client.py       client of SGLang-compatible servers; weight sync over HTTP
task_costs.py          what task ratios are shares of
task_health.py         disables tasks after consecutive failures
task_mixture.py        task ratios over time
task_schedule.py       deterministic order of tasks, rollout seeds
watchdog.py            detects a blocked event loop
worker.py              runs one rollout: environment, session, client
"""

from paddock.rollout import agents, deterministic, gateway, sglang_client
from paddock.rollout.batch_composer import BatchIncomplete
from paddock.rollout.client import (
    EngineUnavailableError,
    InferenceClient,
    InferenceRequest,
    InProcessClient,
)
from paddock.rollout.concurrency import AdaptiveConcurrencyLimit, EngineLoad
from paddock.rollout.context_management import ContextSettings
from paddock.rollout.executor import LongRunningRollout
from paddock.rollout.group import RolloutFn, RolloutGroup, TaskSpec
from paddock.rollout.in_flight import CANCEL_GRACE_S, failed_trajectory
from paddock.rollout.orchestrator import LogEvent, Orchestrator
from paddock.rollout.replica_pool import Replica, ReplicaPool, ReplicaPoolSettings
from paddock.rollout.session import PRESERVED
from paddock.rollout.settings import RolloutSettings, TaskSettings
from paddock.rollout.task_health import RunAbortedError
from paddock.rollout.task_schedule import RolloutSpec
from paddock.rollout.watchdog import EventLoopWatchdog
from paddock.rollout.worker import RolloutWorker

__all__ = [
    "CANCEL_GRACE_S",
    "PRESERVED",
    "AdaptiveConcurrencyLimit",
    "BatchIncomplete",
    "ContextSettings",
    "EngineLoad",
    "EngineUnavailableError",
    "EventLoopWatchdog",
    "InProcessClient",
    "InferenceClient",
    "InferenceRequest",
    "LogEvent",
    "LongRunningRollout",
    "Orchestrator",
    "Replica",
    "ReplicaPool",
    "ReplicaPoolSettings",
    "RolloutFn",
    "RolloutGroup",
    "RolloutSettings",
    "RolloutSpec",
    "RolloutWorker",
    "RunAbortedError",
    "TaskSettings",
    "TaskSpec",
    "agents",
    "deterministic",
    "failed_trajectory",
    "gateway",
    "sglang_client",
]
