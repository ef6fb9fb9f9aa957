"""Durable state of the training service: SQLite (WAL) or PostgreSQL through SQLAlchemy Core.

records      rows as plain data, and the errors of acceptance
tables       the tables
transactions connections and transactions
intake       the server's side of requests: accept, look up, wait, forget, cancel
work         the worker's side: ready, claim, finish, replay, snapshots
directory    sessions, runs, samplers and checkpoints
access       API keys and audit
durable      ServiceStore: all of it
"""

from flows.service.store.directory import PROJECT
from flows.service.store.durable import ServiceStore
from flows.service.store.records import (
    Answer,
    ApiKey,
    AuditEntry,
    CheckpointRecord,
    NewRequest,
    OverLimit,
    Page,
    RequestGone,
    RequestKind,
    SamplerRecord,
    SeqReused,
    SessionRecord,
    StoredRequest,
    TrainingRunRecord,
)

__all__ = [
    "PROJECT",
    "Answer",
    "ApiKey",
    "AuditEntry",
    "CheckpointRecord",
    "NewRequest",
    "OverLimit",
    "Page",
    "RequestGone",
    "RequestKind",
    "SamplerRecord",
    "SeqReused",
    "ServiceStore",
    "SessionRecord",
    "StoredRequest",
    "TrainingRunRecord",
]
