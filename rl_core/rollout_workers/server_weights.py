"""The trainer's weights in an inference server: sent when they have changed, and verified before any rollout counts.

Each version is written to a folder; the session folder is removed even after a crash.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from rl_core.errors import CheckpointError, PosttrainError, SamplerMismatch, SettingsError
from rl_core.inference.sampling import RolloutBackend
from rl_core.json_client import ServerErrorResponse, ServerUnavailable
from rl_core.models.causal_lm import save_weights
from rl_core.models.export_records import read_vocabulary_size
from rl_core.models.lora import is_servable_adapter, save_adapter
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.rollout_workers.inference_server import (
    InferenceServer,
    LoadedWeights,
    ServerDescription,
    ServerState,
)
from rl_core.rollout_workers.sampler_probe import (
    LogprobDifference,
    SamplerProbe,
    measure_logprob_difference,
    sample_probe,
)
from rl_core.rollout_workers.weight_transfer import combine_digests, digest_tensors
from rl_core.settings import SamplingSettings
from rl_core.settings.rollouts import select_rounding_bound
from rl_core.storage.session_resources import (
    WEIGHTS_PREFIX,
    SessionFolder,
    remove_stale_session_folders,
)
from rl_core.timing import span

if TYPE_CHECKING:
    from transformers import PreTrainedModel


UNLOAD_TIMEOUT_S = 10.0  # for unloading the adapter at the end of a run


@dataclass(frozen=True, slots=True)
class WeightFolder:
    """One version of the weights as files."""

    path: Path
    digest: str  # of the tensors
    num_bytes: int
    is_adapter: bool  # False = a full model, adapters merged


# of the first comparison of a run in half precision: beyond the rounding of deep models on texts
HALF_PRECISION_LIMIT = LogprobDifference(largest=math.inf, mean=0.08, kl=0.01)


def _build_relative_limit(first: LogprobDifference) -> LogprobDifference:
    """Build the limit of later comparisons: rounding stays of the first one's size while the weights change."""
    return LogprobDifference(
        largest=math.inf,
        mean=min(HALF_PRECISION_LIMIT.mean, 2 * first.mean + 0.01),
        kl=min(HALF_PRECISION_LIMIT.kl, 4 * first.kl + 0.001),
    )


