"""Settings of TRL and verl by what they are called here: for error messages, `posttrain convert` and the documents."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rl_core.settings.trl_names import TRAINER_STAGES, TRL
from rl_core.settings.verl_names import VERL

__all__ = [
    "TRAINER_STAGES",
    "PeerName",
    "peer_hint",
    "peer_hints_within",
    "trl_name",
    "trl_names",
    "verl_name",
    "verl_names",
]

_SHOWN = 4  # leaves of an unknown block that a message names
_CONVERT = "`posttrain convert FILE` translates a whole file"


@dataclass(frozen=True, slots=True)
class PeerName:
    """A setting of a peer: what it is here, and the difference in meaning."""

    peer: Literal["TRL", "verl"]
    names: tuple[str, ...]  # as the peer writes them; verl's are dotted, `*` = any part
    here: tuple[str, ...]  # dotted from the root of a configuration; STAGE = the trainer's stage; () = no equal
    note: str  # difference in meaning, or why there is no equal
    trainers: tuple[str, ...] = ()  # of TRL's trainers, without "Config"; () = all
    is_copied: bool = False  # True = the value stays as it is

    def paths(self, stage: str | None) -> tuple[str, ...]:
        """Our settings, with the stage filled in; None leaves its name open."""
        return tuple(path.replace("STAGE", f"stages.{stage or '<stage>'}") for path in self.here)


def _rows(peer: Literal["TRL", "verl"], rows: Iterable[tuple[str, ...]]) -> tuple[PeerName, ...]:
    made = []
    for names, here, note, *trainers in rows:
        paths = tuple(path for path in here.removeprefix("=").split(", ") if path)
        made.append(
            PeerName(peer, tuple(names.split()), paths, note, tuple(" ".join(trainers).split()), here.startswith("="))
        )
    return tuple(made)


_TRL = _rows("TRL", TRL)
_VERL = _rows("verl", VERL)
_PATTERNS = [
    (re.compile(re.escape(name).replace(r"\*\.", r"(?:.+\.)?").replace(r"\*", ".+")), row)
    for row in _VERL
    for name in row.names
]


def trl_names() -> tuple[PeerName, ...]:
    """All rows of TRL's names, in the order of the documents."""
    return _TRL


def verl_names() -> tuple[PeerName, ...]:
    """All rows of verl's names, in the order of the documents."""
    return _VERL


def trl_name(name: str, trainer: str) -> PeerName | None:
    """Row of a name of TRL's class `trainer` + "Config"."""
    rows = [row for row in _TRL if name in row.names]
    return next((row for row in rows if trainer in row.trainers), next((r for r in rows if not r.trainers), None))


def verl_name(name: str) -> PeerName | None:
    """Row of a dotted name of verl's configuration."""
    return next((row for pattern, row in _PATTERNS if pattern.fullmatch(name)), None)


def peer_hint(name: str, stage: str | None = None, *, inside: str = "") -> str:
    """Sentence on a key that TRL or verl has, for a message about an unknown key; "" = neither has it.

    Args:
        name: the key, a last part or dotted.
        stage: the stage that it was written in, where it was.
        inside: prefix that the message leaves out of our names, as "stages.policy.".
    """
    found = _of_trl(name, stage) or _of_verl(name)
    sentences = []
    for row, own in found:
        where = " and ".join(path.removeprefix(inside) for path in row.paths(own))
        who = f"{row.peer}'s {name}"
        if row.trainers and len(found) > 1:
            who += f" ({', '.join(row.trainers)})"
        sentences.append(f"{who} is {where} here ({row.note})" if where else f"{who} has no equal here: {row.note}")
    return "; ".join(sentences)


def peer_hints_within(name: str, value: Any) -> str:
    """Sentences on a block of a peer, such as verl's `actor_rollout_ref`; "" = no peer has such a block."""
    leaves = [leaf for leaf in _leaves(name, value) if verl_name(leaf) is not None]
    if not leaves:
        return ""
    hints = [peer_hint(leaf) for leaf in leaves[:_SHOWN]]
    more = [f"and {len(leaves) - _SHOWN} more"] if len(leaves) > _SHOWN else []
    return "; ".join([*hints, *more, _CONVERT])


def _leaves(name: str, value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [name]
    return [leaf for key, item in value.items() for leaf in _leaves(f"{name}.{key}", item)]


def _of_trl(name: str, stage: str | None) -> list[tuple[PeerName, str | None]]:
    """Rows of a name, each with the stage here: that of `stage` alone, if a trainer of it has the name."""
    rows = [row for row in _TRL if name in row.names]
    for row in rows:
        if stage in TRAINER_STAGES.values() and any(TRAINER_STAGES.get(t) == stage for t in row.trainers):
            return [(row, stage)]
    return [(row, _stage_of(row.trainers, stage)) for row in rows]


def _stage_of(trainers: Sequence[str], stage: str | None) -> str | None:
    """Stage of the first trainer; of a row for all trainers the one that it was written in."""
    return TRAINER_STAGES.get(trainers[0], "preference") if trainers else stage


def _of_verl(name: str) -> list[tuple[PeerName, str | None]]:
    """Row of a dotted name, or the first one with this last part."""
    row = verl_name(name) if "." in name else None
    if row is None:
        row = next((row for row in _VERL for known in row.names if known.rpartition(".")[2] == name), None)
    return [] if row is None else [(row, None)]
