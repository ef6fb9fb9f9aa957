"""Tables of a training as DataFrames that read well in a notebook: metrics and sampled texts. Imports pandas.

Both are ordinary DataFrames. Only their display differs: long texts are shortened, and a note says what is left out.
"""

# pandas has no types here
# mypy: allow-subclassing-any, no-warn-return-any

from __future__ import annotations

import html
import shutil
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pandas as pd

from rl_core.analysis.metric_reference import MAIN_METRICS, sort_by_importance
from rl_core.types import Trajectory

SHOWN_CHARACTERS = 400  # of a text in a table; the DataFrame holds all of it
SHOWN_NAMES = 6  # of the metrics that the note of a table lists
CONSTANT_TOLERANCE = 1e-9  # relative; rounding noise is no change
# A reward or a success that never changes is what a user must see.
INFORMATIVE_CONSTANTS = frozenset(MAIN_METRICS) - {"policy/update_kl", "train/learning_rate"}
_STYLE = (
    "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif;font-size:13px"
)
_CELL = (
    "text-align:left;vertical-align:top;padding:6px 10px;border-top:1px solid rgba(128,128,128,.35)"
)
_TEXT = (
    "white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;min-width:10em;max-width:34em;"
    "max-height:14em;overflow:auto"
)


class MetricsFrame(pd.DataFrame):
    """Metrics by step, the most important first. Constant metrics are not columns, but can still be looked up.

    `frame["tool/calls"]` returns a constant metric as well; `frame.constants` lists them with their values.
    """

    _internal_names = [*pd.DataFrame._internal_names, "constants", "_complete"]  # noqa: RUF012 as in pandas
    _internal_names_set = set(_internal_names)  # noqa: RUF012

    def __init__(self, complete: pd.DataFrame, *, keep_constant: bool) -> None:
        """Order the columns of `complete` by importance.

        Args:
            keep_constant: True = constant metrics stay columns, the last ones.
        """
        constants = find_constant_metrics(complete)
        names = sort_by_importance(name for name in complete if name not in constants)
        if keep_constant:
            names += sort_by_importance(constants)
        super().__init__(complete[names])
        self.constants = {} if keep_constant else constants
        self._complete = complete

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        """Return the class of rows and columns selected from this frame."""
        return pd.DataFrame

    def __getitem__(self, key: Any) -> Any:
        """Return columns as a DataFrame does, constant metrics included."""
        names = [key] if isinstance(key, str) else key if isinstance(key, list) else []
        missing = [
            name
            for name in names
            if isinstance(name, str) and name in self.constants and name not in self.columns
        ]
        if not missing:
            return super().__getitem__(key)
        return pd.DataFrame(self).join(self._complete[missing])[key]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the frame with its constant metrics."""
        return _restore_metrics_frame, (pd.DataFrame(self), self.constants, self._complete)

    @property
    def note(self) -> str:
        """Note below the table about the metrics that it leaves out; "" if there are none."""
        names = sort_by_importance(name for name in self.constants if name not in self.columns)
        if not names:
            return ""
        shown = ", ".join(f"{name} = {self.constants[name]:.4g}" for name in names[:SHOWN_NAMES])
        more = f", and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        return f"Constant, not shown: {shown}{more}. metrics(keep_constant=True) shows all."

    def __repr__(self) -> str:
        """Show the table as pandas does, with the note."""
        return "\n".join(filter(None, [super().__repr__(), self.note]))

    def _repr_html_(self) -> str | None:
        """Return the table as pandas does, with the note."""
        table = super()._repr_html_()
        if table is None or not self.note:
            return table
        return f'{table}<p style="{_STYLE};opacity:.75;max-width:70em">{html.escape(self.note)}</p>'


class SamplesColumn(pd.Series):
    """One column or row of a SamplesFrame."""

    @property
    def _constructor(self) -> type[SamplesColumn]:
        """Return the class of values selected from this column."""
        return SamplesColumn

    @property
    def _constructor_expanddim(self) -> type[SamplesFrame]:
        """Return the class of a table of such columns."""
        return SamplesFrame

    def __repr__(self) -> str:
        """Show the values as pandas does, without characters that would move the cursor."""
        column = pd.Series(self).map(_escape_value)
        column.index = column.index.map(_escape_value)
        return repr(column)


class SamplesFrame(pd.DataFrame):
    """Sampled texts, one per row, with reward and its components. The DataFrame holds the complete texts."""

    @property
    def _constructor(self) -> type[SamplesFrame]:
        """Return the class of rows and columns selected from this frame."""
        return SamplesFrame

    @property
    def _constructor_sliced(self) -> type[SamplesColumn]:
        """Return the class of one row or column of this frame."""
        return SamplesColumn

    def __repr__(self) -> str:
        """Show the table as pandas does, with all columns and without characters that would move the cursor."""
        frame = pd.DataFrame(self).map(_escape_value)
        frame.index, frame.columns = (
            labels.map(_escape_value) for labels in (frame.index, frame.columns)
        )
        width = shutil.get_terminal_size((120, 24)).columns
        with pd.option_context("display.max_columns", None, "display.width", width):
            return repr(frame)

    def _repr_html_(self) -> str:
        """Return a table of wrapped texts, each cut at SHOWN_CHARACTERS and in its direction of writing."""
        if self.empty:
            return f'<p style="{_STYLE};opacity:.7">No samples yet: no iteration was played.</p>'
        header = "".join(
            f'<th style="{_CELL};font-weight:600">{html.escape(str(name))}</th>' for name in self
        )
        limit = pd.get_option("display.max_rows") or len(self)
        rows = "".join(
            f"<tr>{''.join(_format_cell(value) for value in row)}</tr>"
            for row in self.head(limit).itertuples(index=False)
        )
        more = ""
        if len(self) > limit:
            more = f'<p style="{_STYLE};opacity:.75">{len(self) - limit} more rows</p>'
        return (
            f'<div style="overflow-x:auto;max-width:100%"><table style="{_STYLE};border-collapse:collapse">'
            f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>{more}"
        )


def _restore_metrics_frame(
    shown: pd.DataFrame, constants: dict[str, float], complete: pd.DataFrame
) -> MetricsFrame:
    frame = MetricsFrame.__new__(MetricsFrame)
    pd.DataFrame.__init__(frame, shown)  # in the order of its columns
    frame.constants, frame._complete = constants, complete
    return frame


def find_constant_metrics(frame: pd.DataFrame) -> dict[str, float]:
    """Return the metrics that had the same value at least twice and never another one, INFORMATIVE_CONSTANTS aside."""
    constants = {}
    for name in frame:
        values = frame[name].dropna()
        if len(values) < 2 or name in INFORMATIVE_CONSTANTS:
            continue
        low, high = float(values.min()), float(values.max())
        if high - low <= CONSTANT_TOLERANCE * max(abs(low), abs(high)):
            constants[str(name)] = float(values.iloc[-1])
    return constants


def build_samples_frame(rows: Iterable[tuple[int, Trajectory]], limit: int | None) -> SamplesFrame:
    """Build one row per sampled episode, newest iteration first; `limit` rows, spread evenly over an iteration's.

    Columns: iteration, prompt, completion, reward, success (where the environment knows it), `reward/NAME` of every
    component that counts, tokens, stop_reason.
    """
    ordered: list[tuple[int, Trajectory]] = []
    for _, block in groupby(sorted(rows, key=lambda row: -row[0]), key=lambda row: row[0]):
        played = list(block)
        count = len(played) if limit is None else min(limit - len(ordered), len(played))
        ordered += [played[index * len(played) // count] for index in range(count)]
    # Components that count for the reward; an environment's reward is also recorded if a function replaces it.
    weighted = {
        name.removeprefix("weighted/")
        for _, trajectory in ordered
        for name in trajectory.rewards
        if name.startswith("weighted/")
    }
    knows_success = any(trajectory.success is not None for _, trajectory in ordered)
    records = []
    for iteration, trajectory in ordered:
        record: dict[str, Any] = {
            "iteration": iteration + 1,  # counted as in `metrics`, from 1
            "prompt": replace_surrogates(trajectory.prompt),
            "completion": replace_surrogates(trajectory.completion),
            "reward": trajectory.reward,
        }
        if knows_success:
            record["success"] = trajectory.success
        record |= {
            f"reward/{name}": value
            for name, value in trajectory.rewards.items()
            if name in weighted or not (weighted or name.startswith("weighted/"))
        }
        records.append(
            record
            | {"tokens": trajectory.num_action_tokens, "stop_reason": str(trajectory.stop_reason)}
        )
    frame = SamplesFrame.from_records(records)
    last = [name for name in ("tokens", "stop_reason") if name in frame]
    return SamplesFrame(frame[[name for name in frame if name not in last] + last])


def replace_surrogates(text: str) -> str:
    """Replace what UTF-8 cannot hold by question marks: neither a DataFrame nor a notebook's message can hold it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def show_control_characters(text: str) -> str:
    """Replace control characters by visible ones."""
    return "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text)


def _escape_value(value: Any) -> Any:
    """Show the control characters of a text, or of the texts in a label of several levels."""
    if isinstance(value, tuple):
        return tuple(_escape_value(part) for part in value)
    return show_control_characters(value) if isinstance(value, str) else value


def _format_cell(value: Any) -> str:
    if isinstance(value, str):
        shown = show_control_characters(value[:SHOWN_CHARACTERS])
        more = len(value) - SHOWN_CHARACTERS
        rest = f'<span style="opacity:.65"> … {more:,} more characters</span>' if more > 0 else ""
        return f'<td style="{_CELL}"><div dir="auto" style="{_TEXT}">{html.escape(shown)}</div>{rest}</td>'
    if isinstance(value, float):
        text = "" if value != value else f"{value:.4g}"
    else:
        text = "" if value is None else str(value)
    return f'<td style="{_CELL};font-variant-numeric:tabular-nums">{html.escape(text)}</td>'
