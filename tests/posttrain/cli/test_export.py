"""Command `posttrain export`: names that cannot be exported are refused at once, in one line."""

import os
import socketserver
import subprocess
import sys
import threading

import pytest

from posttrain.cli.main import main


class SilentHub:
    """A server on loopback that closes every connection unanswered, and counts them."""

    def __enter__(self):
        hub = self
        self.num_connections = 0

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                hub.num_connections += 1

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def export(folder, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "posttrain", "export", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).strip().splitlines()


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, kind):
    """Check that no retries of the hub's client are printed or waited for."""
    with SilentHub() as hub:
        status, lines = export(
            tmp_path,
            *("nothing/here", "--to", "new", "--format", kind),
            HF_ENDPOINT=hub.address,
            HF_HUB_OFFLINE="0",
            TRANSFORMERS_OFFLINE="0",
            HF_HOME=str(tmp_path / "cache"),
            NO_PROXY="127.0.0.1",
        )
    assert status != 0 and len(lines) == 1, lines
    assert "nothing/here" in lines[0] and "does not answer (" in lines[0]
    assert "ServerUnavailable" not in lines[0]  # a class of ours tells users nothing
    assert hub.num_connections == 1
    assert not (tmp_path / "new").exists()


def test_a_model_without_files_to_copy_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posttrain.cli.export.find_hub_problem", lambda name: "")
    assert main(["export", "nothing/here", "--to", "new"]) != 0
    message = capsys.readouterr().err
    assert "hf download nothing/here --local-dir new" in message and "--format gguf" in message
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "config.json").write_text("{}")
    assert main(["export", "trained", "--to", "new", "--format", "adapter"]) != 0
    message = capsys.readouterr().err
    assert "has no folder adapter" in message and "--format hf" in message
    assert [path.name for path in tmp_path.iterdir()] == ["trained"]
