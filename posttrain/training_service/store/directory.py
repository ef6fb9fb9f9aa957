"""Sessions, training runs, samplers and checkpoints in the store.

API keys, of which the store keeps digests alone, and the audit of acts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

import posttrain.training_service.store.tables as tables
from posttrain.training_service.store.database import StoreDatabase, next_counter_value
from posttrain.training_service.store.records import (
    ApiKey,
    AuditEntry,
    CheckpointRecord,
    Page,
    SamplerRecord,
    SessionRecord,
    TrainingRunRecord,
    replace_unstorable,
)
from rl_core.errors import SettingsError

_sessions, _runs, _samplers, _checkpoints = (
    tables.sessions,
    tables.runs,
    tables.samplers,
    tables.checkpoints,
)
Record = TypeVar("Record")
DEFAULT_PROJECT = "default"  # of sessions that name none


def parse_record(kind: type[Record], row: sa.Row[Any]) -> Record:
    """A row as a record with the same names."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: row._mapping[name] for name in names})


class ResourceDirectory:
    """Lists of what exists. `owner=None` = everybody's."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def _find_record(self, kind: type[Record], query: Any) -> Record | None:
        with self._database.read_transaction() as connection:
            row = connection.execute(query).first()
        return None if row is None else parse_record(kind, row)

    def _list_records(
        self, kind: type[Record], query: Any, limit: int, offset: int
    ) -> Page[Record]:
        with self._database.read_transaction() as connection:
            total = (
                connection.scalar(
                    sa.select(sa.func.count()).select_from(query.order_by(None).subquery())
                )
                or 0
            )
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return Page([parse_record(kind, row) for row in rows], total)

    def _execute_change(self, statement: Any) -> bool:
        with self._database.write_transaction() as connection:
            return bool(connection.execute(statement).rowcount)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def create_session(
        self, session_id: str, owner: str, facts: Mapping[str, Any]
    ) -> SessionRecord:
        """A new session."""
        now = self._clock()
        record = SessionRecord(
            session_id=session_id, owner=owner, created=now, touched=now, facts=dict(facts)
        )
        with self._database.write_transaction() as connection:
            connection.execute(_sessions.insert().values(dataclasses.asdict(record)))
        return record

    def find_session(self, session_id: str) -> SessionRecord | None:
        """A session."""
        return self._find_record(
            SessionRecord, sa.select(_sessions).where(_sessions.c.session_id == session_id)
        )

    def mark_session_active(self, session_id: str) -> bool:
        """A sign of life. False = there is no such session, or it is finished."""
        open_one = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
        return self._execute_change(
            _sessions.update().where(open_one).values(touched=self._clock())
        )

    def finish_session(self, session_id: str, facts: Mapping[str, Any] | None = None) -> bool:
        """End a session; `facts` are added to its own. False = it was not open."""
        with self._database.write_transaction() as connection:
            open_one = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
            row = connection.execute(sa.select(_sessions.c.facts).where(open_one)).first()
            if row is None:
                return False
            values = {"finished": self._clock(), "facts": {**row.facts, **(facts or {})}}
            connection.execute(_sessions.update().where(open_one).values(values))
            return True

    def update_session(self, session_id: str, facts: Mapping[str, Any]) -> bool:
        """Add to a session's facts. False = there is no such session."""
        with self._database.write_transaction() as connection:
            mine = _sessions.c.session_id == session_id
            row = connection.execute(sa.select(_sessions.c.facts).where(mine)).first()
            if row is not None:
                connection.execute(
                    _sessions.update().where(mine).values(facts={**row.facts, **facts})
                )
            return row is not None

    def list_sessions(
        self, owner: str | None = None, limit: int = 100, offset: int = 0
    ) -> Page[SessionRecord]:
        """Sessions, the newest first."""
        query = sa.select(_sessions).order_by(_sessions.c.created.desc(), _sessions.c.session_id)
        return self._list_records(
            SessionRecord, _filter_by_owner(query, _sessions, owner), limit, offset
        )

    # -- runs ----------------------------------------------------------------------------------------------------------

    def find_run(self, model_id: str) -> TrainingRunRecord | None:
        """A training run."""
        return self._find_record(
            TrainingRunRecord, sa.select(_runs).where(_runs.c.model_id == model_id)
        )

    def list_runs(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        session_id: str | None = None,
        *,
        project: str | None = None,
        with_published: bool = False,
    ) -> Page[TrainingRunRecord]:
        """Training runs, the newest first.

        Args:
            project: of their sessions; those that name none are of `PROJECT`.
            with_published: those of other owners, too, that have saved weights which are published.
        """
        query = sa.select(_runs).order_by(_runs.c.created.desc(), _runs.c.model_id)
        if not with_published:
            query = _filter_by_owner(query, _runs, owner)
        elif owner is not None:
            query = query.where(
                (_runs.c.owner == owner) | self._build_published_condition(_runs.c.model_id)
            )
        if session_id is not None:
            query = query.where(_runs.c.session_id == session_id)
        if project is not None:
            named = sa.func.coalesce(_sessions.c.facts["project_id"].as_string(), DEFAULT_PROJECT)
            query = query.where(
                sa.exists().where(_sessions.c.session_id == _runs.c.session_id, named == project)
            )
        return self._list_records(TrainingRunRecord, query, limit, offset)

    def is_published(self, model_id: str) -> bool:
        """True = some of the run's saved weights are published."""
        with self._database.read_transaction() as connection:
            return bool(
                connection.scalar(sa.select(self._build_published_condition(sa.literal(model_id))))
            )

    def _build_published_condition(self, model_id: Any) -> Any:
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        return sa.exists().where(_checkpoints.c.model_id == model_id, _checkpoints.c.public, lives)

    # -- samplers ------------------------------------------------------------------------------------------------------

    def find_sampler(self, sampler_id: str) -> SamplerRecord | None:
        """A sampler."""
        return self._find_record(
            SamplerRecord, sa.select(_samplers).where(_samplers.c.sampler_id == sampler_id)
        )

    def list_samplers(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        session_id: str | None = None,
        model_id: str | None = None,
    ) -> Page[SamplerRecord]:
        """Samplers, the newest first."""
        query = _filter_by_owner(
            sa.select(_samplers).order_by(_samplers.c.created.desc(), _samplers.c.sampler_id),
            _samplers,
            owner,
        )
        if session_id is not None:
            query = query.where(_samplers.c.session_id == session_id)
        if model_id is not None:
            query = query.where(_samplers.c.model_id == model_id)
        return self._list_records(SamplerRecord, query, limit, offset)

    def next_clone_number(self, sampler_id: str) -> int:
        """A number, from 1, that no other copy of the sampler's clients got."""
        with self._database.write_transaction() as connection:
            return next_counter_value(connection, f"clones.{sampler_id}"[:64])

    def delete_sampler(self, sampler_id: str) -> bool:
        """Forget a sampler. False = there was none."""
        return self._execute_change(_samplers.delete().where(_samplers.c.sampler_id == sampler_id))

    def list_folder_samplers(self, folder: str) -> list[SamplerRecord]:
        """Samplers that read this folder."""
        with self._database.read_transaction() as connection:
            rows = connection.execute(_samplers.select().where(_samplers.c.folder == folder))
            return [parse_record(SamplerRecord, row) for row in rows]

    def move_sampler(self, sampler_id: str, folder: str) -> bool:
        """Have a sampler read another folder. False = it is gone."""
        chosen = _samplers.c.sampler_id == sampler_id
        return self._execute_change(_samplers.update().where(chosen).values(folder=folder))

    def list_unused_samplers(
        self, before: float, ended_before: float, exclusive_part: str
    ) -> list[SamplerRecord]:
        """Samplers without a path, or with weights of their own, unused since `before`, or since `ended_before` in a
        session that is over.

        Args:
            own: part of the path of every folder that is one sampler's own.
        """
        ended = sa.exists().where(
            _sessions.c.session_id == _samplers.c.session_id, _sessions.c.finished < ended_before
        )
        used = _samplers.c.touched
        query = sa.select(_samplers).where(
            _samplers.c.path.is_(None) | _samplers.c.folder.contains(exclusive_part),
            (used < before) | (ended & (used < ended_before)),
        )
        with self._database.read_transaction() as connection:
            return [parse_record(SamplerRecord, row) for row in connection.execute(query)]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def find_checkpoint(self, path: str) -> CheckpointRecord | None:
        """Saved weights; None also where they have expired."""
        found = self._find_record(
            CheckpointRecord, sa.select(_checkpoints).where(_checkpoints.c.path == path)
        )
        return None if found is None or _has_expired(found, self._clock()) else found

    def list_checkpoints(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        model_id: str | None = None,
    ) -> Page[CheckpointRecord]:
        """Saved weights, the newest first."""
        query = sa.select(_checkpoints).order_by(_checkpoints.c.created.desc(), _checkpoints.c.path)
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        query = _filter_by_owner(query.where(lives), _checkpoints, owner)
        if model_id is not None:
            query = query.where(_checkpoints.c.model_id == model_id)
        return self._list_records(CheckpointRecord, query, limit, offset)

    def summarize_storage(
        self, owner: str, project: str | None = None
    ) -> list[tuple[str, int, int]]:
        """(project, number of saved weights, their bytes) of an owner, by project."""
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        named = sa.func.coalesce(
            _sessions.c.facts["project_id"].as_string(), DEFAULT_PROJECT
        ).label("project")
        joined = _checkpoints.outerjoin(
            _runs, _runs.c.model_id == _checkpoints.c.model_id
        ).outerjoin(_sessions, _sessions.c.session_id == _runs.c.session_id)
        query = sa.select(named, sa.func.count(), sa.func.sum(_checkpoints.c.bytes)).select_from(
            joined
        )
        query = (
            query.where(_checkpoints.c.owner == owner, lives)
            .group_by(sa.text("1"))
            .order_by(sa.text("1"))
        )
        if project is not None:
            query = query.where(named == project)
        with self._database.read_transaction() as connection:
            return [
                (str(name), int(count), int(size or 0))
                for name, count, size in connection.execute(query)
            ]

    def add_checkpoint_copy(self, run: TrainingRunRecord, record: CheckpointRecord) -> None:
        """Saved weights whose folder is there already, and the run that holds them; either may be known."""
        with self._database.write_transaction() as connection:
            for table, key, row in ((_runs, "model_id", run), (_checkpoints, "path", record)):
                values = dataclasses.asdict(row)
                if (
                    connection.execute(
                        sa.select(table.c[key]).where(table.c[key] == values[key])
                    ).first()
                    is None
                ):
                    connection.execute(table.insert().values(values))

    def update_checkpoint(self, path: str, **values: Any) -> bool:
        """Change `expires`, `public`, `version`, `registration` or `facts`. False = there is no such path."""
        assert values.keys() <= {"expires", "public", "version", "registration", "facts"}, (
            values.keys()
        )
        return self._execute_change(
            _checkpoints.update().where(_checkpoints.c.path == path).values(values)
        )

    def delete_checkpoint(self, path: str) -> bool:
        """Let saved weights expire now; the worker removes their folder. False = there is no such path."""
        if self.find_checkpoint(path) is None:
            return False
        return self.update_checkpoint(path, expires=0.0)

    def list_expired_checkpoints(self) -> list[CheckpointRecord]:
        """Saved weights whose folder is to be removed."""
        query = sa.select(_checkpoints).where(_checkpoints.c.expires <= self._clock())
        with self._database.read_transaction() as connection:
            return [parse_record(CheckpointRecord, row) for row in connection.execute(query)]

    def drop_checkpoint(self, path: str) -> bool:
        """Remove the record of expired weights whose folder is gone."""
        gone = (_checkpoints.c.path == path) & (_checkpoints.c.expires <= self._clock())
        return self._execute_change(_checkpoints.delete().where(gone))

    def find_checkpoint_to_register(self) -> CheckpointRecord | None:
        """The oldest saved weights that wait for a version in the registry."""
        query = sa.select(_checkpoints).where(_checkpoints.c.registration == "waiting")
        return self._find_record(CheckpointRecord, query.order_by(_checkpoints.c.created).limit(1))


