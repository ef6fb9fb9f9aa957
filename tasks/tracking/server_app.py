"""MLflow's server without its Assistant: the app `posttrain` of `mlflow server --app-name`.

The Assistant is an agent with a shell under the account that started the server. Whoever reaches the server chooses its
model and lifts its limits (`PUT .../assistant/config`), and MLflow asks for no password: on a shared machine every
account could run commands as that one. No setting of MLflow 3.17 switches it off, and its panel opens by itself over a
quarter of the page on a first visit under a local name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# behind a static prefix, too
_ASSISTANT_PATH = re.compile(r"/(ajax-)?api/[^/]+/mlflow/assistant(/|$)")
REFUSAL_MESSAGE = "the Assistant of MLflow is switched off on the servers of posttrain: it would run commands on this machine"
# What the page keeps in the browser about the panel (keys and values of MLflow 3.17), and everything that opens it.
_CLOSE_PANEL_HTML = """<script>try{localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1','true');
localStorage.setItem('mlflow.assistant.panelOpen_v1','false')}catch(e){}</script>
<style>[data-assistant-ui=true]{display:none!important}</style>"""


class _AssistantBlocker:
    """ASGI middleware that answers 403 to every request for the Assistant."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and _ASSISTANT_PATH.search(scope["path"]):
            from starlette.responses import JSONResponse

            await JSONResponse({"detail": REFUSAL_MESSAGE}, 403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def create_app() -> Any:
    """MLflow's application (FastAPI) as `mlflow server` makes it, without the Assistant and its panel."""
    from flask import Response
    from mlflow.server import app as pages
    from mlflow.server.fastapi_app import app

    def page() -> Response:
        text = Path(str(pages.static_folder), "index.html").read_text(encoding="utf-8")
        text = text.replace("<head>", f"<head>{_CLOSE_PANEL_HTML}", 1)
        return Response(text, mimetype="text/html", headers={"Cache-Control": "no-cache"})

    pages.view_functions["serve"] = page  # of the address /
    app.add_middleware(_AssistantBlocker)
    return app
