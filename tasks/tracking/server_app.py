"""MLflow's server without its Assistant: the app `posttrain` of `mlflow server --app-name`.

The Assistant is an agent with a shell under the account that started the server. Anybody who reaches the server can
choose its model and lift its limits (`PUT .../assistant/config`), and MLflow asks for no password: on a shared machine
every account could run commands as that user. No setting of MLflow 3.17 disables it, and on a first visit under a local
name its panel opens over a quarter of the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# The path may follow a static prefix.
_ASSISTANT_PATH = re.compile(r"/(ajax-)?api/[^/]+/mlflow/assistant(/|$)")
REFUSAL_MESSAGE = (
    "MLflow's Assistant is disabled on servers of posttrain: it would run commands on this machine"
)
# Keys and values with which the page of MLflow 3.17 stores in the browser that the panel is closed, and a style that
# hides everything that opens it.
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
    """Create MLflow's application (FastAPI) as `mlflow server` does, without the Assistant and its panel."""
    from flask import Response
    from mlflow.server import app as flask_app
    from mlflow.server.fastapi_app import app

    def serve_index() -> Response:
        html = Path(str(flask_app.static_folder), "index.html").read_text(encoding="utf-8")
        html = html.replace("<head>", f"<head>{_CLOSE_PANEL_HTML}", 1)
        return Response(html, mimetype="text/html", headers={"Cache-Control": "no-cache"})

    flask_app.view_functions["serve"] = serve_index  # serves the address /
    app.add_middleware(_AssistantBlocker)
    return app
