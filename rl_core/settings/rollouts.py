"""Settings of rollouts: where they are played, the server that samples them, replay of past ones, the numerics gate."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

RAY_VERSION = "2.60"  # tested version; see the extra `ray`
VLLM_VERSION = "0.30.0"  # the client was written from its source; see deployments/vllm/
# versions that the client was run against or whose source it was compared with; a build suffix (+cpu) does not count
TRIED_VLLM_VERSIONS = (VLLM_VERSION, "0.32.0")
_RAY_ADDRESS = re.compile(r"auto|[A-Za-z0-9.\-_\[\]:]+:\d{1,5}")
_SERVER_ADDRESS = re.compile(
    r"(https?://)?([A-Za-z0-9.\-_]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}/?", re.ASCII
)


def select_rounding_bound(is_float32: bool) -> float:
    """Select the largest difference of a token's log-probability that rounding explains, in nats.

    Args:
        is_float32: False = bfloat16 or float16.
    """
    return 1e-3 if is_float32 else 0.5


@dataclass(frozen=True, kw_only=True)
class NumericsGateSettings(Settings):
    """Comparison of trainer and sampler on fixed prompts after weight updates (docs/reliability.md)."""

    every: int = setting(
        16,
        ge=0,
        le=1_000_000,
        doc="iterations between two comparisons, starting after the first update; 1 = after every update; 0 = "
        "never. Rollout workers are always compared after every transfer",
    )
    bound: float | None = setting(
        None,
        gt=0,
        doc="largest difference of a token's log-probability, nats; default: 0.001 in float32, 0.5 in bfloat16 and "
        "float16 (of an inference server: mean and KL on texts), none with `importance`, `importance_mask` or a "
        "`sampler_kl_max`, which allow for other samplers",
    )
    action: Literal["refuse", "rollback"] = setting(
        "refuse",
        doc="refuse: above the bound the run ends without saving the iteration; rollback: "
        "training returns to the weights of the last comparison that passed (a copy of "
        "model and optimizer in memory and in checkpoints)",
    )


def select_decisive_numerics(settings: dict[str, Any]) -> dict[str, Any]:
    """Select the part of these settings, as plain values, that affects numbers: a comparison alone does not."""
    return settings if settings["action"] == "rollback" and settings["every"] else {}


@dataclass(frozen=True, kw_only=True)
class RolloutServerSettings(Settings):
    """An inference server that samples the rollouts, in a separate environment (docs/scaling.md)."""

    model: str | None = setting(
        None, doc="the server's name for the model; unset: the first that it lists"
    )
    start: bool = setting(
        False,
        doc="the trainer starts vLLM with `python` on a free port of this machine, restarts it when it dies, and ends "
        "it with the run; false: a server runs at `address`",
    )
    python: str | None = setting(
        None,
        doc="Python of vLLM's environment on this machine, for `start` or for `posttrain up --rollouts CONFIG`, which "
        "keeps the server running; unset: the server is started by hand",
    )
    arguments: tuple[str, ...] = setting(
        (),
        doc="further arguments of `vllm serve` for a server that is started with `python`, such as "
        "[--gpu-memory-utilization=0.4]",
    )
    start_timeout_s: float = setting(
        900.0,
        gt=0,
        le=1e6,
        doc="time limit of a start with `start`, until the server answers; the first start may download the model",
    )
    version: str = setting(
        VLLM_VERSION,
        doc=f"accepted version of vLLM; the default accepts the tried ones ({', '.join(TRIED_VLLM_VERSIONS)}); "
        "others may answer differently in form or meaning",
    )
    key_variable: str | None = setting(
        None, doc="environment variable with the server's API key; unset: no key"
    )
    folder: str | None = setting(
        None,
        doc="folder that trainer and server see under the same path, for transferring weights; unset: a folder of "
        "the run in this machine's temporary folder",
    )
    concurrency: int = setting(
        256, ge=1, le=4_096, doc="sequences that the server samples concurrently"
    )
    timeout_s: float = setting(
        1800.0, gt=0, le=1e6, doc="time limit of one request, which ends with a turn's last token"
    )
    patience_s: float = setting(
        300.0,
        ge=0,
        le=1e6,
        doc="how long to wait for a server that does not answer, for example while it restarts; then the run ends "
        "with one error and can be resumed",
    )
    sleeps: bool = setting(
        False,
        doc="the server releases its GPU memory during updates (start it with sleep mode): for a trainer "
        "on the same GPU",
    )


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(Settings):
    """Processes that play the rollouts: the trainer's or those of workers (docs/scaling.md)."""

    workers: Literal["in_process", "ray", "server"] = setting(
        "in_process",
        doc="ray: actors, each with an engine and environments (extra `ray`); with max_staleness 0 the numbers "
        "are those of in_process with `independent`. server: tokens come over HTTP from an inference server at "
        "`address` (vLLM, or `posttrain serve`), environments run here",
    )
    count: int = setting(1, ge=1, le=1024, doc="number of actors")
    independent: bool = setting(
        False,
        doc="prompts of different lengths are processed in separate passes, so that a rollout's numbers depend on no "
        "other one; workers always do",
    )
    max_staleness: int = setting(
        0,
        ge=0,
        le=64,
        doc="weight updates by which the oldest token of a rollout may lag behind the trained weights; 0 = "
        "rollouts and updates alternate; above 0 rollouts continue during updates, which needs `importance`",
    )
    partial: Literal["keep", "drop"] = setting(
        "keep",
        doc="rollouts in progress when new weights arrive (max_staleness above 0); keep: continue with the new "
        "weights, each token with its policy version; drop: start over",
    )
    address: str | None = setting(
        None,
        doc="host:port of a running Ray cluster, or auto; unset: the run starts Ray on this machine. Of "
        "an inference server: host:port, or http(s)://host:port",
    )
    server: RolloutServerSettings = setting(
        RolloutServerSettings(), doc="the inference server, with `workers: server`"
    )

    replay_schedule: str | None = setting(
        None,
        doc="schedule.jsonl of a run with max_staleness above 0 (`posttrain run --replay-schedule`): train on the "
        "same tokens again, bit for bit, in this process, regardless of `workers`",
    )

    def check(self) -> None:
        """Check that settings of workers and servers are used only with workers and servers."""
        if self.workers == "server":
            self._check_server()
            return
        if self.server != RolloutServerSettings():
            raise SettingsError(
                f"server: applies to an inference server, but workers is {self.workers}; set workers: server"
            )
        if self.address is not None and not _RAY_ADDRESS.fullmatch(self.address):
            raise SettingsError(
                f"address: {self.address!r} must be host:port of a Ray cluster's head, or auto"
            )
        if self.replay_schedule is not None and not self.max_staleness:
            raise SettingsError(
                "replay_schedule: belongs to a run with max_staleness above 0; set that run's max_staleness"
            )
        if self.workers != "in_process":
            return
        for name, value in (("count", self.count != 1), ("address", self.address is not None)):
            if value:
                raise SettingsError(
                    f"{name}: {getattr(self, name)!r} applies to workers, but there are none in_process; set workers: "
                    "ray"
                )
        if self.max_staleness:
            raise SettingsError(
                f"max_staleness: {self.max_staleness} needs rollouts that run during updates; set workers: ray, or 0"
            )

    def _check_server(self) -> None:
        """Check that a server has an address or is started here, and that rollouts and updates alternate."""
        if self.server.arguments and self.server.python is None:
            raise SettingsError(
                "server.arguments: apply to a server that is started with server.python, which is not set"
            )
        if self.server.start:
            if self.server.python is None:
                raise SettingsError(
                    "server.python: start needs the Python of vLLM's environment (docs/scaling.md)"
                )
            if self.address is not None:
                raise SettingsError(
                    f"address: {self.address!r} is that of a running server, but server.start starts one on a free "
                    "port; remove one of the two"
                )
        elif self.address is None:
            raise SettingsError(
                "address: workers: server needs host:port of an inference server, or server: {start: true, python: "
                "...}, with which the trainer starts one (docs/scaling.md)"
            )
        elif not _is_server_address(self.address):
            raise SettingsError(
                f"address: {self.address!r} must be host:port of an inference server, or http(s)://..."
            )
        if self.count != 1:
            raise SettingsError(
                f"count: {self.count} servers; give the address of a single server with as many replicas"
            )
        if self.independent:
            raise SettingsError(
                "independent: applies to the built-in engine, but a server samples here; remove it"
            )
        for name in ("max_staleness", "replay_schedule"):
            if getattr(self, name):
                raise SettingsError(
                    f"{name}: {getattr(self, name)!r} needs workers that play during updates, but rollouts from a "
                    "server alternate with updates; remove it, or set workers: ray"
                )

    @property
    def base_url(self) -> str:
        """Address of the server, as `http://host:port`."""
        address = (self.address or "").rstrip("/")
        return address if "://" in address else f"http://{address}"


