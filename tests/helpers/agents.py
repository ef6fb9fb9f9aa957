"""Agents as programs for tests, and episodes that they play with a policy made from scratch."""

import sys
from itertools import pairwise
from pathlib import Path

import rl_core
from rl_core.environments.failed_episodes import EpisodeFailureMonitor
from rl_core.rollouts.collect import collect_rollouts
from rl_core.rollouts.episode_sequence import EpisodeRequest

TEXTS = ["lookup a b c d e f g h. friend of code 0 1 2 3 4 5 6 7 8 9"] * 4

# What the agents of these tests begin with: a client of the standard library.
CLIENT = """
import json, os, sys, threading, time, urllib.error, urllib.request

task = json.loads(os.environ["TASK"])


def send(path, body, key=os.environ["OPENAI_API_KEY"], url=os.environ["OPENAI_BASE_URL"]):
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + key)
    return urllib.request.urlopen(request)


def ask(messages, **options):
    body = {"model": "policy", "messages": messages, "max_tokens": 8, **options}
    return json.load(send("/chat/completions", body))


def reply(messages, **options):
    return ask(messages, **options)["choices"][0]["message"]


def user(text):
    return {"role": "user", "content": text}
"""

TWO_TURNS_AGENT = """
messages = [user(task["question"])]
messages.append(reply(messages))
messages.append(user("again"))
messages.append(reply(messages))
open("answer.txt", "wb").write(messages[-1]["content"].encode())
print(json.dumps({"reward": 0.5, "note": "printed"}))
"""


def build_agent(folder, code, tasks=({"question": "code of a"},), **options):
    """Build the environment of an agent whose program is `code` after CLIENT."""
    script = Path(folder) / "agent.py"
    script.write_text(CLIENT + code)
    defaults = {"heldout": 0, "reward": reward_length, "timeout_s": 20.0, **options}
    return rl_core.Agent(f"{sys.executable} {script}", list(tasks), **defaults)


def reward_length(task, calls, result):
    """Reward by the characters of the last reply."""
    return float(len(calls[-1].reply["content"] or ""))


def build_policy(seed=0, preset="tiny", context=256):
    """Build a policy from scratch: tiny is decoded by compiled code, nano by torch's kernels."""
    settings = rl_core.ModelSettings(preset=preset, vocab_size=300, context=context, device="cpu")
    return rl_core.create_policy(TEXTS, settings, seed=seed)


def play(
    environment, policy, *, group_size=1, seed=5, max_failed_share=1.0, failed=None, **sampling
):
    """Play each task `group_size` times; return the rollouts of all groups, and put failed episodes into `failed`."""
    options = {"max_completion_tokens": 120, "max_failed_share": max_failed_share, **sampling}
    settings = rl_core.SamplingSettings(**options)
    monitor = EpisodeFailureMonitor(max_failed_share, is_refill=True)
    if failed is not None:
        monitor.store_episode = lambda episode: failed.append(episode) or ""
    requests = [EpisodeRequest(environment.levels[0], n) for n in environment.seeds("train")]
    groups = collect_rollouts(
        environment,
        policy.backend(),
        policy.renderer,
        requests,
        group_size=group_size,
        sampling=settings,
        seed=seed,
        failures=monitor,
    )
    return [rollout for group in groups for rollout in group.rollouts]


def split_contexts(rollout):
    """Return the token ids of each context of a rollout."""
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    starts = [len(rollout.prompt_ids) + start for start in rollout.context_starts]
    edges = [0, *starts, len(ids)]
    return [ids[begin:end] for begin, end in pairwise(edges)]
