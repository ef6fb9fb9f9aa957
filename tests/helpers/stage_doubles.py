"""As much of a pipeline run and its tracking as a stage without a model asks for."""

import dataclasses
import threading

from tasks.config import build_settings
from tasks.pipeline.run_options import RunOptions
from tasks.pipeline.stage_key import StageKeys

PIPELINE = {"name": "t", "environment": {"name": "arithmetic"}, "stages": {"sft": {}}}


def pipeline(**changes):
    return build_settings({**PIPELINE, **changes})


class Tracker:
    run_id, seconds = "r", 1.5

    def __init__(self):
        self.artifacts, self.datasets = [], []
        self.closed, self.tags, self.metrics, self.texts, self.on_progress = [], {}, [], {}, []

    def log_dict(self, value, name):
        pass

    def log_artifact(self, path, folder=""):
        self.artifacts.append((folder, path.name))

    def log_dataset(self, path, digest, name, context="training", *, profile=None):
        self.datasets.append((path, digest, name, context, profile))

    def log_text(self, text, name):
        self.texts[name] = text

    def log_metrics(self, metrics, step):
        self.metrics.append((step, dict(metrics)))

    def set_tag(self, name, value):
        self.tags[name] = value

    def progress(self, done, total, message=""):
        for tell in self.on_progress:
            tell(done, total, message)

    def close(self, status, timeout_s=30.0):
        self.closed.append(status)


class PipelineRun:
    """A pipeline run that is also its tracker and its models."""

    threads = 3

    def __init__(self, folder, options=RunOptions(), environment_options=None, **changes):  # noqa: B008 frozen
        """`environment_options`: as they are, whether the environment has such options or not."""
        self.settings, self.stages_folder, self.stop = (
            pipeline(**changes),
            folder,
            threading.Event(),
        )
        if environment_options is not None:
            environment = dataclasses.replace(
                self.settings.environment, options=environment_options
            )
            self.settings = dataclasses.replace(self.settings, environment=environment)
        self.tracker = self.models = self.tracking = self
        self.options, self.results = options, {}
        self.cached, self.trackers, self.computed = [], [], set()

    @property
    def stage_keys(self):
        return StageKeys(self.settings)

    def build_charts_link(self, stage):
        return ""

    def record_data_inputs(self, digests):
        pass

    def should_recompute(self, name, key):
        return self.options.fresh and self.options.only in (None, name) and key not in self.computed

    def should_restart(self, key):
        return self.options.restart and key not in self.computed

    def mark_computed(self, key):
        self.computed.add(key)

    def record_cached_stage(self, label, source):
        self.cached.append((label, source))

    def build_parent_tags(self, name):
        return {"parent_model_version": "org/name"}

    def open_stage(self, label, name, journal, settings, digests, key, tags):
        journal.mkdir(exist_ok=True)
        self.trackers.append(Tracker())
        self.trackers[-1].tags.update(tags)
        return self.trackers[-1]
