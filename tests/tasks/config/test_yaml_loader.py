"""Accepted YAML, and the message for everything else."""

from pathlib import Path

import pytest

from rl_core.errors import SettingsError
from tasks.config.yaml_loader import MAX_BYTES, parse_value, read_yaml


def write_file(folder: Path, content: str | bytes, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read_message(path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        read_yaml(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),  # PyYAML alone reads text here
        ("1E5", 100000.0),
        ("-.5", -0.5),
        ("3.", 3.0),
        ("+7", 7),
        ("007", 7),
        ("0x1f", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("yes", "yes"),  # YAML 1.1 reads true
        ("on", "on"),
        ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),  # YAML 1.1 reads 45045
        ("2024-01-01", "2024-01-01"),
        ("'1e-5'", "1e-5"),
        ("[easy, 2, {a: 1}]", ["easy", 2, {"a": 1}]),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    parsed = parse_value(text)
    assert parsed == value and type(parsed) is type(value)


def test_every_key_and_item_has_its_line(tmp_path):
    document = read_yaml(
        write_file(
            tmp_path,
            "# top\nname: x\nstages:\n  policy:\n    curriculum:\n    - name: a\n    - name: b\n",
        )
    )
    assert document.data == {
        "name": "x",
        "stages": {"policy": {"curriculum": [{"name": "a"}, {"name": "b"}]}},
    }
    assert document.lines[("name",)] == 2
    assert document.lines[("stages", "policy", "curriculum", 1)] == 7
    assert document.lines[("stages", "policy", "curriculum", 1, "name")] == 7


def test_byte_order_mark_and_crlf_are_fine(tmp_path):
    document = read_yaml(write_file(tmp_path, b"\xef\xbb\xbfname: x\r\nseed: 1\r\n"))
    assert document.data == {"name": "x", "seed": 1}
    assert document.lines[("seed",)] == 2


def test_keys_are_text_as_written(tmp_path):
    assert read_yaml(write_file(tmp_path, "1: a\ntrue: b\n")).data == {"1": "a", "true": "b"}


def test_duplicate_keys_name_both_lines(tmp_path):
    document = read_yaml(write_file(tmp_path, "a:\n  b: 1\n  c: 2\n  b: 3\na: 4\n"))
    places = [
        (problem.key, problem.location.rsplit(":", 1)[1], problem.text)
        for problem in document.problems
    ]
    assert places == [
        (("a", "b"), "4", "the key occurs twice, first on line 2; keep one"),
        (("a",), "5", "the key occurs twice, first on line 1; keep one"),
    ]


@pytest.mark.parametrize("text", [".nan", ".inf", "-.Inf", "1e999"])
def test_numbers_that_are_not_finite_are_problems(tmp_path, text):
    (problem,) = read_yaml(write_file(tmp_path, f"a: 1\nb: {text}\n")).problems
    assert problem.key == ("b",) and problem.location.endswith(":2") and text in problem.text


def test_lone_surrogates_and_nul_are_problems(tmp_path):
    (problem,) = read_yaml(write_file(tmp_path, 'a: "x\\ud800"\n')).problems
    assert "U+D800" in problem.text
    (problem,) = read_yaml(write_file(tmp_path, 'a: "x\\0"\n')).problems
    assert "U+0000" in problem.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "a: !!python/object/apply:os.system [echo]\n",
            ":1: contains the tag 'tag:yaml.org,2002:python/object/apply",
        ),
        ("a: 1\nb: !secret x\n", ":2: contains the tag '!secret'"),
        ("a: !!str 1\n", "tags are not allowed"),
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("- a\n- b\n", "contains a list; a pipeline is a mapping"),
        ("just text\n", "contains a single value"),
        ("a: 1\n---\nb: 2\n", ":2: a second document starts here"),
        ("a: [1, 2\n", "is not valid YAML"),
        ("a:\n\tb: 1\n", "indent with spaces"),
        ("a: 1\nb: \x01\n", ":2: character U+0001 is not allowed"),
        ('a: "\\UFFFFFFFF"\n', "is not valid YAML"),
        ("[a]: 1\n", "a key must be text"),
        ("a: *nothing\n", "undefined alias"),
        ("a: &a {b: *a}\n", "an alias refers to the block that contains it"),
        ("a: &a\n  <<: *a\n", "an alias refers to the block that contains it"),
        ("a: " + "[" * 100 + "]" * 100, "nests deeper than 32 levels"),
        ("a: 1\n<<: 2\n", "'<<' merges blocks"),
        (b"a: 1\nb: \xff\n", ":2: byte 0xff at offset 8 is not UTF-8"),
        ("a: 1\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"#" * (MAX_BYTES + 1), "is larger than 256 KiB"),
    ],
)
def test_refused_with_file_and_line(tmp_path, content, expected):
    path = write_file(tmp_path, content)
    message = read_message(path)
    assert message.startswith(str(path)) and expected in message


def test_alias_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "through aliases" in read_message(write_file(tmp_path, "\n".join(lines)))


def test_merge_bomb_is_refused(tmp_path):
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 10)]
    assert "through aliases" in read_message(write_file(tmp_path, "\n".join(lines)))


def test_small_aliases_and_merges_work(tmp_path):
    text = "base: &b {x: 1, y: {z: 2}}\nmore: &m {x: 5, w: 6}\nuse:\n  <<: [*b, *m]\n  y: 3\nagain: *b\n"
    document = read_yaml(write_file(tmp_path, text))
    assert document.data["use"] == {
        "x": 1,
        "y": 3,
        "w": 6,
    }  # the block's keys first, then the first base
    assert document.data["again"] == {"x": 1, "y": {"z": 2}}
    assert document.lines[("use", "y")] == 5
    assert document.lines[("use", "w")] == 2
    document.data["again"]["y"]["z"] = 9
    assert (
        document.data["base"]["y"]["z"] == 2
    )  # copies: an override of one does not change the other


def test_missing_file_names_its_neighbours(tmp_path):
    write_file(tmp_path, "name: x\n", "demo.yaml")
    assert read_message(tmp_path / "demos.yaml").endswith(
        f"no such file; did you mean '{tmp_path / 'demo.yaml'}'?"
    )
    assert read_message(tmp_path / "other.yaml").endswith(f"no such file; {tmp_path} has demo.yaml")


def test_folder_is_refused(tmp_path):
    assert "is a folder" in read_message(tmp_path)


def test_bad_override_value_says_so():
    with pytest.raises(SettingsError, match=r"^the value contains the tag"):
        parse_value("!!python/name:os.system ''")
    with pytest.raises(SettingsError, match=r"^the value is not valid YAML"):
        parse_value("[1, 2")
    with pytest.raises(SettingsError, match="finite"):
        parse_value(".nan")
