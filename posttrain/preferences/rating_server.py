"""`posttrain prefer`: the items, the page's server, and its end.

<output>/<pipeline>/preferences/    items.jsonl, token, and journal and data file of each kind of question (`FILES`)
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.preferences.rating_session import RatingSession, filter_ratable_items
from posttrain.web.server_setup import find_free_port
from posttrain.web.tokens import load_or_create_token
from rl_core.errors import DataError
from rl_core.preferences.items import RatedItem, load_items, read_items, write_items
from rl_core.preferences.question_order import RewardPosterior
from rl_core.settings import RatingSettings
from rl_core.storage.atomic_files import make_folder
from rl_core.storage.locks import FolderLock
from tasks.config import PipelineSettings

HOST = "127.0.0.1"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RatingTask:
    """All that `prefer` needs to know."""

    pipeline: PipelineSettings
    rating: RatingSettings
    output: Path  # of the pipelines
    answers_file: Path | None = None  # file of answers to rate; None = models answer
    should_sample_more: bool = False  # True = models answer again, though there are items

    @property
    def folder(self) -> Path:
        """Folder of everything that people see and say."""
        return resolve_ratings_folder(self.output, self.pipeline)


def resolve_ratings_folder(output: Path, pipeline: PipelineSettings) -> Path:
    """Folder of a pipeline's ratings."""
    return output / pipeline.name / "preferences"


def serve_ratings(task: RatingTask, *, say: Say = print) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Raises: SettingsError, ModelError, DataError for items that cannot be had; BackendError without a free port;
        FolderBusy where another one is served from the folder.
    """
    with FolderLock(make_folder(task.folder)):
        items = _load_items(task, say)
        posterior = _build_posterior(task, items, say)
        token = load_or_create_token(task.folder)
        with RatingSession(
            task.folder, items, task.rating, seed=task.pipeline.seed, posterior=posterior
        ) as room:
            _serve_page(room, token, task.rating.port, say)
        say(f"{len(room.journal)} ratings in {room.rows_file}")


def export_ratings(task: RatingTask, *, say: Say = print) -> Path:
    """Write the data file from the journal, without a page. Raises: DataError where nothing was rated yet."""
    with FolderLock(make_folder(task.folder)):
        items = read_items(task.folder / "items.jsonl")
        room = RatingSession(task.folder, items, task.rating, seed=task.pipeline.seed)
        if not len(room.journal):
            raise DataError(
                f"{task.folder}: nothing is rated yet; start the page: posttrain prefer CONFIG"
            )
        room.write_data_file()
        found = room.compute_agreement()
    say(f"{len(room.journal)} ratings, raters: {len(room.journal.raters)}, in {room.rows_file}")
    if found.alpha is not None:
        interval = f" [{found.low:.2f}, {found.high:.2f}]" if found.low is not None else ""
        say(
            f"Krippendorff's alpha {found.alpha:.2f}{interval} on {found.units} items rated by two people or more"
        )
    return room.rows_file


def _load_items(task: RatingTask, say: Say) -> list[RatedItem]:
    """The folder's items, to which new ones of a file or of the models are added; a rated item always stays."""
    path = task.folder / "items.jsonl"
    known = {item.id: item for item in read_items(path)}
    number = 2 if task.rating.ask == "pairs" else 1
    before = len(known)
    if task.answers_file is not None:
        for item in load_items(task.answers_file, answers=number):
            known.setdefault(item.id, item)
    elif not known or task.should_sample_more:
        from posttrain.preferences.sampled_answers import (  # here: they load torch
            find_models,
            sample_items,
        )

        models = find_models(task.pipeline, task.rating, task.output)
        for item in sample_items(task.pipeline, task.rating, models, say):
            known.setdefault(item.id, item)
    if len(known) > before:
        write_items(path, list(known.values()))
    fitting = filter_ratable_items(list(known.values()), task.rating)
    if not fitting:
        raise DataError(
            f"{path}: has no item for prefer.ask: {task.rating.ask}; add some with --more or --answers FILE"
        )
    return fitting


def _build_posterior(task: RatingTask, items: list[RatedItem], say: Say) -> RewardPosterior | None:
    """The reward posterior that chooses pairs; None = the order is random."""
    rating = task.rating
    if rating.choose != "uncertainty" or rating.ask != "pairs":
        return None
    policy = None
    if rating.reward_model is None:
        if task.answers_file is not None and not rating.models:
            say(
                "order      random: name a reward model (prefer.reward_model) or a model to choose by uncertainty"
            )
            return None
        from posttrain.preferences.sampled_answers import find_models

        policy = find_models(task.pipeline, rating, task.output)[0].path
    from posttrain.preferences.sampled_answers import build_reward_posterior

    model: Any = Path(rating.reward_model).expanduser() if rating.reward_model is not None else None
    say(
        f"order      by the uncertainty of {'a new head on ' + str(policy) if model is None else model}"
    )
    return build_reward_posterior(items, task.pipeline.model, policy=policy, reward_model=model)


def _serve_page(session: RatingSession, token: str, preferred_port: int, say: Say) -> None:
    import uvicorn

    from posttrain.preferences.rating_routes import build_rating_app

    port = find_free_port(preferred_port)
    server = uvicorn.Server(
        uvicorn.Config(
            build_rating_app(session, token),
            host=HOST,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            server_header=False,
            lifespan="off",  # it has none; a second Ctrl-C would end its wait with a traceback
        )
    )

    def announce() -> None:
        while not server.started and not server.should_exit:
            time.sleep(0.05)
        if server.started:
            note = f"  (port {preferred_port} is taken)" if port != preferred_port else ""
            say(f"items      {len(session.items)}, {len(session.journal)} ratings so far{note}")
            say(f"page       http://{HOST}:{port}/#token={token}")
            say(f"data file  {session.rows_file}")
            say("Ctrl-C stops it; everything is kept")

    threading.Thread(target=announce, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has shut down and re-raises the signal
        server.run()
