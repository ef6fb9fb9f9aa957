"""Callbacks of the loop: when they are called, with which arguments, and how they stop or fail."""

import pytest
from helpers.library import length, settings, small_policy

import rl_core


def train_policy(*callbacks, **options):
    return rl_core.grpo(
        small_policy(),
        prompts=["say e"],
        heldout_prompts=["e", "f"],
        reward=length,
        callbacks=callbacks,
        settings=settings(**options),
    )


def test_callbacks_see_iterations_and_evaluations_in_order():
    observed, evaluated = [], []

    class Both:
        def on_evaluation(self, event):
            evaluated.append((event.iteration, event.metrics["eval/reward_mean"]))

    training = train_policy(
        lambda event: observed.append((event.kind, event.iteration, event.step)),
        Both(),
        eval_every=2,
    )
    training.run()
    assert observed == [
        ("iteration", 1, 1),
        ("iteration", 2, 2),
        ("evaluation", 2, 2),
        ("iteration", 3, 3),
        ("evaluation", 3, 3),
    ]
    assert [iteration for iteration, _ in evaluated] == [2, 3]
    assert evaluated[0][1] == training.metrics()["eval/reward_mean"].loc[2]


def test_a_callback_stops_and_the_reason_is_reported():
    def stop_after_two(event):
        if event.kind == "iteration" and event.iteration == 2:
            event.stop("two are enough")

    training = train_policy(stop_after_two, iterations=9)
    outcome = training.run()
    assert (outcome.iterations, outcome.stop_reason) == (2, "two are enough")
    assert training.run() is outcome


def test_a_stop_survives_the_evaluation_of_the_same_iteration():
    """Check that the stop requested after the iteration stands although its evaluation requests nothing."""

    def stop_after_two(event):
        if event.kind == "iteration" and event.iteration == 2:
            event.stop("two are enough")

    outcome = train_policy(stop_after_two, iterations=4, eval_every=2).run()
    assert (outcome.iterations, outcome.stop_reason) == (2, "two are enough")


def test_a_stop_without_a_reason_is_a_stop():
    outcome = train_policy(lambda event: event.stop(""), iterations=4).run()
    assert (outcome.iterations, outcome.stop_reason) == (1, "callback")


def test_a_callback_that_raises_is_named_and_the_run_can_continue():
    failing = [True]

    def plot_once(event):
        if failing and event.iteration == 2:
            failing.pop()
            raise ZeroDivisionError("no data")

    training = train_policy(plot_once)
    with pytest.raises(
        rl_core.CallbackError,
        match=r"'.*plot_once' raised ZeroDivisionError: no data \(after the iteration",
    ):
        training.run()
    assert training.run().iterations == 3
    assert list(training.metrics().index) == [1, 2, 3]


def test_errors_of_ours_pass_through():
    def fail_check(event):
        raise rl_core.CheckFailed("not good enough")

    with pytest.raises(rl_core.CheckFailed, match="not good enough"):
        train_policy(fail_check).run()