def _is_server_address(address: str) -> bool:
    """Return whether an address is host:port, with or without http(s)."""
    if not _SERVER_ADDRESS.fullmatch(address):
        return False
    return 0 < int(address.rstrip("/").rpartition(":")[2]) < 2**16


@dataclass(frozen=True, kw_only=True)
class ReplaySettings(Settings):
    """Replay of past rollouts with importance weights."""

    iterations: int = setting(4, ge=1, doc="past iterations kept")
    share: float = setting(0.5, gt=0, le=4, doc="replayed groups per fresh group")


def check_ray_installed(
    key: str = "rollouts.workers: ray", alternative: str = "set workers: in_process"
) -> None:
    """Raise SettingsError if Ray is not installed, without importing it. The arguments are for the message."""
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(
            f"{key} needs the package ray ({RAY_VERSION} was tested): python -m posttrain.install --extras ray, or "
            f"{alternative}"
        )


def select_decisive_rollouts(settings: dict[str, Any]) -> dict[str, Any]:
    """Select the part of these settings, as plain values, that affects numbers: where rollouts are played does not.

    A server does: it draws different random numbers and rounds differently.
    """
    decisive: dict[str, Any] = {}
    if settings["workers"] == "server":
        names = ("version", "arguments") if settings["server"]["arguments"] else ("version",)
        return {"server": {name: settings["server"][name] for name in names}}
    if settings["independent"] or settings["workers"] != "in_process":
        decisive["independent"] = True
    if settings["max_staleness"]:
        decisive |= {
            name: settings[name] for name in ("max_staleness", "partial", "replay_schedule")
        }
    return decisive
