"""The animated picture of a terminal (docs/tools/terminal_picture.py): rows, times, and texts of a command's output."""

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree

from documents import ROOT

SPEC = importlib.util.spec_from_file_location(
    "terminal_picture", ROOT / "docs/tools/terminal_picture.py"
)
tool = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tool  # its dataclass looks its module up
SPEC.loader.exec_module(tool)

OUTPUT = """\
real: policy -> evaluate
output   /somewhere/outputs/real
stage 1/2 policy: 1/60 · success 2%
stage 1/2 policy: 60/60 · success 45%
stage 2/2 evaluate: 1/1
policy: a <b> & more
""".splitlines()


def test_progress_replaces_itself_and_other_lines_stay():
    lines, seconds = tool.place_lines(OUTPUT, "posttrain run real")
    assert [(line.row, line.text, line.end is None) for line in lines] == [
        (0, "$ posttrain run real", True),
        (1, "real: policy -> evaluate", True),
        (2, "stage 1/2 policy: 1/60 · success 2%", False),
        (2, "stage 1/2 policy: 60/60 · success 45%", True),
        (3, "stage 2/2 evaluate: 1/1", True),
        (4, "policy: a <b> & more", True),
    ]
    assert lines[2].end == lines[3].start and seconds > lines[-1].start


def test_the_picture_is_valid_and_runs_no_script(tmp_path):
    log, picture = tmp_path / "run.log", tmp_path / "terminal.svg"
    log.write_text("\n".join([*OUTPUT, "x" + " word" * 60]))
    assert tool.main([str(log), str(picture), "--command", "posttrain run real"]) == 0
    root = ElementTree.parse(picture).getroot()
    texts = ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "policy: a <b> & more" in texts and max(map(len, texts)) <= tool.COLUMNS + 4
    assert "script" not in picture.read_text() and "/somewhere" not in picture.read_text()
