"""Token ids and loss tokens of common formats, equal to those that TRL 1.16.0 made of the same rows.

Recorded by `tests/benchmarks/trl_masks.py` with the tokenizer below, for `SFTTrainer` (with assistant_only_loss for
rows of messages) and `DPOTrainer`.
"""

import json

import pytest
from helpers import ROOT

from rl_core.data.chat import ChatRenderer
from rl_core.data.conversation import training_sequences
from rl_core.data.preference_rows import pair_of
from rl_core.data.records import read_demonstrations, read_preferences
from rl_core.data.tokenizer import train_tokenizer

RECORDED = json.loads((ROOT / "tests/helpers/peers/trl_masks.json").read_text())
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def renderer():
    tokenizer = train_tokenizer(["Once upon a time 2+2 is 4, I think no. Be brief."] * 3, 300)
    tokenizer.chat_template = TEMPLATE
    return ChatRenderer(tokenizer)


def places(mask):
    return [index for index, learns in enumerate(mask) if learns]


@pytest.mark.parametrize("case", RECORDED["sft"], ids=lambda case: "-".join(case["row"]) + str(len(case["ids"])))
def test_demonstrations_have_the_loss_tokens_of_trl(renderer, case):
    row = read_demonstrations([case["row"]]).rows[0]
    ((ids, mask),) = training_sequences(renderer, row["messages"])
    assert ids == case["ids"]
    expected = case["loss"]
    if "text" in case["row"]:  # TRL labels the first token too, which no logits predict
        expected = expected[1:]
    assert places(mask) == expected


@pytest.mark.parametrize(
    "case", RECORDED["dpo"], ids=lambda case: str(len(case["row"])) + str(len(case["row"]["chosen"]))
)
def test_pairs_have_the_completion_tokens_of_trl(renderer, case):
    pair = pair_of(read_preferences([case["row"]]).rows[0], renderer)
    for side, found in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        assert found.ids == case[side]["ids"]
        assert places([False] * len(found.prompt_ids) + found.loss_mask) == case[side]["loss"]


def test_a_side_of_several_turns_has_loss_on_the_assistants_turns_alone(renderer):
    """TRL counts the user's turn within a side as well; here it is read only. Tokens are those of the conversation."""
    user, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    row = {"prompt": [user], "chosen": [answer, user, answer], "rejected": [answer]}
    pair = pair_of(read_preferences([row]).rows[0], renderer)
    ids, mask = renderer.conversation([user, answer, user, answer])
    assert pair.chosen.ids == ids and [False] * len(pair.chosen.prompt_ids) + pair.chosen.loss_mask == mask
    assert sum(mask) == 4  # two answers of one token, with their ends of turn
    assert pair.rejected.ids == ids[: len(pair.rejected.ids)] and pair.rejected.loss_mask == [True, True]
