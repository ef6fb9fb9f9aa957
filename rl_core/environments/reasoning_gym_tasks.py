"""`reasoning_gym`: generated reasoning tasks of Reasoning Gym (arXiv:2505.24760), one question per episode.

    user    State the final answer to the following arithmetic problem: 26 + 91 - 5 = ...
    policy  answer 112

The package runs in subprocesses with a time limit (timeout = reward 0), because several of its scorers (countdown,
puzzle24, simple_integration, polynomial_multiplication, ...) evaluate model output.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rl_core.environments.environment import (
    HELDOUT_START,
    Demonstration,
    Environment,
    Episode,
    Step,
)
from rl_core.environments.optional_packages import require_package
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    NO_ANSWER,
    read_tagged_answer,
    score_answer,
)
from rl_core.environments.subprocess_host import ChildFailed, ChildPool
from rl_core.environments.tools import Toolset
from rl_core.errors import EnvironmentFault, SettingsError, suggest_name
from rl_core.types import Message

# Text tasks that generate an item in well under a second, without a download; others need a custom environment class.
TASKS = (
    "ab",
    "advanced_geometry",
    "aiw",
    "arc_1d",
    "base_conversion",
    "basic_arithmetic",
    "binary_alternation",
    "binary_matrix",
    "bitwise_arithmetic",
    "caesar_cipher",
    "calendar_arithmetic",
    "chain_sum",
    "circuit_logic",
    "coin_flip",
    "color_cube_rotation",
    "complex_arithmetic",
    "count_bits",
    "count_primes",
    "countdown",
    "course_schedule",
    "cryptarithm",
    "decimal_arithmetic",
    "decimal_chain_sum",
    "dice",
    "family_relationships",
    "fraction_simplification",
    "futoshiki",
    "game_of_life",
    "gcd",
    "graph_color",
    "gsm_symbolic",
    "intermediate_integration",
    "isomorphic_strings",
    "jugs",
    "kakurasu",
    "knights_knaves",
    "largest_island",
    "lcm",
    "leg_counting",
    "letter_counting",
    "letter_jumble",
    "list_functions",
    "manipulate_matrix",
    "maze",
    "mini_sudoku",
    "n_queens",
    "number_filtering",
    "number_format",
    "number_sequence",
    "number_sorting",
    "palindrome_generation",
    "polynomial_equations",
    "polynomial_multiplication",
    "pool_matrix",
    "power_function",
    "prime_factorization",
    "products",
    "propositional_logic",
    "puzzle24",
    "ransom_note",
    "rotate_matrix",
    "rotten_oranges",
    "self_reference",
    "shortest_path",
    "simple_equations",
    "simple_geometry",
    "simple_integration",
    "sokoban",
    "spell_backward",
    "spiral_matrix",
    "string_manipulation",
    "sudoku",
    "survo",
    "syllogism",
    "time_intervals",
    "tower_of_hanoi",
    "word_ladder",
    "word_sequence_reversal",
    "word_sorting",
    "zebra_puzzles",
)
_SCRIPT = Path(__file__).with_name("reasoning_gym_child.py")
_INSTRUCTIONS = f"End with the line '{ANSWER_WORD} X'; put an answer of several lines between <answer> and </answer>."
_MEMORY_GIB = 4.0  # an answer like 9**9**9 exhausts any memory


class ReasoningGymEpisode(Episode):
    """One question; the reward is the task's own score of the answer, mostly 0 to 1."""

    def __init__(self, environment: ReasoningGym, seed: int, level: str) -> None:
        super().__init__(seed, level)
        self._environment = environment
        self._item: dict[str, Any] = {}

    def reset(self) -> list[Message]:
        """Return the question."""
        self._item = self._environment.generate_item(self.seed, self.level)
        self.kind, self.target = self._item["task"], self._item["answer"]
        self.prompt = self._item["question"]
        question = Message(role="user", content=self.prompt)
        if self._environment.instructions:
            return [Message(role="system", content=_INSTRUCTIONS), question]
        return [question]

    def act(self, text: str) -> Step:
        """Score the answer."""
        answer = read_tagged_answer(text)
        if answer is None:
            return Step([Message(role="tool", content=NO_ANSWER)], is_error=True)
        environment = self._environment
        return score_answer(
            self,
            answer,
            lambda: environment.score_item_answer(self._item, self.level, answer),
            environment.success_at,
        )


