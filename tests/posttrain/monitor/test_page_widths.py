"""Live page in a real browser: six widths, light and dark, addresses that name a run and a tab."""

import importlib.util
import json
import os
import shutil
import signal

import pytest
from helpers import chromium
from helpers.monitor_runs import make_run, run_page

from posttrain.monitor.charts import PageSelection
from posttrain.monitor.episodes import list_episode_files, read_episodes
from posttrain.monitor.reader import RunReader
from rl_core.online.learning_folder import SERVICE_FILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium here"),
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="needs posttrain[monitor]"
    ),
]
# Right edge of the layout, document width, number of chart columns. Content of a scrolling box may be wider.
LAYOUT = """(() => {
  const shown = [...document.querySelectorAll('.pt-header *, #pt-controls *, .pt-tabs *, .pt-panel *')]
    .filter(e => e.offsetParent && !e.closest('.pt-scroll'));
  const lefts = new Set([...document.querySelectorAll('.pt-panel .pt-chart')].filter(e => e.offsetParent)
    .map(e => Math.round(e.getBoundingClientRect().left)));
  const edge = Math.max(...shown.map(e => e.getBoundingClientRect().right));
  return [edge, document.documentElement.scrollWidth, lefts.size];
})()"""


CONTROLS = "!!document.querySelector('#pt-controls input')"
TOP = "Math.round(document.querySelector('.pt-tabs').getBoundingClientRect().top)"


SERVER: list[int] = []  # its process id


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    output = tmp_path_factory.mktemp("widths") / "out"
    make_run(output, status="FINISHED")
    with run_page(output, 18862) as (url, pid):
        SERVER[:] = [pid]
        yield url


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [420, 600, 768, 900, 1024, 1400])
def test_nothing_is_cut_off(address, width, dark):
    with chromium.Chromium(address, (width, 1000), dark) as page:
        page.wait(f"document.querySelectorAll('.pt-panel .pt-chart svg').length > 1 && {CONTROLS}")
        edge, document_width, columns = page.run(LAYOUT)
        assert edge <= width and document_width <= width
        assert (columns == 1) == (width <= 900)
        assert page.errors == []


@pytest.mark.timeout(600)
def test_address_opens_a_tab_of_a_narrow_page(address):
    with chromium.Chromium(f"{address}/?tab=online", (390, 844)) as page:
        page.wait("!!document.querySelector('.pt-panel[data-tab=online] .pt-block')")
        edge, document_width, _ = page.run(LAYOUT)
        assert max(edge, document_width) <= 390 and page.run(
            "location.search.includes('tab=online')"
        )


@pytest.mark.timeout(600)
def test_an_episode_of_unknown_success_has_no_verdict(tmp_path):
    make_run(tmp_path, status="FINISHED")
    (path,) = list_episode_files(RunReader(tmp_path).load_run("")).values()
    first, *others = reversed(read_episodes(path))
    rows = [first | {"success": None}, *others]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    badges = "[...document.querySelectorAll('.pt-row .pt-badge')]"
    with (
        run_page(tmp_path, 18865) as (address, _),
        chromium.Chromium(f"{address}/?tab=trajectories", (1400, 1000)) as page,
    ):
        page.wait(f"{badges}.length == 2")
        shown = page.run(f"{badges}.map(e => [e.textContent, e.className, e.title].join('|'))")
        assert sorted(shown) == ["wrong|pt-badge bad|", "\u2013|pt-badge none|success is unknown"]
        assert page.errors == []


@pytest.mark.timeout(600)
def test_a_command_with_a_long_path_fits_a_narrow_page(tmp_path):
    service = (
        tmp_path
        / "a-folder-whose-name-is-longer-than-the-page-is-wide"
        / "demo"
        / "online"
        / "version-2"
    )
    service.mkdir(parents=True)
    (service / SERVICE_FILE).write_text('{"began": 1.0}')
    with (
        run_page(service.parents[2], 18864) as (address, _),
        chromium.Chromium(f"{address}/?tab=online", (390, 844)) as page,
    ):
        page.wait("((document.body || {}).innerText || '').includes('posttrain online report')")
        edge, document_width, _ = page.run(LAYOUT)
        assert max(edge, document_width) <= 390


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [420, 1400])
def test_charts_are_drawn_before_gradio_and_do_not_move(address, width):
    with chromium.Chromium("about:blank", (width, 1000)) as page:
        page.call("Network.setBlockedURLs", urls=["*/assets/*", "*/static/*", "*/gradio_api/*"])
        page.call("Page.navigate", url=address)
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg polyline').length > 1")
        assert not page.run(CONTROLS)
        top_without_controls = page.run(TOP)
    with chromium.Chromium(address, (width, 1000)) as page:
        page.wait(CONTROLS)
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg polyline').length > 1")
        assert abs(page.run(TOP) - top_without_controls) <= 3


