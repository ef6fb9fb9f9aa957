"""Episode outcomes of all models on disk, for pairing in constant memory.

A private temporary SQLite database, which spills to a temporary file and is deleted with the process. Queries return
sums over episodes, never all episodes.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from rl_core.analysis.glossary import PAIRED_METRIC_DIRECTIONS
from rl_core.analysis.statistics import Rate, compute_rate_from_sums, pass_at_k
from rl_core.errors import DataError
from rl_core.types import Trajectory

_METRICS = tuple(PAIRED_METRIC_DIRECTIONS)
_SCHEMA = f"""
CREATE TABLE episode (
    place INTEGER,      -- number of (environment, level)
    environment INTEGER,
    seed INTEGER,
    model INTEGER,
    kind INTEGER,
    digest INTEGER,     -- of prompt and target: the same seed under another version of the data is another episode
    samples INTEGER,
    successes INTEGER,  -- NULL where one of the samples does not tell it
    reward REAL,        -- sum over the samples
    offset INTEGER,     -- of the first sample's line
    {", ".join(f"{name} REAL" for name in _METRICS)},  -- sums over the samples; NULL where one of them has none
    PRIMARY KEY (place, seed, model)
) WITHOUT ROWID
"""
_BATCH_ROWS = 2000  # rows per INSERT
_JOIN = """
FROM episode a JOIN episode b USING (place, seed)
WHERE a.model = ? AND b.model = ? AND a.digest = b.digest
"""
_SUCCESS_GAIN = "1.0 * b.successes / b.samples - 1.0 * a.successes / a.samples"
_REWARD_GAIN = "(b.reward / b.samples - a.reward / a.samples)"
_REWARD_SIGN = f"1.0 * (({_REWARD_GAIN} > 0) - ({_REWARD_GAIN} < 0))"
GroupBy = Literal["all", "environment", "level", "kind"]
_ALIASES = "abcdefgh"  # aliases of the joined tables; limits the number of models
MAX_GROUPS = 1000  # maximum distinct levels or kinds; more indicate a malformed file


@dataclass(frozen=True, slots=True)
class EpisodeReference:
    """One episode, with the byte offset of each model's first trajectory of it."""

    environment: str
    level: str
    kind: str
    seed: int
    offsets: tuple[int, ...]  # in the order of the requested models
    success: tuple[
        float | None, ...
    ]  # success rate over the samples, in that order; None = unknown
    reward: tuple[float, ...]  # mean over the samples