class ReasoningGym(Environment):
    """Selected Reasoning Gym tasks, with options per level and task."""

    name = "reasoning_gym"
    splits_itself = True  # by the text of the question, in the subprocess

    def __init__(
        self,
        data: Path | None = None,
        *,
        tasks: list[str] | None = None,
        levels: dict[str, dict[str, dict[str, Any]]] | None = None,
        instructions: bool = True,
        heldout: float = 0.2,
        success_at: float = 1.0,
        workers: int = 2,
        timeout_s: float = 10.0,
    ) -> None:
        """Set up `tasks` with the package's default options and one level, 'default'; or `levels`.

        Args:
            levels: level -> task -> config options, as in {"easy": {"chain_sum": {"max_terms": 3}}}.
            instructions: describe the answer format in a system message.
            heldout: share of questions, split by text, reserved for held-out episodes.
            success_at: minimum score of a success.
            workers: maximum number of subprocesses.
            timeout_s: time limit for scoring one answer or generating one item; on timeout the answer earns 0.
        Raises: SettingsError if the package is missing, for a task outside the whitelist, or for invalid options.
        """
        super().__init__(data)
        if (tasks is None) == (levels is None):
            raise SettingsError(
                f"options.tasks: name some tasks, or levels of tasks with options, not both; {_format_known_tasks()}"
            )
        self._tasks = (
            levels if levels is not None else {"default": {task: {} for task in tasks or ()}}
        )
        for level, chosen in self._tasks.items():
            if not chosen:
                raise SettingsError(
                    f"options: level '{level}' names no task; {_format_known_tasks()}"
                )
            for task in chosen:
                if task not in TASKS:
                    raise SettingsError(
                        f"options: '{task}' is not on the whitelist of tasks; {suggest_name(task, TASKS)}"
                    )
        for name, number in (("heldout", heldout), ("success_at", success_at)):
            if not 0 < number <= 1 or (name == "heldout" and number == 1):
                raise SettingsError(f"options.{name}: {number} must be between 0 and 1")
        if workers < 1 or not timeout_s > 0:
            raise SettingsError("options: workers must be at least 1 and timeout_s above 0")
        require_package("reasoning_gym", self.name)
        self.levels = tuple(self._tasks)
        self.instructions, self.success_at, self._heldout = instructions, success_at, heldout
        self._children = ChildPool(
            _SCRIPT, setup={}, count=workers, timeout_s=timeout_s, memory_gib=_MEMORY_GIB
        )
        self._items: dict[tuple[int, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._check_task_options()

    @property
    def tools(self) -> Toolset:
        """No tools."""
        return Toolset([])

    def episode(self, seed: int, level: str) -> ReasoningGymEpisode:
        """Return the episode of a level and seed; the question is generated on reset."""
        self.check_level(level)
        return ReasoningGymEpisode(self, seed, level)

    def demonstration(self, seed: int, level: str) -> Demonstration | None:
        """Return the task's reference answer as a demonstration; None without one (its scorer accepts several)."""
        episode = self.episode(seed, level)
        messages = episode.reset()
        if not episode.target:
            return None
        text = f"{ANSWER_WORD} {episode.target}"
        if "\n" in episode.target:
            text = f"<answer>\n{episode.target}\n</answer>"
        messages.append(Message(role="assistant", content=text))
        return Demonstration(messages, level, episode.kind, seed, True)

    def generate_item(self, seed: int, level: str) -> dict[str, Any]:
        """Generate {task, seed, question, answer}, cached for the rollouts of a group. Raises: EnvironmentFault."""
        with self._lock:
            if (seed, level) in self._items:
                return self._items[seed, level]
        request = {
            "do": "item",
            "tasks": self._tasks[level],
            "key": f"{level}/{seed}",
            "is_heldout": seed >= HELDOUT_START,
            "share": self._heldout,
        }
        try:
            item: dict[str, Any] = self._children.request_reply(request)
        except ChildFailed as error:
            raise EnvironmentFault(f"reasoning_gym could not generate an item: {error}") from error
        with self._lock:
            if len(self._items) >= 1024:
                self._items.clear()
            self._items[seed, level] = item
        return item

    def score_item_answer(self, item: dict[str, Any], level: str, answer: str) -> float:
        """Score an answer. Raises: ChildFailed."""
        request = {
            "do": "score",
            "task": item["task"],
            "options": self._tasks[level][item["task"]],
            "seed": item["seed"],
            "answer": answer,
        }
        return float(self._children.request_reply(request))

    def _check_task_options(self) -> None:
        """Generate one item of every task with options, so that invalid options fail at construction."""
        for level, tasks in self._tasks.items():
            for task, options in tasks.items():
                if {"seed", "size"} & set(options):
                    raise SettingsError(
                        f"options.levels.{level}.{task}: seed and size are set by the environment"
                    )
                if options:
                    try:
                        self._children.request_reply({"do": "check", "tasks": {task: options}})
                    except ChildFailed as error:
                        raise SettingsError(f"options.levels.{level}.{task}: {error}") from error


def _format_known_tasks() -> str:
    return f"known: {', '.join(TASKS)}"
