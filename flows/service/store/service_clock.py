"""The service's time: seconds since 1970 that do not jump when somebody sets the machine's clock.

Ages decide what expires, so an hour forward by the wall clock must not be an hour of age. The first process that opens
a store after a boot notes there how the wall clock stood to the time since boot; from then on all processes add that
to the time since boot. Between two boots the wall clock alone can tell how much time has passed; it is never taken to
have gone back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from flows.service.store.tables import counters
from flows.service.store.transactions import Database

__all__ = ["note_time", "service_clock"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LATEST = "clock.latest"
MICRO = 1_000_000


def boot_id() -> str:
    """Name of this boot of the machine; "" where the system does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def since_boot() -> float:
    """Seconds since boot, those of suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def service_clock(
    database: Database,
    wall: Callable[[], float] = time.time,
    steady: Callable[[], float] = since_boot,
    boot: Callable[[], str] = boot_id,
) -> Callable[[], float]:
    """The clock of a store. Where the system has no time since boot: the wall clock."""
    if not hasattr(time, "CLOCK_BOOTTIME") or not (name := boot()):
        return wall
    key, value = f"clock.{name}"[:64], counters.c.value

    def stored(connection: sa.Connection, one: str) -> int | None:
        found: int | None = connection.scalar(sa.select(value).where(counters.c.name == one))
        return found

    with database.reading() as connection:
        offset = stored(connection, key)
    if offset is None:
        with database.writing() as connection:
            offset = stored(connection, key)
            if offset is None:
                latest = stored(connection, _LATEST) or 0
                offset = max(int(wall() * MICRO), latest) - int(steady() * MICRO)
                old = counters.c.name.startswith("clock.") & (counters.c.name != _LATEST)
                connection.execute(counters.delete().where(old))  # of earlier boots
                connection.execute(counters.insert().values(name=key, value=offset))
    found = offset / MICRO
    return lambda: found + steady()


def note_time(connection: sa.Connection, now: float) -> None:
    """Keep the newest moment, from which the next boot goes on at the earliest."""
    latest = {"value": int(now * MICRO)}
    if not connection.execute(counters.update().where(counters.c.name == _LATEST).values(latest)).rowcount:
        connection.execute(counters.insert().values(name=_LATEST, **latest))