@pytest.mark.timeout(600)
def test_address_selects_stage_metrics_and_average(address):
    selection = "tab=curves&stage=sft&metrics=train/loss&window=3"
    with chromium.Chromium(f"{address}/?run=demo/2027-01-15-08-00-00&{selection}") as page:
        panel = ".pt-panel[data-tab=curves]"
        titles = (
            f"[...document.querySelectorAll('{panel} .pt-title b')]"
            ".map(e => e.dataset.metric).join()"
        )
        assert page.wait(f"{titles} == 'train/loss'")
        parameters = page.run("Object.fromEntries(new URLSearchParams(location.search))")
        assert parameters == {
            "run": "demo/2027-01-15-08-00-00",
            "stage": "sft",
            "metrics": "train/loss",
            "window": "3",
            "tab": "curves",
        }
        assert page.errors == []


SHORT = "const real = setTimeout; window.setTimeout = (f, ms, ...rest) => real(f, ms >= 20000 ? ms / 20 : ms, ...rest);"


@pytest.mark.timeout(600)
def test_unanswered_request_is_repeated(address):
    """As of a stopped server, or a broken tunnel: the connection stays open and nothing arrives."""
    (pid,) = SERVER
    with chromium.Chromium("about:blank", first=SHORT) as page:
        page.call("Page.navigate", url=address)
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg').length > 1")
        os.kill(pid, signal.SIGSTOP)
        try:
            page.wait("document.body.classList.contains('pt-lost')", 30)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert page.wait("!document.body.classList.contains('pt-lost')", 60)
        assert page.errors == []


@pytest.mark.timeout(600)
def test_page_without_a_response_says_so(address):
    message = "getComputedStyle(document.querySelector('.pt-header'), '::before').content"
    with chromium.Chromium("about:blank") as page:
        page.call("Network.setBlockedURLs", urls=["*/view*"])
        page.call("Page.navigate", url=address)
        page.wait(f"document.querySelector('.pt-header') && {message}.includes('does not answer')")
        page.call("Network.setBlockedURLs", urls=[])
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg').length > 1")
        assert "does not answer" not in page.run(message)


def test_metric_groups_are_offered_for_every_stage(tmp_path):
    """A pending request may still name the metrics of the previous stage."""
    from posttrain.monitor.page import _update_lists

    make_run(tmp_path)
    reader = RunReader(tmp_path)
    groups = [_update_lists(reader, PageSelection(stage=stage))[3] for stage in ("sft", "policy")]
    names = [[name for _, name in group.choices] for group in groups]
    assert names[0] == names[1] == ["curriculum", "perf", "reward", "tool", "train"]
    assert ("reward/ (0)", "reward") in groups[0].choices and ("reward/ (2)", "reward") in groups[
        1
    ].choices
    assert groups[0].value == ["train"]


@pytest.mark.timeout(600)
def test_address_opens_a_tab_and_follows_it(address):
    with chromium.Chromium(f"{address}/?tab=curves") as page:
        page.wait("!!document.querySelector('.pt-panel[data-tab=curves] .pt-block')")
        assert page.wait("location.search.includes('tab=curves')")
        page.run(
            "[...document.querySelectorAll('button[role=tab]')].find(b => b.textContent.trim() == 'System').click()"
        )
        assert page.wait("location.search.includes('tab=system')")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", [420, 1400])
def test_nothing_moves_when_runs_are_compared(tmp_path, width):
    output = tmp_path / "out"
    home = make_run(output, status="FINISHED")
    for number in (1, 2):
        shutil.copytree(home, output / f"a-pipeline-with-a-long-name-{number}")
    run = "?run=demo/2027-01-15-08-00-00"
    with (
        run_page(output, 18863) as (address, _),
        chromium.Chromium(f"{address}/{run}", (width, 1000)) as page,
    ):
        page.wait(CONTROLS)
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg').length > 1")
        top_before = page.run(TOP)
        others = ",".join(
            f"a-pipeline-with-a-long-name-{number}/2027-01-15-08-00-00" for number in (1, 2)
        )
        page.call("Page.navigate", url=f"{address}/{run}&compare={others}")
        page.wait("document.querySelectorAll('#pt-controls .token').length == 2")
        page.wait("document.querySelectorAll('.pt-panel .pt-chart svg').length > 1")
        assert page.run(TOP) == top_before
        assert page.run(
            "[...document.querySelectorAll('#pt-controls .token')].every(e => e.offsetWidth >= 90)"
        )