class WeightFolders:
    """A writer of one model's versions; the newest stays on disk for a server that is restarted."""

    def __init__(self, model: PreTrainedModel, root: str | None = None) -> None:
        """Store the settings; write nothing.

        Args:
            root: a folder that the server sees under the same path; None = the temporary folder.
        """
        self._model: Any = model
        self._root = Path(root).expanduser().resolve() if root is not None else None
        self._session: SessionFolder | None = None
        self._number = 0
        self._newest: Path | None = None

    def write_version(self) -> WeightFolder:
        """Write the current weights: only the adapter if a server can use it, otherwise the full model.

        Raises: SettingsError if the folder cannot be created; CheckpointError if writing fails.
        """
        session = self._open_session()
        folder = session.path / f"version-{self._number}"
        self._number += 1
        is_adapter = is_servable_adapter(self._model)
        try:
            save = save_adapter if is_adapter else save_weights
            with torch.no_grad():
                save(self._model, folder)
            digest, num_bytes = digest_weight_folder(folder), _measure_folder_size(folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise CheckpointError(
                f"{folder}: the weights for the inference server cannot be written ({error}); make room, or set "
                "rollouts.server.folder"
            ) from error
        if self._newest is not None:
            shutil.rmtree(self._newest, ignore_errors=True)
        self._newest = folder
        return WeightFolder(folder, digest, num_bytes, is_adapter)

    def close(self) -> None:
        """Remove everything that was written."""
        if self._session is not None:
            self._session.close()
        self._session, self._newest = None, None

    def _open_session(self) -> SessionFolder:
        if self._session is None:
            try:
                remove_stale_session_folders(WEIGHTS_PREFIX, self._root)
                self._session = SessionFolder(WEIGHTS_PREFIX, self._root)
            except OSError as error:
                raise SettingsError(
                    f"rollouts.server.folder: {self._root or 'the temporary folder'} cannot be written ({error})"
                ) from error
        return self._session


def digest_weight_folder(folder: Path) -> str:
    """Compute the digest of all tensors in a folder's safetensors files, regardless of which file each is in."""
    digests: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a mapping
                digests |= digest_tensors({name: tensors.get_tensor(name)})
    return combine_digests(digests)


def _measure_folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


class ServerWeights:
    """The weights of one server, kept in sync with one model."""

    def __init__(
        self,
        server: InferenceServer,
        model: PreTrainedModel,
        description: ServerDescription,
        folders: WeightFolders,
        bound: float | None,
        prompts: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """Store the parts; send nothing.

        Args:
            bound: largest difference of log-probs, nats; None = what rounding explains: a largest difference in
                float32, and in half precision a mean and a KL on texts, relative to the first comparison.
            prompts: of `encode_probe_texts`, for comparisons in half precision.
        """
        self.server, self.model, self.description = server, model, description
        self.sent_bytes = 0  # size of the newest version
        self.difference = 0.0  # largest in the newest comparison, nats
        # False = the trainer's forward pass runs in reduced precision (autocast)
        self.is_exact = True
        self._folders, self._bound, self._prompts = folders, bound, prompts
        # the first comparison of this process, by temperature
        self._first_differences: dict[float, LogprobDifference] = {}
        self._prefix = (
            f"posttrain-{secrets.token_hex(4)}"  # of adapter names: other runs may share the server
        )
        self._versions = 0
        # digest of each trained tensor on the server
        self._sent_digests: dict[str, str] = {}
        self._folder: WeightFolder | None = None
        self._state: ServerState | None = None  # of the server after loading; None = unknown
        self._adapter: str | None = None
        # temperatures at which the current weights were verified
        self._verified_temperatures: set[float] = set()
        self._may_have_changed = True

    @property
    def name(self) -> str:
        """Name of the model or adapter in requests."""
        return self._adapter or self.description.model

    @property
    def instance(self) -> str:
        """Id of the process that has the weights; "" = none."""
        return self._state.instance if self._state is not None else ""

    @property
    def bound(self) -> float:
        """Largest accepted difference of log-probs, nats."""
        if self._bound is not None:
            return self._bound
        return select_rounding_bound(self._computes_in_float32)

    @property
    def _computes_in_float32(self) -> bool:
        is_float32 = next(self.model.parameters()).dtype == torch.float32
        return is_float32 and self.is_exact and "float32" in self.description.dtype

    def mark_changed(self) -> None:
        """Mark the model's weights as possibly changed."""
        self._may_have_changed = True

    def forget_server_state(self) -> None:
        """Assume that the server has lost the weights."""
        self._state = None

    def sync_weights(self, sampler: RolloutBackend, sampling: SamplingSettings) -> None:
        """Make the server sample from the current weights, and verify it at this temperature.

        Args:
            sampler: samples from the server as it is.
        Raises: SamplerMismatch with the figure; ServerUnavailable, ServerErrorResponse.
        """
        with span("weight_sync"):
            if self._may_have_changed:
                digests = digest_tensors(collect_trainable_weights(self.model))
                if digests != self._sent_digests or self._folder is None:
                    self._write_folder()
                    self._sent_digests = digests
                self._may_have_changed = False
            if self._state is None or self.server.read_state() != self._state:
                self._load_folder()
            if sampling.temperature not in self._verified_temperatures:
                self._verify_logprobs(sampler, sampling)

    def check_weights_unchanged(self) -> None:
        """Raise SamplerMismatch if another client has changed the server's weights since `sync_weights`."""
        try:
            state = self.server.read_state()
        except ServerUnavailable:  # all requests were answered with the right weights
            return
        if (
            self._state is not None
            and state.instance == self._state.instance
            and state != self._state
        ):
            raise self._build_changed_error(state)

    def _build_changed_error(self, state: ServerState) -> SamplerMismatch:
        assert self._folder is not None
        return SamplerMismatch(
            f"{self.server_label}: another client changed its weights (digest {state.weights[:12] or 'of its start'}, "
            f"ours {self._folder.digest[:12]}) while rollouts were sampled. None of them is used; use one server per "
            "run"
        )

    @property
    def server_label(self) -> str:
        """Address and engine, for messages."""
        return f"inference server {self.server.address} ({self.description.engine_label})"

    def _write_folder(self) -> None:
        self._folder = self._folders.write_version()
        self.sent_bytes = self._folder.num_bytes
        self._state = None

    def _load_folder(self) -> None:
        """Load the newest version on the server.

        Raises: SamplerMismatch if it loaded something else.
        """
        assert self._folder is not None
        self._verified_temperatures.clear()
        try:
            loaded = (
                self._load_adapter()
                if self._folder.is_adapter
                else self.server.load_weights(self._folder.path)
            )
        except ServerErrorResponse as refusal:
            self.server.read_state()  # raises ServerUnavailable if the engine has failed
            raise ServerErrorResponse(
                f"{refusal}; does it see {self._folder.path} under the same path (rollouts.server.folder)?",
                refusal.status,
            ) from refusal
        self._check_loaded_weights(loaded, self._folder)
        if not self._folder.is_adapter:
            self.server.reset_prefix_cache()
        state = self.server.read_state()
        self._check_server_state(state, self._folder)
        self._state = state

    def _load_adapter(self) -> LoadedWeights:
        """Load the newest adapter under a new name; unload the previous one."""
        assert self._folder is not None
        previous, name = self._adapter, f"{self._prefix}-v{self._versions}"
        self._versions += 1
        loaded = self.server.load_adapter(name, self._folder.path)
        self._adapter = name
        if previous is not None:
            self.server.unload_adapter(previous)
        return loaded

    def _check_loaded_weights(self, loaded: LoadedWeights, folder: WeightFolder) -> None:
        if loaded.digest != folder.digest:
            raise SamplerMismatch(
                f"{self.server_label}: it has read weights with the digest {loaded.digest[:12]}, the trainer wrote "
                f"{folder.digest[:12]}: the transfer failed. Does it see {folder.path} under the same path?"
            )
        if loaded.differing:
            raise SamplerMismatch(
                f"{self.server_label}: {len(loaded.differing)} of {loaded.num_compared} weights checked after the "
                f"update differ from what was sent, first {loaded.differing[0]}: the update was not applied"
            )

    def _check_server_state(self, state: ServerState, folder: WeightFolder) -> None:
        """Raise ServerUnavailable, SamplerMismatch or SettingsError for unexpected weights right after an update."""
        if folder.is_adapter:
            if state.weights:
                raise SettingsError(
                    f"rollouts.address: {self.server_label} holds full weights of an earlier run (digest "
                    f"{state.weights[:12]}), but adapters need its initial weights; restart it"
                )
        elif not state.weights:
            raise ServerUnavailable(
                f"{self.server.address}: it was restarted while it loaded new weights"
            )
        elif state.weights != folder.digest:
            raise self._build_changed_error(state)

    def _verify_logprobs(self, sampler: RolloutBackend, sampling: SamplingSettings) -> None:
        is_relative = self._bound is None and not self._computes_in_float32 and self._prompts
        prompts = self._prompts if is_relative else ()
        probe = SamplerProbe.from_sampling(read_vocabulary_size(self.model), sampling, prompts)
        answers = sample_probe(sampler, probe)
        difference = measure_logprob_difference(self.model, answers, probe)
        self.difference = difference.largest
        if is_relative:
            self._check_half_precision(difference, sampling.temperature)
        elif not self.difference <= self.bound:
            raise SamplerMismatch(
                f"{self.server_label}: on {len(answers)} fixed prompts its log-probs differ by up to "
                f"{self.difference:.3g} nats from the trainer's (limit {self.bound:g}; numerics.bound): it does not "
                "sample from the trained weights, adapter and temperature. None of its rollouts is used"
            )
        self._verified_temperatures.add(sampling.temperature)

    def _check_half_precision(self, difference: LogprobDifference, temperature: float) -> None:
        """Raise SamplerMismatch if mean or KL exceed what rounding explains, by the run's first comparison."""
        first = self._first_differences.get(temperature)
        limit = HALF_PRECISION_LIMIT if first is None else _build_relative_limit(first)
        if not (difference.mean <= limit.mean and difference.kl <= limit.kl):
            basis = "the first comparison" if first is None else "what the first comparison allows"
            raise SamplerMismatch(
                f"{self.server_label}: on {len(self._prompts)} texts its log-probs differ from the trainer's by "
                f"{difference.mean:.3g} nats on average, with a KL of {difference.kl:.3g} (limits of {basis} "
                f"{limit.mean:.3g} and {limit.kl:.3g}; numerics.bound sets one of the largest difference, here "
                f"{difference.largest:.3g}): it does not sample from the trained weights, adapter and temperature. "
                "None of its rollouts is used"
            )
        self._first_differences.setdefault(temperature, difference)

    def close(self) -> None:
        """Unload the run's adapter and remove what was written."""
        if self._adapter is not None:
            with contextlib.suppress(PosttrainError):  # a lost server has no adapter to unload
                self.server.unload_adapter(self._adapter, UNLOAD_TIMEOUT_S)
        self._adapter = None
        self.forget_server_state()
        self._folders.close()
