"""Past versions of a policy: which stay, what is on the disk, what a changed file gives, adapters and tied weights."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
import torch
from helpers.tiny import nano, weights_digest

from rl_core.errors import CheckpointError, SettingsError
from rl_core.models import lora
from rl_core.models.trainable_weights import collect_trainable_weights
from rl_core.settings import LoraSettings, SelfPlaySettings
from rl_core.storage import faults
from rl_core.storage.faults import InjectedFault
from rl_core.training.opponent_pool import OpponentPool


def build_pool(model, folder: Path | None, *, seed: int = 0, keep: int = 2, **options: object):
    settings = SelfPlaySettings(**{"snapshot_every": 1, "pool_size": 3, **options})  # type: ignore[arg-type]
    return OpponentPool(model, settings, seed, folder=folder, keep_checkpoints=keep)


def shift(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.01


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def list_iterations(pool) -> list[int]:
    return [snapshot.iteration for snapshot in pool.snapshots]


@pytest.mark.parametrize("on_disk", [True, False])
@pytest.mark.parametrize("adapters", [True, False])
def test_an_opponent_has_the_weights_of_its_iteration_and_the_policy_gets_its_own_back(
    tmp_path: Path, on_disk: bool, adapters: bool
) -> None:
    model = nano(tie_word_embeddings=True)
    if adapters:
        model = lora.add_adapter(model, LoraSettings(rank=2, target_modules=("q_proj",)))
    pool = build_pool(model, tmp_path if on_disk else None)
    digests = []
    for iteration in range(3):
        shift(model)
        assert pool.take_snapshot_when_due(iteration)
        assert not pool.take_snapshot_when_due(iteration)
        digests.append(weights_digest(model))
    shift(model)
    before = weights_digest(model)
    for snapshot, digest in zip(pool.snapshots, digests, strict=True):
        with pool.use_snapshot(snapshot.name):
            assert weights_digest(model) == digest
        assert weights_digest(model) == before
    with pytest.raises(RuntimeError), pool.use_snapshot(pool.snapshots[0].name):
        raise RuntimeError("a game failed")
    assert weights_digest(model) == before
    if on_disk and adapters:
        trained = sum(t.numel() * 4 for t in collect_trainable_weights(model).values())
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert all(trained < size < trained + 4000 for size in sizes)  # no frozen weight


def test_snapshots_are_taken_when_due(tmp_path: Path) -> None:
    pool = build_pool(nano(), tmp_path, snapshot_every=4, pool_size=10)
    taken = [iteration for iteration in range(13) if pool.take_snapshot_when_due(iteration)]
    assert taken == [0, 4, 8, 12] == list_iterations(pool)


def test_the_newest_stay_and_the_first_one_in_addition(tmp_path: Path) -> None:
    pool = build_pool(nano(), tmp_path, retention="newest")
    for iteration in range(6):
        pool.take_snapshot_when_due(iteration)
    assert list_iterations(pool) == [3, 4, 5] and pool.first.iteration == 0
    assert list_files(tmp_path) == [f"snapshot-0000000{n}.safetensors" for n in (0, 3, 4, 5)]


def test_a_reservoir_is_a_uniform_sample_of_the_past() -> None:
    """Each of 8 snapshots stays with probability 3/8: 150 of 400 seeds, standard deviation 9.7."""
    model, counts = torch.nn.Linear(1, 1), collections.Counter()
    for seed in range(400):
        pool = build_pool(model, None, seed=seed)
        for iteration in range(8):
            pool.take_snapshot_when_due(iteration)
        assert len(pool.snapshots) == 3
        counts.update(list_iterations(pool))
    assert all(110 < counts[iteration] < 190 for iteration in range(8))


def test_opponents_are_drawn_by_the_seed_with_a_limit_of_different_ones() -> None:
    model, played = torch.nn.Linear(1, 1), collections.Counter()
    pools = [build_pool(model, None, seed=7, pool_size=5) for _ in range(2)]
    for pool in pools:
        for iteration in range(5):
            pool.take_snapshot_when_due(iteration)
    for iteration in range(300):
        drawn, again = (pool.draw_opponents(iteration, 6) for pool in pools)
        assert drawn == again
        counts = collections.Counter(snapshot.iteration for snapshot in drawn)
        assert sorted(counts.values()) == [3, 3]  # two different ones, equal shares
        played.update(counts)
    assert all(240 < played[iteration] < 480 for iteration in range(5))  # 360 each
    assert pools[0].draw_opponents(0, 6) != pools[0].draw_opponents(1, 6)
    with pytest.raises(CheckpointError, match="no snapshot"):
        build_pool(model, None).draw_opponents(0, 1)


def test_files_are_bounded_and_those_of_kept_checkpoints_stay(tmp_path: Path) -> None:
    """With a checkpoint after every second iteration, of which the newest two are kept."""
    pool, states = build_pool(nano(), tmp_path, retention="newest"), []
    for iteration in range(20):
        pool.take_snapshot_when_due(iteration)
        if iteration % 2:
            states.append(pool.state_dict(iteration + 1))
        assert len(list_files(tmp_path)) <= 1 + pool.settings.pool_size * 4
        for state in states[-2:]:
            build_pool(nano(), tmp_path).load_state_dict(state)  # verifies its files
    named = {row["iteration"] for state in states[-4:] for row in state["snapshots"]} | {0}
    assert list_files(tmp_path) == [f"snapshot-{n:08d}.safetensors" for n in sorted(named)]


def test_many_saves_in_one_iteration_forget_no_checkpoint(tmp_path: Path) -> None:
    pool = build_pool(nano(), tmp_path, retention="newest", pool_size=1)
    pool.take_snapshot_when_due(0)
    pool.take_snapshot_when_due(1)
    state = pool.state_dict(2)
    for _ in range(9):
        pool.state_dict(3)
    pool.take_snapshot_when_due(4)
    other = build_pool(nano(), tmp_path)
    other.load_state_dict(state)  # verifies the files
    assert list_iterations(other) == [1] and "snapshot-00000001.safetensors" in list_files(tmp_path)


@pytest.mark.parametrize("on_disk", [True, False])
def test_a_resumed_pool_continues_as_the_unbroken_one(tmp_path: Path, on_disk: bool) -> None:
    folders = [tmp_path / name if on_disk else None for name in ("whole", "cut")]
    models = [nano(), nano()]
    whole, cut = (build_pool(m, f) for m, f in zip(models, folders, strict=True))
    for iteration in range(12):
        for pool, model in ((whole, models[0]), (cut, models[1])):
            shift(model)
            pool.take_snapshot_when_due(iteration)
        if iteration == 6:
            state = cut.state_dict(iteration + 1)
            cut = build_pool(models[1], folders[1])
            cut.load_state_dict(state)
            assert not cut.take_snapshot_when_due(iteration)
    assert whole.snapshots == cut.snapshots and whole.first == cut.first
    for place in range(3):
        names = [pool.snapshots[place].name for pool in (whole, cut)]
        with whole.use_snapshot(names[0]), cut.use_snapshot(names[1]):
            assert weights_digest(models[0]) == weights_digest(models[1])


def change_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            change_byte,
            "is not the file that the checkpoint names .* was changed or damaged; restore",
        ),
        (Path.unlink, "cannot be read: No such file or directory; restore the file from a copy"),
        (lambda path: path.write_bytes(b""), "is not the file that the checkpoint names"),
    ],
)
def test_a_changed_or_missing_file_is_named(tmp_path: Path, harm, message: str) -> None:
    pool = build_pool(nano(), tmp_path)
    pool.take_snapshot_when_due(0)
    pool.take_snapshot_when_due(1)
    state = pool.state_dict(2)
    harm(tmp_path / "snapshot-00000001.safetensors")
    with pytest.raises(CheckpointError, match=message) as raised:
        build_pool(nano(), tmp_path).load_state_dict(state)
    assert "snapshot-00000001.safetensors: the opponent of iteration 1" in str(raised.value)
    with pytest.raises(CheckpointError, match=message), pool.use_snapshot("snapshot-00000001"):
        pass


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    pool = build_pool(nano(), tmp_path)
    pool.take_snapshot_when_due(0)
    other = build_pool(torch.nn.Linear(2, 2), tmp_path)
    other.load_state_dict(pool.state_dict(1))
    with pytest.raises(CheckpointError, match="weights of another model"):
        other.use_snapshot("snapshot-00000000").__enter__()


@pytest.mark.parametrize("point", ["opponent.written", "opponent.stored", "opponent.removing"])
def test_a_failure_at_any_point_leaves_what_the_checkpoint_names(
    tmp_path: Path, point: str
) -> None:
    model = nano()
    pool = build_pool(model, tmp_path, retention="newest", pool_size=1)
    pool.take_snapshot_when_due(0)
    shift(model)
    pool.take_snapshot_when_due(1)
    state, before = pool.state_dict(2), list_files(tmp_path)
    pool.state_dict(3)
    shift(model)
    pool.take_snapshot_when_due(3)
    faults.configure_faults(f"{point}:1:raise")
    for number in (4, 5, 6, 7):
        shift(model)
        pool.state_dict(number)
        try:
            pool.take_snapshot_when_due(number)
        except (InjectedFault, CheckpointError):
            break
    else:
        pytest.fail("the point was not reached")
    faults.configure_faults(None)
    assert set(before[:1]) <= set(list_files(tmp_path))
    if number == 4:
        assert set(before) <= set(list_files(tmp_path))
        resumed = build_pool(model, tmp_path, retention="newest", pool_size=1)
        resumed.load_state_dict(state)
        assert resumed.take_snapshot_when_due(2)
        assert not [name for name in list_files(tmp_path) if name.startswith(".tmp")]


def test_remains_of_another_run_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "snapshot-00000070.safetensors").write_bytes(b"of a run that was killed")
    (tmp_path / "notes.txt").write_text("mine")
    build_pool(nano(), tmp_path).take_snapshot_when_due(0)
    assert list_files(tmp_path) == ["notes.txt", "snapshot-00000000.safetensors"]


def test_settings_out_of_range_are_refused() -> None:
    for bad in ({"pool_size": 0}, {"snapshot_every": 0}, {"current_share": 1.5}, {"eval_games": 1}):
        with pytest.raises(SettingsError, match=next(iter(bad))):
            SelfPlaySettings(**bad)
    with pytest.raises(SettingsError, match="plays no game against the pool"):
        SelfPlaySettings(current_share=1.0)
    SelfPlaySettings(current_share=1.0, opponent="current")
