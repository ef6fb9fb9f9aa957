"""`posttrain up` over fake servers that start in less than a second; the supervision is real.

`python fake_servers.py OUTPUT PORT PORT [OPTIONS OF up]`
"""

from __future__ import annotations

import sys

from flows.runtime import stopping
from posttrain.cli import main as cli
from posttrain.operations import commands, connection, supervisor
from posttrain.operations.processes import MARK_VARIABLE, format_mark
from posttrain.operations.services import ServiceSpec
from rl_core.json_client import RequestError, fetch_json

# Answers with its process id; has a child in a separate session, as a worker has.
SERVER = """
import http.server, os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
if os.path.exists(sys.argv[2]):
    print("Address already in use", flush=True)
    sys.exit(4)
def save(number, frame):
    time.sleep(1.0)
    open(sys.argv[2] + ".saved", "w").close()
    os._exit(0)
if os.path.exists(sys.argv[2] + ".slow"):
    signal.signal(signal.SIGTERM, save)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
REGISTRATION = (
    "import json, sys; "
    "json.dump({'at': 0, 'problem': '', 'pool': 'made', 'gpu_slots': 1}, open(sys.argv[-1], 'w'))"
)


def fake_services(output, options, databases, elsewhere):
    def service(name: str, port: int, needs: str = "") -> ServiceSpec:
        environment = {MARK_VARIABLE: format_mark(output, name)}
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-c", SERVER, str(port), str(output / f"{name}.breaks")]

        def works() -> bool:
            try:
                fetch_json(url)
            except RequestError:
                return False
            return True

        return ServiceSpec(
            name,
            tuple(command),
            environment,
            output,
            url,
            works,
            "--x-port",
            port,
            required_service=needs,
            soft=0.2,
        )

    return [
        service("mlflow", options.mlflow_port),
        service("prefect", options.prefect_port, needs="mlflow"),
    ]


def fake_spawn(command, environment, folder, log, **seconds):
    return spawn(
        [command[0], "-c", REGISTRATION, *command[3:]], environment, folder, log, **seconds
    )


if __name__ == "__main__":
    spawn = supervisor.spawn_server
    supervisor.build_service_specs, supervisor.spawn_server = fake_services, fake_spawn
    connection._describe_pool_problem = lambda state, output, auth: ""
    commands.COMMAND = (sys.executable, __file__)  # what a start in the background runs
    stopping.FORCED_EXIT_SECONDS = 0.3  # that a command has after SIGTERM; a supervisor has longer
    sys.exit(cli.main(sys.argv[1:]))
