"""Tool servers of a `verifiers` task set, run within the child that plays it: see `verifiers_child`.

The package starts each as an MCP server in a separate process or container. Here its tools are registered and called
through the package's MCP classes, without a network; what a call changes in the rollout's state stays in its trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any


def refuse_unsupported_servers(servers: Sequence[Any]) -> None:
    """Refuse a server that cannot run here: remote, in a container, or inside an agent's container.

    Raises: ValueError.
    """
    for server in servers:
        config, name = server.config, type(server).__name__
        if getattr(config, "url", None):
            raise ValueError(f"its toolset {name} is served at a URL, which is not supported")
        if getattr(config, "colocated", False):
            raise ValueError(
                f"its toolset {name} is to run inside the agent's runtime, which is not supported"
            )
        runtime = type(getattr(config, "runtime", None)).__name__
        if runtime not in ("SubprocessConfig", "NoneType"):
            raise ValueError(
                f"its toolset {name} needs the runtime {runtime}; only plain processes are supported"
            )


class ToolServers:
    """The servers of one episode."""

    def __init__(self, servers: Sequence[Any], trace: Any) -> None:
        self._servers, self._trace = servers, trace
        # (MCP server, its tool) by the name that the policy sees.
        self._tools: dict[str, tuple[Any, Any]] = {}

    async def open(self, task: Any, task_servers: Sequence[Any]) -> None:
        """Set the servers up as the package does; `task_servers` are made for a task and receive it."""
        from mcp.server.mcpserver import MCPServer

        for server in self._servers:
            self._share_state(server)
            await server.setup()
            if server in task_servers:
                await server.setup_task(task.data)
            prefix = server.server_name
            mcp = MCPServer(prefix or type(server).__name__)
            server.register(mcp)
            for tool in await mcp.list_tools():
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                if name in self._tools:
                    raise ValueError(f"its toolsets have two tools '{name}'")
                self._tools[name] = (mcp, tool)

    def _share_state(self, server: Any) -> None:
        """Let calls read and change the trace's state directly; the package uses a channel between processes."""
        state = self._trace.state

        async def pull() -> Any:
            return state if isinstance(state, server._state_cls) else server._state_cls()

        async def push(before: bytes) -> None:
            return None  # changed in place

        server._pull_state, server._push_state = pull, push

    def list_schemas(self) -> list[dict[str, Any]]:
        """List the name, description and JSON schema of the arguments of each tool."""
        return [
            {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
            for name, (_, tool) in self._tools.items()
        ]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Call a tool; return its text and whether it is an error, as the package's agent would see them."""
        mcp, tool = self._tools[name]
        try:
            call = mcp.call_tool(tool.name, arguments)
            result = await call if inspect.isawaitable(call) else call
        except Exception as error:  # raised by the tool; shown to the policy
            return f"Error: {type(error).__name__}: {error}"[:2000], True
        texts = [
            block.text if getattr(block, "type", "") == "text" else str(block)
            for block in result.content
        ]
        return "\n".join(texts), bool(getattr(result, "is_error", False))
