"""Tables of the service's store. Column names are those of `records`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

__all__ = [
    "audit",
    "checkpoints",
    "counters",
    "keys",
    "metadata",
    "minutes",
    "requests",
    "runs",
    "samplers",
    "sessions",
]

FORMAT = 1  # a store of another format is refused
metadata = MetaData()
_BIG = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER counts up by itself there


def _key(name: str, size: int) -> Column[str]:
    return Column(name, String(size), primary_key=True)


def _text(name: str, size: int | None = None, **more: Any) -> Column[str]:
    """A text that is always there, of at most `size` characters."""
    return Column(name, Text if size is None else String(size), nullable=False, **more)


def _count(name: str, start: int | None = 0) -> Column[int]:
    """A whole number that is always there; `start`: in a new row, None = the row has to say."""
    return Column(name, BigInteger, nullable=False, default=start)


def _time(name: str) -> Column[float]:
    """A time that is always there."""
    return Column(name, Double, nullable=False)


def _plain(*names: str) -> list[Column[Any]]:
    """JSON objects, always there."""
    return [Column(name, JSON, nullable=False) for name in names]


def _owner() -> Column[str]:
    return _text("owner", 64, index=True)


def _session() -> Column[str]:
    return _text("session_id", 200, index=True)


def _life() -> list[Column[float]]:
    """Beginning, and newest sign of life."""
    return [_time("created"), _time("touched")]


requests = Table(
    "requests",
    metadata,
    Column("place", BigInteger, primary_key=True, autoincrement=False),  # of a counter
    _text("request_id", 64, unique=True),
    _text("kind", 32),
    _text("line", 16),  # see `records.line_of`
    _text("owner", 64),
    _text("session_id", 200),
    _text("target", 200),
    _count("seq", None),
    Column("payload", LargeBinary, nullable=False),  # empty when nothing needs it any more
    _text("digest", 64),
    _text("content_type", 16),
    *_plain("facts"),
    Column("deadline", Double),
    _text("state", 16),
    _time("accepted"),
    Column("started", Double),
    Column("finished", Double),
    Column("finish_place", BigInteger),  # in the order of finishing
    Column("answer", LargeBinary),
    Column("answer_type", String(16)),
    Column("answer_digest", String(64)),
    Column("error", Text),
    Column("category", String(16)),
    Column("forgotten", Boolean, nullable=False, default=False),
    Column("deaths", Integer, nullable=False, default=0),
    UniqueConstraint("target", "line", "seq"),
)
_OPEN = text("state in ('waiting', 'running')")
Index("requests_open", requests.c.state, requests.c.place, sqlite_where=_OPEN, postgresql_where=_OPEN)
Index("requests_owner", requests.c.owner, sqlite_where=_OPEN, postgresql_where=_OPEN)
Index("requests_finished", requests.c.finish_place)
Index("requests_expiry", requests.c.forgotten, requests.c.finished)

sessions = Table(
    "sessions", metadata, _key("session_id", 200), _owner(), *_life(), Column("finished", Double), *_plain("facts")
)

runs = Table(
    "runs",
    metadata,
    _key("model_id", 200),
    _owner(),
    _session(),
    *_life(),
    _text("state", 16),
    _text("base", default=""),
    _count("steps"),
    _count("next_seq"),
    _count("covered", -1),
    _count("covered_before", -1),
    Column("published", Text),
    *_plain("facts", "info"),
)

samplers = Table(
    "samplers",
    metadata,
    _key("sampler_id", 200),
    _owner(),
    _session(),
    *_life(),
    _text("base", default=""),
    Column("path", Text),
    Column("model_id", String(200), index=True),
    Column("folder", Text),
    _text("kind", 16),
    *_plain("facts"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    _key("path", 600),
    _text("model_id", 200, index=True),
    _owner(),
    _text("kind", 20),
    _text("name", 300),
    _text("folder"),
    _time("created"),
    _count("steps"),
    _count("bytes"),
    Column("expires", Double, index=True),
    Column("public", Boolean, nullable=False, default=False),
    _text("base", default=""),
    *_plain("facts"),
    Column("version", Text),
    _text("registration", 16, default="none"),
)

keys = Table(
    "keys",
    metadata,
    _key("key_id", 64),
    _text("name", 200, unique=True),
    _text("secret_digest", 64, unique=True),
    _time("created"),
    Column("requests_per_minute", BigInteger),
    Column("queue", BigInteger),
    Column("revoked", Double),
    Column("used", Double),
)

minutes = Table(  # accepted requests of a key, by minute
    "minutes",
    metadata,
    _key("owner", 64),
    Column("minute", BigInteger, primary_key=True, autoincrement=False),
    _count("accepted", None),
)

audit = Table(
    "audit",
    metadata,
    Column("place", _BIG, primary_key=True, autoincrement=True),
    _time("time"),
    _owner(),
    _text("action", 64),
    _text("subject"),
    _text("detail"),
)

counters = Table("counters", metadata, _key("name", 64), _count("value", None))
