"""Checkpoints: bit-exact continuation after a kill, damage found and named, other runs refused, other rank counts."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, Running, environment, launcher_command

import checkpoint
from errors import UserError

EXACT = ("step", "loss", "learning_rate", "grad_norm", "lost_update_fraction", "validation_loss")
STEPS, INTERVAL = 24, 5
STAGES = [("bf16_full_sr", 3)]
STAGES += [pytest.param(config, stage, marks=pytest.mark.slow) for config in ("baseline", "bf16_full", "bf16_full_sr")
           for stage in (1, 2, 3) if (config, stage) != ("bf16_full_sr", 3)]  # fmt: skip


def exact(run):
    return [{key: row[key] for key in EXACT} for row in run.rows]


def tensors(value, path=""):
    """{path: tensor} of every tensor in a nested state."""
    if torch.is_tensor(value):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: tensor for key, item in items for name, tensor in tensors(item, f"{path}/{key}").items()}


def saved_tensors(folder):
    files = sorted(folder.glob("*.pt"))
    assert len(files) >= 3, "a state of the model, and an optimizer's of each rank"
    return {
        name: tensor
        for file in files
        for name, tensor in tensors(torch.load(file, weights_only=False), file.name).items()
    }


@pytest.fixture(scope="module")
def data(wikitext_folder, tokenizer_folder):
    """Text of which a rank's share is 19 or 20 blocks of 256 tokens: STEPS steps go through it twice."""
    return {"use_real_data": True, "dataset": wikitext_folder, "tokenizer": tokenizer_folder, "seq_length": 256}


