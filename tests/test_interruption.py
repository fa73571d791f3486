"""Signals, launchers and ranks that die, and every other fault of a run, with the real launcher on CPU ranks."""

import contextlib
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Running, environment

import checkpoint
import run_log
from errors import UserError

slow = pytest.mark.slow
LONG = {"num_steps": 100_000, "vocab_size": 512}
FAULTY = ROOT / "tests" / "probe_fault.py"


def faulty(folder, fault, **options):
    return Running(folder, script=FAULTY, env=environment(FAULT=fault), **{**LONG, **options})


def seconds_until_gone(running, limit):
    started = time.monotonic()
    running.wait_until(running.all_gone, limit)
    return time.monotonic() - started


def messages(run):
    assert "Traceback" not in run.stdout and "frame #" not in run.stdout
    return [line for line in run.stdout.splitlines() if line.startswith("train.py: error")]


# ------------------------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    "rank, number, code",
    [
        (1, signal.SIGTERM, 0),
        pytest.param(0, signal.SIGUSR1, 0, marks=slow),
        pytest.param(1, signal.SIGINT, 130, marks=slow),
    ],
)
def test_a_signal_at_one_rank_stops_all_after_the_same_step(tmp_path, rank, number, code):
    kept = tmp_path / "kept"
    with Running(tmp_path, **LONG, checkpoint_dir=kept, checkpoint_interval=7, log_interval=5) as running:
        running.wait_for_rows(5).ranks()[rank].send_signal(number)
        assert seconds_until_gone(running, 30) < 30
        run = running.end()
    assert run.code == code, run.stdout
    step = len(run.rows)
    assert run.record["status"] == f"interrupted at step {step}"
    assert run.record["steps_completed"] == step, "rows that were pending are written"
    assert run.stdout.count(f"interrupted at step {step}") == 1
    newest = checkpoint.complete(kept)[0]
    assert newest.step == step and checkpoint.damaged(newest) is None
    assert "Traceback" not in run.stdout


@slow
def test_a_signal_is_honoured_during_an_evaluation(tmp_path, wikitext_folder, tokenizer_folder):
    options = {"use_real_data": True, "dataset": wikitext_folder, "tokenizer": tokenizer_folder, "num_steps": 100_000}
    with Running(tmp_path, **options, eval_interval=1, eval_batches=20) as running:  # nearly all of the time
        running.wait_for_rows(2).ranks()[0].send_signal(signal.SIGTERM)
        assert seconds_until_gone(running, 30) < 30
        run = running.end()
    assert run.code == 0
    assert all(row["validation_loss"] for row in run.rows)


@slow
def test_a_signal_is_honoured_during_a_save(tmp_path):
    with Running(tmp_path, **LONG, checkpoint_dir=tmp_path / "kept", checkpoint_interval=1) as running:
        running.wait_for_rows(2).wait_until(lambda: list(tmp_path.glob("kept/*.partial")))
        running.ranks()[1].send_signal(signal.SIGTERM)
        assert seconds_until_gone(running, 30) < 30
        run = running.end()
    assert run.code == 0
    newest = checkpoint.complete(tmp_path / "kept")[0]
    assert newest.step == len(run.rows) and checkpoint.damaged(newest) is None


@slow
@pytest.mark.parametrize("seconds", [1, 5, 8])
def test_a_signal_is_honoured_during_start_up(tmp_path, seconds):
    with Running(tmp_path, **LONG) as running:
        running.wait_until(lambda: len(running.ranks()) == 2)
        time.sleep(seconds)
        running.ranks()[1].send_signal(signal.SIGTERM)
        assert seconds_until_gone(running, 30) < 30


@slow
@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_is_honoured_while_one_rank_waits_for_data(tmp_path, signalled):
    with faulty(tmp_path, "slow-data:0:20", checkpoint_dir=tmp_path / "kept") as running:
        running.wait_for_rows(20)
        time.sleep(2)
        running.ranks()[signalled].send_signal(signal.SIGTERM)
        assert seconds_until_gone(running, 30) < 30
        run = running.end()
    assert (run.code, run.record["status"]) == (0, "interrupted at step 20")
    assert checkpoint.complete(tmp_path / "kept")[0].step == 20


@slow
def test_a_second_signal_leaves_at_once(tmp_path):
    with faulty(tmp_path, "sleep:1:5") as running:
        rank = running.wait_for_rows(5).ranks()[1]
        rank.send_signal(signal.SIGTERM)
        time.sleep(2)
        assert rank.is_running(), "the first one waits for the step to end"
        rank.send_signal(signal.SIGTERM)
        rank.wait(3)
        assert seconds_until_gone(running, 60) < 60
        assert running.end().code != 0


@slow
@pytest.mark.parametrize("victim", ["deepspeed", "its child"])
def test_a_run_whose_launcher_is_killed_stops_as_if_signalled(tmp_path, victim):
    with Running(tmp_path, **LONG, checkpoint_dir=tmp_path / "kept") as running:
        running.wait_for_rows(5)
        launcher = psutil.Process(running.process.pid)
        if victim == "its child":
            (launcher,) = [child for child in launcher.children() if "deepspeed.launcher.launch" in child.cmdline()]
        launcher.kill()
        running.process.wait(60)
        assert seconds_until_gone(running, 60) < 60
        step = len(running.end().rows)
    assert json.loads(running.csv.with_suffix(".json").read_text())["status"] == f"interrupted at step {step}"
    assert checkpoint.complete(tmp_path / "kept")[0].step == step


