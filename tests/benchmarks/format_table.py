"""Table of results/data_formats.md: every data format, the file tried, where its loss tokens lie, compared with TRL's.

    python tests/benchmarks/format_table.py record --trl TRL_PYTHON --questions GSM8K.jsonl --pairs PAIRS.jsonl
    python tests/benchmarks/format_table.py write

`record` runs TRL on the files of `tests/helpers/data_formats/`, and on real text written in the columns of each
format: questions with `question` and `answer`, pairs with `prompt`, `chosen` and `rejected`. It keeps the masks of TRL
and the counts in `tests/helpers/peers/trl_masks.json`. `write` puts the table into the document from that and from what
this version loads. `tests/rl_core/data/test_trl_masks.py` compares both in every run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from helpers import ROOT
from helpers.format_files import (
    FILES,
    RECORDED,
    FormatFile,
    list_loss_positions,
    make_renderer,
    read,
    read_raw_rows,
    read_recorded_masks,
    sides_of,
    small_renderer,
)

from rl_core.data.chat import ChatRenderer

PAGE = ROOT / "tests/benchmarks/results/data_formats.md"
BEGIN, END = "<!-- written by tests/benchmarks/format_table.py -->\n", "<!-- end of it -->\n"
_LONGEST = 120  # characters of a run of tokens that are shown
COMPARED = 200  # rows of real text that TRL is run on, format by format

Row = dict[str, Any]

_JOINED = (
    "TRL joins the texts without the chat template; as lists of messages (next row) they are equal"
)
_LOST = "TRL reads `chosen` and `rejected` alone: the question is lost"
# Differences that are meant, by file: their kind, and the reason for people
REASONS = {
    "prompt_completion": ("other tokens", _JOINED),
    "pairs": ("other tokens", _JOINED),
    "kto": ("other tokens", _JOINED),
    "text": (
        "other loss tokens",
        "equal but for the first token, which TRL labels and nothing predicts",
    ),
    "pairs_turns": (
        "other loss tokens",
        "the same tokens; TRL counts the user's turn within a side as well",
    ),
    "sharegpt": (
        "other tokens",
        "TRL keeps the roles `human` and `gpt`, and puts loss on every token",
    ),
    "sharegpt_tools": (
        "other tokens",
        "TRL keeps the roles `human` and `function_call`, and puts loss on every token",
    ),
    "hh_rlhf": (
        "other tokens",
        "TRL keeps `Human:` and `Assistant:` as text, without the chat template",
    ),
    "alpaca_pairs": ("other tokens", _LOST),
    "orca_dpo": ("other tokens", _LOST),
    "orca_dpo_distilabel": ("other tokens", _LOST),
}


def make_message(role: str, text: str) -> Row:
    return {"role": role, "content": text}


def make_conversation(question: str, answer: str) -> list[Row]:
    return [make_message("user", question), make_message("assistant", answer)]


QUESTIONS: dict[str, Callable[[str, str], Row]] = {
    "messages": lambda q, a: {"messages": make_conversation(q, a)},
    "prompt_completion": lambda q, a: {"prompt": q, "completion": a},
    "conversational": lambda q, a: {
        "prompt": [make_message("user", q)],
        "completion": [make_message("assistant", a)],
    },
    "sharegpt": lambda q, a: {
        "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]
    },
    "alpaca": lambda q, a: {"instruction": "Solve the problem.", "input": q, "output": a},
    "dolly": lambda q, a: {"instruction": q, "context": "", "response": a},
    "text": lambda q, a: {"text": f"{q}\n{a}"},
}
PAIRS: dict[str, Callable[[str, str, str], Row]] = {
    "pairs": lambda p, c, r: {"prompt": p, "chosen": c, "rejected": r},
    "pairs_conversational": lambda p, c, r: {
        "prompt": [make_message("user", p)],
        "chosen": [make_message("assistant", c)],
        "rejected": [make_message("assistant", r)],
    },
    "implicit_prompt": lambda p, c, r: {
        "chosen": make_conversation(p, c),
        "rejected": make_conversation(p, r),
    },
    "ultrafeedback_binarized": lambda p, c, r: {
        "prompt": p,
        "chosen": make_conversation(p, c),
        "rejected": make_conversation(p, r),
    },
    "sharegpt_pairs": lambda p, c, r: {
        "conversations": [{"from": "human", "value": p}],
        "chosen": {"from": "gpt", "value": c},
        "rejected": {"from": "gpt", "value": r},
    },
    "alpaca_pairs": lambda p, c, r: {"instruction": p, "input": "", "chosen": c, "rejected": r},
    "hh_rlhf": lambda p, c, r: {
        "chosen": f"\n\nHuman: {p}\n\nAssistant: {c}",
        "rejected": f"\n\nHuman: {p}\n\nAssistant: {r}",
    },
    "orca_dpo": lambda p, c, r: {"system": "", "question": p, "chosen": c, "rejected": r},
    "orca_dpo_distilabel": lambda p, c, r: {"system": "", "input": p, "chosen": c, "rejected": r},
    "kto": lambda p, c, r: {"prompt": p, "completion": c, "label": True},
    "kto_conversational": lambda p, c, r: {
        "prompt": [make_message("user", p)],
        "completion": [make_message("assistant", r)],
        "label": False,
    },
    "kto_messages": lambda p, c, r: {"messages": make_conversation(p, r), "label": False},
}


def record_masks(trl: str, questions: Path, pairs: Path, only: Collection[str]) -> None:
    """Run TRL on the files and on real text, and save the results; files not in `only` keep earlier results."""
    files = [file for file in FILES if not only or file.name in only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        masks = _run_trl(
            trl,
            folder / "small",
            small_renderer(),
            {f.name: (f, read_raw_rows(f.path)) for f in files},
            False,
        )
        real = _write_real_files(folder, files, questions, pairs)
        texts = [line for path in (questions, pairs) for line in path.read_text().split("\n")]
        renderer = make_renderer(texts, 2000)
        jobs = {f.name: (f, read_raw_rows(path)[:COMPARED]) for f, path in real}
        theirs = _run_trl(trl, folder / "real", renderer, jobs, True)
        counts = {
            f.name: _count_tokens(f, path, renderer, theirs["files"][f.name]) for f, path in real
        }
    previous = read_recorded_masks() if only else {"files": {}, "real": {}}
    versions = {"trl": masks["trl"], "transformers": masks["transformers"]}
    result = {
        **versions,
        "files": {**previous["files"], **masks["files"]},
        "real": {**previous["real"], **counts},
    }
    RECORDED.write_text(json.dumps(result, ensure_ascii=False).replace("}, ", "},\n") + "\n")


def _run_trl(
    trl: str,
    folder: Path,
    renderer: ChatRenderer,
    jobs: dict[str, tuple[FormatFile, list[Row]]],
    together: bool,
) -> Row:
    renderer.tokenizer.save_pretrained(folder)
    files = {
        name: {"trainer": f.trainer, "rows": rows, "together": together}
        for name, (f, rows) in jobs.items()
    }
    (folder / "job.json").write_text(json.dumps({"tokenizer": str(folder), "files": files}))
    script = ROOT / "tests/benchmarks/trl_masks.py"
    done = subprocess.run(
        [trl, str(script), str(folder / "job.json")], check=True, stdout=subprocess.PIPE, text=True
    )
    result: Row = json.loads(done.stdout.splitlines()[-1])
    return result


def _write_real_files(
    folder: Path, files: Iterable[FormatFile], questions: Path, pairs: Path
) -> list[tuple[FormatFile, Path]]:
    """Write real text in the columns of each format."""
    pairs_of_text = [(row["question"], row["answer"]) for row in read_raw_rows(questions)]
    judged = [(row["prompt"], row["chosen"], row["rejected"]) for row in read_raw_rows(pairs)]
    written = []
    for file in files:
        if file.name in QUESTIONS:
            rows = [QUESTIONS[file.name](*row) for row in pairs_of_text]
        elif file.name in PAIRS:
            rows = [PAIRS[file.name](*row) for row in judged]
        else:
            continue
        path = folder / f"{file.name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        written.append((file, path))
    return written


def _count_tokens(file: FormatFile, path: Path, renderer: ChatRenderer, theirs: list[Row]) -> Row:
    """Count rows, tokens and loss tokens of a file of real text, and how many of the compared rows are TRL's."""
    records = read(path, file.kind)
    sides = [sides_of(row, renderer) for row in records.rows]
    equal = [not describe_difference(row, other) for row, other in zip(sides, theirs, strict=False)]
    taken = [other for other in theirs if "error" not in other]
    return {
        "rows": records.num_rows,
        "loaded": len(records.rows),
        "tokens": sum(len(ids) for row in sides for ids, _ in row),
        "with_loss": sum(sum(mask) for row in sides for _, mask in row),
        "compared": len(taken),
        "equal": sum(equal),
    }


