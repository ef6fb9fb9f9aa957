"""The distribution of learning rates in the report of a learning service."""

import json
import re

from posttrain.online.service_report import draw_histogram_svg, write_service_report
from rl_core.online.service_files import CONTRIBUTION_FILE
from rl_core.storage.append_log import AppendLog

RATES = [1e-6, 1e-6, 2e-6, 3e-6, 5e-5]


def write_updates(folder, rates, **changes):
    log = AppendLog(folder / CONTRIBUTION_FILE, checksums=False)
    for number, rate in enumerate(rates, 1):
        losses = {"rl": 0.1, "kl": 0.0, "total": 0.1}
        row = {"number": number, "refused": "", "learning_rate": rate, "losses": losses}
        log.append_record({**row, "experiences": [], **changes})


def read_section(folder):
    html = write_service_report(folder).read_text()
    return re.search(r"<h2>Learning rates</h2>(.*?)</section>", html, re.S)[1]


def test_the_report_shows_the_distribution_of_taken_updates(tmp_path):
    write_updates(tmp_path, RATES)
    section = read_section(tmp_path)
    cells = re.sub(r"<[^>]*>", " ", section)
    assert re.search(r"lowest\s+1e-06", cells) and re.search(r"median\s+2e-06", cells)
    assert re.search(r"highest\s+5e-05", cells) and re.search(r"mean\s+1.14e-05", cells)
    assert re.search(r"at the lowest\s+40.0%", cells) and re.search(
        r"at the highest\s+20.0%", cells
    )
    heights = [float(text) for text in re.findall(r"<rect[^>]*height='([\d.]+)'", section)]
    assert len(heights) == 20 and heights[0] == max(heights) > heights[-1] > 0
    assert sum(height > 0 for height in heights) == 2


def test_refused_updates_do_not_count(tmp_path):
    write_updates(tmp_path, RATES, refused="kl")
    assert "Nothing yet" in read_section(tmp_path)


def test_equal_rates_are_one_bar():
    assert json.dumps(draw_histogram_svg([1e-5] * 3)).count("<rect") == 1
