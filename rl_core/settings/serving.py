"""Settings of `posttrain serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_core.errors import SettingsError
from rl_core.settings.base import Settings, setting

__all__ = ["ServingSettings"]


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """The server of `posttrain serve`: the model, its slots, bounds of requests."""

    model: str | None = setting(
        None, doc="models:/NAME@ALIAS, a model or stage folder, or a hub name; left out: the pipeline's champion"
    )
    name: str | None = setting(None, doc="name by which clients ask for the model; left out: the pipeline's name")
    host: str = setting("127.0.0.1", doc="loopback address to listen on; 127.0.0.1, ::1 or localhost")
    port: int = setting(8321, ge=1, le=65_535, doc="port to listen on")
    slots: int = setting(64, ge=1, le=65_536, doc="answers decoded together")
    context: int = setting(4096, ge=16, le=1_048_576, doc="tokens of a prompt and its answer, at most the model's own")
    threads: int | None = setting(None, ge=1, le=1024, doc="CPU threads of the engine; left out: torch decides")
    max_waiting: int = setting(256, ge=1, le=1_000_000, doc="answers that wait for a slot; more are refused with 429")
    turn_tokens: int = setting(
        256,
        ge=1,
        le=1_048_576,
        doc="tokens after which an answer leaves its slot to others that wait, and goes on later",
    )
    request_seconds: float = setting(
        600.0,
        gt=0,
        le=1e6,
        doc="time of one request, its waiting included; a trainer's turns (rollouts) are bounded by the trainer alone",
    )
    max_body_bytes: int = setting(8 * 2**20, ge=1024, le=2**31, doc="largest body of a request")
    max_choices: int = setting(64, ge=1, le=65_536, doc="largest n of a request")
    max_connections: int = setting(2048, ge=1, le=1_000_000, doc="open connections; further ones are closed at once")
    idle_seconds: float = setting(
        15.0, gt=0, le=1e6, doc="time for a request's head and body to arrive, and between two requests of a connection"
    )
    write_seconds: float = setting(30.0, gt=0, le=1e6, doc="time that a client may take to read a part of an answer")
    reload_seconds: float = setting(
        10.0, ge=0, le=1e6, doc="between two looks at the registry for a new version behind the alias; 0 = never"
    )
    tools: Literal["template", "instructions", "read"] = setting(
        "template",
        doc="tools of a request; template: described by the chat template, where it takes tools; instructions: in a "
        "system message; read: only read from answers, for policies that know them; where a template takes none: read",
    )

    rollouts: bool = setting(
        False,
        doc="true: a trainer may give orders: load weights and adapters from folders of this machine, sleep, wake "
        "(docs/inference-servers.md); the registry is not looked at for new versions",
    )

    def check(self) -> None:
        """The server is for this machine; a tunnel or a proxy with TLS leads to it."""
        if self.host not in ("127.0.0.1", "::1", "localhost"):
            raise SettingsError(
                f"host: {self.host!r} is not loopback; other machines reach the server through an SSH tunnel"
            )
