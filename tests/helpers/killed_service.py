"""A learning service whose processes are killed at random moments under load, and all that must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from helpers import ROOT
from helpers.serving import make_folder_of_model
from helpers.waiting import free_ports, wait_for
from rl_core.online.experience_log import ExperienceLogReader, ExperienceLogRecord
from rl_core.online.service_files import GATE_FILE, METRICS_FILE, read_gate_state, read_json_object
from rl_core.online.weight_snapshots import WeightSnapshots
from rl_core.storage.atomic_files import write_json_atomic

CONFIG = """
name: tiny
output: {output}
environment: {{name: pixel_grid}}
model: {{path: {model}, device: cpu}}
serving: {{model: {model}, slots: 8, threads: 1, context: 200}}
online:
  environment: {{name: chat}}
  service: {{nice: 0, run_gate: false}}
  labels: {{min_confidence: 0.1, min_votes: 1}}
  rollouts: {{samples: 4, sampling: {{max_completion_tokens: 6}}}}
  drift: {{watched: []}}
  update: {{first_update: 8, update_every: {every}, batch_size: 2, checkpoint_every: 5, snapshot_every: 4,
            learning_rate: 1.0e-3, max_learning_rate: 1.0e-2, ema_decay: 0.5, kl_max: 5.0, keep_snapshots: 60000}}
