"""OpenEnv servers written with its package, as the tests start them: a counter, and tools."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class CountAction(Action):
    add: int


class CountObservation(Observation):
    total: int


class CounterEnvironment(Environment):
    """Ends at ten or more; reward 1 for exactly ten."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.total = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total = (seed or 0) % 10
        return CountObservation(total=self.total)

    def step(self, action, timeout_s=None, **kwargs):
        if action.add > 100:
            raise RuntimeError("the counter is stuck")
        self.total += action.add
        done = self.total >= 10
        return CountObservation(total=self.total, done=done, reward=float(self.total == 10))

    @property
    def state(self):
        return State(step_count=0)


class ToolsEnvironment(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("garden")
        planted = []

        @server.tool
        def plant(name: str) -> str:
            """Plant a plant."""
            planted.append(name)
            return f"{len(planted)} planted"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State(step_count=0)


APPS = {
    "counter": (CounterEnvironment, CountAction, CountObservation),
    "tools": (ToolsEnvironment, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port = sys.argv[1:]
    app = create_app(*APPS[name], env_name=name, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
