"""Trackers of the Python API: where a run's metrics go while it trains.

A `tracker=` argument is one of these, or a list of several:

    "terminal"                  a line an iteration
    "jsonl:PATH", "csv:PATH"    a file; the prefix may be left out where the name ends in .jsonl or .csv
    "tensorboard:FOLDER"        TensorBoard's event files (needs the package tensorboard)
    "wandb:PROJECT"             a run of Weights & Biases (needs the package wandb)
    "prometheus:PLACE"          text for Prometheus: PLACE is a folder for files, PORT or HOST:PORT to be scraped
    "dogstatsd[:HOST:PORT]"     datagrams for a Datadog agent, a file where none listens (needs the package datadog)
    "mlflow:URI", "mlflow"      an MLflow run, where the package `posttrain` is installed as a whole
    an object                   whatever has the methods of `rl_core.Tracker`

Others plug in by the entry point group `rl_core.trackers`: a name and a function (address, folder) -> tracker. A
tracker may also have `begin(name, params)`, called when a run starts, `log_system(metrics, number)` for readings of the
machine, and `close(status)`, called when it ends with status FINISHED, FAILED or KILLED; it may begin again afterwards.
"""

from rl_core.trackers.dogstatsd import DogStatsdTracker
from rl_core.trackers.experiment_trackers import TensorBoardTracker, WandbTracker
from rl_core.trackers.local_trackers import CsvTracker, JsonlTracker, TerminalTracker
from rl_core.trackers.prometheus import PrometheusTracker
from rl_core.trackers.resolve import TrackerSource, begin_run, build_tracker_group, end_run
from rl_core.tracking import BackgroundTracker

__all__ = [
    "BackgroundTracker",
    "CsvTracker",
    "DogStatsdTracker",
    "JsonlTracker",
    "PrometheusTracker",
    "TensorBoardTracker",
    "TerminalTracker",
    "TrackerSource",
    "WandbTracker",
    "begin_run",
    "end_run",
    "build_tracker_group",
]
