"""Hand-made trajectories for the tests of evaluation and analysis."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rl_core.types import StopReason, ToolCall, Trajectory, Turn

LEVELS = ("easy", "medium", "hard")
KINDS = ("colour", "count", "compare")


def zoom(row: int, column: int, seen: str = "red", is_error: bool = False) -> Turn:
    call = ToolCall("zoom", {"row": row, "column": column})
    return Turn(f"zoom {row} {column}", call, seen, is_error, num_tokens=5)


def trajectory(
    seed: int = 0, success: bool = True, turns: list[Turn] | None = None, **fields
) -> Trajectory:
    turns = [zoom(1, 2), Turn("answer red", num_tokens=3)] if turns is None else turns
    values = {
        "environment": "pixel_grid",
        "level": "easy",
        "kind": "colour",
        "seed": seed,
        "prompt": "Which colour is the cell in row 1, column 2?",
        "target": "red",
        "turns": turns,
        "answer": "red" if success else "blue",
        "success": success,
        "reward": float(success),
        "rewards": {"task": float(success)},
        "num_action_tokens": sum(turn.num_tokens for turn in turns),
        "num_completion_tokens": 20,
        "mean_logprob": -0.25,
    }
    return Trajectory(**{**values, **fields})


def generate_trajectories(
    count: int, skill: float, seed: int = 0, samples: int = 1
) -> Iterator[Trajectory]:
    """`count` episodes x `samples` of a model with that skill; harder levels need more looks and succeed less."""
    for number in range(count):
        depth = number % 3
        kind = KINDS[number // 3 % 3]
        for sample in range(samples):
            draw = random.Random(f"{seed}/{number}/{sample}")
            success = draw.random() < skill ** (1 + 0.6 * depth)
            turns: list[Turn] = []
            for look in range(1 + depth + (draw.random() > skill)):
                if draw.random() > 0.55 + 0.45 * skill:
                    turns.append(
                        Turn(
                            "zom 3",
                            None,
                            "error: there is no tool 'zom'; did you mean 'zoom'?",
                            True,
                            4,
                        )
                    )
                elif look % 2 and depth:
                    line = draw.randint(1, 8)
                    call = ToolCall("scan", {"axis": "row", "number": line})
                    turns.append(Turn(f"scan row {line}", call, "red blue red green", False, 6))
                else:
                    turns.append(
                        zoom(
                            draw.randint(1, 3 + depth),
                            draw.randint(1, 8),
                            draw.choice(["red", "blue"]),
                        )
                    )
            if draw.random() > 0.6 + 0.4 * skill:
                turns += [zoom(1, 1), zoom(2, 2, "blue")] * 2
                reason, answer, success = StopReason.MAX_TURNS, None, False
            else:
                turns.append(Turn("answer red", num_tokens=3))
                reason, answer = StopReason.TERMINATED, "red" if success else "blue"
            reward = success - 0.02 * len(turns)
            yield trajectory(
                10**9 + number,
                success,
                turns,
                level=LEVELS[depth],
                kind=kind,
                answer=answer,
                reward=reward,
                rewards={"task": float(success), "tool_use": -0.02 * len(turns)},
                stop_reason=reason,
                sample=sample,
                prompt=f"Question {number}: which colour is the cell in row 1, column 2?",
                mean_logprob=-0.5 * (1.1 - skill) - 0.02 * draw.random(),
            )
