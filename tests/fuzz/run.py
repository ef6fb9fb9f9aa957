"""`make fuzz`: coverage-guided fuzzing of every target for some minutes.

    python -m fuzz.run [--minutes 10] [--seed 0] [--target config ...]

An input that reaches a new line of our code is mutated further. One that fails (an exception that is none of ours, a
result that cannot be stored, SECONDS of processor time) is made smaller, saved in tests/fuzz/corpus/, and ends the run
with status 1 after the time is up. Inputs of the corpus are run by the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from fuzz.mutation import mutate
from fuzz.targets import CORPUS, SOURCES, TARGETS, read_corpus

SECONDS = 5.0  # of processor time that an input may take
TRACED = 3  # of so many inputs one is traced, which takes several times as long
MAX_POOL = 3000
SHRINK_S = 20.0
SLICE_S = 2.0  # of a target, before the next one has its turn


class _TooSlow(BaseException):
    pass


def _raise_timeout(signum: int, frame: FrameType | None) -> None:
    raise _TooSlow


class Fuzzer:
    """Inputs of one target, grown by the lines that they reach."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.target = name, TARGETS[name]
        self.chance = random.Random(f"{name} {seed}")
        self.lines: set[tuple[Any, int]] = set()
        self.pool: list[bytes] = []
        self.failures: dict[str, bytes] = {}
        self.num_inputs = 0
        self.slowest = 0.0
        inputs = read_corpus(name)
        self.target(inputs[0])  # imports, outside any limit
        for data in inputs:
            self.feed(data)
        self.pool += inputs

    def feed(self, data: bytes) -> None:
        """Run one input; keep it if it is new, note it if it fails."""
        before = len(self.lines)
        cause = self._cause(data, traced=self.num_inputs % TRACED == 0 or not self.pool)
        self.num_inputs += 1
        if cause is not None:
            if cause not in self.failures:
                self.failures[cause] = self._smaller(data, cause)
                print(f"{self.name}: {cause}\n  {self.failures[cause][:300]!r}", flush=True)
        elif len(self.lines) > before and len(self.pool) < MAX_POOL:
            self.pool.append(data)

    def fuzz(self, until: float) -> None:
        """Mutate inputs of the pool."""
        while time.monotonic() < until:
            self.feed(mutate(self.chance.choice(self.pool), self.chance, self.pool))

    def _cause(self, data: bytes, traced: bool = False) -> str | None:
        """Return kind and place of a failure; None if the target does not fail."""
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            sys.settrace(self._trace if traced else None)
            self.target(data)
        except _TooSlow:
            return f"more than {SECONDS:g} s"
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__} at {last.filename.rpartition('/')[2]}:{last.name}"
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.slowest = max(self.slowest, time.process_time() - began)
        return None

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        return (
            self._record_line
            if any(part in code.co_filename for part in SOURCES[self.name])
            else None
        )

    def _record_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self.lines.add((frame.f_code, frame.f_lineno))
        return self._record_line

    def _smaller(self, data: bytes, cause: str) -> bytes:
        """Return a shorter input with the same cause, by leaving out parts."""
        end, size = time.monotonic() + SHRINK_S, max(1, len(data) // 2)
        while size and time.monotonic() < end:
            start = 0
            while start < len(data) and time.monotonic() < end:
                shorter = data[:start] + data[start + size :]
                if self._cause(shorter) == cause:
                    data = shorter
                else:
                    start += size
            size //= 2
        return data


def main() -> int:
    """Fuzz until the time is up; return 1 if something failed."""
    parser = argparse.ArgumentParser(
        description="Fuzz the readers of configs, data, tool calls and chat templates."
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target", choices=sorted(TARGETS), action="append", help="may be repeated; all by default"
    )
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGPROF, _raise_timeout)
    end = time.monotonic() + 60 * arguments.minutes
    fuzzers = [Fuzzer(name, arguments.seed) for name in arguments.target or TARGETS]
    while time.monotonic() < end:
        for fuzzer in fuzzers:
            fuzzer.fuzz(min(end, time.monotonic() + SLICE_S))
    for fuzzer in fuzzers:
        print(
            f"{fuzzer.name}: {fuzzer.num_inputs} inputs, {len(fuzzer.lines)} lines reached, "
            f"pool of {len(fuzzer.pool)}, slowest {fuzzer.slowest:.2f} s, {len(fuzzer.failures)} failures"
        )
        for data in fuzzer.failures.values():
            path = CORPUS / fuzzer.name / f"found-{hashlib.sha256(data).hexdigest()[:12]}"
            path.write_bytes(data)
            print(f"  saved: {path}")
    print(f"{sum(fuzzer.num_inputs for fuzzer in fuzzers)} inputs")
    return 1 if any(fuzzer.failures for fuzzer in fuzzers) else 0


if __name__ == "__main__":
    sys.exit(main())
