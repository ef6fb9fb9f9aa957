"""Tables of the service's store. Column names are those of `records`."""

from __future__ import annotations

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

requests = Table(
    "requests",
    metadata,
    Column("place", BigInteger, primary_key=True, autoincrement=False),  # of a counter
    Column("request_id", String(64), nullable=False, unique=True),
    Column("kind", String(32), nullable=False),
    Column("line", String(16), nullable=False),  # see `records.line_of`
    Column("owner", String(64), nullable=False),
    Column("session_id", String(200), nullable=False),
    Column("target", String(200), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("payload", LargeBinary, nullable=False),  # empty when nothing needs it any more
    Column("digest", String(64), nullable=False),
    Column("content_type", String(16), nullable=False),
    Column("facts", JSON, nullable=False),
    Column("deadline", Double),
    Column("state", String(16), nullable=False),
    Column("accepted", Double, nullable=False),
    Column("started", Double),
    Column("finished", Double),
    Column("finish_place", BigInteger),  # in the order of finishing
    Column("answer", LargeBinary),
    Column("answer_type", String(16)),
    Column("answer_digest", String(64)),
    Column("error", Text),
    Column("category", String(16)),
    Column("forgotten", Boolean, nullable=False, default=False),
    UniqueConstraint("target", "line", "seq"),
)
_OPEN = text("state in ('waiting', 'running')")
Index("requests_open", requests.c.state, requests.c.place, sqlite_where=_OPEN, postgresql_where=_OPEN)
Index("requests_owner", requests.c.owner, sqlite_where=_OPEN, postgresql_where=_OPEN)
Index("requests_finished", requests.c.finish_place)
Index("requests_expiry", requests.c.forgotten, requests.c.finished)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", String(200), primary_key=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("created", Double, nullable=False),
    Column("touched", Double, nullable=False),
    Column("finished", Double),
    Column("facts", JSON, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("model_id", String(200), primary_key=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("session_id", String(200), nullable=False, index=True),
    Column("created", Double, nullable=False),
    Column("touched", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("base", Text, nullable=False, default=""),
    Column("steps", BigInteger, nullable=False, default=0),
    Column("next_seq", BigInteger, nullable=False, default=0),
    Column("covered", BigInteger, nullable=False, default=-1),
    Column("covered_before", BigInteger, nullable=False, default=-1),
    Column("published", Text),
    Column("facts", JSON, nullable=False),
    Column("info", JSON, nullable=False),
)

samplers = Table(
    "samplers",
    metadata,
    Column("sampler_id", String(200), primary_key=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("session_id", String(200), nullable=False, index=True),
    Column("created", Double, nullable=False),
    Column("touched", Double, nullable=False),
    Column("base", Text, nullable=False, default=""),
    Column("path", Text),
    Column("model_id", String(200), index=True),
    Column("folder", Text),
    Column("kind", String(16), nullable=False),
    Column("facts", JSON, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("path", String(600), primary_key=True),
    Column("model_id", String(200), nullable=False, index=True),
    Column("owner", String(64), nullable=False, index=True),
    Column("kind", String(20), nullable=False),
    Column("name", String(300), nullable=False),
    Column("folder", Text, nullable=False),
    Column("created", Double, nullable=False),
    Column("steps", BigInteger, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False, default=0),
    Column("expires", Double, index=True),
    Column("public", Boolean, nullable=False, default=False),
    Column("base", Text, nullable=False, default=""),
    Column("facts", JSON, nullable=False),
    Column("version", Text),
    Column("registration", String(16), nullable=False, default="none"),
)

keys = Table(
    "keys",
    metadata,
    Column("key_id", String(64), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("secret_digest", String(64), nullable=False, unique=True),
    Column("created", Double, nullable=False),
    Column("requests_per_minute", BigInteger),
    Column("queue", BigInteger),
    Column("revoked", Double),
    Column("used", Double),
)

minutes = Table(  # accepted requests of a key, by minute
    "minutes",
    metadata,
    Column("owner", String(64), primary_key=True),
    Column("minute", BigInteger, primary_key=True, autoincrement=False),
    Column("accepted", BigInteger, nullable=False),
)

audit = Table(
    "audit",
    metadata,
    Column("place", _BIG, primary_key=True, autoincrement=True),
    Column("time", Double, nullable=False),
    Column("owner", String(64), nullable=False, index=True),
    Column("action", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("detail", Text, nullable=False),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
