"""Experiment tracking: the only package that imports MLflow.

journal          records of a run, written to local disk first
shipper          background thread that delivers them
sink             records as MLflow calls; episodes as traces
store            address, client, errors and sqlite tables of the store
tracking         Tracking: one store, its runs, its registry
replay           delivery of journals of finished and crashed runs
run_ids          short ids of runs: demo-7f3a
run_reading      runs of a store, read without MLflow
run_list         the list of runs, with filters and differing settings
run_tracker      RunTracker: rl_core's Tracker on top of all this
models           Hugging Face folders as model versions
registry         model references, champion and challenger
removal          removal of runs, versions and models
values           names, flat parameters, environment
system           CPU, memory and GPU readings
experiment_view  MLflow's page of the experiment
extra_trackers   TensorBoard, Weights & Biases, Prometheus, Datadog and alerts
mlflow_tracker   MlflowTracker: MLflow for the Python API
server_app       MLflow's server without its Assistant
"""

from tasks.mlflow_environment import build_default_uri, build_offline_environment
from tasks.tracking.journal import read_metrics
from tasks.tracking.mlflow_tracker import MlflowTracker
from tasks.tracking.models import check_model_folder, digest_model
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
