"""The page's document: header, tabs and panels stand in the HTML itself, around the element that Gradio fills.

Gradio loads its scripts for more than a second, and only the controls need them: what is chosen by the address is asked
for and drawn meanwhile.
"""

from __future__ import annotations

from typing import Any

from flows.monitor.live_script import SCRIPT
from flows.monitor.style import STYLE
from flows.monitor.views import TAB_NAMES

__all__ = ["OwnDocument"]

_THEME = (  # before anything is drawn; Gradio looks at the same two
    "<script>{const t = new URLSearchParams(location.search).get('__theme');"
    "document.documentElement.classList.toggle('dark', t ? t === 'dark' :"
    " matchMedia('(prefers-color-scheme: dark)').matches);}</script>"
)
_TABS = "".join(
    f'<button role="tab" data-tab="{name}" aria-selected="false">{name.capitalize()}</button>' for name in TAB_NAMES
)
_PANELS = "".join(f'<div class="pt-panel" role="tabpanel" data-tab="{name}"></div>' for name in TAB_NAMES)
_BEFORE = '<div class="pt-page"><div class="pt-header"></div><div id="pt-place">'
_AFTER = f'</div><nav class="pt-tabs" role="tablist">{_TABS}</nav>{_PANELS}</div>{SCRIPT}'
_HEAD, _START, _END = "<head>", "<gradio-app", "</gradio-app>"


class OwnDocument:
    """Middleware that puts header, tabs, panels and their script into Gradio's document; plain ASGI.

    Nothing is compressed: over loopback that costs more than it saves.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            scope["headers"] = [item for item in scope["headers"] if item[0] != b"accept-encoding"]
            if scope["path"] == "/":
                send = _Around(send)
        await self.app(scope, receive, send)


class _Around:
    """Sender of a response that puts the page into its document, once that is whole."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._start: dict[str, Any] = {}
        self._body = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish()
        else:
            await self._send(message)

    async def _finish(self) -> None:
        headers = self._start["headers"]
        if any(name == b"content-type" and value.startswith(b"text/html") for name, value in headers) and self._body:
            self._body = _with_page(self._body.decode()).encode()
            headers = [item for item in headers if item[0] != b"content-length"]
            headers.append((b"content-length", str(len(self._body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._body})


def _with_page(document: str) -> str:
    """Gradio's document with the page around its element; another document as it is."""
    if _START not in document:
        return document
    head, _, rest = document.partition(_HEAD)
    before, start, rest = rest.partition(_START)
    element, end, after = rest.partition(_END)
    return f"{head}{_HEAD}{_THEME}<style>{STYLE}</style>{before}{_BEFORE}{start}{element}{end}{_AFTER}{after}"
