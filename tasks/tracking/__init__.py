"""Experiment tracking: the one package that imports MLflow.

journal      records of a run, on local disk first
shipper      the thread that delivers them
sink         records as MLflow calls
store        address of the store, its client, its errors
tracking     Tracking: one store, its runs, its registry
replay       delivery of journals of runs that are over
run_list     the list of runs, with filters and the settings that differ
run_tracker  RunTracker: rl_core's Tracker over all this
models       Hugging Face folders as model versions
registry     references, champion and challenger
registered_names  names of a sqlite store's models, without MLflow
traces       episodes as traces
values       names, flat parameters, environment
system       CPU, memory, GPU
beside       TensorBoard and Weights & Biases as further trackers of a run
plug_in      MlflowTracker: MLflow for the Python API
"""

from tasks.tracking.journal import read_metrics
from tasks.tracking.models import check_safe, digest_model
from tasks.tracking.plug_in import MlflowTracker
from tasks.tracking.registry import ModelVersion, Registry, is_registered_reference
from tasks.tracking.replay import Waiting
from tasks.tracking.run_list import find_run, list_runs, run_records, runs_below
from tasks.tracking.run_tracker import ProgressCallback, RunTracker
from tasks.tracking.sink import PARENT
from tasks.tracking.store import default_uri, offline_environment
from tasks.tracking.tracking import RunRow, Tracking
from tasks.tracking.values import MAX_RESULT, VersionOf, environment_freeze, flatten, result_text

__all__ = [
    "MAX_RESULT",
    "PARENT",
    "MlflowTracker",
    "ModelVersion",
    "ProgressCallback",
    "Registry",
    "RunRow",
    "RunTracker",
    "Tracking",
    "VersionOf",
    "Waiting",
    "check_safe",
    "default_uri",
    "digest_model",
    "environment_freeze",
    "find_run",
    "flatten",
    "is_registered_reference",
    "list_runs",
    "offline_environment",
    "read_metrics",
    "result_text",
    "run_records",
    "runs_below",
]
