"""The alias `champion` moved by hand: to a version, or back to the champion before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rl_core.errors import ExportMismatch, SettingsError
from rl_core.storage.faults import fault
from tasks.config import PipelineSettings
from tasks.tracking import Tracking

__all__ = ["PROOF", "PROVEN", "REFUSED", "promote_version"]

PROOF = "export.json"  # file of the stage `export`
PROVEN = "export.model_sha256"  # tag of a version: digest of the folder that its proof is of
REFUSED = "export.refused"  # tag of a version whose folder is not the model that was trained and evaluated


def promote_version(settings: PipelineSettings, version: int | None, note: str = "") -> str:
    """Move the alias `champion` by hand: to `version`, or back to the champion before when `version` is None.

    Returns: what was done, as a sentence. Raises: SettingsError when there is no such version; ExportMismatch for one
        whose folder was found not to be the model that was evaluated, or was never compared with it.
    """
    output = Path(settings.output).resolve()
    tracking = Tracking(settings.tracking.uri, output, settings.tracking.experiment or settings.name)
    registry = tracking.registry
    registered = settings.tracking.registered_model or settings.name
    champion = registry.champion(registered)
    if version is None:
        before = champion.tags.get("gate.champion_before", "none") if champion else "none"
        if champion is None or not before.isdigit():
            raise SettingsError(
                f"model '{registered}' has no champion before the present one to go back to; name one with --version N"
            )
        version = int(before)
    if champion is not None and champion.version == version:
        registry.clear_challenger(registered, version)  # an earlier call may have been killed before it did
        if (journal := tracking.journal_of(champion)) is not None:
            tracking.replay(journal)
        return f"version {version} of {registered} is the champion already"
    promoted = registry.version(registered, version)  # raises where there is none
    if refused := promoted.tags.get(REFUSED):
        raise ExportMismatch(f"version {version} of {registered} is not promoted: {refused}")
    if not _is_proven(promoted.tags, output / settings.name):
        raise ExportMismatch(
            f"version {version} of {registered} is not promoted: there is no proof that it is the model that was "
            "trained and evaluated; run the configuration that made it again with `stages.evaluate` and "
            "`stages.export: {}`: what is finished is not run twice, and the proof is written"
        )
    tags = {
        "gate.decision": "promoted by hand",
        "gate.reason": note or "promoted by hand",
        "gate.champion_before": str(champion.version) if champion else "none",
    }
    journal = tracking.journal_move(promoted, "champion", tags)
    registry.tag_version(registered, version, tags)
    fault("hand.tagged")
    registry.set_champion(registered, version)
    if journal is not None:
        tracking.replay(journal)
    was = f" (was version {champion.version})" if champion else ""
    return f"version {version} of {registered} is the champion now{was}"


def _is_proven(tags: Mapping[str, str], home: Path) -> bool:
    """True = a proof of export is of this version's folder: by its tags, or in a finished stage of the pipeline.

    A store that was away when the stage ran has no tags of it.
    """
    digest = tags.get("model_sha256")
    if not digest:  # registered without a digest: nothing can be compared with the proof but the tag's being there
        return bool(tags.get(PROVEN))
    if tags.get(PROVEN) == digest:
        return True
    for path in sorted((home / "stages" / "export").glob(f"*/{PROOF}")):
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"].values()
            if any(facts["model_sha256"] == digest for facts in models):
                return True
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # of another version of posttrain, or just being removed
    return False
