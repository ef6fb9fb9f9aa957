"""Requests of the rating page: access, refused input, ratings recorded once, undo, scores, the data file."""

import json
import threading

import pytest
from helpers.rating import TOKEN, items, room_of
from starlette.testclient import TestClient

from posttrain.preferences.rating_routes import build_rating_app
from posttrain.preferences.rating_session import RatingSession
from rl_core.data.records import read_preferences
from rl_core.errors import CheckpointError
from rl_core.settings import RatingSettings


class RaterPage:
    """A rater with the page open."""

    def __init__(self, room, rater="ann"):
        self.room, self.rater = room, rater
        self.client = TestClient(build_rating_app(room, TOKEN), base_url="http://127.0.0.1:8331")

    def ask(self, path, expected=200, token=TOKEN, **body):
        headers = {"authorization": f"Bearer {token}"}
        if path in ("page", "agreement"):
            response = self.client.get(f"/api/{path}", headers=headers)
        else:
            response = self.client.post(
                f"/api/{path}", headers=headers, json={"rater": self.rater, **body}
            )
        assert response.status_code == expected, response.text
        return response.json()

    def rate(self, state, expected=200, **answer):
        return self.ask(
            "rate", expected, item=state["question"]["item"], count=state["rated"], **answer
        )


def test_only_with_the_token_and_from_this_machine(tmp_path):
    page = RaterPage(room_of(tmp_path))
    for path in ("page", "question", "rate", "undo", "agreement"):
        for token in ("", "another"):
            assert "token" in page.ask(path, 401, token=token)["error"]
    assert page.client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert page.client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    response = page.client.get("/")
    assert (
        response.status_code == 200
        and "default-src 'none'" in response.headers["content-security-policy"]
    )
    assert TOKEN not in response.text and "What is" not in response.text
    assert page.client.get("/api/nothing").status_code == 404


def test_rating_becomes_a_row_of_the_chosen_side(tmp_path):
    room = room_of(tmp_path)
    page = RaterPage(room)
    state = page.ask("question")
    expected = []
    for choice in ("left", "right", "left", "tie", "both_bad", "skip", "right"):
        texts = [answer[-1]["content"] for answer in state["question"]["answers"]]
        expected.append((choice, texts))
        answer = {"choice": choice, "seconds": 1.25, "reason": "clearer", "comment": "ü \u2028"}
        state = page.rate(state, **answer)
        assert state["outdated"] is False
    room.write_data_file()
    rows = read_preferences(room.rows_file).rows
    rated = [(c, t) for c, t in expected if c != "skip"]
    assert len(rows) == len(rated) == 6 and {rating.left for rating in room.journal} == {0, 1}
    for row, (choice, texts) in zip(rows, rated, strict=True):
        chosen = row["chosen"] if isinstance(row["chosen"], str) else row["chosen"][-1]["content"]
        if choice in ("left", "right"):
            assert chosen == texts[choice == "right"] and "tie" not in row
        else:
            assert row["tie"] is True
    first = json.loads(room.rows_file.read_text().splitlines()[0])["judgement"]
    assert first["reason"] == "clearer" and first["seconds"] == 1.25 and first["rater"] == "ann"


def test_repeated_request_counts_once(tmp_path):
    room = room_of(tmp_path)
    page = RaterPage(room)
    state = page.ask("question")
    next_state = page.rate(state, choice="left")
    repeated = page.rate(state, choice="left")
    assert (
        repeated["outdated"] is True
        and repeated["question"] == next_state["question"]
        and len(room.journal) == 1
    )
    other_tab = page.rate(next_state, choice="right")
    assert page.rate(next_state, choice="left")["outdated"] is True and other_tab["rated"] == 2


def test_undo_reopens_the_same_question(tmp_path):
    page = RaterPage(room_of(tmp_path))
    assert page.ask("undo")["undone"] is None
    state = page.ask("question")
    page.rate(state, choice="tie", comment="wait", reason="safer")
    undone_state = page.ask("undo")
    assert undone_state["question"] == state["question"] and undone_state["undone"] == {
        "comment": "wait",
        "reason": "safer",
    }
    assert undone_state["rated"] == 0 and page.rate(undone_state, choice="left")["rated"] == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choice": "best"}, "choice"),
        ({}, "choice: None must be left, right, tie, both_bad or skip"),
        ({"choice": "left", "score": 3}, "choice"),
        ({"choice": "left", "reason": "because"}, "reason: 'because' is not one of the choices"),
        ({"choice": "left", "comment": "x" * 2001}, "comment"),
        ({"choice": "left", "seconds": -1}, "seconds"),
        ({"choice": "left", "extra": 1}, "extra"),
        ({"choice": "left", "rater": " "}, "rater"),
        ({"choice": "left", "rater": "a\nb"}, "rater"),
    ],
)
def test_invalid_answers_are_refused_and_not_recorded(tmp_path, answer, message):
    room = room_of(tmp_path)
    page = RaterPage(room)
    assert message in page.rate(page.ask("question"), 422, **answer)["error"]
    assert len(room.journal) == 0


