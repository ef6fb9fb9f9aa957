"""Stand-in for the hub on loopback: repositories of files, listed and downloaded as the hub's client does it."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve_hub(repositories):
    """Serve {"owner/repo": {"file": bytes}} and yield the address and the list of requested paths."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            requests.append(f"{self.command} {self.path}")
            listing = re.match(r"/api/models/([^/]+/[^/]+?)(/revision/.*)?$", self.path)
            if listing and listing[1] in repositories:
                files = [{"rfilename": name} for name in repositories[listing[1]]]
                body = {"id": listing[1], "sha": COMMIT, "siblings": files}
                self.answer(200, json.dumps(body).encode(), Content_Type="application/json")
                return
            file = re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)$", self.path)
            if file and file[2] in repositories.get(file[1], {}):
                body = repositories[file[1]][file[2]]
                self.answer(200, body, ETag=f'"{len(body)}"', X_Repo_Commit=COMMIT)
                return
            known = (file and file[1] in repositories) or False
            self.answer(404, X_Error_Code="EntryNotFound" if known else "RepoNotFound")

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
