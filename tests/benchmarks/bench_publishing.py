"""Time of publishing a checkpoint folder, and of reading it back verified, by size.

    python tests/benchmarks/bench_publishing.py [--folder DIR] [--megabytes 1 10 100] [--repeats 7]

Medians in milliseconds. `write` is the same bytes written once without a sync, a manifest or a checksum.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rl_core.storage.folders import publish_folder, remove_folder, write_folder_file
from rl_core.storage.manifest import digest_bytes, read_manifest, read_verified_file

FILE = "weights"


def time_call(work: Callable[[], object]) -> float:
    """Return the duration of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def publish(folder: Path, data: bytes) -> None:
    """Publish a folder with one file, as a checkpoint is: hashed in memory, synced, renamed."""

    def write(temporary: Path) -> dict[str, str]:
        write_folder_file(temporary / FILE, data)
        return {FILE: digest_bytes(data)}

    publish_folder(folder, write)


def measure(base_folder: Path, size: int, repeats: int) -> dict[str, float]:
    """Return median seconds of `size` bytes: written, hashed, published, read and verified."""
    data = bytes(range(256)) * (size // 256)
    seconds: dict[str, list[float]] = {"write": [], "hash": [], "publish": [], "read": []}
    folder = base_folder / "version"
    for _ in range(repeats):
        seconds["write"].append(time_call(lambda: write_folder_file(base_folder / "plain", data)))
        (base_folder / "plain").unlink()
        seconds["hash"].append(time_call(lambda: digest_bytes(data)))
        seconds["publish"].append(time_call(lambda: publish(folder, data)))
        seconds["read"].append(
            time_call(lambda: read_verified_file(folder, FILE, read_manifest(folder)))
        )
        remove_folder(folder)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    print("| MB | write | SHA-256 | publish | read, verified |\n|---|---|---|---|---|")
    if arguments.folder is not None:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for megabytes in arguments.megabytes:
            medians = measure(Path(folder), megabytes * 1_000_000, arguments.repeats)
            cells = " | ".join(
                f"{1000 * medians[name]:.1f} ms" for name in ("write", "hash", "publish", "read")
            )
            print(f"| {megabytes} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