def describe_difference(ours: list[tuple[list[int], list[bool]]], theirs: Row) -> str:
    """Describe how a row's sequences differ from TRL's: "", an error of TRL's, other tokens, or other loss tokens."""
    if "error" in theirs:
        return f"not taken by TRL: {theirs['error'][:70]}"
    sides = theirs["sides"]
    if [ids for ids, _ in ours] != [side["ids"] for side in sides]:
        return "other tokens"
    return (
        ""
        if [list_loss_positions(mask) for _, mask in ours] == [side["loss"] for side in sides]
        else "other loss tokens"
    )


def read_format_rows() -> Iterator[
    tuple[FormatFile, list[list[tuple[list[int], list[bool]]]], list[str], ChatRenderer]
]:
    """Return each file with the sequences of its rows, and their differences from TRL's."""
    renderer, theirs = small_renderer(), read_recorded_masks()["files"]
    for file in FILES:
        sides = [sides_of(row, renderer) for row in read(file.path, file.kind).rows]
        yield (
            file,
            sides,
            [describe_difference(a, b) for a, b in zip(sides, theirs[file.name], strict=True)],
            renderer,
        )


def format_table() -> str:
    """Format the table as Markdown."""
    known = read_recorded_masks()
    head = f"| format | file: first row as it is read, loss in « » | against TRL {known['trl']} | real text |\n"
    head += "|---|---|---|---|\n"
    lines = []
    for file, sides, differences, renderer in read_format_rows():
        shown = "<br>".join(f"`{_mark_loss_tokens(renderer, ids, mask)}`" for ids, mask in sides[0])
        more = f"<br>and {len(sides) - 1} more" if len(sides) > 1 else ""
        lines.append(
            f"| {file.label} | `{file.path.name}`: {shown}{more} | {_format_verdict(file, differences)} "
            f"| {_format_real(known['real'].get(file.name))} |\n"
        )
    return head + "".join(lines)