# -------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=slow)])
def test_a_rank_that_raises_ends_the_run_with_one_message(tmp_path, rank):
    with faulty(tmp_path, f"raise:{rank}:7") as running:
        running.wait_for_rows(7)
        assert seconds_until_gone(running, 60) < 60
        run = running.end()
    assert run.code == 1
    (message,) = messages(run)
    assert f"rank {rank}: ArithmeticError: the numbers do not add up (probe_fault.py:" in message
    assert run.record["status"].startswith(f"failed: rank {rank}: ArithmeticError")
    assert [row["step"] for row in run.rows] == list("0123456")


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_with_one_message(tmp_path, rank):
    with Running(tmp_path, **LONG) as running:
        running.wait_for_rows(5).ranks()[rank].kill()
        assert seconds_until_gone(running, 60) < 60
        run = running.end()
    assert run.code != 0
    (message,) = messages(run)
    assert f"rank {rank} is gone: it was killed" in message
    assert len(run.rows) >= 5
    # Rank 0 alone writes: killed, it can leave no word.
    assert run.record["status"] == ("running" if rank == 0 else message.replace("train.py: error", "failed"))


@slow
def test_a_rank_that_waits_for_a_dead_one_is_not_left_behind(tmp_path):
    """As above, where nothing but the watcher can see it: rank 0 sleeps outside any collective."""
    with faulty(tmp_path, "sleep:0:5") as running:
        running.wait_for_rows(5).ranks()[1].kill()
        assert seconds_until_gone(running, 60) < 60
        assert running.end().code != 0


@slow
def test_one_rank_without_data_stops_all_with_its_message_and_a_checkpoint(tmp_path):
    with faulty(tmp_path, "no-data:1:9", checkpoint_dir=tmp_path / "kept") as running:
        running.wait_for_rows(9)
        assert seconds_until_gone(running, 60) < 60
        run = running.end()
    assert run.code == 1
    assert run.record["status"] == "failed: rank 1 has no data: ConnectionError: the cable is cut"
    assert run.record["status"] in run.stdout and "Traceback" not in run.stdout
    assert checkpoint.complete(tmp_path / "kept")[0].step == 9


@slow
def test_numbers_that_are_not_finite_stop_the_run_at_that_step(tmp_path):
    options = {"num_steps": 50, "vocab_size": 512, "checkpoint_dir": tmp_path / "kept", "checkpoint_interval": 1}
    with Running(tmp_path, **options, learning_rate=1e30) as running:
        run = running.end()
    assert run.code == 1
    step = len(run.rows) - 1
    assert 1 <= step < 10
    words = f"gradients not finite at step {step}, learning rate 1e+30"
    assert words in run.record["status"] and words in run.stdout
    assert checkpoint.complete(tmp_path / "kept")[0].step == step, "the last good one, before that step"


@slow
def test_numbers_that_are_not_finite_are_skipped_so_many_times(tmp_path):
    options = {"num_steps": 50, "vocab_size": 512, "learning_rate": 1e30, "on_nan": "skip", "max_skipped_steps": 3}
    with Running(tmp_path, **options) as running:
        run = running.end()
    assert run.code == 1
    assert [f"update skipped ({count} in a row)" in run.stdout for count in (1, 2, 3, 4)] == [True, True, True, False]
    assert run.record["skipped_steps"] == 4 and "not finite" in run.record["status"]


@slow
def test_a_loss_spike_is_recorded_and_nothing_else(tmp_path):
    with Running(tmp_path, vocab_size=512, learning_rate=0.3, num_steps=12) as running:
        run = running.end()
    assert (run.code, run.record["status"]) == (0, "completed")
    assert max(run.losses) > 1.5 * run.losses[0]


@slow
def test_two_runs_cannot_write_one_csv_and_a_changed_config_has_no_effect(tmp_path):
    config = tmp_path / "my config.json"
    shutil.copy(ROOT / "configs" / "bf16_full.json", config)
    with Running(tmp_path / "first", **LONG, deepspeed_config=config) as running:
        running.wait_for_rows(2)
        config.write_text("{}")
        with Running(tmp_path / "second", **LONG, loss_log_file=running.csv) as second:
            refused = second.end(60)
        running.wait_for_rows(200).ranks()[0].send_signal(signal.SIGTERM)
        run = running.end()
    assert refused.code == 2
    assert "another run writes to it" in second.text
    assert run.code == 0 and [int(row["step"]) for row in run.rows] == list(range(len(run.rows)))
    assert run.record["status"] == f"interrupted at step {len(run.rows)}"
    assert run.record["deepspeed_config"]["bf16"]["bf16_optimizer_states"] is True


