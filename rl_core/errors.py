"""The one exception tree of rl_core.

    PosttrainError
    |-- SettingsError (ValueError)      a setting is unknown, mistyped, out of range, or impossible beside another
    |-- DataError (ValueError)          a tensor, record or file is not what it has to be
    |   |-- RecordsError                bad rows of a data file: file, line, field, what was found, what was expected
    |   `-- NonFiniteTensor             a tensor given to a loss holds NaN or infinity; the message names it
    |-- CheckpointError                 a checkpoint or model folder cannot be written or read
    |   |-- CorruptError                bytes differ from their manifest
    |   `-- ResumeRefused               settings, data or code changed since the checkpoint was written
    |-- FolderBusy                      another process writes into the same folder
    |-- EnvironmentFault                an environment broke its own protocol
    |-- ToolMisuse                      an action calls a tool wrongly; told to the policy, never to the user
    |-- RewardError                     a reward function raised, hung, or returned the wrong thing
    |-- NonFiniteError                  too many non-finite steps in a row; the first bad tensor is named
    |-- OutOfMemory                     a single row does not fit
    |-- CheckFailed                     training ended, but a check of what it learned does not hold
    |-- BackendError                    a rollout backend or tracking store did not answer (transient: worth a retry)
    |-- WorkerFailed                    one of several processes that train together died, or raised no error of ours
    |-- StageTimeout                    a stage ran past the limit that the settings give it; it can be resumed
    `-- Stopped                         a stop signal arrived; state was saved and the run can be resumed

User errors (what the user can mend) are PosttrainErrors; broken invariants are asserts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BackendError",
    "CheckFailed",
    "CheckpointError",
    "CorruptError",
    "DataError",
    "EnvironmentFault",
    "FolderBusy",
    "NonFiniteError",
    "NonFiniteTensor",
    "OutOfMemory",
    "PosttrainError",
    "RecordsError",
    "ResumeRefused",
    "RewardError",
    "SettingsError",
    "StageTimeout",
    "Stopped",
    "ToolMisuse",
    "WorkerFailed",
    "nearest",
]


class PosttrainError(Exception):
    """Root of every error that this project raises on purpose."""


class SettingsError(PosttrainError, ValueError):
    """A setting is unknown, mistyped, out of range, or impossible beside another one."""


class DataError(PosttrainError, ValueError):
    """A tensor, record or file is not what it has to be."""


class RecordsError(DataError):
    """Rows of a data file that cannot be used; the message lists the first ten with file, line, field and reason."""


class NonFiniteTensor(DataError):
    """A tensor given to a loss holds NaN or infinity; the message names it, the place and the value."""


class CheckpointError(PosttrainError):
    """A checkpoint or model folder cannot be written or read."""


class CorruptError(CheckpointError):
    """Bytes on disk differ from their manifest."""


class ResumeRefused(CheckpointError):
    """Settings, data or code changed since the checkpoint was written."""


class FolderBusy(PosttrainError):
    """Another process holds the lock of the folder that this one wants to write."""


class EnvironmentFault(PosttrainError):
    """An environment broke its protocol (stepped after its end, returned the wrong type, raised)."""


class ToolMisuse(PosttrainError):
    """An action calls a tool wrongly: unknown tool, wrong arguments, unreadable JSON. The policy gets to read it."""


class RewardError(PosttrainError):
    """A reward function raised, hung, or returned a wrong length or a non-finite value."""


class NonFiniteError(PosttrainError):
    """Too many non-finite steps in a row; the message names the first non-finite tensor."""


class OutOfMemory(PosttrainError):
    """A single row does not fit into the device's memory."""


class CheckFailed(PosttrainError):
    """Training ended, but a check of what it learned does not hold; the message gives the numbers."""


class BackendError(PosttrainError):
    """A rollout backend or a store did not answer; transient, so a retry may help."""


class WorkerFailed(PosttrainError):
    """One of several processes that train together died, or raised what has no type of ours; the message says how."""


class StageTimeout(PosttrainError):
    """A stage ran past the limit that the settings give it; the next run goes on from its last checkpoint."""


class Stopped(PosttrainError):
    """A stop signal arrived; state was saved and the run can be resumed. `signum` says which."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence naming the known name nearest to `name`, or all of them when none is near."""
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if match:
        return f"did you mean '{match[0]}'?"
    return f"known: {', '.join(names)}" if names else "none are known"
