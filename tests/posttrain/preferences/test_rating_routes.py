"""Requests of the page: who may ask, what is refused, ratings that are kept once, undo, scores, the data file."""

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


class Page:
    """A person with the page open."""

    def __init__(self, room, rater="ann"):
        self.room, self.rater = room, rater
        self.client = TestClient(build_rating_app(room, TOKEN), base_url="http://127.0.0.1:8331")

    def ask(self, path, expected=200, token=TOKEN, **body):
        headers = {"authorization": f"Bearer {token}"}
        if path in ("page", "agreement"):
            answer = self.client.get(f"/api/{path}", headers=headers)
        else:
            answer = self.client.post(
                f"/api/{path}", headers=headers, json={"rater": self.rater, **body}
            )
        assert answer.status_code == expected, answer.text
        return answer.json()

    def rate(self, shown, expected=200, **given):
        return self.ask(
            "rate", expected, item=shown["question"]["item"], count=shown["rated"], **given
        )


def test_only_with_the_token_and_from_this_machine(tmp_path):
    page = Page(room_of(tmp_path))
    for path in ("page", "question", "rate", "undo", "agreement"):
        for token in ("", "another"):
            assert "token" in page.ask(path, 401, token=token)["error"]
    assert page.client.get("/", headers={"host": "evil.example"}).status_code == 403
    assert page.client.get("/", headers={"origin": "http://evil.example"}).status_code == 403
    found = page.client.get("/")
    assert (
        found.status_code == 200
        and "default-src 'none'" in found.headers["content-security-policy"]
    )
    assert TOKEN not in found.text and "What is" not in found.text
    assert page.client.get("/api/nothing").status_code == 404


def test_a_rating_becomes_a_row_of_the_side_that_was_chosen(tmp_path):
    room = room_of(tmp_path)
    page = Page(room)
    shown = page.ask("question")
    expected = []
    for choice in ("left", "right", "left", "tie", "both_bad", "skip", "right"):
        texts = [answer[-1]["content"] for answer in shown["question"]["answers"]]
        expected.append((choice, texts))
        given = {"choice": choice, "seconds": 1.25, "reason": "clearer", "comment": "ü \u2028"}
        shown = page.rate(shown, **given)
        assert shown["outdated"] is False
    room.write_data_file()
    rows = read_preferences(room.rows_file).rows
    said = [(c, t) for c, t in expected if c != "skip"]
    assert len(rows) == len(said) == 6 and {rating.left for rating in room.journal} == {0, 1}
    for row, (choice, texts) in zip(rows, said, strict=True):
        chosen = row["chosen"] if isinstance(row["chosen"], str) else row["chosen"][-1]["content"]
        if choice in ("left", "right"):
            assert chosen == texts[choice == "right"] and "tie" not in row
        else:
            assert row["tie"] is True
    first = json.loads(room.rows_file.read_text().splitlines()[0])["judgement"]
    assert first["reason"] == "clearer" and first["seconds"] == 1.25 and first["rater"] == "ann"


def test_a_request_that_comes_twice_counts_once(tmp_path):
    room = room_of(tmp_path)
    page = Page(room)
    shown = page.ask("question")
    after = page.rate(shown, choice="left")
    again = page.rate(shown, choice="left")
    assert (
        again["outdated"] is True
        and again["question"] == after["question"]
        and len(room.journal) == 1
    )
    other_tab = page.rate(after, choice="right")
    assert page.rate(after, choice="left")["outdated"] is True and other_tab["rated"] == 2


def test_undo_gives_the_question_back_as_it_was(tmp_path):
    page = Page(room_of(tmp_path))
    assert page.ask("undo")["undone"] is None
    shown = page.ask("question")
    page.rate(shown, choice="tie", comment="wait", reason="safer")
    back = page.ask("undo")
    assert back["question"] == shown["question"] and back["undone"] == {
        "comment": "wait",
        "reason": "safer",
    }
    assert back["rated"] == 0 and page.rate(back, choice="left")["rated"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"choice": "best"}, "choice"),
        ({}, "choice: None must be left, right, tie, both_bad or skip"),
        ({"choice": "left", "score": 3}, "choice"),
        ({"choice": "left", "reason": "because"}, "reason: 'because' is not one of the choices"),
        ({"choice": "left", "comment": "x" * 2001}, "comment"),
        ({"choice": "left", "seconds": -1}, "seconds"),
        ({"choice": "left", "more": 1}, "more"),
        ({"choice": "left", "rater": " "}, "rater"),
        ({"choice": "left", "rater": "a\nb"}, "rater"),
    ],
)
def test_what_means_nothing_is_refused_and_nothing_is_kept(tmp_path, given, message):
    room = room_of(tmp_path)
    page = Page(room)
    assert message in page.rate(page.ask("question"), 422, **given)["error"]
    assert len(room.journal) == 0


