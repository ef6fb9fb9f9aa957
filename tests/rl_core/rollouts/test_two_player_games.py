"""Games of two players: contexts, trained tokens, rewards, swaps of weights, limits, faults, and TextArena's games."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator

import pytest
from helpers.adapters import stand_in
from helpers.two_player import SAMPLING, ScriptedBackend, build_policy

from rl_core.environments import make_environment
from rl_core.environments.failed_episodes import FailedEpisode
from rl_core.environments.kuhn_poker import KuhnPoker, KuhnPokerGame
from rl_core.environments.two_player import TwoPlayerEnvironment
from rl_core.errors import DataError, EnvironmentFault, SettingsError
from rl_core.inference.sampling import RolloutBackend
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.replay import replay_episode
from rl_core.rollouts.two_player_games import (
    CURRENT_PLAYER,
    RANDOM_PLAYER,
    GamePlan,
    PlayedGame,
    TwoPlayerResult,
    play_two_player_games,
)
from rl_core.settings import SamplingSettings

fake = stand_in("textarena")


@pytest.fixture(scope="module")
def policy():
    return build_policy()


def find_seed(*cards: str) -> int:
    environment = KuhnPoker()
    return next(s for s in range(999) if environment.create_game(s, "standard").cards == cards)


def play(
    policy,
    choose: Callable[[str, str], str],
    plans,
    *,
    environment: TwoPlayerEnvironment | None = None,
    sampling: SamplingSettings = SAMPLING,
    failed: list | None = None,
    max_length: int = 64,
) -> tuple[TwoPlayerResult, ScriptedBackend]:
    backend = ScriptedBackend(policy, choose, max_length)

    @contextlib.contextmanager
    def use_player(name: str) -> Iterator[None]:
        backend.weights = name
        yield
        backend.weights = CURRENT_PLAYER

    environment, failed = environment or KuhnPoker(), [] if failed is None else failed
    result = play_two_player_games(
        environment,
        backend,
        policy.renderer,
        plans,
        sampling=sampling,
        seed=3,
        policy_version=7,
        use_player=use_player,
        on_failure=failed.append,
    )
    check_replays(environment, result, failed)
    return result, backend


def check_replays(environment: TwoPlayerEnvironment, result: TwoPlayerResult, failed: list) -> None:
    """Replay every seat and failure from its record."""
    played = [rollout.trajectory for game in result.games for rollout in game.rollouts.values()]
    for episode in [*played, *failed]:
        if isinstance(episode, FailedEpisode) and "forfeit()" in episode.error:
            continue  # what the player to move did is not in the record
        recorded = type(episode).from_json(json.loads(json.dumps(episode.to_json())))
        assert replay_episode(environment, recorded).differences == []


def plan(seed: int, *players: str, recorded=(0, 1), number: int = 0, level="standard") -> GamePlan:
    first, second = players
    return GamePlan(EpisodeRequest(level, seed), 0, number, (first, second), recorded)


def test_both_seats_of_a_game_against_itself_are_rollouts_of_their_own_context(policy) -> None:
    """K against Q: pass, bet, call. Each rollout holds its player's tokens alone."""
    moves = {"card K first": "pass", "card Q second they pass": "bet", "they bet": "bet"}

    def choose(weights: str, text: str) -> str:
        last = max(moves, key=lambda shown: text.rfind(shown) + len(shown) * (shown in text))
        return moves[last]

    result, backend = play(policy, choose, [plan(find_seed("K", "Q"), "current", "current")])
    (game,) = result.games
    assert game.outcome.rewards == (2.0, -2.0) and game.num_moves == 3
    assert backend.runs == [("current", 1)] * 3 and result.num_weight_swaps == 0
    renderer = policy.renderer
    first, second = game.rollouts[0], game.rollouts[1]
    assert first.prompt_ids == renderer.prompt_ids([{"role": "user", "content": "card K first"}])
    own = [renderer.action_ids("pass"), renderer.action_ids("bet")]
    seen = renderer.observation_ids([{"role": "user", "content": "they bet"}])
    assert first.completion_ids == [*own[0], *seen, *own[1]]
    assert first.loss_mask == [True] * len(own[0]) + [False] * len(seen) + [True] * len(own[1])
    assert first.sampler_logprobs == [-0.5 if counts else 0.0 for counts in first.loss_mask]
    assert second.prompt_ids == renderer.prompt_ids(
        [{"role": "user", "content": "card Q second they pass"}]
    )
    assert second.completion_ids == renderer.action_ids("bet") and all(second.loss_mask)
    for rollout, player, reward in ((first, 0, 2.0), (second, 1, -2.0)):
        trajectory = rollout.trajectory
        assert (rollout.reward, trajectory.success, rollout.is_truncated) == (
            reward,
            reward > 0,
            False,
        )
        assert trajectory.kind == f"player {player}" and trajectory.policy_version == 7
        assert trajectory.rewards == {"task": reward}
        assert trajectory.info == {
            "player": player,
            "reason": "player 0 wins: the higher card",
            "illegal_move": False,
            "cards": "K Q",
            "moves": ["pass", "bet", "bet"],
            "opponent": "current",
            "game_moves": ["pass", "bet", "bet"],
        }
    assert [turn.action for turn in first.trajectory.turns] == ["pass", "bet"]
    assert first.trajectory.turns[0].observation == "they bet"