@slow
def test_rows_that_found_the_disk_full_are_written_when_it_is_not(tmp_path):
    with Running(tmp_path, vocab_size=512, num_steps=150) as running:
        rank = running.wait_for_rows(20).ranks()[0]
        rank.rlimit(resource.RLIMIT_FSIZE, (running.csv.stat().st_size + 50, resource.RLIM_INFINITY))
        running.wait_until(lambda: "rows cannot be written" in running.text)
        assert running.csv.read_text().endswith("\n"), "no half row"
        time.sleep(1)
        rank.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        run = running.end()
    assert run.code == 0
    assert run.stdout.count("rows cannot be written") == 1
    assert [int(row["step"]) for row in run.rows] == list(range(150))


@slow
def test_rows_whose_folder_is_deleted_are_saved_elsewhere_in_the_end(tmp_path):
    with Running(
        tmp_path / "outputs", vocab_size=512, num_steps=60, loss_log_file=tmp_path / "gone" / "x.csv"
    ) as running:
        csv = tmp_path / "gone" / "x.csv"
        running.wait_until(lambda: csv.exists() and csv.read_text().count("\n") > 10)
        shutil.rmtree(csv.parent)
        run = running.end()
    assert run.code == 0
    assert run.stdout.count("rows cannot be written") == 1
    rescue = Path(run.stdout.split("all rows are in ")[1].splitlines()[0])
    try:
        assert [line.split(",")[0] for line in rescue.read_text().splitlines()[1:]] == list(map(str, range(60)))
    finally:
        shutil.rmtree(rescue.parent)


# ------------------------------------------------------------------------------------------------ rows, in process


ROW = ["1", *["2"] * (len(run_log.COLUMNS) - 1)]


def rows_of(*steps):
    return [[str(step), *ROW[1:]] for step in steps]


def test_a_resumed_csv_keeps_the_rows_before_and_cuts_the_rest(tmp_path):
    path = tmp_path / "loss.csv"
    first = run_log.RowsFile(path)
    first.begin(0)
    first.append(rows_of(0, 1, 2, 3))
    os.close(first.file)
    again = run_log.RowsFile(path)
    assert [row["step"] for row in again.begin(2)] == ["0", "1"]
    again.append(rows_of(2))
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["step", "0", "1", "2"]
    os.close(again.file)


@pytest.mark.parametrize("content", ["", "\0\0", "step,loss\n5,1\n", "step,loss\n0,", "x" * 10_000, "step\n0\n" * 3])
def test_a_csv_that_is_not_the_run_s_is_begun_anew(tmp_path, content):
    path = tmp_path / "loss.csv"
    path.write_text(content)
    rows = run_log.RowsFile(path)
    rows.begin(3)
    rows.append(rows_of(3))
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join(run_log.COLUMNS) and lines[-1].startswith("3,")
    os.close(rows.file)


def test_two_writers_of_one_csv(tmp_path):
    first = run_log.RowsFile(tmp_path / "loss.csv")
    with pytest.raises(UserError, match="another run writes to it"):
        run_log.RowsFile(tmp_path / "loss.csv")
    os.close(first.file)
    os.close(run_log.RowsFile(tmp_path / "loss.csv").file)


def test_a_full_disk_never_leaves_half_a_row(tmp_path, capsys):
    rows = run_log.RowsFile(tmp_path / "loss.csv")
    rows.begin(0)
    whole = rows.path.read_text()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as restore:
        restore.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, hard))
        rows.append(rows_of(0))
        rows.append(rows_of(1))
        assert rows.path.read_text() == whole
    assert capsys.readouterr().err.count("rows cannot be written") == 1
    rows.append(rows_of(2))
    assert [line.split(",")[0] for line in rows.path.read_text().splitlines()] == ["step", "0", "1", "2"]
    os.close(rows.file)


def cut(path):
    os.truncate(path, 20)


def replace(path):
    path.with_name("other").write_text("somebody's own table\n")
    path.with_name("other").rename(path)


@pytest.mark.parametrize("change", [cut, replace, Path.unlink, lambda path: path.open("a").write("step,loss\n")])
def test_a_csv_that_is_changed_under_the_run_has_the_run_s_rows_again(tmp_path, change):
    rows = run_log.RowsFile(tmp_path / "loss.csv")
    rows.begin(0)
    rows.append(rows_of(0, 1))
    change(rows.path)
    rows.append(rows_of(2))
    assert [line.split(",")[0] for line in rows.path.read_text().splitlines()] == ["step", "0", "1", "2"]
    os.close(rows.file)


def test_a_deleted_csv_that_is_another_run_s_by_now_stays_the_other_s(tmp_path, capsys):
    first = run_log.RowsFile(tmp_path / "loss.csv")
    first.begin(0)
    first.path.unlink()
    second = run_log.RowsFile(tmp_path / "loss.csv")
    second.begin(0)
    second.append(rows_of(0))
    first.append(rows_of(0, 1, 2))
    second.append(rows_of(1))
    assert [line.split(",")[0] for line in second.path.read_text().splitlines()] == ["step", "0", "1"]
    assert "rows cannot be written" in capsys.readouterr().err
    for rows in (first, second):
        os.close(rows.file)
