"""Models of epochs: which are saved, their contents, and that saving them changes nothing else."""

import pytest
import torch
from helpers.library import small_policy

import rl_core
from rl_core.settings import LoraSettings
from rl_core.training import checkpoints

ROWS = [
    {"prompt": f"{a} + {b} =", "completion": str(a + b)} for a in range(1, 6) for b in range(1, 5)
]  # 20
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "e"} for row in ROWS]
SETTINGS = {
    "batch_size": 8,
    "epochs": 3.5,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "checkpoint_every": 4,
}


def run_sft(output, lora=None, **options):
    """Run 3 batches an epoch, 11 steps in all."""
    torch.manual_seed(5)  # for dropout, as a stage seeds it
    policy = small_policy(lora=lora)
    settings = rl_core.SFTSettings(**{**SETTINGS, **options})
    return rl_core.sft(policy, ROWS, heldout=0.0, settings=settings, output=output)


def read_weights(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def list_epochs(output):
    return sorted(path.name for path in (output / "epochs").iterdir())


@pytest.mark.parametrize(
    ("lora", "options"),
    [(None, {}), (LoraSettings(rank=2, dropout=0.1), {}), (None, {"ema_decay": 0.5})],
    ids=["plain", "lora", "averaged"],
)
def test_the_model_of_an_epoch_is_that_of_a_training_that_ends_there(tmp_path, lora, options):
    training = run_sft(tmp_path / "whole", lora, keep_epochs=2, **options)
    training.run()
    assert list_epochs(tmp_path / "whole") == ["2", "3"], "whole epochs, the newest two"
    without = run_sft(tmp_path / "without", lora, **options)
    without.run()
    ended = zip(training.model.parameters(), without.model.parameters(), strict=True)
    assert all(torch.equal(*weights) for weights in ended), "keeping them changes no number"
    shorter = run_sft(tmp_path / "shorter", lora, **{**options, "epochs": 2.0})
    shorter.run()
    shorter.save(tmp_path / "saved")
    assert read_weights(tmp_path / "saved") == read_weights(tmp_path / "whole/epochs/2")
    loaded = rl_core.load_policy(tmp_path / "whole/epochs/2")
    assert rl_core.generate(loaded, ["1 + 1 ="], seed=1) == shorter.generate(["1 + 1 ="], seed=1)
    assert (tmp_path / "whole/epochs/2/adapter").is_dir() == (lora is not None)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_that_dies_between_a_model_and_its_checkpoint_leaves_the_same(
    tmp_path, monkeypatch, epoch
):
    run_sft(tmp_path / "whole", keep_epochs=2).run()
    names = []

    def write_and_die(name):
        names.append(name)
        if len(names) == epoch:
            raise RuntimeError("killed")

    training = run_sft(tmp_path / "cut", keep_epochs=2)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "inject_fault", write_and_die)
        with pytest.raises(RuntimeError, match="killed"):
            training.run()
    (
        tmp_path / "cut/epochs/.tmp-3@elsewhere-1"
    ).mkdir()  # from another machine: left unchanged, and not an epoch
    resumed = run_sft(tmp_path / "cut", keep_epochs=2)
    resumed.run()
    assert list_epochs(tmp_path / "cut") == [".tmp-3@elsewhere-1", "2", "3"]
    for name in ("2", "3"):
        assert read_weights(tmp_path / "cut/epochs" / name) == read_weights(
            tmp_path / "whole/epochs" / name
        )


def test_preferences_and_reward_models_keep_theirs(tmp_path):
    shared = {"batch_size": 10, "epochs": 2.0, "warmup_steps": 0, "keep_epochs": 5}
    rl_core.dpo(
        small_policy(),
        PAIRS,
        heldout=0.0,
        settings=rl_core.PreferenceSettings(**shared),
        output=tmp_path / "dpo",
    ).run()
    rl_core.load_policy(tmp_path / "dpo/epochs/1")
    for number, loss in enumerate(("bradley_terry", "mse")):
        rows = (
            PAIRS
            if loss == "bradley_terry"
            else [{**row, "score": index} for index, row in enumerate(ROWS)]
        )
        output = tmp_path / loss
        settings = rl_core.RewardModelSettings(**shared, loss=loss, head_layers=1 + number)
        training = rl_core.reward_model(
            small_policy(), rows, heldout=0.0, settings=settings, output=output
        )
        training.run()
        training.save(output / "last")
        assert list_epochs(output) == ["1", "2"]
        assert (
            read_weights(output / "epochs/2")
            == read_weights(output / "last")
            != read_weights(output / "epochs/1")
        )


def test_without_a_folder_there_is_no_place_for_them():
    with pytest.raises(rl_core.SettingsError, match="keep_epochs: needs an output folder"):
        run_sft(None, keep_epochs=1).run()
