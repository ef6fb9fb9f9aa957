"""Rating page in a real browser: keyboard alone, phone width, dark mode, kills of the server."""

import signal

import pytest
from helpers import chromium
from helpers.rating import Command, room_of, serve_rating_page

from rl_core.data.records import read_preferences

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here")

CODES = {"Enter": ("Enter", 13), "Escape": ("Escape", 27), "ArrowRight": ("ArrowRight", 39)}


def press(page, *keys):
    """Press keys as a person does."""
    for key in keys:
        code, number = CODES.get(key, (f"Key{key.upper()}", ord(key.upper()[0])))
        text = {"text": "\r"} if key == "Enter" else {} if key in CODES else {"text": key}
        common = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        page.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        page.call("Input.dispatchKeyEvent", type="keyUp", **common)


def enter_name(page, name="ann"):
    page.wait("(document.activeElement || {}).id == 'name'")
    press(page, *name, "Enter")
    page.wait("!document.getElementById('task').hidden")


def wait_for_count(page, count):
    page.wait(f"document.getElementById('progress').textContent.startsWith('you: {count} ')")


def fits_width(page):
    return page.run("document.documentElement.scrollWidth <= window.innerWidth")


def test_by_keyboard_alone(tmp_path):
    room = room_of(tmp_path, count=8, overlap=0.0)
    with serve_rating_page(room) as address, chromium.Chromium(address, size=(1280, 900)) as page:
        enter_name(page)
        assert page.run("location.hash") == "" and "token" not in page.run(
            "document.body.innerText"
        )
        assert page.run("document.activeElement.id") == "question"
        press(page, "1")
        wait_for_count(page, 1)
        press(page, "r", "r", "c", *"why", "Escape", "2")
        wait_for_count(page, 2)
        press(page, "t")
        wait_for_count(page, 3)
        press(page, "b")
        wait_for_count(page, 4)
        press(page, "s")
        wait_for_count(page, 5)
        press(page, "u")
        wait_for_count(page, 4)
        page.run("document.querySelector('#reasons button').focus()")
        press(page, "ArrowRight", "ArrowRight")  # among the reasons, not the right answer
        assert page.run("document.activeElement.getAttribute('aria-checked')") == "true"
        assert page.run("document.activeElement.textContent") == room.settings.reasons[2]
        wait_for_count(page, 4)
        press(page, "0")
        wait_for_count(page, 5)
        while page.run("document.getElementById('done').hidden"):
            progress = page.run("document.getElementById('progress').textContent")
            press(page, "1")
            page.wait(f"document.getElementById('progress').textContent != {progress!r}")
        assert page.errors == []
        assert {
            request.split("/")[2].rsplit(":", 1)[0] for request in page.requests if "://" in request
        } == {"127.0.0.1"}
    ratings = list(room.journal)
    assert [rating.choice for rating in ratings[2:5]] == ["tie", "both_bad", "tie"] and len(
        ratings
    ) == 8
    assert ratings[4].reason == room.settings.reasons[2]
    assert ratings[1].comment == "why" and ratings[1].reason == room.settings.reasons[1]
    assert [ratings[0].choice, ratings[1].choice] == [
        "first" if ratings[0].left == 0 else "second",
        "second" if ratings[1].left == 0 else "first",
    ]
    assert len(read_preferences(room.rows_file).rows) == 8 and all(
        0 < rating.seconds < 60 for rating in ratings
    )


@pytest.mark.parametrize(
    ("size", "dark"), [((390, 780), False), ((390, 780), True), ((320, 640), False)]
)
def test_phone_and_dark(tmp_path, size, dark):
    room = room_of(tmp_path, count=8)
    with (
        serve_rating_page(room) as address,
        chromium.Chromium(address, size=size, dark=dark) as page,
    ):
        enter_name(page)
        assert fits_width(page)
        tops = page.run(
            "[...document.querySelectorAll('article')].map(e => e.getBoundingClientRect().top)"
        )
        assert tops[1] > tops[0]  # one under the other
        are_choices_visible = page.run(
            "[...document.querySelectorAll('#choices button')].every(b => { const r = b.getBoundingClientRect();"
            " return r.bottom <= window.innerHeight && r.height >= 40 && r.right <= window.innerWidth; })"
        )
        assert are_choices_visible  # all choices without scrolling, each as large as a finger
        background = page.run("getComputedStyle(document.body).backgroundColor")
        assert (int(background[4:].split(",")[0]) < 60) == dark
        page.run(
            "[...document.querySelectorAll('#choices button')].find(b => b.dataset.key == '2').click()"
        )
        wait_for_count(page, 1)
        page.run("document.getElementById('show-agreement').click()")
        page.wait("!document.getElementById('agreement').hidden")
        assert fits_width(page) and page.errors == []


def test_texts_of_models_are_not_interpreted(tmp_path):
    room = room_of(tmp_path, count=1, overlap=0.0)
    with serve_rating_page(room) as address, chromium.Chromium(address) as page:
        enter_name(page, "eve <b>")
        shown = page.run("document.getElementById('answers').innerText")
        assert (
            "<script>alert(1)</script>" in shown
            and "<b>not bold</b>" in shown
            and '{"name": "look"' in shown
        )
        assert page.run("document.querySelectorAll('#answers script, #answers b').length") == 0
        roles = page.run("[...document.querySelectorAll('article .role')].map(e => e.textContent)")
        assert sorted(roles) == ["assistant", "assistant", "tool"]  # the trajectory, turn by turn
        assert "m/1" not in page.run(
            "document.body.innerHTML"
        )  # nothing reveals which model wrote it


@pytest.mark.slow
def test_nothing_is_lost_when_server_and_browser_are_killed(tmp_path):
    """kill -9 of the server between ratings, a browser closed during a comment, another page afterwards."""
    command = Command(tmp_path)
    address = command.start()
    with chromium.Chromium(address) as page:
        enter_name(page)
        press(page, "1")
        wait_for_count(page, 1)
        press(page, "2")
        wait_for_count(page, 2)
        question = page.run("document.getElementById('prompt').innerText")
        command.process.send_signal(signal.SIGKILL)
        command.process.wait()
        press(page, "c", *"draft", "Escape", "1")
        page.wait("!document.getElementById('problem').hidden")
        assert "does not answer" in page.run("document.getElementById('problem').textContent")
        assert page.run("document.getElementById('comment').value") == "draft"
        assert command.start() == address  # the same token and port
        press(page, "1")
        wait_for_count(page, 3)
    folder = tmp_path / "outputs" / "rated" / "preferences"
    with chromium.Chromium(
        address
    ) as page:  # another browser: it asks for the name, and the ratings are there
        enter_name(page)
        wait_for_count(page, 3)
        assert page.run("document.getElementById('prompt').innerText") != question
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(20) in (0, 143)
    rows = read_preferences(folder / "preferences.jsonl").rows
    assert len(rows) == 3 and (folder / "token").stat().st_mode & 0o077 == 0