def test_a_replay_says_what_differs_in_a_game_and_closes_it(policy) -> None:
    class Other(KuhnPokerGame):
        num_closed = 0

        def take_messages(self, player: int):
            messages = super().take_messages(player)
            return [{**m, "content": m["content"].replace("they bet", "raise")} for m in messages]

        def close(self) -> None:
            Other.num_closed += 1

    class Others(KuhnPoker):
        def create_game(self, seed: int, level: str):
            return Other(("K", "Q") if seed == find_seed("K", "J") else ("Q", "J"))

    def choose(weights: str, text: str) -> str:
        return "pass" if "first" in text and "they" not in text else "bet"

    result, _ = play(policy, choose, [plan(find_seed("K", "J"), "current", "old")])
    first, second = (result.games[0].rollouts[seat].trajectory for seat in (0, 1))
    assert replay_episode(Others(), first).differences == [
        "observation of turn 1: recorded they bet, now raise",
    ]
    assert replay_episode(Others(), second).differences == [
        "prompt: recorded card J second they pass, now card Q second they pass",
    ]
    assert Other.num_closed == 2


def test_an_opponent_is_played_with_its_weights_and_leaves_no_token(policy) -> None:
    seed = find_seed("Q", "K")
    result, _ = play(
        policy,
        lambda weights, text: "pass" if weights == "current" else "bet",
        [
            plan(seed, "current", "old", recorded=(0,)),
            plan(seed, "old", "current", recorded=(1,), number=1),
        ],
    )
    as_first, as_second = result.games
    assert list(as_first.rollouts) == [0] and list(as_second.rollouts) == [1]
    assert as_first.outcome.rewards == (-1.0, 1.0)  # pass, bet, fold
    assert as_second.outcome.rewards == (1.0, -1.0)  # bet, fold
    assert as_first.rollouts[0].trajectory.info["opponent"] == "old"
    bet = policy.renderer.action_ids("bet")[0]
    assert bet not in as_first.rollouts[0].completion_ids[:1]
    assert [turn.action for turn in as_second.rollouts[1].trajectory.turns] == ["pass"]
    assert sum(as_second.rollouts[1].loss_mask) == len(policy.renderer.action_ids("pass"))


def test_weights_are_swapped_by_snapshot_and_round_not_by_game(policy) -> None:
    seeds = range(40)
    plans = [
        plan(seed, *players, recorded=(players.index("current"),), number=number)
        for seed in seeds
        for number, players in enumerate(
            [("current", "a"), ("a", "current"), ("current", "b"), ("b", "current")]
        )
    ]
    result, backend = play(policy, lambda weights, text: "pass", plans)
    # A snapshot answers in the games that the policy has opened, and opens its own, in one run.
    assert result.num_weight_swaps == 2
    assert backend.runs == [("current", 80), ("a", 80), ("b", 80), ("current", 80)]
    assert len(result.games) == 160


