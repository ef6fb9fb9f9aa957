"""Trackers of the Python API: destinations of a run's metrics while it trains.

A `tracker=` argument is one of these, or a list of several:

    "terminal"                  a line per iteration
    "jsonl:PATH", "csv:PATH"    a file; the prefix is optional if the name ends in .jsonl or .csv
    "tensorboard:FOLDER"        TensorBoard event files (needs the package tensorboard)
    "wandb:PROJECT"             a run of Weights & Biases (needs the package wandb)
    "prometheus:PLACE"          text for Prometheus: PLACE is a folder for files, or PORT or HOST:PORT to be scraped
    "dogstatsd[:HOST:PORT]"     datagrams for a Datadog agent, or a file if none listens (needs the package datadog)
    "mlflow:URI", "mlflow"      an MLflow run (needs the complete package `posttrain`)
    an object                   with the methods of `rl_core.Tracker`

Other trackers plug in through the entry point group `rl_core.trackers`: a name and a function (address, folder) ->
tracker. A tracker may also have `begin(name, params)`, called when a run starts, `log_system(metrics, number)` for
readings of the machine, and `close(status)`, called when it ends with status FINISHED, FAILED or KILLED; it may begin
again afterwards.
"""

from rl_core.trackers.dogstatsd import DogStatsdTracker
from rl_core.trackers.experiment_trackers import TensorBoardTracker, WandbTracker
from rl_core.trackers.local_trackers import CsvTracker, JsonlTracker, TerminalTracker
from rl_core.trackers.prometheus import PrometheusTracker
from rl_core.trackers.resolve import (
    TrackerGroup,
    TrackerSource,
    build_tracker_group,
    notify_run_end,
    notify_run_start,
)
from rl_core.tracking import BackgroundTracker

__all__ = [
    "BackgroundTracker",
    "CsvTracker",
    "DogStatsdTracker",
    "JsonlTracker",
    "PrometheusTracker",
    "TensorBoardTracker",
    "TerminalTracker",
    "TrackerGroup",
    "TrackerSource",
    "WandbTracker",
    "notify_run_start",
    "notify_run_end",
    "build_tracker_group",
]