@dataclass(frozen=True, slots=True)
class PairedDifferences:
    """Histogram of paired success differences (b - a) of two models; of the rewards' signs where success is unknown."""

    values: list[float]
    counts: list[int]
    knows_success: bool
    reward_sum: float  # of the differences b - a of mean rewards
    reward_squares: float

    @property
    def episodes(self) -> int:
        """Number of episodes compared."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PairedMetricSums:
    """Sums of paired differences (b - a) of one measure over the episodes on which both models have it."""

    episodes: int
    total: float
    squares: float


class EpisodeIndex:
    """Index of episode outcomes: add trajectories model by model, then query. A context manager."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None)
        # Scratch data: no journal, no fsync; 32 MB page cache.
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -32000"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute(_SCHEMA)
        self._db.execute("BEGIN")
        self._level_ids: dict[tuple[str, str], int] = {}
        self._environment_ids: dict[str, int] = {}
        self._kind_ids: dict[str, int] = {}
        self._pending: list[tuple[int | float | None, ...]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._db.close()

    def add_trajectory(
        self,
        model: int,
        trajectory: Trajectory,
        offset: int,
        metrics: Mapping[str, float | None] | None = None,
    ) -> None:
        """Add one trajectory of one model.

        Args:
            offset: start of its line in bytes.
            measures: of `Summary.add`; None = not to be compared.
        """
        place = self._level_ids.setdefault(
            (trajectory.environment, trajectory.level), len(self._level_ids)
        )
        environment = self._environment_ids.setdefault(
            trajectory.environment, len(self._environment_ids)
        )
        kind = self._kind_ids.setdefault(trajectory.kind, len(self._kind_ids))
        if max(place, kind) >= MAX_GROUPS:
            raise DataError(
                f"more than {MAX_GROUPS} different levels or kinds of question; check the fields 'level' and 'kind'"
            )
        digest = zlib.crc32(
            f"{trajectory.prompt}\0{trajectory.target}".encode("utf-8", "surrogatepass")
        )
        known = metrics or {}
        self._pending.append(
            (
                place,
                environment,
                trajectory.seed,
                model,
                kind,
                digest,
                None if trajectory.success is None else int(trajectory.success),
                trajectory.reward,
                offset,
                *(known.get(name) for name in _METRICS),
            )
        )
        if len(self._pending) >= _BATCH_ROWS:
            self.flush_pending_rows()

    def flush_pending_rows(self) -> None:
        """Write pending rows; called by every query."""
        self._db.executemany(
            f"""INSERT INTO episode VALUES (?, ?, ?, ?, ?, ?, 1, ?, ?, ?{", ?" * len(_METRICS)})
            ON CONFLICT DO UPDATE SET samples = samples + 1, successes = successes + excluded.successes,
            reward = reward + excluded.reward, {", ".join(f"{n} = {n} + excluded.{n}" for n in _METRICS)}""",
            self._pending,
        )
        self._pending.clear()

    def format_level(self, level_id: int) -> str:
        """Format a level, with its environment if there are several; levels of a mixture contain it already."""
        environment, level = list(self._level_ids)[level_id]
        if len(self._environment_ids) == 1 or level.startswith(f"{environment}/"):
            return level
        return f"{environment}/{level}"

    def list_group_names(self, by: GroupBy) -> dict[int, str]:
        """Return id -> display name of the groups, in order of first appearance; {0: 'all'} for all."""
        if by == "all":
            return {0: "all"}
        if by == "environment":
            return {number: name for name, number in self._environment_ids.items()}
        if by == "level":
            return {number: self.format_level(number) for number in self._level_ids.values()}
        return {number: kind for kind, number in self._kind_ids.items()}

    def compute_rates(self, model: int, by: GroupBy = "all") -> dict[str, Rate]:
        """Compute the success rate of a model with its interval, overall or by environment, level or kind.

        {} = unknown, or by environment where there is only one.
        """
        self.flush_pending_rows()
        if by == "environment" and len(self._environment_ids) == 1:
            return {}
        rows = self._db.execute(
            f"""SELECT {_select_group_column(by)}, COUNT(*), SUM(samples), SUM(successes), SUM(successes * successes),
            SUM(samples * samples), SUM(successes * samples) FROM episode
            WHERE model = ? AND successes IS NOT NULL GROUP BY 1 ORDER BY 1""",
            (model,),
        )
        names = self.list_group_names(by)
        return {names[row[0]]: compute_rate_from_sums(*row[1:]) for row in rows}

    def compute_pass_at_ks(self, model: int) -> dict[int, float]:
        """Compute pass@k for k = 1, 2, 4, ... up to the fewest samples of an episode."""
        self.flush_pending_rows()
        rows = self._db.execute(
            "SELECT samples, successes, COUNT(*) FROM episode WHERE model = ? AND successes IS NOT NULL GROUP BY 1, 2",
            (model,),
        ).fetchall()
        if not rows:
            return {}
        fewest = min(row[0] for row in rows)
        ks = sorted({2**i for i in range(fewest.bit_length())} | {fewest})
        total = sum(count for _, _, count in rows)
        return {k: sum(pass_at_k(n, c, k) * count for n, c, count in rows) / total for k in ks}

    def count_episodes(self, model: int) -> int:
        """Return the number of distinct episodes of a model."""
        self.flush_pending_rows()
        return int(
            self._db.execute("SELECT COUNT(*) FROM episode WHERE model = ?", (model,)).fetchone()[0]
        )

    def compute_paired_differences(
        self, a: int, b: int, by: GroupBy = "all"
    ) -> dict[str, PairedDifferences]:
        """Compute the differences b - a on common episodes, overall or by environment, level or kind."""
        self.flush_pending_rows()
        if by == "environment" and len(self._environment_ids) == 1:
            return {}
        rows = self._db.execute(
            f"""SELECT {_select_group_column(by, "a.")}, COALESCE({_SUCCESS_GAIN}, {_REWARD_SIGN}), COUNT(*),
            COUNT({_SUCCESS_GAIN}), SUM(b.reward / b.samples - a.reward / a.samples),
            SUM((b.reward / b.samples - a.reward / a.samples) * (b.reward / b.samples - a.reward / a.samples))
            {_JOIN} GROUP BY 1, 2 ORDER BY 1, 2""",
            (a, b),
        )
        names = self.list_group_names(by)
        differences: dict[str, PairedDifferences] = {}
        for number, value, count, known, reward, squares in rows:
            old = differences.get(names[number], PairedDifferences([], [], True, 0.0, 0.0))
            differences[names[number]] = PairedDifferences(
                [*old.values, value],
                [*old.counts, count],
                old.knows_success and known == count,
                old.reward_sum + reward,
                old.reward_squares + squares,
            )
        return differences

    def sum_paired_metrics(self, a: int, b: int) -> dict[str, PairedMetricSums]:
        """Sum the differences b - a of the measures on common episodes; omit measures that no common episode has."""
        self.flush_pending_rows()
        differences = [f"(b.{name} / b.samples - a.{name} / a.samples)" for name in _METRICS]
        sums = ", ".join(f"COUNT({d}), SUM({d}), SUM({d} * {d})" for d in differences)
        row = self._db.execute(f"SELECT {sums} {_JOIN}", (a, b)).fetchone()
        columns = zip(_METRICS, row[::3], row[1::3], row[2::3], strict=True)
        return {
            name: PairedMetricSums(count, total, squares)
            for name, count, total, squares in columns
            if count
        }

    def find_changed_episodes(
        self, models: Sequence[int], *, worse: bool, limit: int
    ) -> list[EpisodeReference]:
        """Find common episodes on which the last model is worse (or better) than the first: by success, where known.

        Sorted by the difference of success, then of reward, largest first.
        """
        sign = 1 if worse else -1
        last = _ALIASES[len(models) - 1]
        success = (
            f"{sign} * (1.0 * {last}.successes / {last}.samples - 1.0 * a.successes / a.samples)"
        )
        reward = f"{sign} * ({last}.reward / {last}.samples - a.reward / a.samples)"
        worst = f"COALESCE({success}, {reward})"
        return self._find_episodes(models, f"AND {worst} < 0", f"{success}, {reward}, ", limit)

    def find_common_episodes(self, models: Sequence[int], limit: int) -> list[EpisodeReference]:
        """Return common episodes in a fixed pseudo-random order."""
        return self._find_episodes(models, "", "", limit)

    def _find_episodes(
        self, models: Sequence[int], where: str, order: str, limit: int
    ) -> list[EpisodeReference]:
        """Query joined rows of several models' episodes; ties in a fixed pseudo-random order."""
        self.flush_pending_rows()
        names = _ALIASES[: len(models)]
        joins = " ".join(
            f"JOIN episode {n} ON {n}.place = a.place AND {n}.seed = a.seed AND {n}.digest = a.digest AND {n}.model = ?"
            for n in names[1:]
        )
        columns = ", ".join(
            f"{n}.offset, 1.0 * {n}.successes / {n}.samples, {n}.reward / {n}.samples"
            for n in names
        )
        rows = self._db.execute(
            f"""SELECT a.place, a.kind, a.seed, {columns} FROM episode a {joins} WHERE a.model = ? {where}
            ORDER BY {order}((a.seed & 65535) * 40503 + a.place * 30011) & 65535, a.place, a.seed LIMIT ?""",
            (*models[1:], models[0], limit),
        )
        places, kinds = list(self._level_ids), list(self._kind_ids)
        return [
            EpisodeReference(
                environment=places[row[0]][0],
                level=places[row[0]][1],
                kind=kinds[row[1]],
                seed=row[2],
                offsets=tuple(row[3::3]),
                success=tuple(row[4::3]),
                reward=tuple(row[5::3]),
            )
            for row in rows
        ]


def _select_group_column(by: GroupBy, table: str = "") -> str:
    columns = {"level": "place", "environment": "environment", "kind": "kind"}
    return "0" if by == "all" else table + columns[by]