def test_random_players_need_no_run(policy) -> None:
    plans = [plan(seed, RANDOM_PLAYER, "current", recorded=(1,)) for seed in range(30)]
    result, backend = play(policy, lambda weights, text: "bet", plans)
    assert all(name == "current" for name, _ in backend.runs) and result.num_weight_swaps == 0
    openings = {game.rollouts[1].trajectory.prompt.partition("they ")[2] for game in result.games}
    assert openings == {"pass", "bet"}


def test_illegal_moves_lose_and_the_other_player_may_have_no_turn(policy) -> None:
    seed = find_seed("K", "J")
    result, _ = play(policy, lambda weights, text: "raise", [plan(seed, "current", "current")])
    (game,) = result.games
    assert game.outcome.rewards == (-2.0, 2.0) and game.outcome.illegal_player == 0
    assert list(game.rollouts) == [0]  # player 1 never moved
    turn = game.rollouts[0].trajectory.turns[0]
    assert turn.is_error and turn.info["illegal_move"] and turn.reward == -2.0
    assert turn.info["reason"] == "player 0 loses: illegal move 'raise': neither pass nor bet"


@pytest.mark.parametrize(
    ("room", "max_turns", "reason", "stop_reason"),
    [
        (-1, 4, "no complete move", "max_tokens"),  # not even for the first move
        (1, 4, "no tokens left", "max_tokens"),  # not for what the other player did
        (20, 1, "no turns left", "max_turns"),
    ],
)
def test_a_player_at_its_limit_loses(policy, room, max_turns, reason, stop_reason) -> None:
    """K passes, is bet at, and has no tokens or turns for an answer."""
    tokens = len(policy.renderer.action_ids("pass")) + room
    sampling = SamplingSettings(max_completion_tokens=tokens, max_turns=max_turns)

    def choose(weights: str, text: str) -> str:
        return "pass" if "first" in text and "they" not in text else "bet"

    result, _ = play(
        policy, choose, [plan(find_seed("K", "J"), "current", "current")], sampling=sampling
    )
    (game,) = result.games
    rollout = game.rollouts[0]
    assert game.outcome.rewards == (-2.0, 2.0) and reason in game.outcome.reason
    assert (rollout.reward, rollout.is_truncated) == (-2.0, True)
    assert rollout.trajectory.stop_reason == stop_reason
    assert rollout.num_episode_tokens <= sampling.max_completion_tokens
    assert reason in rollout.trajectory.info["reason"]
    if 1 in game.rollouts:
        assert (game.rollouts[1].reward, game.rollouts[1].is_truncated) == (2.0, False)


def test_an_action_is_cut_to_the_tokens_that_its_player_has_left(policy) -> None:
    """K passes, is bet at, and has one token for its answer: the first of `bet`, whose game is lost."""
    renderer = policy.renderer
    seen = renderer.observation_ids([{"role": "user", "content": "they bet"}])
    tokens = len(renderer.action_ids("pass")) + len(seen) + 1

    def choose(weights: str, text: str) -> str:
        return "pass" if "first" in text and "they" not in text else "bet"

    result, _ = play(
        policy,
        choose,
        [plan(find_seed("K", "J"), "current", "current")],
        sampling=SamplingSettings(max_completion_tokens=tokens, max_turns=4),
    )
    (game,) = result.games
    rollout = game.rollouts[0]
    assert "no complete move" in game.outcome.reason and rollout.reward == -2.0
    assert rollout.completion_ids[-1] == renderer.action_ids("bet")[0]
    assert len(rollout.completion_ids) == tokens and rollout.is_truncated


