"""Output of transformers while a model is loaded or written: no progress bar for a moment's work, no load report.

transformers draws a bar for every file that it reads or writes, and reports weights that its caller expects to be
missing. In `quiet_transformers` a bar appears only once the work takes SHOW_AFTER_SECONDS, and the report only if
loading fails. Settings of the user's program win: bars that are switched off stay off, a hook for bars is left alone,
and at transformers' verbosity INFO or DEBUG the report is always shown.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

SHOW_AFTER_SECONDS = 2.0
_REPORT_LOGGER = "transformers.modeling_utils"
_REPORT_TEXT = "LOAD REPORT"

_lock = threading.Lock()
_num_delaying = 0  # open contexts; the first installs the hook, the last removes it


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Delay transformers' progress bars, and withhold its load report unless the block raises. Thread-safe."""
    with _delay_progress_bars(), _withhold_load_report():
        yield


def ignore_missing_widgets() -> None:
    """Ignore tqdm's warning that a notebook has no ipywidgets: tqdm then draws a text bar, which is enough."""
    warnings.filterwarnings("ignore", message="IProgress not found")


@contextlib.contextmanager
def _delay_progress_bars() -> Iterator[None]:
    from transformers.utils.logging import set_tqdm_hook

    global _num_delaying
    with _lock:
        _num_delaying += 1
        if _num_delaying == 1:
            _restore_hook(set_tqdm_hook(_open_delayed_bar), unless=_open_delayed_bar)
    try:
        yield
    finally:
        with _lock:
            _num_delaying -= 1
            if not _num_delaying:
                _restore_hook(set_tqdm_hook(None), unless=_open_delayed_bar)


def _open_delayed_bar(factory: Callable[..., Any], arguments: Any, options: Any) -> Any:
    return factory(*arguments, **{"delay": SHOW_AFTER_SECONDS, **options})


def _restore_hook(hook: Callable[..., Any] | None, *, unless: Callable[..., Any]) -> None:
    """Install the hook that `set_tqdm_hook` has just replaced, if it is one of the user's program."""
    from transformers.utils.logging import set_tqdm_hook

    if hook is not None and hook is not unless:
        set_tqdm_hook(hook)


class _ReportFilter(logging.Filter):
    """Filter that withholds the load reports of one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()
        self.withheld: list[logging.LogRecord] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Withhold a load report; let other records pass."""
        if record.thread != self.thread or _REPORT_TEXT not in str(record.msg):
            return True
        self.withheld.append(record)
        return False


@contextlib.contextmanager
def _withhold_load_report() -> Iterator[None]:
    from transformers.utils.logging import get_verbosity

    if get_verbosity() <= logging.INFO:
        yield
        return
    logger, reports = logging.getLogger(_REPORT_LOGGER), _ReportFilter()
    logger.addFilter(reports)
    failed = True
    try:
        yield
        failed = False
    finally:
        logger.removeFilter(reports)
        for record in reports.withheld if failed else ():
            logger.handle(record)