def _mark_loss_tokens(renderer: ChatRenderer, ids: list[int], mask: list[bool]) -> str:
    parts = []
    for learns, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        text = str(
            renderer.tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        )
        text = text if len(text) <= _LONGEST else f"{text[:20]} … {text[-40:]}"
        parts.append(f"«{text}»" if learns else text)
    return "".join(parts).replace("<|", "[").replace("|>", "]").replace("\n", "⏎")


def _format_verdict(file: FormatFile, differences: list[str]) -> str:
    if not any(differences):
        return "equal"
    if file.name in REASONS and set(differences) == {REASONS[file.name][0]}:
        return REASONS[file.name][1]
    return "; ".join(dict.fromkeys(word or "equal" for word in differences))


def _format_real(counts: Row | None) -> str:
    if counts is None:
        return ""
    left_out = counts["rows"] - counts["loaded"]
    text = f"{counts['loaded']:,} rows{f' ({left_out} refused)' * bool(left_out)}, {counts['tokens']:,} tokens, "
    text += f"{counts['with_loss']:,} with loss"
    return text + (
        f"; {counts['equal']} of {counts['compared']} equal to TRL's" if counts["equal"] else ""
    )


def render_page() -> str:
    """Return the document with the current table."""
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n" + format_table() + "\n" + text[end:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "write"))
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="files to record again; default: all")
    options = parser.parse_args()
    if options.what == "record":
        record_masks(options.trl, options.questions, options.pairs, options.only)
    else:
        PAGE.write_text(render_page())


if __name__ == "__main__":
    main()
