"""Program: tasks of lm-eval on a model of this project, by its engine. See `rl_core/evaluators/run_suites.py`.

The argument is a file with the request as JSON. Each task's result is written as soon as it is complete; a task that
has one is not run again. An error goes to `error.json` in the request's folder, for the parent's message.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import DataError, PosttrainError, SettingsError, suggest_name
from rl_core.evaluators.results import (
    RESULT_FILE,
    TaskMetric,
    TaskResult,
    build_metric,
    build_metric_name,
    read_number,
    write_task_result,
)
from rl_core.settings import ModelSettings, build_settings
from rl_core.storage.atomic_files import write_json_atomic

if TYPE_CHECKING:
    from rl_core.evaluators.text_scoring import TextScorer

ERROR_FILE = "error.json"
# Errors of packages that could not reach the hub, by class; those of a missing file on it are others.
_HUB_ERRORS = (
    "ConnectionError",
    "ConnectError",
    "ConnectTimeout",
    "ReadTimeout",
    "Timeout",
    "ProxyError",
    "MaxRetryError",
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
)
_PROXY_VARIABLES = (
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
)
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_MAX_MESSAGE = 1000  # characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the request of a file; return the exit code."""
    (path,) = sys.argv[1:] if arguments is None else arguments
    request: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    output = Path(request["output"])
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        run_request(request)
    except PosttrainError as error:
        write_json_atomic(output / ERROR_FILE, {"error": str(error)[:_MAX_MESSAGE]})
        return 1
    return 0


def run_request(request: Mapping[str, Any]) -> None:
    """Run the tasks that have no result yet. Raises: PosttrainError."""
    import torch

    torch.set_num_threads(int(request["threads"]))
    output = Path(request["output"])
    pending = [
        task for task in request["tasks"] if not (output / task["folder"] / RESULT_FILE).is_file()
    ]
    if not pending:
        return
    manager = _create_task_manager(request, [task["name"] for task in pending])
    model = build_language_model(load_scorer(request), request)
    for task in pending:
        _run_task(request, task, manager, model)


def load_scorer(request: Mapping[str, Any]) -> TextScorer:
    """Load the model of a request. Raises: ModelError."""
    from rl_core.api.policy import resolve_model_folder
    from rl_core.data.chat import ChatRenderer
    from rl_core.evaluators.text_scoring import TextScorer
    from rl_core.models.causal_lm import load_model

    settings = build_settings(request["model_settings"], ModelSettings)
    model, tokenizer = load_model(resolve_model_folder(request["model"]), settings)
    end_ids: Sequence[int] = ()
    if request["chat_template"]:  # a turn also ends with the template's token
        end_ids = ChatRenderer(tokenizer, settings).eos_ids
    return TextScorer(
        model,
        tokenizer,
        end_ids=end_ids,
        pass_tokens=request["pass_tokens"],
        slots=request["slots"],
        seed=request["seed"],
    )


