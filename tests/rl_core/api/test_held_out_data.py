"""Held-out rows of the Python API: no prompt is on both sides of the split."""

import pytest
from helpers.library import small_policy

import rl_core
from rl_core.api.data import load_conversations, load_preference_pairs
from rl_core.api.policy import load_policy


@pytest.fixture(scope="module")
def policy():
    return load_policy(small_policy())


def split_rows(policy, rows, heldout=0.3, read=load_conversations):
    return read(rows, heldout, policy.renderer, 10_000, 0)


def build_chat(question, follow_up):
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": follow_up},
            {"role": "assistant", "content": "2"},
        ]
    }


def test_prompts_longer_than_the_context_are_refused_before_anything_is_played(policy):
    """Check at the start; such prompts once ended training at the iteration that drew them."""
    fits, long = "2 + 2 = ?", "word " * 3000
    with pytest.raises(
        rl_core.DataError, match=r"2 of 4 prompts leave no room[\s\S]*  prompts\[1\]: \d+ tokens\n"
    ) as messages:
        rl_core.policy_gradient(
            policy, prompts=[fits, long, fits], heldout_prompts=[long], reward=lambda rows: [0.0]
        )
    assert (
        "heldout_prompts[0]: " in str(messages.value)
        and str(messages.value).count(" tokens\n") == 2
    )
    with pytest.raises(rl_core.DataError, match="1 of 2 prompts leave no room"):
        rl_core.evaluate(policy, prompts=[fits, long])


def test_conversations_with_the_same_question_stay_together(policy):
    """Check the split key; it once was all but the last message, so a second turn put one question on both sides."""
    rows = [build_chat(f"{n} + {n} = ?", f"and {m} = ?") for n in range(8) for m in range(4)]
    actual = split_rows(policy, rows)
    expected = [
        [policy.renderer.encode_conversation(row["messages"])[0] for row in rows[4 * n : 4 * n + 4]]
        for n in range(8)
    ]
    for part, count in ((actual.train, 6), (actual.heldout, 2)):
        selected = [ids for ids, _ in part]
        assert sorted(ids in selected for ids in expected[0]) in ([False] * 4, [True] * 4)
        assert (
            sum(all(ids in selected for ids in group) for group in expected)
            == count
            == len(selected) / 4
        )


def test_conversations_that_all_begin_alike_are_distinguished_by_what_follows(policy):
    actual = split_rows(policy, [build_chat("look", f"it says {n}") for n in range(10)])
    assert (len(actual.train), len(actual.heldout)) == (7, 3)


def test_prompts_that_differ_in_case_and_space_stay_together(policy):
    rows = [
        {"prompt": f"{word}{n}", "chosen": "a", "rejected": "b"}
        for n in range(10)
        for word in ("Name ", "name  ", "NAME\n")
    ]
    actual = split_rows(policy, rows, read=load_preference_pairs)
    texts = [
        {
            "".join(policy.renderer.tokenizer.decode(pair.chosen.prompt_ids).lower().split())
            for pair in part
        }
        for part in (actual.train, actual.heldout)
    ]
    assert [len(part) for part in texts] == [7, 3] and not texts[0] & texts[1]


def test_held_out_rows_with_a_training_prompt_are_counted(policy, caplog):
    rows = [build_chat(f"{n} = ?", "and") for n in range(5)]
    split_rows(policy, rows, [build_chat("3  =  ?", "or"), build_chat("7 = ?", "or")])
    assert "heldout: 1 of 2 rows have a prompt of the training rows" in caplog.text
    caplog.clear()
    split_rows(policy, rows, [build_chat("7 = ?", "or")])
    assert caplog.text == ""
