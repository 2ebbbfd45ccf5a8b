"""An MCP server written with the SDK, as the tests start it: a garden that each process forgets."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("garden")
planted: dict[str, int] = {}


@server.tool()
def plant(name: str, count: int = 1) -> str:
    """Plant some of a plant."""
    if count < 1:
        raise ToolError(f"cannot plant {count}")
    planted[name] = planted.get(name, 0) + count
    return f"planted {count} {name}"


@server.tool()
def count(name: str) -> int:
    """How many of a plant there are."""
    return planted.get(name, 0)


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def flood(size: int) -> str:
    """A long text."""
    return "x" * size


@server.tool()
def crash() -> str:
    """End the server."""
    os.write(2, b"the garden is on fire")
    os._exit(3)


@server.tool()
def secret() -> str:
    """An environment variable."""
    return os.environ.get("GARDEN_SECRET", "none")


if __name__ == "__main__":
    transport, *port = sys.argv[1:]
    server.run(transport, **({"port": int(port[0])} if port else {}))
