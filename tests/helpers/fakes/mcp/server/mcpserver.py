"""Tools that are functions of the process, with integers and texts as arguments."""

import inspect
from types import SimpleNamespace

KINDS = {int: "integer", str: "string"}


class MCPServer:
    def __init__(self, name):
        self.name, self.tools = name, {}

    def add_tool(self, function, name, description):
        self.tools[name] = (function, description)

    async def list_tools(self):
        return [
            SimpleNamespace(name=name, description=description, input_schema=_schema(function))
            for name, (function, description) in self.tools.items()
        ]

    async def call_tool(self, name, arguments):
        text = str(await self.tools[name][0](**arguments))
        return SimpleNamespace(content=[SimpleNamespace(type="text", text=text)])


def _schema(function):
    named = inspect.signature(function).parameters
    return {
        "type": "object",
        "properties": {name: {"type": KINDS[each.annotation]} for name, each in named.items()},
        "required": [
            name for name, each in named.items() if each.default is inspect.Parameter.empty
        ],
    }
