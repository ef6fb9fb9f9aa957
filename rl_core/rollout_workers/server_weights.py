"""The trainer's weights in an inference server: sent when they have changed, and verified before anything counts."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

import torch

from rl_core.errors import PosttrainError, SamplerMismatch, SettingsError
from rl_core.inference.sampling import RolloutBackend
from rl_core.models.logprob_record import vocabulary_size
from rl_core.models.trainable_weights import trainable_weights
from rl_core.rollout_workers.http_connections import ServerAway, ServerRefusal
from rl_core.rollout_workers.sampler_probe import Probe, play_probe, trainer_difference
from rl_core.rollout_workers.server_dialect import InferenceServer, LoadedWeights, ServerDescription, ServerState
from rl_core.rollout_workers.weight_folders import WeightFolder, WeightFolders
from rl_core.rollout_workers.weights import digests
from rl_core.settings import SamplingSettings
from rl_core.settings.numerics import rounding_bound
from rl_core.timing import span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ServerWeights"]

CLOSE_S = 10.0  # that the end of a run waits for its adapter to be dropped


class ServerWeights:
    """Keeps one server's weights those of one model."""

    def __init__(
        self, server: InferenceServer, model: PreTrainedModel, description: ServerDescription, folders: WeightFolders,
        bound: float | None,
    ) -> None:  # fmt: skip
        """`bound`: largest difference of log-probs, nats; None = what rounding explains, by the model's dtype."""
        self.server, self.model, self.description = server, model, description
        self.sent_bytes = 0  # of the newest version
        self.difference = 0.0  # of the newest comparison, nats
        self.is_exact = True  # False = the trainer's forward pass rounds to half the digits (autocast)
        self._folders, self._bound = folders, bound
        self._prefix = f"posttrain-{secrets.token_hex(4)}"  # of adapters' names: other runs may share the server
        self._versions = 0
        self._sent: dict[str, str] = {}  # digest of each trained tensor, as the server has it
        self._folder: WeightFolder | None = None
        self._state: ServerState | None = None  # of the server, once it had them
        self._adapter: str | None = None
        self._verified: set[float] = set()  # temperatures at which these weights were compared
        self._may_have_changed = True

    @property
    def name(self) -> str:
        """Model's or adapter's name for requests."""
        return self._adapter or self.description.model

    @property
    def instance(self) -> str:
        """Process that has the weights."""
        return self._state.instance if self._state is not None else ""

    @property
    def bound(self) -> float:
        """Largest difference that passes, nats."""
        if self._bound is not None:
            return self._bound
        is_float32 = next(self.model.parameters()).dtype == torch.float32
        return rounding_bound(is_float32 and self.is_exact and "float32" in self.description.dtype)

    def refresh(self) -> None:
        """Notice that the model's weights may have changed."""
        self._may_have_changed = True

    def forget(self) -> None:
        """Notice that the server may have lost them."""
        self._state = None

    def bring(self, sampler: RolloutBackend, sampling: SamplingSettings) -> None:
        """Have the server sample from the present weights, and prove it at this temperature.

        Args:
            sampler: asks the server, without bringing anything.
        Raises: SamplerMismatch with the figure; ServerAway, ServerRefusal.
        """
        with span("weight_sync"):
            if self._may_have_changed:
                found = digests(trainable_weights(self.model))
                if found != self._sent or self._folder is None:
                    self._write()
                    self._sent = found
                self._may_have_changed = False
            if self._state is None or self.server.state() != self._state:
                self._load()
            if sampling.temperature not in self._verified:
                self._verify(sampler, sampling)

    def check_unchanged(self) -> None:
        """Raises: SamplerMismatch where somebody else has changed the server's weights since `bring`."""
        try:
            now = self.server.state()
        except ServerAway:  # it has answered everything that was asked, under the right weights
            return
        if self._state is not None and now.instance == self._state.instance and now != self._state:
            raise self._changed_by_others(now)

    def _changed_by_others(self, now: ServerState) -> SamplerMismatch:
        assert self._folder is not None
        return SamplerMismatch(
            f"{self.who}: its weights were changed by somebody else (digest {now.weights[:12] or 'of its start'}, ours "
            f"{self._folder.digest[:12]}) while rollouts were sampled, of which none is used; give each run a server "
            "of its own"
        )

    @property
    def who(self) -> str:
        """Address and engine, for messages."""
        return f"inference server {self.server.address} ({self.description.words})"

    def _write(self) -> None:
        self._folder = self._folders.write()
        self.sent_bytes = self._folder.num_bytes
        self._state = None

    def _load(self) -> None:
        """Have the newest version loaded. Raises: SamplerMismatch where something else has arrived."""
        assert self._folder is not None
        self._verified.clear()
        try:
            loaded = self._load_adapter() if self._folder.is_adapter else self.server.load_weights(self._folder.path)
        except ServerRefusal as refusal:
            self.server.state()  # an engine that has failed is a loss
            raise ServerRefusal(
                f"{refusal}; does it see {self._folder.path} under the same path (rollouts.server.folder)?",
                refusal.status,
            ) from refusal
        self._check(loaded, self._folder)
        if not self._folder.is_adapter:
            self.server.forget_prefixes()
        state = self.server.state()
        self._check_state(state, self._folder)
        self._state = state

    def _load_adapter(self) -> LoadedWeights:
        """The newest adapter under a name of its own; the one before it is dropped."""
        assert self._folder is not None
        before, name = self._adapter, f"{self._prefix}-v{self._versions}"
        self._versions += 1
        loaded = self.server.load_adapter(name, self._folder.path)
        self._adapter = name
        if before is not None:
            self.server.unload_adapter(before)
        return loaded

    def _check(self, loaded: LoadedWeights, folder: WeightFolder) -> None:
        if loaded.digest != folder.digest:
            raise SamplerMismatch(
                f"{self.who}: it has read weights with the digest {loaded.digest[:12]}, the trainer wrote "
                f"{folder.digest[:12]}: the transfer did not arrive. Does it see {folder.path} under the same path?"
            )
        if loaded.differing:
            raise SamplerMismatch(
                f"{self.who}: of {loaded.compared} weights that were looked at after the update "
                f"{len(loaded.differing)} are not what was sent, first {loaded.differing[0]}: the update was "
                "not taken over"
            )

    def _check_state(self, state: ServerState, folder: WeightFolder) -> None:
        """Raises: ServerAway, SamplerMismatch, SettingsError for other weights right after an update."""
        if folder.is_adapter:
            if state.weights:
                raise SettingsError(
                    f"rollouts.address: {self.who} holds whole weights of an earlier run (digest {state.weights[:12]}"
                    "), and adapters belong on those of its start; start it again"
                )
        elif not state.weights:
            raise ServerAway(f"{self.server.address}: it was started again while it took new weights")
        elif state.weights != folder.digest:
            raise self._changed_by_others(state)

    def _verify(self, sampler: RolloutBackend, sampling: SamplingSettings) -> None:
        probe = Probe.of(vocabulary_size(self.model), sampling)
        answers = play_probe(sampler, probe)
        self.difference = trainer_difference(self.model, answers, probe)
        if not self.difference <= self.bound:
            raise SamplerMismatch(
                f"{self.who}: on {len(answers)} fixed prompts its log-probs differ by up to {self.difference:.3g} "
                f"nats from the trainer's (limit {self.bound:g}; numerics.bound): it does not sample from the weights, "
                "adapter and temperature that are trained. None of its rollouts is used"
            )
        self._verified.add(sampling.temperature)

    def close(self) -> None:
        """Take the run's adapter out of the server, and remove what was written."""
        if self._adapter is not None:
            with contextlib.suppress(PosttrainError):  # one that is gone has forgotten it
                self.server.unload_adapter(self._adapter, CLOSE_S)
        self._adapter = None
        self.forget()
        self._folders.close()
