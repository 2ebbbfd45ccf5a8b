"""RL in the environments that people have: data files with reward functions, MCP servers, tasksets
of verifiers. Nothing but a recipe and the functions, servers and tasksets themselves."""

import json
import os
import sys
from pathlib import Path

import pytest

from paddock.cli.rl import run_rl
from paddock.envs.foreign.interpreter import venv_folder
from paddock.envs.foreign.verifiers_taskset import VerifiersSettings
from paddock.journal import Ledger
from paddock.launch.rollouts import LEDGER_FILE
from paddock.records import Verdict
from tests.rl.vault_runs import SYNCHRONOUS, numbers, recipe_in

RECIPE = """
stage = "agentic"
steps = 2
[init]
checkpoint = "{start}"
[tasks.short]
env = "ENV"
group_size = 4
[rollout]
groups_per_batch = 2
[sampling]
max_new_tokens = 24
[optim]
type = "muon"
lr = 2e-3
weight_decay = 0.0
[compute]
device = "cpu"
[engines]
kv_cache_bytes = 8388608
"""

FUNCTION = "my_rewards.py:brevity"


def trained(start, folder, env, **args):
    """Two updates in this environment; the first branch of each rollout."""
    sets = [f"tasks.short.args.{name}={json.dumps(value)}" for name, value in args.items()]
    recipe = recipe_in(folder, start, RECIPE.replace("ENV", env))
    run_rl(recipe, folder / "run", [*SYNCHRONOUS, *sets])
    assert sorted(numbers(folder / "run")) == [1, 2]
    with Ledger(folder / "run" / LEDGER_FILE) as ledger:
        return [b[0] for g in ledger.groups() for b in ledger.rollouts(g.ordinal).values()]


def test_a_data_file_and_a_reward_function_train_a_model(start, tmp_path):
    rows = "\n".join(json.dumps({"prompt": f"Vault {n} .", "limit": 40 + n}) for n in range(10))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, limit, **kwargs):\n"
        "    return [-len(text) / most for text, most in zip(completions, limit)]\n"
    )
    files = {"train_file": str(tmp_path / "rows.jsonl"), "reward_funcs": [str(tmp_path / FUNCTION)]}
    found = [rollout.outcome for rollout in trained(start, tmp_path, "ask", **files)]
    assert len(found) >= 16 and all(isinstance(outcome, Verdict) for outcome in found)
    assert len({outcome.reward for outcome in found}) > 2
    assert all(outcome.reward == outcome.parts["brevity"] for outcome in found)


# With the very schema that the tiny network was pretrained on.
VAULT_SERVER = """
import asyncio

import mcp_types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

SCHEMA = {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}


async def list_tools(context, params):
    tool = mcp_types.Tool(name="look", description="x", input_schema=SCHEMA)
    return mcp_types.ListToolsResult(tools=[tool])


async def call_tool(context, params):
    return mcp_types.CallToolResult(content=[mcp_types.TextContent(text="is open")])


async def main():
    server = Server("vault", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


asyncio.run(main())
"""


def test_the_tools_of_an_mcp_server_train_a_model(start, tmp_path):
    pytest.importorskip("mcp", reason="the optional MCP SDK is not installed")
    rows = [{"prompt": [{"role": "user", "content": f"Vault {n} ."}]} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "server.py").write_text(VAULT_SERVER)
    (tmp_path / "my_rewards.py").write_text(
        "def brevity(completions, **kwargs):\n"
        "    return [sum(m['role'] == 'tool' for m in messages) for messages in completions]\n"
    )
    server = {
        "command": [sys.executable, str(tmp_path / "server.py")],
        "env.PYTHONPATH": os.pathsep.join(sys.path),
        "shared": True,
    }
    rollouts = trained(
        start,
        tmp_path,
        "ask",
        train_file=str(tmp_path / "rows.jsonl"),
        reward_funcs=[str(tmp_path / FUNCTION)],
        max_turns=3,
        **{f"mcp_servers.vault.{name}": value for name, value in server.items()},
    )
    assert all(isinstance(rollout.outcome, Verdict) for rollout in rollouts), rollouts
    assert {rollout.outcome.reward for rollout in rollouts} > {0.0}


@pytest.mark.skipif(
    not (venv_folder(VerifiersSettings().requirements) / ".ready").exists(),
    reason="verifiers has no environment yet: make prove AREA=agents",
)
def test_a_taskset_of_verifiers_trains_a_model(start, tmp_path):
    taskset = str(Path(__file__).with_name("foreign_vault.py"))
    found = [r.outcome for r in trained(start, tmp_path, "verifiers", taskset=taskset)]
    assert len(found) >= 16 and all(isinstance(outcome, Verdict) for outcome in found), found
    assert len({outcome.reward for outcome in found}) > 2
    assert all(outcome.reward == outcome.parts["brevity"] for outcome in found)
