"""Child process of `textarena`: plays games from their start with the moves so far. See `textarena_tasks`."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Sequence
from typing import Any

MAX_TRIES = 500  # moves that the random opponent tries before it gives up
_LISTED_MOVE = re.compile(r"\[[^\[\]]+\]")
_NUMBER = re.compile(r"\d+")
_MAX_NUMBER = 9  # in the moves that the random opponent makes up
_settings: dict[str, Any] = {}


def start(setup: dict[str, Any]) -> None:
    """Import the package; takes seconds."""
    import textarena  # noqa: F401

    _settings.update(setup)


def handle(request: dict[str, Any]) -> Any:
    """Answer one request: {"do": "players", "level"}, {"do": "play", "level", "seed", "replies", "others"} or
    {"do": "two_players", "level", "seed", "moves"}.

    A play returns `observations`, the policy's so far, and `hidden`, the state that the first one may not show; at its
    end also `reward`, `reason` and `invalid`, or `ask`: the messages of the player whose move is missing. With
    `random_seed` a play that waits for the policy also has `move`: a random legal one; None = none is known.
    """
    if request["do"] == "players":
        return _count_players(request["level"])
    if request["do"] == "two_players":
        return _play_two_players(request)
    return _play_game(request)


def _make_game(level: str) -> Any:
    import textarena as ta
    from textarena.envs.registration import ENV_REGISTRY

    names = [name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train"))]
    game = _settings["game"]
    if f"{game}-raw" not in ENV_REGISTRY:
        raise ValueError(f"there is no game '{game}' among {', '.join(sorted(names))}")
    return ta.make(f"{game}-raw", **_settings["levels"][level])


def _count_players(level: str) -> int:
    """Count the players that the game takes at least. Raises: ValueError with the game's reason if it takes none."""
    problems = []
    for count in range(1, 9):
        try:
            _make_game(level).reset(num_players=count, seed=0)
        except AssertionError as error:  # the package's word for a wrong number of players
            problems.append(str(error))
            continue
        return count
    raise ValueError(
        "; ".join(dict.fromkeys(problems)) or "it takes no number of players from 1 to 8"
    )


def _play_game(request: dict[str, Any]) -> dict[str, Any]:
    seed, count = request["seed"], _settings["players"] or _count_players(request["level"])
    seat = _settings["seat"]
    if seat is None:
        seat = seed % count
    if not 0 <= seat < count:
        raise ValueError(f"options.seat: {seat}; the game has the players 0 to {count - 1}")
    random.seed(seed)
    game = _make_game(request["level"])
    game.reset(num_players=count, seed=seed)
    hidden = json.dumps(game.state.game_state, sort_keys=True, default=_describe_value)
    replies, others = list(request["replies"]), list(request["others"])
    observations: list[str] = []
    chats: dict[int, list[dict[str, str]]] = {}  # of the other players
    result: dict[str, Any] = {"observations": observations, "hidden": hidden, "players": count}
    num_moves = 0
    while True:
        player, messages = game.get_observation()
        text = _render_messages(messages, player, game.state.role_mapping)
        if player == seat:
            observations.append(text)
            chat = chats.setdefault(player, [])
            if not replies:
                if request.get("random_seed") is not None:
                    rng = random.Random(request["random_seed"])
                    try:
                        result["move"] = _choose_legal_move(game, chat, text, rng)
                    except ValueError:
                        result["move"] = None
                return result
            chat.append({"role": "user", "content": text})
            move = replies.pop(0)
        elif _settings["opponent"] == "random":
            rng = random.Random(f"textarena/{seed}/{num_moves}")
            move = _choose_legal_move(game, chats.setdefault(player, []), text, rng)
        else:
            chat = chats.setdefault(player, [])
            chat.append({"role": "user", "content": text})
            if not others:
                return {**result, "ask": chat}
            move = others.pop(0)
            chat.append({"role": "assistant", "content": move})
        num_moves += 1
        is_done, _ = game.step(action=move)
        if is_done:
            return {**result, **_read_outcome(game, seat)}