def _filter_by_owner(query: Any, table: sa.Table, owner: str | None) -> Any:
    return query if owner is None else query.where(table.c.owner == owner)


def _has_expired(record: CheckpointRecord, now: float) -> bool:
    return record.expires is not None and record.expires <= now


_keys, _audit = tables.keys, tables.audit
KEY_PREFIX = "tml-"  # the SDK refuses other keys
USED_INTERVAL_SECONDS = 60.0  # between two notes that a key is in use


class AccessControl:
    """Keys, and what their owners did."""

    def __init__(self, database: StoreDatabase, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def create_key(
        self, name: str, *, requests_per_minute: int | None = None, queue: int | None = None
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is shown once. Raises: SettingsError for a name that is taken."""
        # 256 random bits: a plain digest cannot be searched, so no slow hash is needed
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            key_id=f"key-{secrets.token_hex(6)}",
            name=name,
            created=self._clock(),
            requests_per_minute=requests_per_minute,
            queue=queue,
        )
        with self._database.write_transaction() as connection:
            if connection.scalar(sa.select(_keys.c.key_id).where(_keys.c.name == name)) is not None:
                raise SettingsError(
                    f"key '{name}': there is one of this name; revoke it, or choose another name"
                )
            connection.execute(
                _keys.insert().values(**dataclasses.asdict(key), secret_digest=_hash_secret(secret))
            )
        return key, secret

    def find_key(self, secret: str) -> ApiKey | None:
        """The key with this secret; None for an unknown or revoked one."""
        query = sa.select(_keys).where(
            _keys.c.secret_digest == _hash_secret(secret), _keys.c.revoked.is_(None)
        )
        with self._database.read_transaction() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        key = parse_record(ApiKey, row)
        if self._clock() - (key.used or 0.0) > USED_INTERVAL_SECONDS:
            with self._database.write_transaction() as connection:
                connection.execute(
                    _keys.update().where(_keys.c.key_id == key.key_id).values(used=self._clock())
                )
        return key

    def list_keys(self) -> list[ApiKey]:
        """All keys, the oldest first."""
        with self._database.read_transaction() as connection:
            return [
                parse_record(ApiKey, row)
                for row in connection.execute(sa.select(_keys).order_by(_keys.c.created))
            ]

    def revoke_key(self, name: str) -> bool:
        """Make a key useless, by name or id; its name is free again. False = there is no such key in use."""
        with self._database.write_transaction() as connection:
            chosen = ((_keys.c.name == name) | (_keys.c.key_id == name)) & _keys.c.revoked.is_(None)
            row = connection.execute(sa.select(_keys.c.key_id, _keys.c.name).where(chosen)).first()
            if row is None:
                return False
            values = {"revoked": self._clock(), "name": f"{row.name} ({row.key_id})"}
            connection.execute(_keys.update().where(_keys.c.key_id == row.key_id).values(values))
            return True

    def record_audit_entry(self, owner: str, action: str, subject: str, detail: str = "") -> None:
        """An entry of the audit."""
        with self._database.write_transaction() as connection:
            connection.execute(
                _audit.insert().values(
                    time=self._clock(),
                    owner=owner,
                    action=action,
                    subject=replace_unstorable(subject),
                    detail=replace_unstorable(detail),
                )
            )

    def list_audit_entries(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        *,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> Page[AuditEntry]:
        """Entries of the audit, the newest first; of the times from `first` on, before `last`."""
        query = sa.select(_audit).order_by(_audit.c.place.desc())
        if first > -math.inf or last < math.inf:
            query = query.where(_audit.c.time >= first, _audit.c.time < last)
        if owner is not None:
            query = query.where(_audit.c.owner == owner)
        with self._database.read_transaction() as connection:
            total = (
                connection.scalar(
                    sa.select(sa.func.count()).select_from(query.order_by(None).subquery())
                )
                or 0
            )
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return Page([parse_record(AuditEntry, row) for row in rows], total)


def _hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