stages: {{evaluate: {{}}}}
"""
CLIENTS = 3
SERVER_SHARE = 0.15  # of the kills that hit the server, and with it everything


@dataclass(slots=True)
class Acknowledged:
    """An answer whose label was acknowledged."""

    answer_id: str
    version: int
    texts: list[str]


@dataclass
class KilledService:
    """The service, its clients, and the one who kills."""

    folder: Path
    seed: int = 0
    every: int = 8  # records between two updates
    pause: float = 0.02  # seconds between two questions of a client
    kills: Counter[str] = field(default_factory=Counter)
    acknowledged: list[Acknowledged] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)  # answers whose choices name several versions
    statuses: Counter[int] = field(default_factory=Counter)
    server: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.model = make_folder_of_model(self.folder / "model")
        (self.port,) = free_ports(1)
        self.config = self.folder / "learn ü.yaml"
        self.config.write_text(
            CONFIG.format(output=self.folder / "out", model=self.model, every=self.every)
        )
        self.segments = set(os.listdir("/dev/shm"))
        self.is_over = threading.Event()
        self.lock = threading.Lock()

    # Processes

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command = [
            sys.executable,
            "-m",
            "posttrain.cli.main",
            "serve",
            str(self.config),
            "--learn",
            "--port",
            str(self.port),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / "server.log").open("ab") as out:
            self.server = subprocess.Popen(
                command, env=environment, stdout=out, stderr=out, start_new_session=True
            )
        wait_for(self._is_ready, "the server", 300, every=0.2)

    def _is_ready(self) -> bool:
        assert self.server is not None
        assert self.server.poll() is None, (self.folder / "server.log").read_text()[-2000:]
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz").status_code == 200
        return False

    def children(self) -> dict[str, list[int]]:
        """Return the live processes that the server started, by part."""
        assert self.server is not None
        pids: dict[str, list[int]] = {}
        for path in Path(f"/proc/{self.server.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in path.read_text().split():
                    words = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
                    if "online" in words:
                        pids.setdefault(words[words.index("online") + 1], []).append(int(child))
        return pids

    def left(self) -> list[str]:
        """Return the commands of processes of this service that still run."""
        commands = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").replace("\0", " ")
                if str(self.folder) in words and "posttrain.cli.main" in words:
                    commands.append(words)
        return commands

    @property
    def service(self) -> Path:
        """Folder of the service."""
        (folder,) = (self.folder / "out" / "tiny" / "online").glob("model-*")
        return folder

    # Load

    def _client(self, number: int) -> None:
        turn = 0
        while not self.is_over.is_set():
            turn += 1
            try:
                self._ask(f"row {number} {turn}", 100_000 * number + turn)
            except (httpx.TransportError, OSError):  # the server was killed
                time.sleep(0.1)
            time.sleep(self.pause)

    def _ask(self, text: str, seed: int) -> None:
        token = (self.folder / "out" / "serving" / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=60
        ) as client:
            body = {
                "model": "tiny",
                "messages": [{"role": "user", "content": text}],
                "n": 2,
                "max_tokens": 6,
                "seed": seed,
                "user": f"u{seed % 7}",
            }
            response = client.post("/v1/chat/completions", json=body)
            self.statuses[response.status_code] += 1
            if response.status_code != 200:
                return
            answer = response.json()
            label = {"id": answer["id"], "choice": seed % 2}
            # every third caller names the right answer, for which the worker samples new rollouts
            label |= (
                {"answer": answer["choices"][0]["message"]["content"] or "a"}
                if seed % 3 == 0
                else {"score": (seed % 5) / 4}
            )
            done = client.post("/v1/feedback", json=label)
            versions = {choice["policy_version"] for choice in answer["choices"]}
            with self.lock:
                if len(versions) > 1:
                    self.mixed.append(answer["id"])
                if done.status_code == 200:  # so the record of the answer is on the disk
                    texts = [choice["message"]["content"] for choice in answer["choices"]]
                    self.acknowledged.append(Acknowledged(answer["id"], versions.pop(), texts))

    def order_newest(self) -> None:
        """Order the newest snapshot to be served, as the gate would."""
        with contextlib.suppress(ValueError):
            orders = read_gate_state(self.service).get("orders", [])
            versions = WeightSnapshots(self.service / "snapshots").list_versions()
            last = orders[-1]["order"]["version"] if orders else 0
            if versions and versions[-1] > last:
                number = orders[-1]["number"] + 1 if orders else 1
                orders.append(
                    {"number": number, "order": {"order": "live", "version": versions[-1]}}
                )
                write_json_atomic(self.service / GATE_FILE, {"orders": orders})

    # Kills

    def run(self, kills: int, longest: float = 3.0) -> None:
        """Serve, learn and kill, so many times; then let the backlog be learned, and stop.

        Args:
            longest: seconds between two kills; each gap is drawn evenly from 0 on.
        """
        self.start()
        threads = [
            threading.Thread(target=self._client, args=(n,), daemon=True) for n in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: read_json_object(self.service / METRICS_FILE), "the worker", 300)
            while self.kills.total() < kills:
                time.sleep(self.rng.uniform(0, longest))
                self.order_newest()
                self._kill()
            wait_for(self._has_moved, "an answer of a later snapshot", 300)
            self.is_over.set()
            for thread in threads:
                thread.join(70)
            wait_for(self._has_learned, "the backlog", 1200, every=0.2)
        finally:
            self.is_over.set()
            self.stop()

    def _has_moved(self) -> bool:
        self.order_newest()
        return any(answer.version for answer in self.acknowledged[-30:])

    def _kill(self) -> None:
        assert self.server is not None
        children = self.children()
        if self.rng.random() < SERVER_SHARE or not children:
            self.server.kill()
            self.server.wait()
            self.kills["server"] += 1
            wait_for(
                lambda: not self.left(), "an end to what the server left", 150
            )  # one may still be importing
            self.start()
            return
        part = self.rng.choice(sorted(children))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(children[part]), signal.SIGKILL)
            self.kills[part] += 1

    def stop(self) -> None:
        """End the service."""
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            try:
                self.server.wait(60)
            except subprocess.TimeoutExpired:
                self.server.kill()
                self.server.wait()

    def records(self) -> list[ExperienceLogRecord]:
        """Return all records of the log."""
        return list(ExperienceLogReader(self.service / "buffer").read_records())

    def _has_learned(self) -> bool:
        wanted = sum(record.kind != "control" for record in self.records())
        return read_json_object(self.service / METRICS_FILE).get("online/records") == wanted

    # Afterwards

    def verdict(self, checked: int = 50) -> dict[str, Any]:
        """Return all counts that must be 0, and how much was tried.

        Args:
            checked: answers whose every token is computed again under the version that they name.
        """
        records = self.records()
        logged = Counter(
            record.value["request_id"] for record in records if record.kind == "experience"
        )
        labelled = Counter(
            record.value["request_id"] for record in records if record.kind == "label"
        )
        ids = [answer_id.answer_id for answer_id in self.acknowledged]
        return {
            "kills": dict(self.kills),
            "acknowledged": len(ids),
            "statuses": dict(self.statuses),
            "updates": read_json_object(self.service / METRICS_FILE)["online/updates"],
            "fresh_rollouts": read_json_object(self.service / METRICS_FILE)[
                "online/fresh/rollouts"
            ],
            "versions": len({answer_id.version for answer_id in self.acknowledged}),
            "lost": sum(not logged[answer_id] or not labelled[answer_id] for answer_id in ids),
            "kept_twice": sum(count > 1 for count in [*logged.values(), *labelled.values()]),
            "mixed": len(self.mixed),
            "other_answers": self._other_answers(records, checked),
            "other_weights": self._other_weights(),
            "left_processes": len(self.left()),
            "left_segments": len(
                {name for name in os.listdir("/dev/shm") if name.startswith("posttrain")}
                - self.segments
            ),
        }

    def _other_answers(self, records: list[ExperienceLogRecord], checked: int) -> int:
        """Count answers that differ from the log, or whose log-probs differ from those of their version's weights."""
        import torch

        from rl_core import load_policy
        from rl_core.models.logprobs import completion_logprobs
        from rl_core.models.trainable_weights import load_trainable_weights
        from rl_core.rollouts.batching import build_batches, build_train_row
        from rl_core.settings import ModelSettings

        policy = load_policy(ModelSettings(path=str(self.model), device="cpu"))
        snapshots = WeightSnapshots(self.service / "snapshots")
        logged = {
            record.value["request_id"]: record.parse_experience()
            for record in records
            if record.kind == "experience"
        }
        wrong = 0
        for answer in self.rng.sample(self.acknowledged, min(checked, len(self.acknowledged))):
            experience = logged[answer.answer_id]
            actions = [rollout.trajectory.turns[-1].action for rollout in experience.rollouts]
            load_trainable_weights(policy.model, snapshots.load_weights(answer.version))
            (batch,) = build_batches(
                [build_train_row(r) for r in experience.rollouts],
                10_000,
                policy.renderer.pad_id or 0,
            )
            with torch.no_grad():
                logprobs_BS = completion_logprobs(policy.model, batch)[0]
            assert batch.sampler_logprobs_BS is not None
            mask_BS = batch.loss_mask_BS
            is_equal = torch.allclose(
                logprobs_BS[mask_BS], batch.sampler_logprobs_BS[mask_BS], atol=2e-4
            )
            wrong += not (
                is_equal and actions == answer.texts and experience.policy_version == answer.version
            )
        return wrong

    def _other_weights(self) -> int:
        """Count snapshots and final weights that differ from an unkilled, single-threaded run of the same records."""
        import torch

        from posttrain.online.worker_processes import replay_buffer
        from posttrain.settings_files import load_online_settings
        from rl_core.models.trainable_weights import collect_trainable_weights
        from rl_core.online.build_worker import build_update_worker
        from rl_core.online.weight_snapshots import digest_weights

        settings = load_online_settings(self.service / "online.yaml")
        output = self.folder / "replayed"
        torch.set_num_threads(1)  # as in the service
        replayed = replay_buffer(settings, self.service / "buffer", output, lambda text: None)
        with build_update_worker(settings, self.service) as worker:  # as it was saved at the end
            final = {
                "weights": digest_weights(collect_trainable_weights(worker.learner.model)),
                "average": digest_weights(worker.learner.copy_served_weights()),
                **worker.collect_metrics(),
            }
        digests = [
            {
                path.parent.name: json.loads(path.read_text())["files"]
                for path in folder.glob("snapshots/*/manifest.json")
            }
            for folder in (self.service, output)
        ]
        names = {name for name in final if name in replayed and "time" not in name}
        return sum(final[name] != replayed[name] for name in names) + sum(
            digests[0].get(name) != digests[1].get(name)
            for name in digests[0].keys() | digests[1].keys()
        )
