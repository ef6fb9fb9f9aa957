"""Sessions, training runs, samplers and checkpoints in the store."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa

import flows.service.store.tables as tables
from flows.service.store.records import CheckpointRecord, Page, SamplerRecord, SessionRecord, TrainingRunRecord
from flows.service.store.transactions import Database, counted

__all__ = ["PROJECT", "Directory", "as_record"]

_sessions, _runs, _samplers, _checkpoints = tables.sessions, tables.runs, tables.samplers, tables.checkpoints
Record = TypeVar("Record")
PROJECT = "default"  # of sessions that name none


def as_record(kind: type[Record], row: sa.Row[Any]) -> Record:
    """A row as a record with the same names."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: row._mapping[name] for name in names})


class Directory:
    """Lists of what exists. `owner=None` = everybody's."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock

    def _one(self, kind: type[Record], query: Any) -> Record | None:
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        return None if row is None else as_record(kind, row)

    def _page(self, kind: type[Record], query: Any, limit: int, offset: int) -> Page[Record]:
        with self._database.reading() as connection:
            total = connection.scalar(sa.select(sa.func.count()).select_from(query.order_by(None).subquery())) or 0
            rows = connection.execute(query.limit(limit).offset(offset)).all()
        return Page([as_record(kind, row) for row in rows], total)

    def _change(self, statement: Any) -> bool:
        with self._database.writing() as connection:
            return bool(connection.execute(statement).rowcount)

    # -- sessions ------------------------------------------------------------------------------------------------------

    def create_session(self, session_id: str, owner: str, facts: Mapping[str, Any]) -> SessionRecord:
        """A new session."""
        now = self._clock()
        record = SessionRecord(session_id=session_id, owner=owner, created=now, touched=now, facts=dict(facts))
        with self._database.writing() as connection:
            connection.execute(_sessions.insert().values(dataclasses.asdict(record)))
        return record

    def session(self, session_id: str) -> SessionRecord | None:
        """A session."""
        return self._one(SessionRecord, sa.select(_sessions).where(_sessions.c.session_id == session_id))

    def touch_session(self, session_id: str) -> bool:
        """A sign of life. False = there is no such session, or it is finished."""
        open_one = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
        return self._change(_sessions.update().where(open_one).values(touched=self._clock()))

    def finish_session(self, session_id: str, facts: Mapping[str, Any] | None = None) -> bool:
        """End a session; `facts` are added to its own. False = it was not open."""
        with self._database.writing() as connection:
            open_one = (_sessions.c.session_id == session_id) & _sessions.c.finished.is_(None)
            row = connection.execute(sa.select(_sessions.c.facts).where(open_one)).first()
            if row is None:
                return False
            values = {"finished": self._clock(), "facts": {**row.facts, **(facts or {})}}
            connection.execute(_sessions.update().where(open_one).values(values))
            return True

    def change_session(self, session_id: str, facts: Mapping[str, Any]) -> bool:
        """Add to a session's facts. False = there is no such session."""
        with self._database.writing() as connection:
            mine = _sessions.c.session_id == session_id
            row = connection.execute(sa.select(_sessions.c.facts).where(mine)).first()
            if row is not None:
                connection.execute(_sessions.update().where(mine).values(facts={**row.facts, **facts}))
            return row is not None

    def sessions(self, owner: str | None = None, limit: int = 100, offset: int = 0) -> Page[SessionRecord]:
        """Sessions, the newest first."""
        query = sa.select(_sessions).order_by(_sessions.c.created.desc(), _sessions.c.session_id)
        return self._page(SessionRecord, _owned(query, _sessions, owner), limit, offset)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run(self, model_id: str) -> TrainingRunRecord | None:
        """A training run."""
        return self._one(TrainingRunRecord, sa.select(_runs).where(_runs.c.model_id == model_id))

    def runs(
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
            query = _owned(query, _runs, owner)
        elif owner is not None:
            query = query.where((_runs.c.owner == owner) | self._is_published(_runs.c.model_id))
        if session_id is not None:
            query = query.where(_runs.c.session_id == session_id)
        if project is not None:
            named = sa.func.coalesce(_sessions.c.facts["project_id"].as_string(), PROJECT)
            query = query.where(sa.exists().where(_sessions.c.session_id == _runs.c.session_id, named == project))
        return self._page(TrainingRunRecord, query, limit, offset)

    def is_published(self, model_id: str) -> bool:
        """True = some of the run's saved weights are published."""
        with self._database.reading() as connection:
            return bool(connection.scalar(sa.select(self._is_published(sa.literal(model_id)))))

    def _is_published(self, model_id: Any) -> Any:
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        return sa.exists().where(_checkpoints.c.model_id == model_id, _checkpoints.c.public, lives)

    # -- samplers ------------------------------------------------------------------------------------------------------

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        """A sampler."""
        return self._one(SamplerRecord, sa.select(_samplers).where(_samplers.c.sampler_id == sampler_id))

    def samplers(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        session_id: str | None = None,
        model_id: str | None = None,
    ) -> Page[SamplerRecord]:
        """Samplers, the newest first."""
        query = _owned(
            sa.select(_samplers).order_by(_samplers.c.created.desc(), _samplers.c.sampler_id), _samplers, owner
        )
        if session_id is not None:
            query = query.where(_samplers.c.session_id == session_id)
        if model_id is not None:
            query = query.where(_samplers.c.model_id == model_id)
        return self._page(SamplerRecord, query, limit, offset)

    def next_clone(self, sampler_id: str) -> int:
        """A number, from 1, that no other copy of the sampler's clients got."""
        with self._database.writing() as connection:
            return counted(connection, f"clones.{sampler_id}"[:64])

    def delete_sampler(self, sampler_id: str) -> bool:
        """Forget a sampler. False = there was none."""
        return self._change(_samplers.delete().where(_samplers.c.sampler_id == sampler_id))

    def samplers_in(self, folder: str) -> list[SamplerRecord]:
        """Samplers that read this folder."""
        with self._database.reading() as connection:
            rows = connection.execute(_samplers.select().where(_samplers.c.folder == folder))
            return [as_record(SamplerRecord, row) for row in rows]

    def move_sampler(self, sampler_id: str, folder: str) -> bool:
        """Have a sampler read another folder. False = it is gone."""
        chosen = _samplers.c.sampler_id == sampler_id
        return self._change(_samplers.update().where(chosen).values(folder=folder))

    def unused_samplers(self, before: float, ended_before: float, own: str) -> list[SamplerRecord]:
        """Samplers without a path, or with weights of their own, unused since `before`, or since `ended_before` in a
        session that is over.

        Args:
            own: part of the path of every folder that is one sampler's own.
        """
        ended = sa.exists().where(_sessions.c.session_id == _samplers.c.session_id, _sessions.c.finished < ended_before)
        used = _samplers.c.touched
        query = sa.select(_samplers).where(
            _samplers.c.path.is_(None) | _samplers.c.folder.contains(own),
            (used < before) | (ended & (used < ended_before)),
        )
        with self._database.reading() as connection:
            return [as_record(SamplerRecord, row) for row in connection.execute(query)]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def checkpoint(self, path: str) -> CheckpointRecord | None:
        """Saved weights; None also where they have expired."""
        found = self._one(CheckpointRecord, sa.select(_checkpoints).where(_checkpoints.c.path == path))
        return None if found is None or _has_expired(found, self._clock()) else found

    def checkpoints(
        self,
        owner: str | None = None,
        limit: int = 100,
        offset: int = 0,
        model_id: str | None = None,
    ) -> Page[CheckpointRecord]:
        """Saved weights, the newest first."""
        query = sa.select(_checkpoints).order_by(_checkpoints.c.created.desc(), _checkpoints.c.path)
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        query = _owned(query.where(lives), _checkpoints, owner)
        if model_id is not None:
            query = query.where(_checkpoints.c.model_id == model_id)
        return self._page(CheckpointRecord, query, limit, offset)

    def storage(self, owner: str, project: str | None = None) -> list[tuple[str, int, int]]:
        """(project, number of saved weights, their bytes) of an owner, by project."""
        lives = _checkpoints.c.expires.is_(None) | (_checkpoints.c.expires > self._clock())
        named = sa.func.coalesce(_sessions.c.facts["project_id"].as_string(), PROJECT).label("project")
        joined = _checkpoints.outerjoin(_runs, _runs.c.model_id == _checkpoints.c.model_id).outerjoin(
            _sessions, _sessions.c.session_id == _runs.c.session_id
        )
        query = sa.select(named, sa.func.count(), sa.func.sum(_checkpoints.c.bytes)).select_from(joined)
        query = query.where(_checkpoints.c.owner == owner, lives).group_by(sa.text("1")).order_by(sa.text("1"))
        if project is not None:
            query = query.where(named == project)
        with self._database.reading() as connection:
            return [(str(name), int(count), int(size or 0)) for name, count, size in connection.execute(query)]

    def add_copy(self, run: TrainingRunRecord, record: CheckpointRecord) -> None:
        """Saved weights whose folder is there already, and the run that holds them; either may be known."""
        with self._database.writing() as connection:
            for table, key, row in ((_runs, "model_id", run), (_checkpoints, "path", record)):
                values = dataclasses.asdict(row)
                if connection.execute(sa.select(table.c[key]).where(table.c[key] == values[key])).first() is None:
                    connection.execute(table.insert().values(values))

    def change_checkpoint(self, path: str, **values: Any) -> bool:
        """Change `expires`, `public`, `version`, `registration` or `facts`. False = there is no such path."""
        assert values.keys() <= {"expires", "public", "version", "registration", "facts"}, values.keys()
        return self._change(_checkpoints.update().where(_checkpoints.c.path == path).values(values))

    def delete_checkpoint(self, path: str) -> bool:
        """Let saved weights expire now; the worker removes their folder. False = there is no such path."""
        if self.checkpoint(path) is None:
            return False
        return self.change_checkpoint(path, expires=0.0)

    def expired_checkpoints(self) -> list[CheckpointRecord]:
        """Saved weights whose folder is to be removed."""
        query = sa.select(_checkpoints).where(_checkpoints.c.expires <= self._clock())
        with self._database.reading() as connection:
            return [as_record(CheckpointRecord, row) for row in connection.execute(query)]

    def drop_checkpoint(self, path: str) -> bool:
        """Remove the record of expired weights whose folder is gone."""
        gone = (_checkpoints.c.path == path) & (_checkpoints.c.expires <= self._clock())
        return self._change(_checkpoints.delete().where(gone))

    def checkpoint_to_register(self) -> CheckpointRecord | None:
        """The oldest saved weights that wait for a version in the registry."""
        query = sa.select(_checkpoints).where(_checkpoints.c.registration == "waiting")
        return self._one(CheckpointRecord, query.order_by(_checkpoints.c.created).limit(1))


def _owned(query: Any, table: sa.Table, owner: str | None) -> Any:
    return query if owner is None else query.where(table.c.owner == owner)


def _has_expired(record: CheckpointRecord, now: float) -> bool:
    return record.expires is not None and record.expires <= now
