"""The report in a real browser: on a phone, in dark mode, filtered, printed."""

import pytest
from helpers import chromium
from helpers.handmade_trajectories import generate_trajectories

from rl_core.analysis import analyze, write_trajectories
from rl_core.settings import AnalysisSettings

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
]
SHOWN = "[...document.querySelectorAll('#regressions article')].filter(e => e.offsetParent).length"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for name, skill in {"champion": 0.9, "policy": 0.5}.items():
        write_trajectories(
            folder / f"{name}.jsonl", generate_trajectories(80, skill, seed=len(name))
        )
    models = {name: folder / f"{name}.jsonl" for name in ("champion", "policy")}
    return analyze(
        models, folder / "out", AnalysisSettings(bootstrap_samples=100, side_by_side=12)
    ).report.as_uri()


def open_at(address, width, *, dark=False):
    page = chromium.Chromium(address, (width, 900), dark)
    page.wait("!!document.querySelector('#terms')")
    return page


@pytest.mark.parametrize("width", [420, 768, 1400])
def test_nothing_is_cut_off_and_a_link_of_the_contents_goes_there(address, width):
    with open_at(address, width) as page:
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run("document.querySelector('#verdict').getBoundingClientRect().top") < 200
        page.run("document.querySelector('nav a[href=\"#levels\"]').click()")
        assert page.wait(
            "Math.abs(document.querySelector('#levels').getBoundingClientRect().top - 46) < 2"
        )
        # The contents stay visible, in one line above the section.
        top, bottom = page.run(
            "(r => [r.top, r.bottom])(document.querySelector('nav').getBoundingClientRect())"
        )
        assert abs(top) < 1 and 30 < bottom <= 46
        assert page.errors == []


def test_on_a_phone_tables_scroll_and_their_first_column_stays(address):
    script = """(() => {
      const box = [...document.querySelectorAll('.scroll')].find(e => e.scrollWidth > e.clientWidth + 50);
      box.scrollLeft = 50; const row = box.querySelector('tbody tr');
      return [box.scrollLeft, row.children[0].getBoundingClientRect().left - box.getBoundingClientRect().left,
        row.children[1].getBoundingClientRect().left - row.children[0].getBoundingClientRect().right]; })()"""
    with open_at(address, 420) as page:
        scrolled, first, second = page.run(script)
        assert (
            scrolled == 50 and abs(first) < 1.5 and second < -40
        )  # the second column moved below the first


def test_lost_episodes_are_filtered_by_a_click(address):
    with open_at(address, 1400) as page:
        unfiltered = page.run(SHOWN)
        label = page.run(
            "(() => { const l = [...document.querySelectorAll('.filters label')]"
            ".find(e => e.innerText.includes('hard (')); l.click(); return l.innerText; })()"
        )
        count = int(label.rpartition("(")[2].rstrip(")"))
        assert 0 < page.run(SHOWN) == count < unfiltered


def test_dark_follows_the_system_and_paper_is_white_with_every_episode_open(address):
    ink = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    with open_at(address, 1400) as page:
        light = page.run(ink)
    with open_at(address, 1400, dark=True) as page:
        dark = page.run(ink)
        assert light == ["rgb(251, 251, 250)", "rgb(31, 38, 48)"] and dark == [
            "rgb(21, 24, 28)",
            "rgb(228, 232, 237)",
        ]
        page.call("Emulation.setEmulatedMedia", media="print")
        assert page.run(ink) == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
        assert page.run("document.querySelector('.filters').offsetParent === null")
        closed = "[...document.querySelectorAll('article details:not([open]) .column')]"
        assert page.run(f"{closed}.every(e => e.checkVisibility({{contentVisibilityAuto: true}}))")
