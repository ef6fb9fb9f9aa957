"""Tables of the service's store. Column names are the field names of `records`."""

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

STORE_FORMAT = 1  # a store of another format is refused
metadata = MetaData()
# SQLite increments only INTEGER keys automatically.
_BIG_INTEGER = BigInteger().with_variant(Integer, "sqlite")


def _build_key_column(name: str, size: int) -> Column[str]:
    return Column(name, String(size), primary_key=True)


def _build_text_column(name: str, size: int | None = None, **options: Any) -> Column[str]:
    """Build a required text column of at most `size` characters."""
    return Column(name, Text if size is None else String(size), nullable=False, **options)


def _build_count_column(name: str, start: int | None = 0) -> Column[int]:
    """Build a required integer column. `start`: value in a new row; None = the row must set it."""
    return Column(name, BigInteger, nullable=False, default=start)


def _build_time_column(name: str) -> Column[float]:
    """Build a required time column."""
    return Column(name, Double, nullable=False)


def _build_json_columns(*names: str) -> list[Column[Any]]:
    """Build required columns of JSON objects."""
    return [Column(name, JSON, nullable=False) for name in names]


def _build_owner_column() -> Column[str]:
    return _build_text_column("owner", 64, index=True)


def _build_session_column() -> Column[str]:
    return _build_text_column("session_id", 200, index=True)


def _build_lifetime_columns() -> list[Column[float]]:
    """Build columns for creation and last use."""
    return [_build_time_column("created"), _build_time_column("touched")]


requests = Table(
    "requests",
    metadata,
    Column("place", BigInteger, primary_key=True, autoincrement=False),  # counter "places"
    _build_text_column("request_id", 64, unique=True),
    _build_text_column("kind", 32),
    _build_text_column("line", 16),  # see `records.resolve_request_line`
    _build_text_column("owner", 64),
    _build_text_column("session_id", 200),
    _build_text_column("target", 200),
    _build_count_column("seq", None),
    Column("payload", LargeBinary, nullable=False),  # emptied when no longer needed
    _build_text_column("digest", 64),
    _build_text_column("content_type", 16),
    *_build_json_columns("facts"),
    Column("deadline", Double),
    _build_text_column("state", 16),
    _build_time_column("accepted"),
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
Index(
    "requests_open", requests.c.state, requests.c.place, sqlite_where=_OPEN, postgresql_where=_OPEN
)
Index("requests_owner", requests.c.owner, sqlite_where=_OPEN, postgresql_where=_OPEN)
Index("requests_finished", requests.c.finish_place)
Index("requests_expiry", requests.c.forgotten, requests.c.finished)

sessions = Table(
    "sessions",
    metadata,
    _build_key_column("session_id", 200),
    _build_owner_column(),
    *_build_lifetime_columns(),
    Column("finished", Double),
    *_build_json_columns("facts"),
)

runs = Table(
    "runs",
    metadata,
    _build_key_column("model_id", 200),
    _build_owner_column(),
    _build_session_column(),
    *_build_lifetime_columns(),
    _build_text_column("state", 16),
    _build_text_column("base", default=""),
    _build_count_column("steps"),
    _build_count_column("next_seq"),
    _build_count_column("covered", -1),
    _build_count_column("covered_before", -1),
    Column("published", Text),
    *_build_json_columns("facts", "info"),
)

samplers = Table(
    "samplers",
    metadata,
    _build_key_column("sampler_id", 200),
    _build_owner_column(),
    _build_session_column(),
    *_build_lifetime_columns(),
    _build_text_column("base", default=""),
    Column("path", Text),
    Column("model_id", String(200), index=True),
    Column("folder", Text),
    _build_text_column("kind", 16),
    *_build_json_columns("facts"),
)

recorded_sequences = Table(  # what a sample recorded for stable_reinforce
    "recorded_sequences",
    metadata,
    _build_key_column("sequence_id", 200),
    _build_text_column("session_id", 200),
    Column("touched", Double, nullable=False, index=True),  # sampling, or newest training request
    Column("temperature", Double, nullable=False),
    Column("content", LargeBinary, nullable=False),  # safetensors
)
Index("recorded_sequences_session", recorded_sequences.c.session_id)

checkpoints = Table(
    "checkpoints",
    metadata,
    _build_key_column("path", 600),
    _build_text_column("model_id", 200, index=True),
    _build_owner_column(),
    _build_text_column("kind", 20),
    _build_text_column("name", 300),
    _build_text_column("folder"),
    _build_time_column("created"),
    _build_count_column("steps"),
    _build_count_column("bytes"),
    Column("expires", Double, index=True),
    Column("public", Boolean, nullable=False, default=False),
    _build_text_column("base", default=""),
    *_build_json_columns("facts"),
    Column("version", Text),
    _build_text_column("registration", 16, default="none"),
)

keys = Table(
    "keys",
    metadata,
    _build_key_column("key_id", 64),
    _build_text_column("name", 200, unique=True),
    _build_text_column("secret_digest", 64, unique=True),
    _build_time_column("created"),
    Column("requests_per_minute", BigInteger),
    Column("queue", BigInteger),
    Column("revoked", Double),
    Column("used", Double),
)

minutes = Table(  # accepted requests of a key, by minute
    "minutes",
    metadata,
    _build_key_column("owner", 64),
    Column("minute", BigInteger, primary_key=True, autoincrement=False),
    _build_count_column("accepted", None),
)

audit = Table(
    "audit",
    metadata,
    Column("place", _BIG_INTEGER, primary_key=True, autoincrement=True),
    _build_time_column("time"),
    _build_owner_column(),
    _build_text_column("action", 64),
    _build_text_column("subject"),
    _build_text_column("detail"),
)

counters = Table(
    "counters", metadata, _build_key_column("name", 64), _build_count_column("value", None)
)
