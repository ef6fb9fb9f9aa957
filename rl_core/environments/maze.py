"""`maze`: treasure search in a maze observed one cell at a time, with dead ends and loops.

    user    4 x 4 maze. you are at 1 1
    policy  move east
    tool    at 1 2 open south west
    policy  move south
    tool    at 2 2 open north: treasure
    policy  answer 2 2

Rows and columns count from 1, row first; north is up. Levels differ in size; some walls are removed to create loops.
A move into a wall returns the unchanged position.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

from rl_core.environments.environment import Step
from rl_core.environments.question_episodes import (
    ANSWER_WORD,
    DemonstratedQuestionEnvironment,
    MistakenDemonstration,
    QuestionCosts,
    QuestionEpisode,
    choose_mistake,
)
from rl_core.environments.tools import CallFormat, Tool, Toolset
from rl_core.errors import SettingsError
from rl_core.types import ToolCall

MazeCell = tuple[int, int]  # row, column
DIRECTIONS: dict[str, MazeCell] = {
    "north": (-1, 0),
    "east": (0, 1),
    "south": (1, 0),
    "west": (0, -1),
}
LEVELS = {"easy": 3, "medium": 4, "hard": 5}  # cells of one side
SKILL = {"easy": 0.5, "medium": 0.45, "hard": 0.4}
MISTAKES = ("circles", "gives_up", "guesses")  # the main one first
LOOPS = 0.15  # share of the inner walls that are removed from the spanning tree


def carve_maze(rng: random.Random, size: int, loops: float = LOOPS) -> dict[MazeCell, set[str]]:
    """Generate the open directions of every cell.

    A random depth-first spanning tree, with a share `loops` of the remaining walls removed.
    """
    cells = [(row, column) for row in range(1, size + 1) for column in range(1, size + 1)]
    opened: dict[MazeCell, set[str]] = {cell: set() for cell in cells}
    stack, seen = [cells[0]], {cells[0]}
    while stack:
        unvisited = [
            (name, cell) for name, cell in _list_neighbours(stack[-1], opened) if cell not in seen
        ]
        if not unvisited:
            stack.pop()
            continue
        name, cell = rng.choice(unvisited)
        _open_wall(opened, stack[-1], name)
        seen.add(cell)
        stack.append(cell)
    walls = [
        (cell, name)
        for cell in cells
        for name, _ in _list_neighbours(cell, opened)
        if name in ("east", "south") and name not in opened[cell]
    ]
    for cell, name in rng.sample(walls, round(loops * len(walls))):
        _open_wall(opened, cell, name)
    return opened


def _list_neighbours(
    cell: MazeCell, opened: dict[MazeCell, set[str]]
) -> list[tuple[str, MazeCell]]:
    neighbours = [(name, (cell[0] + r, cell[1] + c)) for name, (r, c) in DIRECTIONS.items()]
    return [(name, other) for name, other in neighbours if other in opened]


def _open_wall(opened: dict[MazeCell, set[str]], cell: MazeCell, name: str) -> None:
    row, column = DIRECTIONS[name]
    back = next(other for other, step in DIRECTIONS.items() if step == (-row, -column))
    opened[cell].add(name)
    opened[(cell[0] + row, cell[1] + column)].add(back)


class MazeEpisode(QuestionEpisode):
    """One maze; `opened`, `start` and `treasure` are for analysis, the policy observes only the cell it is in."""

    def __init__(
        self,
        seed: int,
        level: str,
        opened: dict[MazeCell, set[str]],
        start: MazeCell,
        treasure: MazeCell,
        *,
        tools: Toolset,
        system: str,
        costs: QuestionCosts,
        max_moves: int,
    ) -> None:
        size = LEVELS[level]
        super().__init__(
            seed,
            level,
            kind="near" if len(find_shortest_path(opened, start, treasure)) <= size else "far",
            prompt=f"{size} x {size} maze. you are {self.describe_cell(opened, start, treasure)}",
            target=f"{treasure[0]} {treasure[1]}",
            tools=tools.bind(self),
            system=system,
            costs=costs,
        )
        self.opened, self.start, self.treasure = opened, start, treasure
        self.hidden = [
            sorted((cell, sorted(ways)) for cell, ways in opened.items()),
            start,
            treasure,
        ]
        self.position, self.has_found_treasure, self.max_moves = start, start == treasure, max_moves
        self.visited = [start]

    @staticmethod
    def describe_cell(opened: dict[MazeCell, set[str]], cell: MazeCell, treasure: MazeCell) -> str:
        """Return the observation at a cell."""
        ways = " ".join(name for name in DIRECTIONS if name in opened[cell])
        return f"at {cell[0]} {cell[1]} open {ways}" + (": treasure" if cell == treasure else "")

    def move_one_cell(self, direction: str) -> str:
        """Move one cell unless a wall blocks it, and return the new observation (a tool)."""
        if direction not in DIRECTIONS:
            raise ValueError(f"{direction} is none of {' '.join(DIRECTIONS)}")
        if direction not in self.opened[self.position]:
            return "wall. " + self.describe_cell(self.opened, self.position, self.treasure)
        row, column = DIRECTIONS[direction]
        self.position = (self.position[0] + row, self.position[1] + column)
        self.visited.append(self.position)
        self.has_found_treasure = self.has_found_treasure or self.position == self.treasure
        return self.describe_cell(self.opened, self.position, self.treasure)

    def act(self, text: str) -> Step:
        """Act as QuestionEpisode does, and truncate after `max_moves` cells."""
        step = super().act(text)
        # A wall or a misuse leaves the policy where it is; what it may know of the treasure counts too.
        step.state = f"{self.position[0]} {self.position[1]} {self.has_found_treasure}"
        if not step.terminated and len(self.visited) > self.max_moves:
            return Step(
                reward=step.reward, truncated=True, tool_call=step.tool_call, is_error=step.is_error
            )
        return step

    def is_answer_grounded(self) -> bool:
        """Return whether the policy has visited the treasure's cell."""
        return self.has_found_treasure


