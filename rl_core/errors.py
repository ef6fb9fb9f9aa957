"""Exception tree of rl_core.

    PosttrainError
    |-- SettingsError (ValueError)      a setting is unknown, mistyped, out of range, or conflicts with another
    |-- DataError (ValueError)          a tensor, record or file is invalid
    |   |-- UnknownAnswer               a label for an answer that is unknown or not used for learning
    |   |-- RecordsError                bad rows of a data file: file, line, field, value, expected value
    |   `-- NonFiniteTensor             a loss's input or a weight used for sampling holds NaN or infinity
    |-- CheckpointError                 a checkpoint or model folder cannot be written or read
    |   |-- CorruptError                bytes differ from their manifest
    |   |-- ModelError (ValueError)     the model in the settings does not exist, or cannot be used
    |   `-- ResumeRefused               settings, data or code changed since the checkpoint was written
    |-- FolderBusy                      another process writes into the same folder
    |-- EnvironmentFault                an environment violated its protocol
    |-- ToolMisuse                      an action calls a tool wrongly; shown to the policy, never to the user
    |-- RewardError                     a reward function raised, hung, or returned an invalid value
    |-- CallbackError                   a callback of the training loop raised
    |-- NonFiniteError                  too many non-finite steps in a row; names the first bad tensor
    |-- NothingLearned                  training ended, and every trained weight has the bits it started with
    |-- SamplerMismatch                 rollouts are not from the distribution that is trained
    |-- ExportMismatch                  a written model differs from the one that was trained and evaluated
    |-- OutOfMemory                     a single row does not fit into device memory
    |-- CheckFailed                     training ended, but a check of its result failed
    |-- BackendError                    a rollout backend or tracking store did not respond (transient: worth a retry)
    |-- WorkerFailed                    a process of a distributed stage died, or raised an unexpected exception
    |-- ServiceError                    a request to the training service failed; its category says whose fault it is
    |-- StageTimeout                    a stage exceeded its time limit; it can be resumed
    `-- Stopped                         a stop signal arrived; state was saved and the run can be resumed

User errors are PosttrainErrors; broken invariants are asserts.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal


class PosttrainError(Exception):
    """Base of all errors raised deliberately by this project."""


class SettingsError(PosttrainError, ValueError):
    """A setting is unknown, mistyped, out of range, or conflicts with another."""


class DataError(PosttrainError, ValueError):
    """A tensor, record or file is invalid."""


class UnknownAnswer(DataError):
    """Label for an answer that is unknown or not used for learning."""


class RecordsError(DataError):
    """Unusable rows of a data file; the message lists the first ten with file, line, field and reason."""


class NonFiniteTensor(DataError):
    """Input of a loss, weight or sampled log-probability that is NaN or infinite; the message says which, and where."""


class CheckpointError(PosttrainError):
    """A checkpoint or model folder cannot be written or read."""


class CorruptError(CheckpointError):
    """Bytes on disk differ from their manifest."""


class ModelError(CheckpointError, ValueError):
    """The model in the settings does not exist, or cannot be used."""


class ResumeRefused(CheckpointError):
    """Settings, data or code changed since the checkpoint was written."""


class FolderBusy(PosttrainError):
    """Another process holds the lock of the output folder."""


class EnvironmentFault(PosttrainError):
    """An environment violated its protocol (stepped after its end, returned the wrong type, raised)."""


class ToolMisuse(PosttrainError):
    """An action calls a tool wrongly: unknown tool, wrong arguments, malformed JSON. Shown to the policy."""


class RewardError(PosttrainError):
    """A reward function raised, hung, or returned a wrong length or a non-finite value."""


class CallbackError(PosttrainError):
    """A callback of the training loop raised; the message names it and the iteration."""


class NonFiniteError(PosttrainError):
    """Too many non-finite steps in a row; the message names the first non-finite tensor."""


class NothingLearned(PosttrainError):
    """Training ended with the weights it started with, bit for bit; the message says why no step moved one."""


class SamplerMismatch(PosttrainError):
    """Fresh rollouts are not from the distribution that is trained; the message gives the KL and its limit."""


class ExportMismatch(PosttrainError):
    """A written model differs from the one that was trained and evaluated; the message gives figure and limit."""


class OutOfMemory(PosttrainError):
    """A single row does not fit into the device's memory."""


class CheckFailed(PosttrainError):
    """Training ended, but a check of its result failed; the message gives the numbers."""


class BackendError(PosttrainError):
    """A rollout backend or a store did not respond; transient, so a retry may help."""


class WorkerFailed(PosttrainError):
    """A process of a distributed stage died or raised an unexpected exception; the message gives the cause."""


class ServiceError(PosttrainError):
    """A request to the training service failed.

    `category`: user = the request has to change, server = the service failed.
    """

    def __init__(self, message: str, category: Literal["user", "server"]) -> None:
        super().__init__(message)
        self.category = category


class StageTimeout(PosttrainError):
    """A stage exceeded its configured time limit; the next run resumes from its last checkpoint."""


class Stopped(PosttrainError):
    """A stop signal (`signum`) arrived; state was saved and the run can be resumed."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the message alone, as the user stopped the run."""
        return [f"Stopped: {self}"]


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a suggestion for an error message: the known name closest to `name` in any case, or all names."""
    names = sorted(set(known))
    folded = {known_name.casefold(): known_name for known_name in names}
    match = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    if match:
        return f"did you mean '{folded[match[0]]}'?"
    return f"known: {', '.join(names)}" if names else "none are known"