def test_a_prompt_without_room_is_refused(policy) -> None:
    with pytest.raises(DataError, match="leaves no room in a context of 5"):
        play(policy, lambda *_: "bet", [plan(0, "current", "current")], max_length=5)


class FailingGame(KuhnPokerGame):
    def play(self, text: str) -> None:
        if len(self.history) == 1:
            raise OSError("the table is gone")
        super().play(text)

    def close(self) -> None:
        raise OSError("the table is gone, too")


class FailingPoker(KuhnPoker):
    def create_game(self, seed: int, level: str):
        cards = super().create_game(seed, level).cards
        return FailingGame(cards) if seed % 2 else KuhnPokerGame(cards)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_a_game_that_fails_leaves_the_others(policy, monkeypatch, is_blocking, caplog) -> None:
    monkeypatch.setattr(FailingPoker, "blocking", is_blocking)
    failed: list = []
    plans = [plan(seed, "current", "current") for seed in range(4)]
    result, _ = play(policy, lambda *_: "bet", plans, environment=FailingPoker(), failed=failed)
    assert [game.outcome is None for game in result.games] == [False, True, False, True]
    assert [sorted(game.rollouts) for game in result.games] == [[0, 1], [], [0, 1], []]
    assert len(failed) == 4 and all("the table is gone" in row.error for row in failed)
    assert failed[0].failed_in == "move 2 of the game" and failed[0].trajectory.turns
    assert "its close failed" in caplog.text


class BrokenPokerGame(KuhnPokerGame):
    """A game whose message, description or forfeit breaks the protocol."""

    broken = ""

    def take_messages(self, player: int):
        messages = super().take_messages(player)
        return [{"role": "tool"}] if self.broken == f"message {player}" else messages

    def forfeit(self, reason: str) -> None:
        if self.broken != "forfeit":
            super().forfeit(reason)

    def describe(self):
        if self.broken == "describe":
            raise KeyError("cards")
        return super().describe()


class BrokenPoker(KuhnPoker):
    def create_game(self, seed: int, level: str):
        return BrokenPokerGame(super().create_game(seed, level).cards)


@pytest.mark.parametrize("players", [("current", "current"), ("current", "old")])
@pytest.mark.parametrize(
    ("broken", "error"),
    [
        ("message 0", "no text as its content"),
        ("message 1", "no text as its content"),
        ("describe", "KeyError: 'cards'"),
        ("forfeit", "the game's forfeit() has not ended it"),
    ],
)
def test_a_game_that_breaks_the_protocol_is_no_loss_of_a_player(
    policy, monkeypatch, players, broken, error
) -> None:
    monkeypatch.setattr(BrokenPokerGame, "broken", broken)
    failed: list = []
    recorded = (0, 1) if players[1] == CURRENT_PLAYER else (0,)
    result, _ = play(
        policy,
        lambda *_: "bet",
        [plan(0, *players, recorded=recorded)],
        environment=BrokenPoker(),
        failed=failed,
        sampling=SamplingSettings(max_completion_tokens=1 if broken == "forfeit" else 24),
    )
    assert [(game.outcome, game.rollouts) for game in result.games] == [(None, {})]
    assert [row.trajectory.kind for row in failed] == [f"player {seat}" for seat in recorded]
    assert all(error in row.error for row in failed)


def test_a_game_that_never_ends_is_a_fault(policy) -> None:
    class Endless(KuhnPokerGame):
        def play(self, text: str) -> None:
            pass

    class EndlessPoker(KuhnPoker):
        def create_game(self, seed: int, level: str):
            return Endless(("K", "Q"))

    failed: list = []
    play(
        policy,
        lambda *_: "bet",
        [plan(0, RANDOM_PLAYER, "current", recorded=(1,))],
        environment=EndlessPoker(),
        failed=failed,
    )
    assert "has not ended after 4096 moves" in failed[0].error


def sample_games(policy, plans, backend: RolloutBackend) -> list[PlayedGame]:
    return play_two_player_games(
        KuhnPoker(),
        backend,
        policy.renderer,
        plans,
        sampling=SAMPLING,
        seed=11,
        policy_version=0,
        use_player=lambda name: contextlib.nullcontext(),
        on_failure=lambda episode: None,
    ).games