def find_shortest_path(
    opened: dict[MazeCell, set[str]], start: MazeCell, goal: MazeCell
) -> list[str]:
    """Return the directions of a shortest path; [] if `start` is the goal."""
    previous: dict[MazeCell, tuple[MazeCell, str]] = {}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        if cell == goal:
            break
        for name, other in _list_neighbours(cell, opened):
            if name in opened[cell] and other not in previous and other != start:
                previous[other] = (cell, name)
                queue.append(other)
    path: list[str] = []
    while goal != start:
        goal, name = previous[goal]
        path.append(name)
    return path[::-1]


class Maze(DemonstratedQuestionEnvironment):
    """Mazes whose treasure must be located and reported."""

    name = "maze"
    levels = tuple(LEVELS)

    def __init__(
        self,
        data: Path | None = None,
        *,
        instructions: bool = False,
        call_format: CallFormat = "line",
        loops: float = LOOPS,
        max_moves: int = 24,
        look_cost: float = 0.0,
        misuse_cost: float = 0.0,
        unsupported_reward: float = 0.0,
        skill: dict[str, float] | None = None,
        habit: float = 0.25,
    ) -> None:
        """Set up mazes; `loops`: share of walls removed; `max_moves`: move limit; other options as in `PixelGrid`."""
        if not 0 <= loops <= 1:
            raise SettingsError(f"options.loops: {loops} must be between 0 and 1")
        if max_moves < 8:
            raise SettingsError(
                f"options.max_moves: {max_moves} must be at least 8, the distance across a maze"
            )
        self.loops, self.max_moves = loops, max_moves
        move = Tool(
            "move",
            "go one cell north, east, south or west; says where you are",
            {"direction": str},
            MazeEpisode.move_one_cell,
        )
        ending = f"When you stand on the treasure, end with the line '{ANSWER_WORD} ROW COLUMN'."
        super().__init__(
            data,
            Toolset([move]),
            costs=QuestionCosts(look=look_cost, misuse=misuse_cost, unsupported=unsupported_reward),
            call_format=call_format,
            instructions=ending if instructions else None,
            skill={**SKILL, **(skill or {})},
            habit=habit,
        )

    def episode(self, seed: int, level: str) -> MazeEpisode:
        """Return the episode of a level and seed."""
        self.check_level(level)
        rng = random.Random(f"maze/{level}/{seed}")
        opened = carve_maze(rng, LEVELS[level], self.loops)
        start, treasure = rng.sample(sorted(opened), 2)
        return MazeEpisode(
            seed,
            level,
            opened,
            start,
            treasure,
            tools=self._tools,
            system=self._system,
            costs=self._costs,
            max_moves=self.max_moves,
        )

    def demonstration(self, seed: int, level: str) -> MistakenDemonstration:
        """Return the imperfect demonstrator's episode, a faulty depth-first search; even rows are the tempting ones."""
        episode = self.episode(seed, level)
        rng = random.Random(f"maze/demonstrator/{level}/{seed}")
        tempting = episode.start[0] % 2 == 0
        mistake = choose_mistake(
            rng, MISTAKES, skill=self.skill[level], habit=self.habit, tempting=tempting
        )
        moves = _explore_maze(episode, rng, circles=mistake == "circles")[: self.max_moves - 1]
        if mistake == "gives_up":
            moves = moves[: rng.randint(0, max(0, len(moves) - 1))]
        elif mistake == "guesses":
            moves = moves[:1]
        position = episode.start
        for name in moves:
            position = (position[0] + DIRECTIONS[name][0], position[1] + DIRECTIONS[name][1])
        if mistake == "guesses":
            position = rng.choice(sorted(episode.opened))
        calls = [ToolCall("move", {"direction": name}) for name in moves]
        return self._demonstrate_calls(episode, calls, f"{position[0]} {position[1]}", mistake)

    def render_maze(self, episode: MazeEpisode) -> str:
        """Draw the maze as text: S start, T treasure, . visited."""
        size = LEVELS[episode.level]
        lines = ["+" + "--+" * size]
        for row in range(1, size + 1):
            cells, floor = "|", "+"
            for column in range(1, size + 1):
                cell = (row, column)
                mark = "S" if cell == episode.start else "T" if cell == episode.treasure else " "
                mark = "." if mark == " " and cell in episode.visited else mark
                cells += f"{mark} " + (" " if "east" in episode.opened[cell] else "|")
                floor += ("  " if "south" in episode.opened[cell] else "--") + "+"
            lines += [cells, floor]
        return "\n".join(lines)


def _explore_maze(episode: MazeEpisode, rng: random.Random, *, circles: bool) -> list[str]:
    """Return depth-first moves from start to treasure with backtracking; `circles` forgets visited cells."""
    position, moves = episode.start, []
    seen, trail = {position}, []
    while position != episode.treasure:
        neighbours = _list_neighbours(position, episode.opened)
        reachable = [(name, cell) for name, cell in neighbours if name in episode.opened[position]]
        unvisited = [(name, cell) for name, cell in reachable if circles or cell not in seen]
        if unvisited:
            name, cell = rng.choice(unvisited)
            trail.append(name)
        else:
            name = _reverse_direction(trail.pop())
            cell = (position[0] + DIRECTIONS[name][0], position[1] + DIRECTIONS[name][1])
        moves.append(name)
        position = cell
        seen.add(position)
        if len(moves) > episode.max_moves:
            break
    return moves


def _reverse_direction(name: str) -> str:
    return {"north": "south", "south": "north", "east": "west", "west": "east"}[name]
