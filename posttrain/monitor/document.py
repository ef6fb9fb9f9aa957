"""HTML document of the page: header, tabs and panels around the element that Gradio fills.

Gradio takes more than a second to load its scripts, and only the controls need them. The page's script requests and
draws the selection in the address meanwhile. page.js creates elements once and finds them again by id, so that updates
preserve zoom, scroll position and selection.
"""

from __future__ import annotations

import functools
from string import Template
from typing import Any

from posttrain.monitor.views import TAB_NAMES
from posttrain.web.page_assets import load_page_asset

_HEAD_TAG, _APP_START_TAG, _APP_END_TAG = "<head>", "<gradio-app", "</gradio-app>"


class PageDocumentMiddleware:
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
                send = _DocumentSender(send)
        await self.app(scope, receive, send)


class _DocumentSender:
    """Sender of a response that collects its document and puts the page into it."""

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
                await self._send_document()
        else:
            await self._send(message)

    async def _send_document(self) -> None:
        headers = self._start["headers"]
        is_html = any(
            name == b"content-type" and value.startswith(b"text/html") for name, value in headers
        )
        if is_html and self._body:
            self._body = _insert_page(self._body.decode()).encode()
            headers = [item for item in headers if item[0] != b"content-length"]
            headers.append((b"content-length", str(len(self._body)).encode()))
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self._body})


def _insert_page(document: str) -> str:
    """Insert the page around Gradio's element; return a document without that element unchanged."""
    if _APP_START_TAG not in document:
        return document
    head, _, rest = document.partition(_HEAD_TAG)
    before, start, rest = rest.partition(_APP_START_TAG)
    element, end, after = rest.partition(_APP_END_TAG)
    page_start, page_end = _render_page()
    return f"{head}{_HEAD_TAG}{_render_head()}{before}{page_start}{start}{element}{end}{page_end}{after}"


@functools.cache
def _render_head() -> str:
    """Render the style sheet, and the script that sets light or dark before anything is drawn, as Gradio does."""
    theme = _load_joined("theme.js")
    style = load_page_asset(__package__, "page.css")
    return f"<script>{theme}</script><style>\n{style}</style>"


@functools.cache
def _render_page() -> tuple[str, str]:
    """Render the page's HTML before and after Gradio's element."""
    buttons = [
        f'<button role="tab" data-tab="{name}" aria-selected="false">{name.capitalize()}</button>'
        for name in TAB_NAMES
    ]
    panels = [
        f'<div class="pt-panel" role="tabpanel" data-tab="{name}"></div>' for name in TAB_NAMES
    ]
    before, _, after = _load_joined("page.html").partition("$controls")
    script = load_page_asset(__package__, "page.js").removesuffix("\n")
    after = Template(after).substitute(
        tab_buttons="".join(buttons), tab_panels="".join(panels), script=script
    )
    return before, after


def _load_joined(name: str) -> str:
    """Load a file without its line breaks and indentation."""
    return "".join(line.strip() for line in load_page_asset(__package__, name).splitlines())