def test_a_game_does_not_depend_on_the_games_beside_it(policy) -> None:
    plans = [plan(seed, "current", "current", number=seed) for seed in range(12)]
    together = sample_games(policy, plans, policy.backend())
    for index in (0, 5, 11):
        (alone,) = sample_games(policy, [plans[index]], policy.backend())
        for player, rollout in alone.rollouts.items():
            other = together[index].rollouts[player]
            assert rollout.completion_ids == other.completion_ids
            assert rollout.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_another_number_gives_other_random_numbers(policy) -> None:
    plans = [plan(3, "current", "current", number=number) for number in range(6)]
    games = sample_games(policy, plans, policy.backend())
    assert len({tuple(game.rollouts[0].completion_ids) for game in games}) > 3


def test_textarena_plays_both_seats_of_a_game_through_the_same_code(policy, fake: None) -> None:
    environment = make_environment("textarena", {"game": "Nim-v0", "workers": 1})
    sampling = SamplingSettings(max_completion_tokens=400, max_turns=8)
    texts: list[str] = []

    def choose(weights: str, text: str) -> str:
        texts.append(text)
        return "[take 1]"

    result, _ = play(
        policy,
        choose,
        [plan(0, "current", "old", recorded=(0, 1), level="default")],
        environment=environment,
        sampling=sampling,
        max_length=4000,
    )
    (game,) = result.games
    assert game.outcome.rewards == (-1.0, 1.0) and game.num_moves == 4  # player 1 takes the last
    assert game.rollouts[0].trajectory.info["moves"] == ["[take 1]"] * 4
    assert "Player 1 has won" in game.rollouts[0].trajectory.info["reason"]
    assert [len(game.rollouts[player].trajectory.turns) for player in (0, 1)] == [2, 2]
    assert "You are Player 0" in texts[0] and "You are Player 1" in texts[1]
    assert "You are Player 0" not in texts[1]


def test_textarena_says_which_moves_are_illegal(policy, fake: None) -> None:
    environment = make_environment("textarena", {"game": "Nim-v0", "workers": 1})
    result, _ = play(
        policy,
        lambda *_: "nothing",
        [plan(0, "current", RANDOM_PLAYER, recorded=(0,), level="default")],
        environment=environment,
        sampling=SamplingSettings(max_completion_tokens=400, max_turns=8),
        max_length=4000,
    )
    (game,) = result.games
    assert game.outcome.rewards == (-1.0, 1.0) and game.outcome.illegal_player == 0
    turns = game.rollouts[0].trajectory.turns
    assert len(turns) == 2 and "attempted an invalid move" in turns[0].observation
    assert turns[1].info["reason"].startswith("Invalid Move")


def test_textarena_with_random_players_and_games_of_other_numbers(policy, fake: None) -> None:
    environment = make_environment("textarena", {"game": "Nim-v0", "workers": 1})
    game = environment.create_game(1, "default")  # type: ignore[attr-defined]
    game.begin()
    rng = random.Random(0)
    moves = set()
    while game.outcome is None:
        game.take_messages(game.to_move)
        move = game.choose_random_move(rng)
        moves.add(move)
        game.play(move)
    assert moves <= {"[take 1]", "[take 2]"} and sum(game.outcome.rewards) == 0
    alone = make_environment("textarena", {"game": "GuessTheNumber-v0", "workers": 1})
    with pytest.raises(SettingsError, match="has 1 players here; only games of two"):
        alone.create_game(0, "default")  # type: ignore[attr-defined]
    with pytest.raises(EnvironmentFault, match="finds no legal move"):
        riddle = make_environment("textarena", {"game": "Riddle-v0", "workers": 1})
        stuck = riddle.create_game(0, "default")  # type: ignore[attr-defined]
        stuck.begin()
        stuck.choose_random_move(rng)