def test_bodies_that_are_none(tmp_path):
    client = TestClient(
        build_rating_app(room_of(tmp_path), TOKEN), base_url="http://127.0.0.1:8331"
    )
    headers = {"authorization": f"Bearer {TOKEN}"}
    for body in (b"", b"[1", b"\xff\xfe", b"[" * 5000, b"{}"):
        assert client.post("/api/question", headers=headers, content=body).status_code == 422
    assert client.post("/api/question", headers=headers, content=b" " * 70_000).status_code == 413


@pytest.mark.parametrize(("ask", "score", "wrong"), [("scores", 4, 0), ("thumbs", 0, 3)])
def test_scores_and_thumbs(tmp_path, ask, score, wrong):
    room = room_of(tmp_path, answers=1, ask=ask)
    page = Page(room)
    assert page.ask("page")["ask"] == ask
    shown = page.ask("question")
    assert len(shown["question"]["answers"]) == 1
    assert "is none of" in page.rate(shown, 422, score=wrong)["error"]
    page.rate(shown, score=score)
    room.write_data_file()
    (row,) = read_preferences(room.rows_file).rows
    assert row["score"] == score and room.rows_file.name == f"{ask}.jsonl"


def test_kinds_of_questions_are_kept_apart_in_one_folder(tmp_path):
    """Pairs, then scores, then thumbs: no count, undo, agreement or data file holds those of another kind."""
    both = [*items(4), *items(4, answers=1)]
    for ask, given in (
        ("pairs", {"choice": "left"}),
        ("scores", {"score": 5}),
        ("thumbs", {"score": 1}),
    ):
        room = RatingSession(tmp_path, both, RatingSettings(ask=ask, overlap=1.0, repeat=0.0))
        page = Page(room)
        shown = page.ask("question")
        assert shown["rated"] == 0 and shown["items"] == 4
        assert page.ask("undo")["undone"] is None
        page.rate(shown, **given)
        room.write_data_file()
    for ask, key in (("pairs", "chosen"), ("scores", "score"), ("thumbs", "score")):
        room = RatingSession(tmp_path, both, RatingSettings(ask=ask, overlap=1.0, repeat=0.0))
        assert len(room.journal) == 1
        (row,) = read_preferences(room.rows_file).rows
        assert key in row


def test_undo_of_a_rating_whose_item_is_gone(tmp_path):
    page = Page(room_of(tmp_path, count=3))
    page.rate(page.ask("question"), choice="left", comment="kept")
    rated = next(iter(page.room.journal)).item
    rest = [item for item in items(3) if item.id != rated]
    page = Page(RatingSession(tmp_path, rest, RatingSettings(overlap=0.5, repeat=0.0)))
    back = page.ask("undo")
    assert back["undone"] == {"comment": "kept", "reason": ""} and back["rated"] == 0
    assert back["question"]["item"] in {item.id for item in rest}
    assert page.rate(back, choice="left")["rated"] == 1


def test_agreement_of_two_people(tmp_path):
    room = room_of(tmp_path, count=40, overlap=1.0)
    pages = [Page(room, "ann"), Page(room, "bob")]
    for page in pages:
        shown = page.ask("question")
        while shown["question"] is not None:
            item = room.items[room.order._item_indices[shown["question"]["item"]]]
            better = (
                "perhaps" in shown["question"]["answers"][0][-1]["content"]
            )  # both prefer the second answer
            assert len(item.answers) == 2
            shown = page.rate(shown, choice="left" if better else "right")
    found = pages[0].ask("agreement")
    assert found["units"] == 40 and found["alpha"] is None  # nothing varies
    last = pages[1].ask("undo")
    pages[1].rate(last, choice="tie")
    assert pages[1].ask("agreement")["alpha"] < 0.1


def test_a_full_disk_keeps_nothing_and_says_so(tmp_path, monkeypatch):
    room = room_of(tmp_path)
    page = Page(room)
    shown = page.ask("question")

    def refuse(*_, **__):
        raise CheckpointError(
            "ratings.jsonl: cannot be written: No space left on device; make room"
        )

    with monkeypatch.context() as patched:
        patched.setattr("rl_core.preferences.rating_journal.append_bytes", refuse)
        assert "make room" in page.rate(shown, 503, choice="left")["error"]
    assert page.ask("question")["question"] == shown["question"] and len(room.journal) == 0
    assert page.rate(shown, choice="left")["rated"] == 1


def test_many_people_at_once(tmp_path):
    """Eight threads, one person each: every rating has a number of its own, and no item is rated twice by one."""
    room = room_of(tmp_path, count=64, overlap=0.2)

    def work(name):
        shown = room.describe_question(name)
        while shown["question"] is not None and shown["rated"] < 12:
            given = {"item": shown["question"]["item"], "count": shown["rated"], "choice": "left"}
            room.record_rating(name, given, 0.0)
            shown = room.describe_question(name)

    threads = [threading.Thread(target=work, args=(f"p{n}",)) for n in range(8)]
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