@pytest.mark.parametrize("config, stage", STAGES)
def test_a_killed_run_continues_bit_for_bit(tmp_path, data, config, stage):
    options = {**data, "zero_stage": stage, "num_steps": STEPS, "eval_interval": 7, "eval_batches": 2}
    options |= {"learning_rate": 1e-3, "checkpoint_interval": INTERVAL, "keep_checkpoints": 3}
    with Running(tmp_path / "whole", config, **options, checkpoint_dir=tmp_path / "whole" / "kept") as running:
        whole = running.end()
    assert whole.code == 0, whole.stdout
    kept = tmp_path / "killed" / "kept"
    with Running(tmp_path / "killed", config, **options, checkpoint_dir=kept) as running:
        running.wait_for_rows(16)
        os.killpg(running.process.pid, signal.SIGKILL)
    newest = checkpoint.complete(kept)[0]
    # The newest is damaged on top: the one before has to do, and the rows between are cut from the CSV.
    damage = max(newest.path.glob("*.pt"), key=lambda path: path.stat().st_size)
    content = bytearray(damage.read_bytes())
    content[len(content) // 2] ^= 1
    damage.write_bytes(content)
    assert json.loads((tmp_path / "killed" / "loss.json").read_text())["status"] == "running"
    with Running(tmp_path / "killed", config, **options, checkpoint_dir=kept, resume=True) as running:
        resumed = running.end()
    assert resumed.code == 0, resumed.stdout
    assert f"{newest.path}: {damage.name} is damaged" in resumed.stdout
    assert f"resumed from {kept}/step_{newest.step - INTERVAL:08}, at step {newest.step - INTERVAL}" in resumed.stdout
    assert exact(resumed) == exact(whole)
    assert resumed.record["data_fingerprint"] == whole.record["data_fingerprint"], "no block twice, none skipped"
    assert resumed.record["status"] == "completed" and resumed.record["steps_completed"] == STEPS
    assert resumed.record["lost_update_fraction"] == pytest.approx(whole.record["lost_update_fraction"])
    ends = [saved_tensors(folder / "kept" / f"step_{STEPS:08}") for folder in (tmp_path / "whole", tmp_path / "killed")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of random tokens with checkpoints at steps 4 and 8: (its Run, the folder of the checkpoints)."""
    folder = tmp_path_factory.mktemp("finished")
    with Running(folder, "bf16_full_sr", vocab_size=512, checkpoint_dir=folder / "kept", checkpoint_interval=4) as it:
        run = it.end()
    assert run.code == 0, run.stdout
    return run, folder / "kept"


def continued(tmp_path, kept, config="bf16_full_sr", **options):
    """The Run of the same with --resume, on a copy of the checkpoints in `kept`."""
    copy = tmp_path / "copy"
    if kept.exists():
        shutil.copytree(kept, copy)
    options = {"vocab_size": 512, "checkpoint_dir": copy, "resume": True} | options
    with Running(tmp_path / "again", config, **options) as running:
        return running.end()


@pytest.mark.slow
def test_another_run_s_checkpoint_is_refused_with_every_difference(tmp_path, finished):
    run = continued(tmp_path, finished[1], seed=43, num_layers=1, learning_rate=2e-4, zero_stage=2)
    assert run.code == 2
    (line,) = [line for line in run.stdout.splitlines() if "error" in line]
    for difference in ("--seed: 42 -> 43", "--num_layers: 2 -> 1", "params.lr: 0.0001 -> 0.0002", "stage: 3 -> 2"):
        assert difference in line
    assert "Traceback" not in run.stdout


@pytest.mark.slow
def test_without_a_checkpoint_a_resumed_run_starts_afresh_and_says_so(tmp_path, finished):
    run = continued(tmp_path, tmp_path / "nothing yet")
    assert run.code == 0
    assert run.stdout.count("no checkpoint yet: a fresh start") == 1
    assert run.losses == finished[0].losses


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_was(tmp_path, finished):
    run, kept = finished
    shutil.copytree(run.csv.parent, tmp_path / "again")
    again = continued(tmp_path, kept)
    assert again.code == 0, again.stdout
    assert again.csv.read_text() == run.csv.read_text()
    left, right = ({key: run.record[key] for key in run.record if key != "arguments"} for run in (run, again))
    assert differing(left, right) == []


def differing(left, right):
    """The keys under which two records differ by more than a CSV's rounding."""
    rounded = [
        json.loads(json.dumps(record), parse_float=lambda text: f"{float(text):.6g}") for record in (left, right)
    ]
    return [key for key in rounded[0] if rounded[0][key] != rounded[1].get(key)]


@pytest.mark.slow
def test_more_steps_may_be_asked_for_and_rows_that_are_missing_are_named(tmp_path, finished):
    run = continued(tmp_path, finished[1], num_steps=10)
    assert run.code == 0, run.stdout
    assert [row["step"] for row in run.rows] == ["8", "9"]
    assert "the rows of steps 0 to 7 are missing" in run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("config, stage", [("bf16_full_sr", 3), ("baseline", 3), ("bf16_full", 1)])
def test_other_numbers_of_ranks_continue_from_a_universal_checkpoint(tmp_path, config, stage):
    """Random tokens: the global batches are the same for every number of ranks."""
    options = {"vocab_size": 512, "zero_stage": stage, "learning_rate": 1e-3, "checkpoint_interval": 4}
    with Running(tmp_path / "two", config, **options, num_steps=12, checkpoint_dir=tmp_path / "kept") as running:
        two = running.end()
    assert two.code == 0, two.stdout
    shutil.rmtree(tmp_path / "kept" / "step_00000012")
    run = continued(tmp_path, tmp_path / "kept", config, **options, ranks=1, batch_size=4, num_steps=12)
    assert run.code == 2 and f"convert it first: python checkpoint.py {tmp_path / 'copy'}" in run.stdout
    command = [sys.executable, ROOT / "checkpoint.py", tmp_path / "kept"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for ranks, batch_size in ((1, 4), (4, 1)):
        folder = tmp_path / str(ranks)
        shutil.copytree(tmp_path / "two", folder / "again")
        run = continued(folder, tmp_path / "kept", config, **options, ranks=ranks, batch_size=batch_size, num_steps=12)
        assert run.code == 0, run.stdout
        assert "step_00000008_universal, at step 8" in run.stdout
        assert run.losses == pytest.approx(two.losses, abs=2e-3)  # as between rank counts in test_runs.py
        assert run.losses[:8] == two.losses[:8] and run.losses[8:] != two.losses[8:]


def limited(bytes_a_file):
    """The start of a command none of whose files can grow beyond this: to a writer, what a full disk is."""
    code = "import resource as r, os, sys; n = int(sys.argv[1]); r.setrlimit(r.RLIMIT_FSIZE, (n, n))"
    return [sys.executable, "-c", f"{code}; os.execv(sys.argv[2], sys.argv[2:])", str(bytes_a_file)]


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, finished, strict):
    kept = tmp_path / "kept"
    shutil.copytree(finished[1], kept)
    command = [*limited(100_000), *launcher_command("")[:-1]]
    options = {"vocab_size": 512, "checkpoint_dir": kept, "checkpoint_interval": 2, "resume": True, "num_steps": 12}
    options |= {"checkpoint_strict": True} if strict else {}
    with Running(tmp_path / "run", "bf16_full_sr", command=command, **options) as running:
        run = running.end()
    assert re.search("WARNING: NO CHECKPOINT at step 10: .*full disk.*; the last good one stays", run.stdout)
    assert [found.step for found in checkpoint.complete(kept)] == [8, 4]
    assert not list(kept.glob("*.partial"))
    if strict:
        assert run.code == 1
        assert run.record["status"] == "failed: no checkpoint could be written at step 10"
    else:
        assert (run.code, run.record["status"]) == (0, "completed")
        assert [row["step"] for row in run.rows] == ["8", "9", "10", "11"]


@pytest.mark.slow
def test_killing_at_random_moments_loses_nothing():
    """The short form; `python tests/kill_loop.py --kills 50` is the long one."""
    command = [sys.executable, ROOT / "tests" / "kill_loop.py", "--kills", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills" in done.stdout and "the same rows" in done.stdout


# ------------------------------------------------------------------------------------------------- on disk alone


def make(folder, step, **files):
    path = folder / f"step_{step:08}"
    partial = path.with_name(f"{path.name}.partial")
    partial.mkdir(parents=True)
    for name, content in {"a.pt": "aaaa", "b.pt": "bbbb", **files}.items():
        (partial / name).write_text(content)
    manifest = {"step": step, "identity": {"--seed": 1, "number of ranks": 2}, "files": checkpoint.checksums(partial)}
    checkpoint.publish(partial, path, manifest)
    return path


def whole(folder):
    return [found.step for found in checkpoint.complete(folder) if checkpoint.damaged(found) is None]


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda path: (path / "a.pt").write_text("aab"), "a.pt has 3 bytes in place of 4"),
        (lambda path: (path / "b.pt").write_text("bbbc"), "b.pt is damaged"),
        (lambda path: (path / "b.pt").unlink(), "b.pt is missing"),
        (lambda path: (path / "c.pt").write_text("x"), "c.pt does not belong to it"),
        (lambda path: (path / "manifest.json").write_text('{"step": 2, "iden'), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("[" * 100_000), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("{}"), "manifest.json is damaged"),
    ],
)
def test_damage_is_named_and_the_one_before_is_whole(tmp_path, spoil, words):
    make(tmp_path, 1)
    path = make(tmp_path, 2)
    assert whole(tmp_path) == [2, 1]
    spoil(path)
    assert checkpoint.damaged(checkpoint.complete(tmp_path)[0]) == words
    assert whole(tmp_path) == [1]