def _play_two_players(request: dict[str, Any]) -> dict[str, Any]:
    """Play a game of two players with the moves so far, in the order in which they were made.

    Returns: `log`: [player, text] of every observation; at the end `rewards`, `reason` and `invalid`, else with
        `random_seed` also `move`: a random legal one.
    """
    random.seed(request["seed"])
    game = _make_game(request["level"])
    game.reset(num_players=2, seed=request["seed"])
    hidden = json.dumps(game.state.game_state, sort_keys=True, default=_describe_value)
    log: list[list[Any]] = []
    chats: dict[int, list[dict[str, str]]] = {0: [], 1: []}
    result: dict[str, Any] = {"log": log, "hidden": hidden}
    moves = list(request["moves"])
    while True:
        player, messages = game.get_observation()
        text = _render_messages(messages, player, game.state.role_mapping)
        log.append([player, text])
        if not moves:
            if request.get("random_seed") is not None:
                rng = random.Random(request["random_seed"])
                result["move"] = _choose_legal_move(game, chats[player], text, rng)
            return result
        chats[player].append({"role": "user", "content": text})
        chats[player].append({"role": "assistant", "content": moves[0]})
        is_done, _ = game.step(action=moves.pop(0))
        if is_done:
            outcomes = [_read_outcome(game, seat) for seat in (0, 1)]
            return {
                **result,
                "rewards": [outcome["reward"] for outcome in outcomes],
                "reason": outcomes[0]["reason"] or outcomes[1]["reason"],
                "invalid": [outcome["invalid"] for outcome in outcomes],
            }


def _read_outcome(game: Any, seat: int) -> dict[str, Any]:
    rewards, infos = game.close()
    info = (infos or {}).get(seat, {})
    return {
        "reward": float((rewards or {}).get(seat, 0.0)),
        "reason": str(info.get("reason", "")),
        "invalid": bool(info.get("invalid_move", False)),
    }


def _render_messages(messages: Any, player: int, roles: dict[int, str]) -> str:
    """Render the messages that are new to a player, without the echo of its moves."""
    if isinstance(messages, str):
        return messages
    lines = []
    for sender, text, kind in messages:
        if sender == player and kind.name == "PLAYER_ACTION":
            continue
        lines.append(text if sender == -1 else f"[{roles.get(sender, f'Player {sender}')}] {text}")
    return "\n".join(lines)


def _choose_legal_move(game: Any, chat: list[dict[str, str]], text: str, rng: random.Random) -> str:
    """Choose a random legal move: one that the newest message lists, else one that looks like the game's examples.

    Every candidate is tried on a copy of the game. Raises: ValueError if none is legal.
    """
    chat.append({"role": "user", "content": text})
    listed = [
        move
        for line in text.splitlines()
        if "vailable" in line
        for move in _LISTED_MOVE.findall(line)
    ]
    seen = " ".join(message["content"] for message in chat)
    examples = sorted(set(_LISTED_MOVE.findall(seen)) - {"[GAME]"})
    listed = sorted(set(listed[:MAX_TRIES]))
    rng.shuffle(listed)
    for number in range(MAX_TRIES):
        if number < len(listed):
            move = listed[number]
        elif examples:
            move = _NUMBER.sub(lambda _: str(rng.randint(0, _MAX_NUMBER)), rng.choice(examples))
        else:
            break
        if _is_legal(game, move):
            return move
    raise ValueError(
        "the random opponent finds no legal move of this game; let a function or a model play: options.opponent"
    )


def _is_legal(game: Any, move: str) -> bool:
    """Check whether a copy of the game takes the move as a turn.

    The turn may be counted for another player: a poker round that ends hands the turn to the next dealer first.
    """
    trial = copy.deepcopy(game)
    before = _count_turns(trial)
    try:
        trial.step(action=move)
    except Exception:  # the game cannot read it
        return False
    turns, invalid_moves = _count_turns(trial)
    return turns > before[0] and invalid_moves == before[1]


def _count_turns(game: Any) -> tuple[int, int]:
    """Return the turns of all players and the number of players who lost by an invalid move."""
    infos = game.state.game_info.values()
    return sum(info["turn_count"] for info in infos), sum(info["invalid_move"] for info in infos)


def _describe_value(value: Any) -> Any:
    if isinstance(value, set | frozenset | Sequence):
        return sorted(value, key=str)
    return type(value).__name__
