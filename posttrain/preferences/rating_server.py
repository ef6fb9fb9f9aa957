"""Process of `posttrain label`: the items, the page's server, and the export of ratings.

<output>/<pipeline>/preferences/    items.jsonl, token; journal and data file per kind of question
                                    (`JOURNAL_AND_DATA_FILES`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.preferences.rating_session import RatingSession, filter_ratable_items
from posttrain.web.server_setup import (
    LOOPBACK_HOST,
    find_free_port,
    limit_connections,
    run_server,
)
from posttrain.web.tokens import load_or_create_token
from rl_core.errors import DataError
from rl_core.preferences.items import RatedItem, load_items, read_items, write_items
from rl_core.preferences.question_order import RewardPosterior
from rl_core.settings import RatingSettings
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings

MAX_CONNECTIONS, IDLE_SECONDS = 256, 30.0  # of browsers
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RatingTask:
    """Configuration of `posttrain label`."""

    pipeline: PipelineSettings
    rating: RatingSettings
    output: Path  # of the pipelines
    answers_file: Path | None = None  # file of answers to rate; None = models answer
    should_sample_more: bool = False  # True = models answer again even if there are items

    @property
    def folder(self) -> Path:
        """Folder of items and ratings."""
        return resolve_ratings_folder(self.output, self.pipeline)


def resolve_ratings_folder(output: Path, pipeline: PipelineSettings) -> Path:
    """Return the folder of a pipeline's ratings."""
    return output / pipeline.name / "preferences"


def serve_ratings(task: RatingTask, *, say: Say = print) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Raises: SettingsError, ModelError, DataError if there are no items; BackendError without a free port; FolderBusy if
        another server uses the folder.
    """
    with FolderLock(make_folder(task.folder)):
        items = _load_items(task, say)
        posterior = _build_posterior(task, items, say)
        token = load_or_create_token(task.folder)
        with RatingSession(
            task.folder, items, task.rating, seed=task.pipeline.seed, posterior=posterior
        ) as session:
            _serve_page(session, token, task.rating.port, say)
        say(f"{len(session.journal)} ratings in {session.rows_file}")


def export_ratings(task: RatingTask, *, say: Say = print) -> Path:
    """Write the data file from the journal, without a page. Raises: DataError without ratings."""
    with FolderLock(make_folder(task.folder)):
        items = read_items(task.folder / "items.jsonl")
        session = RatingSession(task.folder, items, task.rating, seed=task.pipeline.seed)
        journal = session.journal
        if not len(journal):
            raise DataError(
                f"{task.folder}: nothing is rated yet; start the page: posttrain label CONFIG"
            )
        session.write_data_file()
        agreement = session.compute_agreement()
    say(f"{len(journal)} ratings, raters: {len(journal.raters)}, in {session.rows_file}")
    if agreement.alpha is not None:
        interval = ""
        if agreement.low is not None:
            interval = f" [{agreement.low:.2f}, {agreement.high:.2f}]"
        say(
            f"Krippendorff's alpha {agreement.alpha:.2f}{interval} on {agreement.units} items rated by two people or "
            "more"
        )
    return session.rows_file


def _load_items(task: RatingTask, say: Say) -> list[RatedItem]:
    """Load the folder's items and add new ones from a file or from models; rated items are never removed."""
    path = task.folder / "items.jsonl"
    items = {item.id: item for item in read_items(path)}
    num_before = len(items)
    if task.answers_file is not None:
        num_answers = 2 if task.rating.ask == "pairs" else 1
        for item in load_items(task.answers_file, answers=num_answers):
            items.setdefault(item.id, item)
    elif not items or task.should_sample_more:
        # Imports torch.
        from posttrain.preferences.sampled_answers import find_models, sample_items

        models = find_models(task.pipeline, task.rating, task.output)
        for item in sample_items(task.pipeline, task.rating, models, say):
            items.setdefault(item.id, item)
    if len(items) > num_before:
        write_items(path, list(items.values()))
    ratable = filter_ratable_items(list(items.values()), task.rating)
    if not ratable:
        raise DataError(
            f"{path}: has no item for prefer.ask: {task.rating.ask}; add some with --more or --answers FILE"
        )
    return ratable


def _build_posterior(task: RatingTask, items: list[RatedItem], say: Say) -> RewardPosterior | None:
    """Build the reward posterior that chooses pairs; None = the order is random."""
    rating = task.rating
    if rating.choose != "uncertainty" or rating.ask != "pairs":
        return None
    if rating.reward_model is None and task.answers_file is not None and not rating.models:
        say(
            "order      random: name a reward model (prefer.reward_model) or a model to choose by uncertainty"
        )
        return None
    # Imports torch.
    from posttrain.preferences.sampled_answers import build_reward_posterior, find_models

    policy, reward_model = None, None
    if rating.reward_model is None:
        policy = find_models(task.pipeline, rating, task.output)[0].path
        source: Any = f"a new head on {policy}"
    else:
        source = reward_model = Path(rating.reward_model).expanduser()
    say(f"order      by the uncertainty of {source}")
    return build_reward_posterior(
        items, task.pipeline.model, policy=policy, reward_model=reward_model
    )


def _serve_page(session: RatingSession, token: str, preferred_port: int, say: Say) -> None:
    import uvicorn

    from posttrain.preferences.rating_routes import build_rating_app

    port = find_free_port(preferred_port)
    http: Any = limit_connections(MAX_CONNECTIONS, IDLE_SECONDS)
    server = uvicorn.Server(
        uvicorn.Config(
            build_rating_app(session, token),
            http=http,
            host=LOOPBACK_HOST,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            server_header=False,
            lifespan="off",  # unused; with it, a second Ctrl-C would print a traceback
        )
    )

    def print_link() -> None:
        note = f"  (port {preferred_port} is taken)" if port != preferred_port else ""
        say(f"items      {len(session.items)}, {len(session.journal)} ratings so far{note}")
        say(f"page       http://{LOOPBACK_HOST}:{port}/#token={token}")
        say(f"data file  {session.rows_file}")
        say("Ctrl-C stops it; everything is saved")

    run_server(server, print_link)