def test_what_is_not_whole_or_lies_elsewhere_is_no_checkpoint(tmp_path):
    make(tmp_path / "elsewhere", 7)
    kept = tmp_path / "kept"
    make(kept, 1)
    (kept / "step_00000007").symlink_to(tmp_path / "elsewhere" / "step_00000007")
    (kept / "step_00000008.partial").mkdir()
    (kept / "step_00000009").mkdir()
    assert whole(kept) == [1]


def test_the_newest_stay_and_half_written_ones_go(tmp_path):
    for step in (9, 1, 2, 3, 4):  # 9 is of an earlier run
        make(tmp_path, step)
    (tmp_path / "step_00000005.partial").mkdir()
    checkpoint.prune(tmp_path, 2, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert (tmp_path / "latest").read_text() == "step_00000004"


def test_a_disk_that_is_full_leaves_no_half_written_file(tmp_path):
    checkpoint.write_whole(tmp_path / "latest", "step_00000004")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
        with pytest.raises(OSError, match="too large"):
            checkpoint.write_whole(tmp_path / "latest", "step_00000008")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "latest").read_text() == "step_00000004"


def test_what_the_run_is_and_what_may_change():
    config = {"bf16": {"enabled": True}, "optimizer": {"params": {"lr": 1e-4, "betas": [0.9, 0.999]}}}
    saved = checkpoint.identity({"seed": 1, "num_steps": 5, "resume": False}, config, 2)
    assert saved == json.loads(json.dumps(saved))
    assert (
        checkpoint.differences(saved, checkpoint.identity({"seed": 1, "num_steps": 9, "resume": True}, config, 2)) == []
    )
    other = {"bf16": {}, "optimizer": {"params": {"lr": 1e-4, "betas": [0.9, 0.95]}}}
    assert checkpoint.differences(saved, checkpoint.identity({"seed": 2}, other, 4)) == [
        "--seed: 1 -> 2",
        "bf16.enabled: True -> not set",
        "number of ranks: 2 -> 4",
        "optimizer.params.betas: [0.9, 0.999] -> [0.9, 0.95]",
    ]


def test_resuming_needs_a_folder():
    import train

    for flag in (["--resume"], ["--checkpoint_interval", "5"], ["--checkpoint_strict"]):
        with pytest.raises(UserError, match="need a --checkpoint_dir"):
            train.parse_args(["--deepspeed_config", "x.json", *flag])


def test_a_folder_without_a_checkpoint_is_the_converter_s_error(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "checkpoint.py", tmp_path], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"checkpoint.py: error: no complete checkpoint in {tmp_path}"
