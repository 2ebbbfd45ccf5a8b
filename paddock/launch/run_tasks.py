"""Tasks of a run, registered, changed and removed over HTTP while it goes on.

Whoever has the admin key may do so. Changes are in the ledger: a resumed run has them again.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

    from paddock.journal import Ledger
    from paddock.rl import LiveBatchSource, RLSettings
    from paddock.rollout import LogEvent, Orchestrator, TaskSpec, gateway

LEDGER_KEY = "tasks"  # settings of the tasks that were registered or changed; null: removed


class RunTasks:
    """`settings.tasks` is changed in place: whoever holds these settings (credit, sampling,
    filters) sees the tasks of the moment."""

    def __init__(
        self,
        settings: "RLSettings",
        orchestrator: "Orchestrator",
        collector: "LiveBatchSource",
        make_spec: "Callable[[str], TaskSpec]",
        log_event: "LogEvent",
        queues: "Mapping[str, gateway.RolloutQueue]",
    ) -> None:
        """`queues`: of the tasks whose rollouts workers ask for."""
        self._queues = queues
        self.settings, self._orchestrator, self._collector = settings, orchestrator, collector
        self._make_spec, self._log_event = make_spec, log_event
        self._ledger: Ledger = orchestrator.ledger
        self._changed: dict[str, Any] = self._ledger.get_metadata(LEDGER_KEY) or {}
        self._started = False

    def start(self, updates: int) -> None:
        """Begin or resume the run, with the tasks of an earlier process."""
        for name, values in self._changed.items():
            if values is not None:
                self._use(name, values)
        self._collector.resume(updates)
        self._started = True

    def put(self, name: str, values: Mapping[str, Any]) -> None:
        """Register a task, or give it these settings. Raises ApiError."""
        from paddock.records import ApiError

        if not self._started:
            raise ApiError("the run has not begun yet", status=503)
        before = self.settings.tasks.get(name)
        try:
            self._use(name, values)
            ratio = self.settings.tasks[name].ratio
            self._orchestrator.set_ratios(self._ratios() | {name: ratio})
        except (ValueError, OSError) as error:
            if before is None:
                self.settings.tasks.pop(name, None)
            else:
                self.settings.tasks[name] = before
            raise ApiError(f"task {name!r:.80}: {error}") from error
        self._note(name, dict(values))
        self._log_event("task_registered", task=name, ratio=ratio)

    def patch(self, name: str, values: Mapping[str, Any]) -> None:
        """Change some settings of a task."""
        known = self._known(name).model_dump(mode="json", exclude_none=True, exclude_unset=True)
        self.put(name, known | dict(values))

    def remove(self, name: str) -> None:
        """Issue and train no more groups of a task."""
        from paddock.records import ApiError

        self._known(name)
        ratios = self._ratios() | {name: 0.0}
        try:
            self._orchestrator.set_ratios(ratios)
        except ValueError as error:
            raise ApiError(f"task {name!r:.80} cannot be removed: {error}", status=409) from error
        self._note(name, None)
        self._log_event("task_removed", task=name)

    def states(self) -> dict[str, Any]:
        """Every task with its ratio, its rollouts and groups by status, and its settings."""
        every = self._states()
        return {name: every[name] for name in self._names()}

    def run_state(self) -> dict[str, Any]:
        """What dashboards show: every task, also removed ones, and rollouts that take long."""
        stragglers = self._orchestrator.executor.stragglers()
        return {
            "tasks": self._states() if self._started else {},
            "stragglers": [asdict(rollout) for rollout in stragglers],
        }

    def _states(self) -> dict[str, Any]:
        counts, ratios = self._collector.progress().tasks, self._ratios()
        return {n: self._state(n, counts[n], ratios.get(n, 0.0)) for n in self.settings.tasks}

    def _state(self, name: str, counts: Any, ratio: float) -> dict[str, Any]:
        queue, executor = self._queues.get(name), self._orchestrator.executor
        untaken = 0 if queue is None else queue.num_waiting
        running = executor.running(name) - untaken
        state = "running" if running else "waiting"
        if counts.disabled_reason:
            state = "disabled"
        if name not in self._names():
            state = "removed"
        return {
            "state": state,
            "disabled_reason": counts.disabled_reason,
            "ratio": ratio,
            "running": running,
            "waiting": self._orchestrator.num_queued(name) + untaken,
            "in_flight": counts.in_flight,
            "finished": counts.finished,
            "trained": counts.trained,
            "filtered": sum(counts.filtered.values()),
            "failed": dict(counts.failed),
            "settings": self.settings.tasks[name].model_dump(mode="json", exclude_unset=True),
        }

    def _names(self) -> list[str]:
        return [n for n in self.settings.tasks if self._changed.get(n, ()) is not None]

    def _known(self, name: str) -> Any:
        from paddock.records import ApiError

        if not self._started:
            raise ApiError("the run has not begun yet", status=503)
        if name not in self._names():
            known = ", ".join(self._names())
            raise ApiError(f"no task {name!r:.80}; there are {known}", status=404)
        return self.settings.tasks[name]

    def _ratios(self) -> dict[str, float]:
        mixture, update = self._orchestrator.task_mixture, self._orchestrator.next_update
        return mixture.requested(update)

    def _use(self, name: str, values: Mapping[str, Any]) -> None:
        """Check the settings of a task with all others, and hand it to the orchestrator."""
        from paddock.rl import RLSettings, task_settings

        task, known = task_settings(values), self.settings.tasks.get(name)
        command = None if task.agent is None else task.agent.command
        if command is not None and (known is None or known.agent != task.agent):
            raise ValueError("'agent.command' is for recipes: over HTTP use 'url' or 'pull'")
        if ":" in task.env and (known is None or known.env != task.env):
            raise ValueError(f"env {task.env!r} is for recipes: over HTTP use a registered one")
        RLSettings(**dict(self.settings) | {"tasks": self.settings.tasks | {name: task}})
        self.settings.tasks[name] = task
        self._orchestrator.put_task(name, self._make_spec(name))

    def _note(self, name: str, values: dict[str, Any] | None) -> None:
        self._changed[name] = values
        self._ledger.set_metadata(LEDGER_KEY, self._changed)

    # --- routes -----------------------------------------------------------------------------------

    def add_routes(self, app: "FastAPI", access: "gateway.GatewayAccess") -> None:
        from paddock.api import RequestBody, protocol_for_path
        from paddock.http import JsonRouter
        from paddock.records import ApiError

        class TaskBody(RequestBody):
            """Settings of a task, as in a recipe."""

        def settings_of(value: Any) -> dict[str, Any]:
            if not isinstance(value, dict):
                raise ApiError("the body must be a JSON object")
            return value

        async def list_tasks(_http: "Request", _value: Any) -> Any:
            return {"tasks": self.states()}

        async def get(http: "Request", _value: Any) -> Any:
            self._known(name := http.path_params["name"])
            return self.states()[name]

        async def put(http: "Request", value: Any) -> Any:
            self.put(name := http.path_params["name"], settings_of(value))
            return self.states()[name]

        async def patch(http: "Request", value: Any) -> Any:
            self.patch(name := http.path_params["name"], settings_of(value))
            return self.states()[name]

        async def remove(http: "Request", _value: Any) -> Any:
            self.remove(http.path_params["name"])
            return {"status": "removed"}

        router = JsonRouter(app, protocol_for_path, 1 << 20, admit=access.admin)
        router.add_route("/tasks", list_tasks, methods=("GET",))
        router.add_route("/tasks/{name}", get, methods=("GET",))
        router.add_route("/tasks/{name}", put, body=TaskBody, methods=("PUT",))
        router.add_route("/tasks/{name}", patch, body=TaskBody, methods=("PATCH",))
        router.add_route("/tasks/{name}", remove, methods=("DELETE",))
