"""lm-eval: multiple choice, rolling perplexity and generation over completions, generation over chat."""

import json
import os
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
os.environ |= {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
import lm_eval
from checks import Checks
from lm_eval.tasks import TaskManager

checks, base = Checks(), os.environ["OPENAI_BASE_URL"]
TOKENIZER = os.environ["CLIENT_MODEL_FOLDER"]
rows = [{"q": f"row {n}", "choices": ["red", "blue"], "gold": n % 2} for n in range(6)]
(folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
COMMON = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{q}}}}: "
"""
TASKS = {
    "cells_choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "cells_text": """
output_type: generate_until
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 20}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "cells_perplexity": """
output_type: loglikelihood_rolling
doc_to_target: "{{q}} {{choices[gold]}}"
metric_list: [{metric: word_perplexity}]
""",
}
for name, text in TASKS.items():
    (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{text}")


def evaluate(kind, path, tasks, **options):
    """Return the results by task."""
    arguments = {"model": "small", "base_url": f"{base}/{path}", "num_concurrent": 2}
    result = lm_eval.simple_evaluate(
        model=kind,
        model_args=arguments | options,
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    assert set(result["results"]) == set(tasks)
    return result


for batched in (False, True):
    size = {"batch_size": 4} if batched else {}
    with checks.passing(f"local-completions, loglikelihood{' in batches' if batched else ''}"):
        options = {"tokenizer": TOKENIZER, "max_length": 2000, **size}
        result = evaluate("local-completions", "completions", ["cells_choice"], **options)
        values = [s["resps"] for s in result["samples"]["cells_choice"]]
        assert all(float(r[0][0]) < 0 for row in values for r in row)
with checks.passing("local-completions, loglikelihood_rolling and generate_until"):
    options = {"tokenizer": TOKENIZER, "max_length": 2000}
    evaluate("local-completions", "completions", ["cells_perplexity", "cells_text"], **options)
with checks.passing("local-chat-completions, generate_until"):
    result = lm_eval.simple_evaluate(
        model="local-chat-completions",
        model_args={"model": "small", "base_url": f"{base}/chat/completions"},
        tasks=["cells_text"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template=True,
        bootstrap_iters=0,
    )
    assert "cells_text" in result["results"]
checks.print_report()
