"""Command `posttrain check judge`: agreement of the policy stage's judge with human labels."""

from __future__ import annotations

import argparse
from pathlib import Path

from posttrain.cli import run_setup
from posttrain.cli.arguments import add_config_argument, add_json_option
from rl_core.errors import SettingsError

EXAMPLES = (
    "check judge grpo.yaml --labels outputs/mine/preferences/preferences.jsonl",
    "check judge grpo.yaml --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_config_argument(parser)
    parser.add_argument(
        "--labels",
        metavar="FILE",
        help="preference pairs or scored answers (default: reward_options.judge.labels)",
    )
    add_json_option(parser)


def run_command(arguments: argparse.Namespace) -> int:
    """Ask the judge about labelled pairs and print its agreement; return 1 below `min_agreement`."""
    settings = run_setup.load_pipeline_settings(arguments, import_code=False)
    policy = settings.stages.policy
    if policy is None or "judge" not in policy.rewards:
        raise SettingsError(
            "stages.policy.rewards: names no judge to check; write {judge: 1.0} and reward_options.judge"
        )
    judge = policy.reward_options.judge
    labels = arguments.labels or judge.labels
    if labels is None or not Path(labels).expanduser().exists():
        raise SettingsError(
            f"--labels: {'name a file of human labels' if labels is None else f'{labels} does not exist'}; "
            "`posttrain label` makes one"
        )
    from rl_core.rewards.judges.calibration import calibrate_judge  # loads torch

    calibration = calibrate_judge(judge, labels)
    passed = calibration.agreement.rate >= judge.min_agreement
    if arguments.json:
        from posttrain.cli.tables import print_json

        print_json({"mode": judge.mode, "labels": labels, "passed": passed, "result": calibration})
    else:
        name = judge.path or judge.model
        print(f"{name} ({judge.mode}) {calibration.describe()}")
        if not passed:
            print(f"below min_agreement {judge.min_agreement:.1%}: a training would be refused")
    return 0 if passed else 1
