"""Recorded distributions from server to update worker: through the experience log, or beside it in shared memory.

    python tests/benchmarks/online_tensors.py

The log has to be written and synced in any case: it is what survives a crash and what a replay reads. Measured for
experiences of several sizes (5 samples, 16 recorded tokens at each): appending one to the log with its sync, following
the log and parsing it, and what shared memory could do instead of carrying the arrays in the log: write a segment, map
it in another process, copy the tensors. Prints medians of 30 experiences in milliseconds.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import shared_memory
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from helpers.online import experience

from rl_core.online.experience import Experience, RecordedTopK
from rl_core.online.experience_log import ExperienceLog, ExperienceLogReader

REPEATS, SAMPLES, RECORDED = 30, 5, 16


def build_experience(num_tokens, *, with_recorded=True):
    """Build an experience of `SAMPLES` answers of so many tokens."""
    rng = np.random.default_rng(num_tokens)
    made = experience(answers=("a",) * SAMPLES)
    rollouts, tops = [], []
    for rollout in made.rollouts:
        rollout.completion_ids[:] = rng.integers(0, 1000, num_tokens).tolist()
        rollout.loss_mask[:] = [True] * num_tokens
        rollout.sampler_logprobs[:] = (-rng.exponential(1.0, num_tokens)).tolist()
        rollout.trajectory.turns[0].num_tokens = num_tokens
        rollouts.append(rollout)
        probabilities = rng.dirichlet(np.ones(RECORDED + 1), num_tokens)
        tops.append(
            RecordedTopK(
                rng.integers(0, 1000, (num_tokens, RECORDED)).astype(np.int32),
                np.log(probabilities[:, :RECORDED]).astype(np.float32),
                probabilities[:, RECORDED].astype(np.float32),
            )
        )
    recorded = tuple(tops) if with_recorded else (None,) * SAMPLES
    return Experience("r", "anna", 1000.0, tuple(rollouts), made.vote, recorded)


def serve_segments(connection):
    """Map each named segment, copy its arrays, and acknowledge (the receiving process)."""
    while (message := connection.recv()) is not None:
        name, layout = message
        segment = shared_memory.SharedMemory(name=name)
        start, arrays = 0, []
        for shape, kind in layout:
            size = int(np.prod(shape)) * np.dtype(kind).itemsize
            view = np.frombuffer(segment.buf, kind, int(np.prod(shape)), start).reshape(shape)
            arrays.append(view.copy())
            del view
            start += size
        segment.close()
        connection.send(len(arrays))


def send_through_memory(connection, made):
    """Send the recorded arrays through a new segment and wait for the acknowledgement."""
    arrays = [array for top in made.recorded for array in (top.ids_TK, top.logprobs_TK, top.rest_T)]
    segment = shared_memory.SharedMemory(create=True, size=sum(array.nbytes for array in arrays))
    start = 0
    for array in arrays:
        segment.buf[start : start + array.nbytes] = array.tobytes()
        start += array.nbytes
    connection.send((segment.name, [(array.shape, array.dtype.str) for array in arrays]))
    connection.recv()
    segment.close()
    segment.unlink()


def time_calls(call):
    """Return the median of REPEATS calls, milliseconds, after one call."""
    call()
    seconds = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_at)
    return 1e3 * statistics.median(seconds)


def measure_log(made):
    """Return milliseconds of appending with sync, and of reading and parsing."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        with ExperienceLog(folder) as log:
            append_ms = time_calls(lambda: log.append([("experience", made.to_json())]))
        records = ExperienceLogReader(folder).read_records()
        return append_ms, time_calls(lambda: next(records).parse_experience())


def main():
    """Print one row for each size."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_segments, args=(theirs,))
    process.start()
    print(
        "| tokens of a sample | bytes of the arrays | append | append without | read | read without | memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for num_tokens in (16, 128, 1024, 4096):
        made = build_experience(num_tokens)
        num_bytes = sum(
            t.ids_TK.nbytes + t.logprobs_TK.nbytes + t.rest_T.nbytes for t in made.recorded
        )
        append_ms, read_ms = measure_log(made)
        plain_append_ms, plain_read_ms = measure_log(
            build_experience(num_tokens, with_recorded=False)
        )
        memory_ms = time_calls(lambda made=made: send_through_memory(ours, made))
        print(
            f"| {num_tokens} | {num_bytes:,} | {append_ms:.2f} | {plain_append_ms:.2f} | {read_ms:.2f} | "
            f"{plain_read_ms:.2f} | {memory_ms:.2f} |",
            flush=True,
        )
    ours.send(None)
    process.join()


if __name__ == "__main__":
    main()
