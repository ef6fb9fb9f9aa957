"""Recorded sessions: episodes of agents elsewhere, opened and scored over HTTP, and the file of scored episodes.

A session is in memory until its score is posted. Then its episode is one line of `recorded/episodes.jsonl`, on the disk
before the score is acknowledged; a repeated score is acknowledged without another line. A session without a score is
lost when the server dies, and its agent has to begin another one.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.serving.errors import ServingHTTPError
from posttrain.web.signed_urls import UrlSigner
from rl_core.chat.prompts import PromptBuilder
from rl_core.data.chat import compute_tokenizer_digest
from rl_core.environments.agent import AgentEpisode
from rl_core.inference.sampling import compute_sequence_seed
from rl_core.rollouts.agent_recorder import AgentSession
from rl_core.settings import SamplingSettings, ServingSettings
from rl_core.storage.append_log import AppendLog, read_records
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.faults import inject_fault
from rl_core.storage.locks import FolderLock

log = logging.getLogger(__name__)

EPISODES_FILE = "episodes.jsonl"
_MAX_REMEMBERED = (
    4096  # newest scored sessions whose scores are in memory; older ones are looked up in the file
)
_CONSEQUENCE = "one recorded episode is lost"  # of a damaged line

Score = dict[str, Any]  # reward, success, info


@dataclass(eq=False, slots=True)
class RecordedSession:
    """Session that is open: its agent may ask, until it is scored, dropped or out of time."""

    id: str
    record: AgentSession
    task: str
    seed: int
    tenant: str
    model: str  # version of the model when it was opened
    opened: float  # seconds since 1970
    deadline: float  # of the monotonic clock
    scoring: asyncio.Lock = field(default_factory=asyncio.Lock)


class EpisodeFile:
    """The file of scored episodes; one process writes it."""

    def __init__(self, folder: Path) -> None:
        """Open the file, and cut off a line that a crash tore, which was never acknowledged.

        Raises: FolderBusy while another server records into the folder; CheckpointError.
        """
        make_folder(folder)
        self.path = folder / EPISODES_FILE
        self._lock = FolderLock(folder)
        self._lock.__enter__()
        self._log = AppendLog(self.path, synced=True, consequence=_CONSEQUENCE)
        self._thread_lock = threading.Lock()
        self._scores: OrderedDict[str, Score] = OrderedDict()
        self.num_episodes = 0
        for line in self._log.recover_lines():
            if line.record is not None:
                self.num_episodes += 1
                self._remember_score(line.record)

    def append_episode(self, row: dict[str, Any]) -> None:
        """Append an episode; it is on the disk when this returns. Raises: CheckpointError; then nothing is appended."""
        with self._thread_lock:
            self._log.append_record(row)
            inject_fault("session.recorded")
            self.num_episodes += 1
            self._remember_score(row)

    def find_score(self, session_id: str) -> Score | None:
        """Return the score of a recorded session; None = it is not in the file."""
        with self._thread_lock:
            if session_id in self._scores or self.num_episodes <= len(self._scores):
                return self._scores.get(session_id)
            for row in read_records(self.path, consequence=_CONSEQUENCE):
                if row.get("session") == session_id:
                    return _extract_score(row)
        return None

    def close(self) -> None:
        """Release the folder."""
        self._lock.__exit__(None, None, None)

    def _remember_score(self, row: dict[str, Any]) -> None:
        self._scores[str(row.get("session"))] = _extract_score(row)
        while len(self._scores) > _MAX_REMEMBERED:
            self._scores.popitem(last=False)


def _extract_score(row: dict[str, Any]) -> Score:
    return {name: row.get(name) for name in ("reward", "success", "info")}


class RecordedSessions:
    """The open sessions of a server, with limits, and the file of the scored ones."""

    def __init__(self, settings: ServingSettings, folder: Path) -> None:
        """Open the file. Raises: FolderBusy, CheckpointError."""
        self._settings = settings
        self.file = EpisodeFile(folder / "recorded")
        self._signer = UrlSigner(folder)
        self._open: dict[str, RecordedSession] = {}
        self._numbers = 0
        self.counts: Counter[str] = Counter()  # opened, scored, dropped, expired
        self._tokenizer: tuple[PromptBuilder, str | None] | None = None  # and its digest

    def open_session(
        self,
        prompts: PromptBuilder,
        context: int,
        model: str,
        *,
        task: str,
        seed: int,
        tenant: str,
        seconds: float | None,
    ) -> RecordedSession:
        """Open a session.

        Args:
            context: most tokens of a prompt and its answer.
            seconds: until it ends without a score; None = serving.session_seconds, which is also the most.
        Raises: ServingHTTPError (429) beyond the limits.
        """
        self._end_late_sessions()
        settings = self._settings
        if len(self._open) >= settings.max_sessions:
            raise _build_limit_error(f"{settings.max_sessions} sessions", "serving.max_sessions")
        num_tenant = sum(session.tenant == tenant for session in self._open.values())
        if num_tenant >= settings.max_tenant_sessions:
            raise _build_limit_error(
                f"{num_tenant} sessions of tenant '{tenant}'", "serving.max_tenant_sessions"
            )
        self._numbers += 1
        session_id = f"session-{secrets.token_hex(12)}"
        record = AgentSession(
            number=self._numbers,
            episode=AgentEpisode(seed, "all", {"task": task}),
            seed=compute_sequence_seed("session", task, seed),
            sample=0,
            sampling=SamplingSettings(
                max_completion_tokens=settings.session_tokens, max_turns=settings.session_calls
            ),
            prompts=prompts,
            context=context,
            uses_run_sampling=False,
            obeys_tool_choice=True,
        )
        most = settings.session_seconds
        deadline = time.monotonic() + (most if seconds is None else min(seconds, most))
        session = RecordedSession(
            session_id, record, task, seed, tenant, model, time.time(), deadline
        )
        self._open[session_id] = session
        self.counts["opened"] += 1
        return session

    def list_open_sessions(self) -> list[RecordedSession]:
        """List the open sessions, the oldest first."""
        self._end_late_sessions()
        return list(self._open.values())

    def build_key(self, session_id: str) -> str:
        """Build the API key of a session; the same after a restart."""
        return f"sk-{self._signer.sign_subject(f'session {session_id}', 0)[:40]}"

    def is_key(self, session_id: str, key: str) -> bool:
        """Return whether this is the session's key, in constant time."""
        return hmac.compare_digest(key.encode(), self.build_key(session_id).encode())

    def find_session(self, session_id: str) -> RecordedSession:
        """Return an open session. Raises: ServingHTTPError (404)."""
        self._end_late_sessions()
        session = self._open.get(session_id)
        if session is None:
            raise ServingHTTPError(
                404,
                f"session '{session_id[:80]}' is not open: it was scored, dropped, out of time, or lost when the "
                "server restarted; open another one",
                code="session_not_open",
            )
        return session

    def drop_session(self, session_id: str) -> None:
        """End a session without a record.

        Raises: ServingHTTPError: 404 for a session that is not open, 409 while its score is being recorded.
        """
        session = self.find_session(session_id)
        if session.scoring.locked():
            raise ServingHTTPError(
                409, "the session's score is being recorded", code="session_scored"
            )
        self._end_session(session, "dropped")

    async def record_score(self, session_id: str, score: Score) -> bool:
        """Append the episode of a session with its score to the file; return False if it was recorded before.

        Raises: ServingHTTPError: 404 for a session that is not open, 409 for another score than the recorded one or a
            session without an answer; CheckpointError, after which the score may be posted again.
        """
        self._end_late_sessions()
        session = self._open.get(session_id)
        if session is None:
            return await self._confirm_score(session_id, score)
        async with session.scoring:
            if self._open.get(session_id) is not session:  # scored meanwhile
                return await self._confirm_score(session_id, score)
            if not session.record.answers:
                raise ServingHTTPError(
                    409, "no request of the session was answered yet", code="session_empty"
                )
            session.record.close()  # answers in progress are not part of the episode
            row = self._build_row(session, score)
            await asyncio.to_thread(self.file.append_episode, row)
            self._end_session(session, "scored")
            return True

    async def _confirm_score(self, session_id: str, score: Score) -> bool:
        recorded = await asyncio.to_thread(self.file.find_score, session_id)
        if recorded is None:
            self.find_session(session_id)
        if recorded != score:
            raise ServingHTTPError(
                409,
                f"the session has the score {recorded}; a score cannot be changed",
                code="session_scored",
            )
        return False

    def _build_row(self, session: RecordedSession, score: Score) -> dict[str, Any]:
        record = session.record
        return {
            "session": session.id,
            "task": session.task,
            "seed": session.seed,
            "tenant": session.tenant,
            "model": session.model,
            **score,
            "opened": round(session.opened, 3),
            "scored": round(time.time(), 3),
            "tokenizer": self._compute_tokenizer(record.prompts),
            "messages": record.list_main_messages(),
            "sequences": record.format_sequences(),
        }

    def _compute_tokenizer(self, prompts: PromptBuilder) -> str | None:
        if self._tokenizer is None or self._tokenizer[0] is not prompts:
            self._tokenizer = prompts, compute_tokenizer_digest(prompts.renderer.tokenizer)
        return self._tokenizer[1]

    def _end_late_sessions(self) -> None:
        now = time.monotonic()
        for session in [s for s in self._open.values() if s.deadline <= now]:
            if not session.scoring.locked():
                self._end_session(session, "expired")

    def _end_session(self, session: RecordedSession, reason: str) -> None:
        session.record.close()
        self._open.pop(session.id, None)
        self.counts[reason] += 1

    def close(self) -> None:
        """End all sessions and release the file."""
        for session in list(self._open.values()):
            self._end_session(session, "dropped")
        self.file.close()


def _build_limit_error(what: str, setting: str) -> ServingHTTPError:
    return ServingHTTPError(
        429, f"{what} are open ({setting}); score or drop one", code="overloaded", retry_after=5
    )
