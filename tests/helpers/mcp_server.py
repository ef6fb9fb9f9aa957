"""An MCP server of the official package for tests: `python mcp_server.py [http PORT]`; counts within one session."""

import os
import sys
import time
from pathlib import Path

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # version 1 of the package
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("counting")
count = 0


@server.tool()
def add(numbers: list[int], twice: bool = False) -> str:
    """Add numbers to the count."""
    global count
    count += sum(numbers) * (2 if twice else 1)
    return str(count)


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def hang() -> str:
    """Never answer in time."""
    time.sleep(600)
    return ""


@server.tool()
def whoami() -> str:
    """Return the process and its arguments."""
    return f"{os.getpid()} {os.environ.get('GIVEN', '-')} {os.environ.get('SECRET_FOR_TEST', '-')}"


if __name__ == "__main__":
    if os.environ.get("STARTED"):
        with Path(os.environ["STARTED"]).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if sys.argv[1:2] == ["http"] and MCPServer.__name__ == "FastMCP":
        server.settings.port = int(sys.argv[2])
        server.run("streamable-http")
    elif sys.argv[1:2] == ["http"]:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run("stdio")