def test_invalid_bodies(tmp_path):
    client = TestClient(
        build_rating_app(room_of(tmp_path), TOKEN), base_url="http://127.0.0.1:8331"
    )
    headers = {"authorization": f"Bearer {TOKEN}"}
    for body in (b"", b"[1", b"\xff\xfe", b"[" * 5000, b"{}"):
        assert client.post("/api/question", headers=headers, content=body).status_code == 422
    assert client.post("/api/question", headers=headers, content=b" " * 70_000).status_code == 413


@pytest.mark.parametrize(("ask", "score", "invalid_score"), [("scores", 4, 0), ("thumbs", 0, 3)])
def test_scores_and_thumbs(tmp_path, ask, score, invalid_score):
    room = room_of(tmp_path, answers=1, ask=ask)
    page = RaterPage(room)
    assert page.ask("page")["ask"] == ask
    state = page.ask("question")
    assert len(state["question"]["answers"]) == 1
    assert "is none of" in page.rate(state, 422, score=invalid_score)["error"]
    page.rate(state, score=score)
    room.write_data_file()
    (row,) = read_preferences(room.rows_file).rows
    assert row["score"] == score and room.rows_file.name == f"{ask}.jsonl"


def test_kinds_of_questions_are_separate_in_one_folder(tmp_path):
    """Pairs, then scores, then thumbs: counts, undo, agreement and data files include only ratings of their kind."""
    all_items = [*items(4), *items(4, answers=1)]
    for ask, answer in (
        ("pairs", {"choice": "left"}),
        ("scores", {"score": 5}),
        ("thumbs", {"score": 1}),
    ):
        room = RatingSession(tmp_path, all_items, RatingSettings(ask=ask, overlap=1.0, repeat=0.0))
        page = RaterPage(room)
        state = page.ask("question")
        assert state["rated"] == 0 and state["items"] == 4
        assert page.ask("undo")["undone"] is None
        page.rate(state, **answer)
        room.write_data_file()
    for ask, key in (("pairs", "chosen"), ("scores", "score"), ("thumbs", "score")):
        room = RatingSession(tmp_path, all_items, RatingSettings(ask=ask, overlap=1.0, repeat=0.0))
        assert len(room.journal) == 1
        (row,) = read_preferences(room.rows_file).rows
        assert key in row


def test_undo_of_a_rating_whose_item_was_removed(tmp_path):
    page = RaterPage(room_of(tmp_path, count=3))
    page.rate(page.ask("question"), choice="left", comment="draft")
    rated_item = next(iter(page.room.journal)).item
    remaining = [item for item in items(3) if item.id != rated_item]
    page = RaterPage(RatingSession(tmp_path, remaining, RatingSettings(overlap=0.5, repeat=0.0)))
    undone_state = page.ask("undo")
    assert (
        undone_state["undone"] == {"comment": "draft", "reason": ""} and undone_state["rated"] == 0
    )
    assert undone_state["question"]["item"] in {item.id for item in remaining}
    assert page.rate(undone_state, choice="left")["rated"] == 1


def test_agreement_of_two_people(tmp_path):
    room = room_of(tmp_path, count=40, overlap=1.0)
    pages = [RaterPage(room, "ann"), RaterPage(room, "bob")]
    for page in pages:
        state = page.ask("question")
        while state["question"] is not None:
            item = room.items[room.order._item_indices[state["question"]["item"]]]
            better = (
                "perhaps" in state["question"]["answers"][0][-1]["content"]
            )  # both prefer the second answer
            assert len(item.answers) == 2
            state = page.rate(state, choice="left" if better else "right")
    agreement = pages[0].ask("agreement")
    assert agreement["units"] == 40 and agreement["alpha"] is None  # nothing varies
    undone_state = pages[1].ask("undo")
    pages[1].rate(undone_state, choice="tie")
    assert pages[1].ask("agreement")["alpha"] < 0.1


def test_full_disk_is_reported_and_records_nothing(tmp_path, monkeypatch):
    room = room_of(tmp_path)
    page = RaterPage(room)
    state = page.ask("question")

    def refuse(*_, **__):
        raise CheckpointError(
            "ratings.jsonl: cannot be written: No space left on device; make room"
        )

    with monkeypatch.context() as patched:
        patched.setattr("rl_core.storage.append_log.AppendLog.append_lines", refuse)
        assert "make room" in page.rate(state, 503, choice="left")["error"]
    assert page.ask("question")["question"] == state["question"] and len(room.journal) == 0
    assert page.rate(state, choice="left")["rated"] == 1


def test_concurrent_raters(tmp_path):
    """Eight threads, one rater each: rating numbers are unique, and nobody rates an item twice."""
    room = room_of(tmp_path, count=64, overlap=0.2)

    def rate_twelve(name):
        state = room.describe_question(name)
        while state["question"] is not None and state["rated"] < 12:
            answer = {"item": state["question"]["item"], "count": state["rated"], "choice": "left"}
            room.record_rating(name, answer, 0.0)
            state = room.describe_question(name)

    threads = [threading.Thread(target=rate_twelve, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ratings = list(room.journal)
    assert (
        sorted(rating.number for rating in ratings) == list(range(1, len(ratings) + 1))
        and len(ratings) > 50
    )
    assert len({(rating.rater, rating.item) for rating in ratings}) == len(ratings)
