"""Several environments in one: levels, labels, seeds, episodes, tools, turn limits, failures and held-out episodes."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from helpers.library import Echo, EchoEpisode, small_policy

import rl_core
from rl_core.curriculum.manager import CurriculumManager, expand_curriculum
from rl_core.environments import make_environment
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.environments.step_pool import StepPool
from rl_core.rollouts.collect import (
    GroupPlan,
    TrainingSeedOrders,
    build_group,
    collect_rollouts,
)
from rl_core.rollouts.episode_sequence import EpisodeRequest
from rl_core.rollouts.heldout_episodes import (
    draw_heldout_requests,
    draw_validation_requests,
    split_episodes,
)
from rl_core.settings import CurriculumStage, EvaluationSettings, SamplingSettings


class Talk(Echo):
    """Goes on until a limit ends the episode; has a tool."""

    name = "talk"
    levels = ("long",)

    @property
    def tools(self):
        def shout(text: str) -> str:
            """Shout a text."""
            return text.upper()

        return rl_core.Toolset([rl_core.Tool.from_function(shout)])

    def episode(self, seed, level):
        return TalkEpisode(seed, level)


class TalkEpisode(EchoEpisode):
    def act(self, text):
        return rl_core.Step(messages=[{"role": "user", "content": "more"}])


class Broken(Echo):
    name = "broken"

    def episode(self, seed, level):
        raise RuntimeError("no such world")


class Waiting(Echo):
    name = "waiting"
    blocking = True


def mix(*items, **named):
    return rl_core.MixtureEnvironment(list(items) or named)


def play(environment, levels, seed=3, group_size=2, failures=None, **sampling):
    policy = small_policy()
    options = {"max_completion_tokens": 20, **sampling}
    return collect_rollouts(
        environment,
        policy.backend(),
        policy.renderer,
        [EpisodeRequest(level, number) for level in levels for number in (1, 2)],
        group_size=group_size,
        sampling=SamplingSettings(**options),
        seed=seed,
        failures=failures,
    )


def test_levels_carry_labels_and_weights_multiply():
    part = rl_core.MixturePart
    mixture = mix(
        part(Echo(), label="a", weight=3.0, levels={"low": 1, "high": 2}),
        part(Echo(), label="b", levels={"high": 5}),
        part(Echo(), label="seen", weight=0.0),
    )
    assert mixture.levels == ("a/low", "a/high", "b/high", "seen/low", "seen/high")
    assert mixture.level_weights == pytest.approx({"a/low": 1.0, "a/high": 2.0, "b/high": 1.0})
    assert mixture.expand_levels({"a": 3, "b/high": 0.5}) == pytest.approx(
        {"a/low": 1.0, "a/high": 2.0, "b/high": 0.5}
    )
    assert [p.name for p in mixture.parts] == ["a", "b", "seen"]
    assert mixture.find_part("b/high").name == "b"


def test_a_curriculum_draws_levels_by_their_weights():
    mixture = mix(a=rl_core.MixturePart(Echo(), weight=3.0), b=Echo())
    manager = CurriculumManager((), mixture.level_weights)
    rng = np.random.default_rng(0)
    drawn = Counter(manager.draw_level(rng).partition("/")[0] for _ in range(4000))
    assert drawn["a"] / 4000 == pytest.approx(0.75, abs=0.03)
    (stage,) = expand_curriculum([CurriculumStage(name="one", levels={"b": 1.0})], mixture)
    assert stage.levels == {"b/low": 0.5, "b/high": 0.5}
    with pytest.raises(rl_core.SettingsError, match="'b/low' is named twice"):
        mixture.expand_levels({"b": 1.0, "b/low": 1.0})


def test_seeds_of_a_level_do_not_change_when_an_environment_is_added():
    def draw(mixture, order):
        seeds, rng = TrainingSeedOrders(mixture, 7), np.random.default_rng(0)
        drawn = {}
        for level in order:
            drawn.setdefault(level, []).append(seeds.draw_seed(level, rng))
        return drawn

    alone = draw(mix(a=Echo(), c=Echo()), ["a/low"] * 4)["a/low"]
    among = draw(mix(a=Echo(), b=Echo(), c=Echo()), ["b/low", "a/low", "c/high", "a/low"] * 2)
    assert among["a/low"] == alone and len(set(alone)) == 4


def test_the_position_in_the_seeds_is_resumed():
    mixture, rng = mix(a=Echo(), b=Echo()), np.random.default_rng(0)
    seeds = TrainingSeedOrders(mixture, 7)
    first = [seeds.draw_seed("a/low", rng) for _ in range(3)]
    resumed = TrainingSeedOrders(mixture, 7)
    resumed.load_state_dict(seeds.state_dict())
    assert resumed.state_dict() == {"a/low": {"draws": 3}}
    following = [resumed.draw_seed("a/low", rng) for _ in range(3)]
    assert following == [seeds.draw_seed("a/low", rng) for _ in range(3)]
    assert not set(first) & set(following)


def test_an_environment_plays_the_same_episodes_whatever_is_beside_it():
    alone = play(mix(a=Echo(), z=Talk()), ["a/low"])
    groups = play(mix(b=Echo(), a=Echo()), ["b/low", "a/low"])
    among = groups[2:]
    for old, new in zip(alone, among, strict=True):
        for before, after in zip(old.rollouts, new.rollouts, strict=True):
            assert before.completion_ids == after.completion_ids
            assert before.trajectory.environment == "a" and before.trajectory.level == "a/low"
    same_seeds = [group.rollouts[0].completion_ids for group in groups[:2]]
    assert same_seeds != [group.rollouts[0].completion_ids for group in among]


def test_each_environment_has_its_turn_limit_and_blocking():
    mixture = mix(
        rl_core.MixturePart(Talk(), label="short", max_turns=1),
        rl_core.MixturePart(Talk(), label="free", max_turns=50),
        rl_core.MixturePart(Waiting(), label="slow"),
    )
    renderer, sampling = small_policy().renderer, SamplingSettings(max_turns=2)
    with StepPool(2, 10.0) as pool:
        groups = [
            build_group(
                mixture,
                renderer,
                GroupPlan(EpisodeRequest(level, 1), 0),
                1,
                sampling,
                pool,
                0,
                print,
            )[0]
            for level in ("short/long", "free/long", "slow/low")
        ]
        # 50 is capped by the stage's 2.
        assert [sequence._max_turns for sequence in groups] == [1, 2, 2]
        assert [sequence._pool for sequence in groups] == [None, None, pool]
    assert mixture.blocking and not mixture.find_part("free/long").blocking
    (slow, _) = play(mixture, ["slow/low"], group_size=1)
    assert slow.rollouts[0].trajectory.environment == "slow"


def test_tools_of_the_chat_template_are_those_of_the_episodes_environment(monkeypatch):
    from rl_core.rollouts import collect

    shown = []
    original = collect.enable_native_tools
    monkeypatch.setattr(
        collect,
        "enable_native_tools",
        lambda renderer, environment: (
            shown.append((environment.name, tuple(environment.tools.tools)))
            or original(renderer, environment)
        ),
    )
    play(mix(a=Echo(), t=Talk()), ["a/low", "t/long"], group_size=1)
    assert {("a", ()), ("t", ("shout",))} <= set(shown)
    assert tuple(mix(a=Echo(), t=Talk()).tools.tools) == ("shout",)


def test_held_out_episodes_have_equal_shares_by_environment():
    mixture = mix(a=Echo(), t=Talk())
    assert split_episodes(mixture, ["a/low", "a/high", "t/long"], 11) == [3, 3, 5]
    plain = Echo()
    assert split_episodes(plain, ["low", "high"], 11) == [6, 5]
    settings = EvaluationSettings(episodes=9, levels=("t", "a/low"))
    requests = draw_heldout_requests(mixture, settings, 0)
    assert Counter(request.level for request in requests) == {"t/long": 5, "a/low": 4}
    more = draw_heldout_requests(
        mix(b=Echo(), a=Echo(), t=Talk()), dataclasses.replace(settings, episodes=9), 0
    )
    assert requests == more
    drawn = draw_heldout_requests(mixture, EvaluationSettings(episodes=9), 0)
    # 9 = 5 + 4 by environment, 5 = 3 + 2 by level; by level alone it would be 3 each.
    assert Counter(r.level for r in drawn) == {"a/low": 3, "a/high": 2, "t/long": 4}
    with pytest.raises(rl_core.SettingsError, match="each environment needs its share"):
        draw_heldout_requests(mixture, EvaluationSettings(episodes=2), 0)
    validation = draw_validation_requests(mixture, 4, ["t", "t/long", "a/low"], 0, requests)
    assert Counter(request.level for request in validation) == {"t/long": 2, "a/low": 2}
    assert not set(validation) & set(requests)


def test_an_environment_that_always_fails_stops_the_run_though_its_share_is_small():
    mixture = mix(good=Echo(), bad=Broken())
    monitor = EpisodeFailureMonitor(0.5)
    levels = ["good/low"] * 9 + ["bad/low"] * 4
    for _ in range(6):
        play_counts(monitor, mixture, levels)
    # 28 > 0.5 * max(28, 50); over everything it is 28 of 791.
    with pytest.raises(rl_core.EnvironmentFault, match=r"^28 of the newest 28 episodes of 'bad'"):
        play_counts(monitor, mixture, levels)
    lenient = EpisodeFailureMonitor(1.0)
    for _ in range(20):
        play_counts(lenient, mixture, levels)
    assert lenient.total == 80


def play_counts(monitor, mixture, levels):
    """Count one collection in which every episode of 'bad' failed."""
    from rl_core.environments.failed_episodes import FailedEpisode
    from rl_core.rollouts.collect import record_failures
    from rl_core.types import Trajectory

    monitor.watch_environments(mixture)
    failed = [
        FailedEpisode(Trajectory("bad", level, "", 1, "", ""), [], "its reset", "boom")
        for level in levels
        if level.startswith("bad/")
    ]
    # Many good episodes, so that the share over everything stays small.
    record_failures(failed, [*levels, *["good/low"] * 100], monitor)


def test_the_failures_of_each_environment_are_resumed():
    mixture = mix(good=Echo(), bad=Broken())
    monitor = EpisodeFailureMonitor(0.5)
    for _ in range(5):
        play_counts(monitor, mixture, ["bad/low"] * 4)
    restored = EpisodeFailureMonitor(0.5)
    restored.watch_environments(mixture)
    restored.load_state_dict(monitor.state_dict())
    assert restored.state_dict() == monitor.state_dict()


def test_played_failures_name_the_environment():
    failures = EpisodeFailureMonitor(1.0)
    groups = play(mix(good=Echo(), bad=Broken()), ["good/low", "bad/low"], failures=failures)
    assert [len(group.rollouts) for group in groups] == [2, 2, 0, 0]
    assert failures.total == 4


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "is empty"),
        ([Echo(), Echo()], r"1\.label: two environments are named 'echo'"),
        ({"a": Echo(), "A": Echo()}, "two environments are named 'A'"),
        ({"a b": Echo()}, "label: 'a b' must be"),
        ({"a/b": Echo()}, "label: 'a/b' must be"),
        ({"": 3}, "is not an rl_core.Environment"),
        ([Echo], "is not an rl_core.Environment"),
        ([rl_core.MixturePart(Echo(), weight=0.0)], "every environment has weight 0"),
        ([rl_core.MixturePart(Echo(), weight=-1.0)], "weight: -1.0 must be at least 0"),
        ([rl_core.MixturePart(Echo(), levels={"middle": 1.0})], "levels.middle: .* no such level"),
        ([rl_core.MixturePart(Echo(), levels={"low": 0.0})], "levels.low: 0 must be above 0"),
        ([rl_core.MixturePart(Echo(), rewards={"task": 0.0})], "no reward has a weight"),
        ([mix(a=Echo())], "a mixture within a mixture"),
        ([{"name": "arithmetik"}], "did you mean 'arithmetic'"),
        ([{"name": "agent"}], "'agent' is not supported among several environments"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(items, message):
    with pytest.raises(rl_core.SettingsError, match=message):
        rl_core.MixtureEnvironment(items)


def test_a_mixture_of_settings_is_made_by_name():
    options = {
        "environments": [
            {"name": "arithmetic", "label": "sums", "levels": {"easy": 1}},
            {"name": "maze", "options": {"max_moves": 9}},
        ]
    }
    mixture = make_environment("mixture", options)
    assert mixture.levels[0] == "sums/easy" and mixture.levels[1] == "maze/easy"
    demonstration = mixture.demonstration(5, "sums/easy")
    inner = make_environment("arithmetic").demonstration(5, "easy")
    assert demonstration.level == "sums/easy" and demonstration.messages == inner.messages
    assert mixture.question(5, "sums/easy") == make_environment("arithmetic").question(5, "easy")
    assert mixture.held_out("maze/easy").by == make_environment("maze").held_out("easy").by
    with pytest.raises(rl_core.SettingsError, match="did you mean 'sums/easy'"):
        mixture.episode(1, "sums/esy")


def test_each_environment_prepares_its_data_in_its_folder(tmp_path):
    class Rows(Echo):
        name = "rows"

        def prepare(self, folder, seed):
            (folder / "rows.txt").write_text(str(seed))
            return {"rows": 1}

    mixture = mix(a=Rows(), b=Rows(), c=Echo())
    assert mixture.prepare(tmp_path, 4) == {"a": {"rows": 1}, "b": {"rows": 1}}
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.txt"))
    assert files == ["environments/a/rows.txt", "environments/b/rows.txt"]
    assert not (tmp_path / "environments" / "c").exists()


def test_demonstrations_come_by_weight_in_a_fixed_order():
    from tasks.stages.prepare_data import _iter_training_seeds

    mixture = mix(
        a=rl_core.MixturePart(Echo(), weight=2.0, levels={"low": 1.0}),
        b=rl_core.MixturePart(Echo(), levels={"high": 1.0}),
        seen=rl_core.MixturePart(Echo(), weight=0.0),
    )
    drawn = [
        level
        for (level, _), _ in zip(
            _iter_training_seeds(mixture, mixture.level_weights), range(6), strict=False
        )
    ]
    # Next is the level with the smallest (count + 1) / weight: 1/2, 2/2 (first of two), 1/1, 3/2, 4/2, 2/1.
    assert drawn == ["a/low", "a/low", "b/high", "a/low", "a/low", "b/high"]


def test_a_served_episode_is_of_its_environment():
    from posttrain.serving.environment_sessions import EnvironmentSessions
    from posttrain.serving.request_bodies import EpisodeBody
    from rl_core.settings import EnvironmentSettings

    options = {
        "environments": [{"name": "arithmetic", "label": "sums", "max_turns": 1}, {"name": "maze"}]
    }
    sessions = EnvironmentSessions(EnvironmentSettings(name="mixture", options=options))
    try:
        body = EpisodeBody(name="mixture", level="sums/easy", seed=3)
        renderer = small_policy().renderer
        session = sessions.open_session(body, renderer, SamplingSettings(), 0, 0, 512)
        assert session._build_trajectory().environment == "sums"
        assert session._max_turns == 1 and session.messages == (
            make_environment("arithmetic").episode(3, "easy").reset()
        )
        session.close()
    finally:
        sessions.close_pool()
