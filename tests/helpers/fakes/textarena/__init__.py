"""The part of textarena 0.7.4 that the adapter uses: a guessing game and Nim with its states and messages."""

import os
import random
import re
from enum import Enum, auto


class ObservationType(Enum):
    PROMPT = auto()
    PLAYER_ACTION = auto()
    GAME_ACTION_DESCRIPTION = auto()
    GAME_MESSAGE = auto()
    GAME_BOARD = auto()
    GAME_ADMIN = auto()


class State:
    """The state of a game: TwoPlayerState and SinglePlayerState in one."""

    def __init__(self, num_players, wanted, seed):
        assert num_players == wanted, (
            f"The number of players has to be {wanted}, received {num_players}"
        )
        if seed is not None:
            random.seed(seed)
        self.num_players, self.current_player_id = num_players, 0

    def reset(self, game_state, prompt):
        self.game_state, self.done, self.rewards = game_state, False, None
        self.role_mapping = {pid: f"Player {pid}" for pid in range(self.num_players)}
        self.error_count, self.made_invalid_move = 0, False
        self.game_info = {
            pid: {"role": f"Player {pid}", "invalid_move": False, "turn_count": 0}
            for pid in range(self.num_players)
        }
        self.observations = {pid: [] for pid in range(self.num_players)}
        for pid in range(self.num_players):
            self.add_observation(prompt(pid), ObservationType.PROMPT, to_id=pid)

    def add_observation(self, message, kind, from_id=-1, to_id=-1):
        for pid in range(self.num_players) if to_id == -1 else [to_id]:
            self.observations[pid].append((from_id, message, kind))

    def set_outcome(self, rewards, reason):
        self.rewards, self.done = rewards, True
        for pid in rewards:
            self.game_info[pid]["reason"] = reason

    def set_invalid_move(self, reason):
        player = self.current_player_id
        if self.error_count < 1:
            self.error_count, self.made_invalid_move = 1, True
            text = f"Player {player} attempted an invalid move. Reason: {reason}"
            self.add_observation(text, ObservationType.GAME_ADMIN)
            return
        rewards = {pid: -1 if pid == player else 1 for pid in range(self.num_players)}
        self.set_outcome(rewards, f"Invalid Move: {reason}")
        self.game_info[player]["invalid_move"] = True

    def step(self):
        if not self.made_invalid_move:
            self.error_count = 0
            self.game_info[self.current_player_id]["turn_count"] += 1
            if not self.done:
                self.current_player_id = (self.current_player_id + 1) % self.num_players
        self.made_invalid_move = False
        return self.done, {}


class Game:
    def get_observation(self):
        player = self.state.current_player_id
        messages, self.state.observations[player] = self.state.observations[player], []
        return player, messages

    def close(self):
        return self.state.rewards, self.state.game_info


class GuessTheNumber(Game):
    def __init__(self, max_number=20):
        self.max_number = max_number

    def reset(self, num_players, seed=None):
        self.state = State(num_players, 1, seed)
        number = random.randint(1, self.max_number)
        self.state.reset(
            {"game_number": number}, lambda pid: f"Guess from 1 to {self.max_number} as [5]."
        )

    def step(self, action):
        self.state.add_observation(action, ObservationType.PLAYER_ACTION, from_id=0)
        match, number = re.search(r"\[(\d+)\]", action), self.state.game_state["game_number"]
        if match is None:
            self.state.set_invalid_move("no number in brackets.")
        elif int(match[1]) == number:
            self.state.set_outcome({0: 1}, "Congratulations!")
        elif "chance" in action:
            self.state.add_observation(os.urandom(8).hex(), ObservationType.GAME_MESSAGE)
        else:
            hint = "lower" if int(match[1]) > number else "higher"
            self.state.add_observation(f"The number is {hint}.", ObservationType.GAME_MESSAGE)
        return self.state.step()


class Nim(Game):
    """Players take 1 or 2 objects in turn; who takes the last one wins."""

    def __init__(self, pile=4, lists_moves=True):
        self.pile, self.lists_moves = pile, lists_moves

    def reset(self, num_players, seed=None):
        self.state = State(num_players, 2, seed)
        self.state.reset(
            {"pile": self.pile}, lambda pid: f"You are Player {pid} in Nim. Take as '[take 1]'."
        )
        self._show()

    def _show(self):
        moves = [f"'[take {n}]'" for n in (1, 2) if n <= self.state.game_state["pile"]]
        listed = f" Available Moves: {', '.join(moves)}" if self.lists_moves else ""
        text = f"Pile: {self.state.game_state['pile']}.{listed}"
        self.state.add_observation(text, ObservationType.GAME_BOARD)

    def step(self, action):
        state, player = self.state, self.state.current_player_id
        state.add_observation(action, ObservationType.PLAYER_ACTION, from_id=player)
        match = re.search(r"\[take (\d+)\]", action)
        if match is None or not 1 <= int(match[1]) <= min(2, state.game_state["pile"]):
            state.set_invalid_move("take 1 or 2.")
        else:
            state.game_state["pile"] -= int(match[1])
            if not state.game_state["pile"]:
                state.set_outcome({player: 1, 1 - player: -1}, f"Player {player} has won!")
        self._show()
        return state.step()


class Rounds(Game):
    """Two rounds of one bid each; the end of a round hands the turn to the next dealer before it is counted."""

    def reset(self, num_players, seed=None):
        self.state = State(num_players, 2, seed)
        self.state.reset({"round": 0}, lambda pid: "Your available actions are: '[bid]'")

    def step(self, action):
        state = self.state
        if "[bid]" not in action:
            state.set_invalid_move("bid.")
            return state.step()
        state.game_state["round"] += 1
        state.current_player_id = 1 - state.current_player_id
        if state.game_state["round"] == 2:
            state.set_outcome({0: 1, 1: -1}, "Player 0 has won!")
        return state.step()


class Riddle(Game):
    """A game whose legal moves cannot be guessed."""

    def reset(self, num_players, seed=None):
        self.state = State(num_players, 2, seed)
        self.state.reset({}, lambda pid: "Say the word.")

    def step(self, action):
        if action != "friend":
            self.state.set_invalid_move("no.")
        return self.state.step()


def make(env_id, **options):
    from textarena.envs.registration import ENV_REGISTRY

    return ENV_REGISTRY[env_id].make(**options)
