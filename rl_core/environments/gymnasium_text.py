"""`gymnasium`: Gymnasium environments with text observations and actions named by words.

    user    S start, F ice, H hole, G goal; you are at [ ]. Write one of: left, down, right, up
            [S]FFF
            FHFH ...
    policy  right
    tool    S[F]FF ...

Action spaces: Discrete (by name or number) or Text. Observations: the `ansi` rendering, or the observation value.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_core.data.model_text import strip_thought
from rl_core.environments.environment import Demonstration, Environment, Episode, Step
from rl_core.environments.optional_packages import import_optional_package
from rl_core.environments.tools import Toolset
from rl_core.errors import SettingsError
from rl_core.types import Message
from rl_core.user_code.load import import_subclass

_MAX_ACTIONS = 32  # of a Discrete space, named in the opening message
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m")
# Brackets by colour code; other backgrounds are [], other letters ().
_MARKS_BY_COLOUR = {"42": "{}", "34": "()", "35": "<>"}


@dataclass(frozen=True, slots=True)
class _ShippedMetadata:
    """Metadata of an environment that ships with Gymnasium: action names, task text, success threshold."""

    actions: tuple[str, ...]
    task: str
    describe: Callable[[Any], str] | None = None
    success_above: float = 0.0  # success: last reward above this


def _describe_blackjack(value: Any) -> str:
    player, dealer, has_usable_ace = value
    ace = " with a usable ace" if has_usable_ace else ""
    return f"you have {int(player)}{ace}, the dealer shows {int(dealer)}"


_SHIPPED_ENVIRONMENTS = {
    "FrozenLake": _ShippedMetadata(
        ("left", "down", "right", "up"), "S start, F ice, H hole, G goal; you are at [ ]."
    ),
    "CliffWalking": _ShippedMetadata(
        ("up", "right", "down", "left"), "x you, C cliff, T goal.", success_above=-1.5
    ),
    "Taxi": _ShippedMetadata(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "[ ] taxi, { } taxi with passenger, ( ) passenger, < > destination; : can be passed, | not.",
    ),
    "Blackjack": _ShippedMetadata(
        ("stick", "hit"), "Come nearer to 21 than the dealer, not above it.", _describe_blackjack
    ),
}


def replace_terminal_colours(text: str) -> str:
    """Replace terminal colours, which often mark the player, by brackets: [] background, () letters, by
    _MARKS_BY_COLOUR.
    """

    def mark_match(match: re.Match[str]) -> str:
        codes = match[1].split(";")
        mark = next((_MARKS_BY_COLOUR[code] for code in codes if code in _MARKS_BY_COLOUR), None)
        if mark is None:
            mark = "[]" if any(code.startswith("4") and len(code) == 2 for code in codes) else "()"
        return f"{mark[0]}{match[2]}{mark[1]}"

    while (marked := _COLOURED.sub(mark_match, text)) != text:  # colours may be nested
        text = marked
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n")


def extract_answer_text(text: str) -> str:
    """Return the text without its thought."""
    return strip_thought(text).strip()


class GymnasiumEpisode(Episode):
    """One episode; success is `info['is_success']` or `info['success']`, else a last reward above a threshold."""

    def __init__(self, environment: GymnasiumText, seed: int, level: str) -> None:
        super().__init__(seed, level)
        self._environment = environment
        self._inner: Any = None
        self._steps = 0

    def reset(self) -> list[Message]:
        """Return the task text, available actions and the first observation."""
        environment = self._environment
        self._inner = environment.build_inner_environment(self.level)
        value, _ = self._inner.reset(seed=self.seed)
        self.prompt = f"{environment.describe_task(self._inner)}\n{environment.render_observation(self._inner, value)}"
        return [Message(role="user", content=self.prompt)]

    def close(self) -> None:
        """Close the Gymnasium environment."""
        self._inner.close()

    def act(self, text: str) -> Step:
        """Execute the action named on the last line; an unknown action is misuse and leaves the state unchanged."""
        environment = self._environment
        action = environment.parse_action(self._inner, text)
        if action is None:
            complaint = (
                f"error: write one of: {', '.join(environment.list_action_names(self._inner))}"
            )
            return Step(
                [Message(role="tool", content=complaint)],
                reward=0.0 - environment.misuse_cost,
                is_error=True,
            )
        value, reward, terminated, truncated, info = self._inner.step(action)
        self._steps += 1
        reward, terminated = float(reward), bool(terminated)
        truncated = bool(truncated) or (
            environment.max_steps is not None and self._steps >= environment.max_steps
        )
        if not (terminated or truncated):
            observation = Message(
                role="tool", content=environment.render_observation(self._inner, value)
            )
            return Step([observation], reward=reward, info=dict(info))
        self.close()
        success = info.get("is_success", info.get("success"))
        if success is None:
            success = terminated and reward > environment.success_above
        answer = extract_answer_text(text).splitlines()[-1]
        return Step(
            reward=reward,
            terminated=terminated,
            truncated=truncated and not terminated,
            answer=answer,
            success=bool(success),
            info=dict(info),
        )


class GymnasiumText(Environment):
    """Episodes of a registered environment id, or of a `gymnasium.Env` class at an import path."""

    name = "gymnasium"

    def __init__(
        self,
        data: Path | None = None,
        *,
        id: str,
        options: dict[str, Any] | None = None,
        levels: dict[str, dict[str, Any]] | None = None,
        actions: list[str] | None = None,
        task: str | None = None,
        observation: Literal["auto", "render", "value"] = "auto",
        max_steps: int | None = None,
        success_above: float | None = None,
        misuse_cost: float = 0.0,
        demonstration_steps: int = 20,
    ) -> None:
        """Environment id and its text interface.

        Args:
            id: 'FrozenLake-v1', or 'package.module:Class'.
            options: keyword arguments of `gymnasium.make`.
            levels: level -> additional keyword arguments; default: one level, 'default'.
            actions: names of the actions 0, 1, ...; default: known names, else the numbers.
            task: first line of the opening message.
            observation: render = `ansi` rendering; value = observation value; auto = render if available.
            max_steps: truncation after this many actions, in addition to the environment's built-in limit.
            success_above: success threshold on the last reward if `info` does not report success; default: 0, or the
                known threshold of the environment (in CliffWalking every step costs 1, the last one too).
            misuse_cost: subtracted from the reward for an invalid action.
            demonstration_steps: maximum actions of a demonstration; they are random and teach SFT only the format.
        Raises: SettingsError if the package is missing or the environment cannot be constructed or shown as text.
        """
        super().__init__(data)
        self._gymnasium = import_optional_package("gymnasium", self.name)
        self._id, self._options = id, options or {}
        self._by_level = levels or {"default": {}}
        self.levels = tuple(self._by_level)
        self.max_steps, self.misuse_cost = max_steps, misuse_cost
        self._demonstration_steps = demonstration_steps
        for option, least in (
            ("max_steps", max_steps),
            ("demonstration_steps", demonstration_steps),
        ):
            if least is not None and least < 1:
                raise SettingsError(f"options.{option}: {least} must be at least 1")
        self._shipped_metadata = _SHIPPED_ENVIRONMENTS.get(id.rpartition("-v")[0])
        self.blocking = self._shipped_metadata is None  # an unknown environment may wait
        default = self._shipped_metadata.success_above if self._shipped_metadata else 0.0
        self.success_above = default if success_above is None else success_above
        if task is None:
            task = self._shipped_metadata.task if self._shipped_metadata else ""
        self._task = task
        if actions is None and self._shipped_metadata:
            actions = list(self._shipped_metadata.actions)
        self._action_names = None if actions is None else [*actions]
        self._renders = False
        for level in self.levels:
            inner = self._probe_level_options(level, observation)
            self._check_action_space(inner)
            inner.close()

    @classmethod
    def named_code(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """List the id if it is an import path."""
        name = options.get("id")
        return (name,) if isinstance(name, str) and ":" in name else ()

    @property
    def tools(self) -> Toolset:
        """No tools: an action is the word itself."""
        return Toolset([])

    def episode(self, seed: int, level: str) -> GymnasiumEpisode:
        """Return the episode of a seed, which is passed to `reset`."""
        self.check_level(level)
        return GymnasiumEpisode(self, seed, level)

    def content(self, seed: int, level: str) -> Any:
        """Return the opening message; later random draws are unknown before the steps are taken."""
        episode = self.episode(seed, level)
        messages = episode.reset()
        episode.close()
        return [message["content"] for message in messages]

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return a demonstration of random actions; None for free-text actions."""
        episode = self.episode(seed, level)
        messages = episode.reset()
        rng = random.Random(f"gymnasium/demonstrator/{level}/{seed}")
        words = self.list_action_names(episode._inner)
        for _ in range(self._demonstration_steps if words else 0):
            action = rng.choice(words)
            step = episode.step(action)
            messages += [Message(role="assistant", content=action), *step.messages]
            if step.terminated or step.truncated:
                return Demonstration(messages, level, episode.kind, seed, bool(step.success))
        # A conversation ends with the policy's message.
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        return Demonstration(messages, level, episode.kind, seed, False) if messages else None

    def build_inner_environment(self, level: str, render: bool | None = None) -> Any:
        """Build a new `gymnasium.Env` of a level."""
        options = {**self._options, **self._by_level[level]}
        if self._renders if render is None else render:
            options["render_mode"] = "ansi"
        if ":" not in self._id:
            return self._gymnasium.make(self._id, **options)
        environment_class = import_subclass(
            self._id, "options.id", self._gymnasium.Env, "gymnasium.Env"
        )
        return environment_class(**options)

    def describe_task(self, inner: Any) -> str:
        """Return the task text and available actions."""
        words = self.list_action_names(inner)
        actions = f"Write one of: {', '.join(words)}" if words else ""
        return " ".join(part for part in (self._task, actions) if part)

    def render_observation(self, inner: Any, value: Any) -> str:
        """Render an observation as text."""
        if self._renders:
            return replace_terminal_colours(str(inner.render()))
        if self._shipped_metadata is not None and self._shipped_metadata.describe is not None:
            return self._shipped_metadata.describe(value)
        return _format_value(value)

    def list_action_names(self, inner: Any) -> list[str]:
        """List the action names of a Discrete space; [] = free text."""
        if not _is_discrete(inner.action_space):
            return []
        return self._action_names or [str(number) for number in range(int(inner.action_space.n))]

    def parse_action(self, inner: Any, text: str) -> Any:
        """Return the action named by a text; None = invalid."""
        text = extract_answer_text(text)
        words = self.list_action_names(inner)
        if not words:
            return text if text and inner.action_space.contains(text) else None
        last = text.splitlines()[-1].strip().lower() if text else ""
        names = [word.lower() for word in words]
        if last not in names:
            return None
        return int(getattr(inner.action_space, "start", 0)) + names.index(last)

    def _probe_level_options(self, level: str, observation: str) -> Any:
        """Validate the options of a level by constructing one environment."""
        try:
            inner = self.build_inner_environment(level, render=False)
            can_render = "ansi" in (inner.metadata or {}).get("render_modes", ())
            known_value = (
                self._shipped_metadata is not None and self._shipped_metadata.describe is not None
            )
            self._renders = observation == "render" or (
                observation == "auto" and can_render and not known_value
            )
            if observation == "render" and not can_render:
                raise SettingsError(
                    f"options.observation: '{self._id}' cannot render as ansi; use value"
                )
        except SettingsError:
            raise
        except (
            Exception
        ) as error:  # unknown or deprecated id, wrong option, missing dependency, user code
            raise SettingsError(
                f"options.id: '{self._id}' cannot be made for level '{level}': {error}"
            ) from error
        return inner

    def _check_action_space(self, inner: Any) -> None:
        space = inner.action_space
        if _is_discrete(space):
            count = int(space.n)
            if count > _MAX_ACTIONS:
                raise SettingsError(
                    f"options.id: '{self._id}' has {count} actions, at most {_MAX_ACTIONS} can be named"
                )
            if self._action_names is not None and len(self._action_names) != count:
                raise SettingsError(
                    f"options.actions: {len(self._action_names)} words for {count} actions of '{self._id}'"
                )
        elif type(space).__name__ != "Text":
            raise SettingsError(
                f"options.id: '{self._id}' has the action space {space}; it must be Discrete or Text"
            )


def _is_discrete(space: Any) -> bool:
    return type(space).__name__ == "Discrete"


def _format_value(value: Any) -> str:
    """Format numbers and arrays compactly."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return ", ".join(f"{key} {_format_value(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_format_value(part) for part in value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
