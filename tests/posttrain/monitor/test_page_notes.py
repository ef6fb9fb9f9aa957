"""The live page in a real browser: labels of marks, bands over seeds, search, and notes from two tabs."""

import importlib.util
import json

import pytest
from helpers import chromium
from helpers.monitor_runs import CONFIG, START, run_page, write_journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="needs posttrain[monitor]"
    ),
]
SAY = "document.querySelector('.pt-notes .pt-foot span').textContent"
MOVES = [
    (iteration, f"stage {number}")
    for number, iteration in enumerate((10, 12, 14, 40, 43, 44, 80, 117, 119))
]


def make_seed(output, seed):
    """Write a run of 120 iterations whose reward is its seed, with moves of the curriculum close together."""
    parent = output / f"s{seed}" / "runs" / "2027-01-15-08-00-00"
    config = json.dumps({**CONFIG, "seed": seed})
    write_journal(
        parent,
        f"s{seed} · 2027-01-15 08:00:00",
        started=START - seed,
        ended=START + 300,
        events=[{"op": "text", "name": "config.json", "text": config}],
    )
    history = [
        {
            "kind": "advance",
            "iteration": iteration,
            "from": "",
            "to": name,
            "why": "",
            "metrics": {},
        }
        for iteration, name in MOVES
    ]
    write_journal(
        output / f"s{seed}" / "stages/policy/bbbb.tracking",
        "policy",
        started=START + 1,
        ended=START + 290,
        parent=parent,
        events=[
            {"op": "text", "name": "curriculum.json", "text": json.dumps({"history": history})}
        ],
        metrics=[
            (i, 2.0 * i, {"reward/mean": seed + 0.01 * i, "policy/entropy": 3 - 0.01 * i})
            for i in range(1, 121)
        ],
    )


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    output = tmp_path_factory.mktemp("seeds")
    for seed in range(3):
        make_seed(output, seed)
    with run_page(output, 18970) as (url, _):
        yield url


@pytest.mark.parametrize("width", [420, 1400])
def test_no_label_of_a_mark_covers_another(url, width):
    with chromium.Chromium(f"{url}?run=s0&tab=curves&search=entropy", (width, 900)) as page:
        page.wait("document.querySelectorAll('.pt-mark-label').length > 0")
        boxes, texts, plot = page.run(
            "(l => [l.map(e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; }), "
            "l.map(e => e.textContent), document.querySelector('.pt-plot').getBoundingClientRect().right])"
            "([...document.querySelectorAll('.pt-mark-label')])"
        )
        for index, (left, top, right, bottom) in enumerate(boxes):
            assert right <= plot + 1, texts[index]
            for other in boxes[:index]:
                apart = (
                    left >= other[2]
                    or right <= other[0]
                    or top >= other[3] - 3
                    or bottom <= other[1] + 3
                )
                assert apart, texts
        names = ", ".join(texts)
        for _, name in MOVES:  # before, a label too close to the one before it was left out
            assert name in names or "…" in names or "+" in names
        assert page.errors == []


def test_seeds_are_a_band_and_the_search_box_narrows_the_curves(url):
    with chromium.Chromium(f"{url}?run=s0&compare=seeds&tab=curves", (1400, 900)) as page:
        page.wait("document.querySelectorAll('.pt-band').length == 2")  # reward and entropy
        assert "3 seeds" in page.run("document.querySelector('.pt-key').textContent")
        page.run("document.querySelector('#pt-search').focus()")
        page.call("Input.insertText", text="entropy")
        page.wait("document.querySelectorAll('.pt-panel[data-tab=curves] .pt-chart').length == 1")
        assert "search=entropy" in page.run("location.search")
        page.wait(
            "!!document.querySelector('#pt-controls .token')"
        )  # Gradio's controls change nothing
        page.run("new Promise(done => setTimeout(done, 1000))")
        assert "search=entropy" in page.run("location.search")
        assert page.errors == []


def test_two_tabs_never_overwrite_each_other_s_note_silently(url):
    def write(page, tags, text):
        script = "((e, t, n) => { e.tags.value = t; e.text.value = n; e.text.oninput(); })"
        page.run(
            f"{script}(document.querySelector('.pt-notes'), {json.dumps(tags)}, {json.dumps(text)})"
        )

    def save(page):
        page.run("document.querySelector('.pt-notes button').click()")

    with (
        chromium.Chromium(f"{url}?run=s0") as first,
        chromium.Chromium(f"{url}?run=s0") as second,
    ):
        for page in (first, second):
            page.wait("!!document.querySelector('.pt-notes')")
        write(second, "theirs", "second <b>tab</b>")
        write(first, "base, good", "first tab")
        save(first)
        first.wait(f"{SAY}.startsWith('saved')")
        # The second tab learns of it and still shows what is being written there.
        second.wait(f"{SAY}.startsWith('Another tab')")
        assert (
            second.run("document.querySelector('.pt-notes textarea').value") == "second <b>tab</b>"
        )
        assert (
            second.run("document.querySelector('.pt-notes pre').textContent")
            == "#base #good\nfirst tab"
        )
        save(second)
        second.wait(f"{SAY}.startsWith('saved')")
        first.wait("document.querySelector('.pt-notes textarea').value == 'second <b>tab</b>'")
        assert (
            first.run("document.querySelectorAll('.pt-notes summary b').length") == 0
        )  # no markup
        assert first.errors == second.errors == []


def test_what_is_typed_while_a_save_is_in_flight_stays(url):
    notes = "document.querySelector('.pt-notes')"
    with chromium.Chromium(f"{url}?run=s1") as page:
        page.wait(f"!!{notes}")
        # Two clicks, with further tags between them, before the server can answer.
        page.run(
            f"(e => {{ const save = e.querySelector('button'); e.tags.value = 'base'; e.tags.oninput(); save.click(); "
            f"e.tags.value = 'base, late'; e.tags.oninput(); save.click(); }})({notes})"
        )
        page.wait(f"!{notes}.querySelector('button').disabled")
        assert page.run(SAY) == "not saved"
        assert page.run(f"[{notes}.tags.value, {notes}.querySelector('pre').hidden]") == [
            "base, late",
            True,
        ]
        page.run(f"{notes}.querySelector('button').click()")
        page.wait(f"{SAY}.startsWith('saved')")
        assert page.run(f"{notes}.querySelector('summary').textContent") == "Notesbaselate"
        assert page.errors == []