def _create_task_manager(request: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Create lm-eval's index of tasks: of the user's folder, and of lm-eval's own tasks if a name is not there.

    Raises: SettingsError for an unknown task.
    """
    from lm_eval.tasks import TaskManager

    folder = request["include_path"]
    if folder is not None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=folder)
    for name in names:
        if name not in manager.all_tasks:
            known = suggest_name(name, manager.all_tasks) if name else ""
            hint = known if known.startswith("did") else f"{len(manager.all_tasks)} are known"
            where = (
                f" nor in {folder}"
                if folder
                else "; stages.suites.include_path names a folder of your own"
            )
            raise SettingsError(f"lm-eval has no task '{name}' of its own{where}; {hint}")
    return manager


def _run_task(
    request: Mapping[str, Any], task: Mapping[str, str], manager: Any, model: Any
) -> None:
    """Run one task, or one group of tasks, and write its result."""
    import lm_eval

    name, started = task["name"], time.perf_counter()
    print(f"task {name}", flush=True)
    try:
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=[name],
            task_manager=manager,
            num_fewshot=request["num_fewshot"],
            limit=request["limit"],
            apply_chat_template=request["chat_template"],
            confirm_run_unsafe_code=request["unsafe_code"],
            bootstrap_iters=1000,
            log_samples=True,
        )
    except PosttrainError as error:
        raise DataError(f"lm-eval's task {name}: {error}") from error
    except Exception as error:
        raise _explain_failure(name, error) from error
    result = convert_results(name, f"lm-eval {lm_eval.__version__}", found)
    result = dataclasses.replace(result, seconds=round(time.perf_counter() - started, 2))
    samples = convert_samples(found.get("samples") or {}, has_subtasks=name not in found["results"])
    write_task_result(Path(request["output"]) / task["folder"], result, samples)


def _explain_failure(name: str, error: BaseException) -> PosttrainError:
    """Turn an error of lm-eval into one that says what to do."""
    chain = list(_iter_causes(error))
    text = " ".join(str(error).split())[: _MAX_MESSAGE // 2]
    if any(type(cause).__name__ in _HUB_ERRORS for cause in chain):
        offline = [
            name for name in _OFFLINE_VARIABLES if os.environ.get(name, "0") not in ("", "0")
        ]
        proxies = [name for name in _PROXY_VARIABLES if os.environ.get(name)]
        state = f"{offline[0]} is set" if offline else "the hub does not answer"
        through = f", through the proxy of {proxies[0]}" if proxies and not offline else ""
        return DataError(
            f"lm-eval's task {name} reads its data from the hub, and {state}{through}: load it once where there is a "
            f"network and copy the cache (HF_HOME), or write the task with local files and name their folder in "
            f"stages.suites.include_path ({type(error).__name__}: {text})"
        )
    if isinstance(error, IndexError | ZeroDivisionError):
        return DataError(f"lm-eval's task {name} failed, perhaps because it has no rows: {text}")
    if "marked as unsafe" in text:
        return SettingsError(
            f"lm-eval's task {name} executes code that the model writes, unconfined; set stages.suites.unsafe_code: "
            "true on a machine that may be harmed"
        )
    if isinstance(error, ImportError):
        return SettingsError(f"lm-eval's task {name} needs a package that is not installed: {text}")
    return DataError(f"lm-eval's task {name} failed: {type(error).__name__}: {text}")


def _iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# ------------------------------------------------------------------------------------------------------------ results


def convert_results(name: str, evaluator: str, found: Mapping[str, Any]) -> TaskResult:
    """Convert the results of lm-eval for one task or group.

    The metrics of a group's tasks are named TASK.METRIC.

    Raises: DataError if nothing was evaluated.
    """
    metrics: dict[str, TaskMetric] = {}
    samples = found.get("samples") or {}
    counts = found.get("n-samples") or {}
    rows = {**found["results"], **(found.get("groups") or {})}
    for task, row in rows.items():
        better = (found.get("higher_is_better") or {}).get(task) or {}
        for key, value in row.items():
            metric, comma, variant = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            values = [
                read_number(sample.get(metric))
                for sample in samples.get(task, ())
                if sample.get("filter", "none") == variant
            ]
            metrics[_name_metric("" if task == name else task, metric, variant)] = build_metric(
                value,
                row.get(f"{metric}_stderr,{variant}"),
                values,
                higher_is_better=better.get(metric, True) is not False,
            )
    total = sum(int(count["effective"]) for count in counts.values())
    if not total or not metrics:
        raise DataError(f"lm-eval's task {name} evaluated no sample")
    version = (found.get("versions") or {}).get(name, "")
    return TaskResult(f"lm_eval/{name}", evaluator, str(version), total, 0.0, metrics)


def convert_samples(
    samples: Mapping[str, Sequence[Mapping[str, Any]]], *, has_subtasks: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the samples of lm-eval with their numbers, by the names of `convert_results`."""
    is_group = has_subtasks or len(samples) > 1
    for task, rows in samples.items():
        prefix = task if is_group else ""
        for row in rows:
            numbers = {
                _name_metric(prefix, metric, row.get("filter", "none")): number
                for metric in row.get("metrics", ())
                if (number := read_number(row.get(metric))) is not None
            }
            identifier = f"{task}:{row['doc_id']}" if is_group else str(row["doc_id"])
            yield {"id": identifier, "metrics": numbers, "sample": row}


def _name_metric(prefix: str, metric: str, variant: str) -> str:
    return build_metric_name(prefix, metric, "" if variant == "none" else variant)


# -------------------------------------------------------------------------------------------------------------- model


def build_language_model(scorer: TextScorer, request: Mapping[str, Any]) -> Any:
    """Build lm-eval's model over a scorer."""
    from lm_eval.api.model import TemplateLM

    from rl_core.evaluators.text_scoring import ContinuationRequest, TextRequest

    default_tokens = int(request["max_completion_tokens"])

    class EngineModel(TemplateLM):
        """A model of this project, as lm-eval asks for it."""

        tokenizer = scorer.tokenizer
        tokenizer_name = str(request["model"]).replace("/", "__")
        max_length = scorer.max_length
        max_gen_toks = default_tokens
        eot_token_id = scorer.eos_id
        prefix_token_id = scorer.prefix_id

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            """Encode a text; a text that begins with the first token of texts does not get it again."""
            if add_special_tokens is None:
                first = str(scorer.tokenizer.decode([scorer.prefix_id]))
                add_special_tokens = not string.startswith(first)
            return list(scorer.tokenizer.encode(string, add_special_tokens=add_special_tokens))

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **options: Any
        ) -> list[tuple[float, bool]]:
            """Score requests ((context, continuation), context ids, continuation ids)."""
            pairs = [
                ContinuationRequest(context, continuation) for _, context, continuation in requests
            ]
            scores = scorer.score_continuations(pairs)
            return [(score.logprob, score.is_greedy) for score in scores]

        def loglikelihood_rolling(
            self, requests: list[Any], disable_tqdm: bool = False
        ) -> list[float]:
            """Score complete texts."""
            return scorer.score_texts([self.tok_encode(item.args[0]) for item in requests])

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            """Continue prompts."""
            texts = [
                build_text_request(self.tok_encode(prompt), options, default_tokens, TextRequest)
                for prompt, options in (item.args for item in requests)
            ]
            return scorer.generate_texts(texts)

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            """Render messages with the model's chat template."""
            return str(
                scorer.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

    return EngineModel()


def build_text_request(
    prompt: Sequence[int], options: Mapping[str, Any], default_tokens: int, kind: Any
) -> Any:
    """Build the request of a prompt with lm-eval's generation options.

    Raises: SettingsError for an option that would change the answer and is not supported.
    """
    rest = dict(options)
    stops = rest.pop("until", None) or []
    tokens = default_tokens
    for name in ("max_completion_tokens", "max_tokens", "max_new_tokens", "max_gen_toks"):
        if (value := rest.pop(name, None)) is not None:
            tokens = int(value)  # the last of these names counts most, as in lm-eval
    temperature = float(rest.pop("temperature", 0.0) or 0.0)
    samples = rest.pop("do_sample", None)
    if samples is False:
        temperature = 0.0
    elif samples is True and temperature == 0.0 and "temperature" not in options:
        temperature = 1.0
    known = {"top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float}
    drawing = {name: convert(rest.pop(name)) for name, convert in known.items() if name in rest}
    if unknown := sorted(set(rest) - {"num_beams", "use_cache", "min_new_tokens"}):
        raise SettingsError(f"generation_kwargs: {unknown[0]} is not supported")
    if rest.get("num_beams", 1) != 1 or rest.get("min_new_tokens"):
        raise SettingsError("generation_kwargs: num_beams and min_new_tokens are not supported")
    return kind(
        prompt=tuple(prompt),
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
        max_tokens=tokens,
        temperature=temperature,
        **drawing,
    )


if __name__ == "__main__":
    sys.exit(main())
