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

from tasks.mlflow_environment import build_default_uri, build_offline_environment
from tasks.tracking.journal import read_metrics
from tasks.tracking.models import check_model_folder, digest_model
from tasks.tracking.plug_in import MlflowTracker
from tasks.tracking.registry import ModelRegistry, ModelVersion, is_registered_reference
from tasks.tracking.replay import UndeliveredCounts
from tasks.tracking.run_list import find_run, list_run_records, list_runs, list_stage_runs
from tasks.tracking.run_tracker import ProgressCallback, RunTracker
from tasks.tracking.sink import PARENT_PLACEHOLDER
from tasks.tracking.tracking import RunRow, Tracking
from tasks.tracking.values import (
    MAX_RESULT_LENGTH,
    VersionByContent,
    flatten_settings,
    freeze_environment,
    shorten_result,
)

__all__ = [
    "MAX_RESULT_LENGTH",
    "PARENT_PLACEHOLDER",
    "MlflowTracker",
    "ModelVersion",
    "ProgressCallback",
    "ModelRegistry",
    "RunRow",
    "RunTracker",
    "Tracking",
    "VersionByContent",
    "UndeliveredCounts",
    "check_model_folder",
    "build_default_uri",
    "digest_model",
    "freeze_environment",
    "find_run",
    "flatten_settings",
    "is_registered_reference",
    "list_runs",
    "build_offline_environment",
    "read_metrics",
    "shorten_result",
    "list_run_records",
    "list_stage_runs",
]
