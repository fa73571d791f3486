"""run_comparison.sh as a user runs it: real, small, in folders with spaces, twice at once, and when a run dies."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, environment

SCRIPT = ROOT / "run_comparison.sh"
SMALL = "--num_layers 1 --hidden_dim 32 --num_heads 2 --seq_length 32 --batch_size 2".split()
SMALL += "--vocab_size 300 --log_interval 2".split()


def script_environment():
    env = environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    del env["DS_ACCELERATOR"]  # the script finds out by itself
    return env


def start(*arguments, cwd):
    command = list(map(str, [SCRIPT, *arguments]))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Where the tests run in the background, SIGINT is ignored, and a shell cannot trap what it was told to ignore.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(command, cwd=cwd, env=script_environment(), preexec_fn=heed, **pipes)


def wait_for_rows(process, csv, rows):
    deadline = time.monotonic() + 180
    while not (csv.exists() and csv.read_text().count("\n") > rows):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def finish(process):
    stdout, stderr = process.communicate(timeout=300)
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory):
    """Two comparisons started together from another folder, with spaces in every path."""
    folders = [tmp_path_factory.mktemp(f"a comparison {index}") for index in (1, 2)]
    running = [
        start(*SMALL, "--num_steps=30", "--configs", configs, "--log_dir", folder / "the logs", cwd=folder)
        for folder, configs in zip(folders, ("baseline,bf16_full", "bf16_full"), strict=True)
    ]
    return [(folder / "the logs", *finish(process)) for folder, process in zip(folders, running, strict=True)]


def test_both_comparisons_end_well(two_at_once):
    for _, code, stdout, stderr in two_at_once:
        assert code == 0, stdout + stderr
        assert "Preset: small model on two CPU ranks" in stdout


def test_it_leaves_csvs_records_logs_the_figure_and_the_tables(two_at_once):
    logs, _, stdout, _ = two_at_once[0]
    for name in ("baseline", "bf16_full"):
        assert json.loads((logs / f"{name}_loss.json").read_text())["status"] == "completed"
        assert len((logs / f"{name}_loss.csv").read_text().splitlines()) == 31
        assert "RESULT" in (logs / f"{name}.log").read_text()
    assert (logs / "loss_comparison.png").read_bytes().startswith(b"\x89PNG")
    summary = (logs / "summary.md").read_text()
    assert summary in stdout
    for row in ("| baseline |", "| bf16_full |", "Allocated (GB)", "Final loss"):
        assert row in summary


def test_both_configs_ran_with_the_same_arguments_on_the_same_data(two_at_once):
    logs = two_at_once[0][0]
    one, other = (json.loads((logs / f"{name}_loss.json").read_text()) for name in ("baseline", "bf16_full"))
    assert one["data_fingerprint"] == other["data_fingerprint"]
    differing = {key for key in one["arguments"] if one["arguments"][key] != other["arguments"][key]}
    assert differing == {"deepspeed_config", "loss_log_file"}


def test_dry_run_prints_the_commands_and_does_nothing(tmp_path):
    code, stdout, stderr = finish(start("--dry_run", "--log_dir", tmp_path / "x y", "--num_gpus", "3", cwd=tmp_path))
    assert (code, stderr) == (0, "")
    commands = [line for line in stdout.splitlines() if line.startswith("deepspeed ")]
    assert len(commands) == 3
    assert all("--num_gpus=3" in line and "--num_layers 4" in line and "--seq_length 256" in line for line in commands)
    assert list(tmp_path.iterdir()) == []


def test_with_gpus_it_takes_all_of_them_and_the_published_dimensions(tmp_path):
    lister = tmp_path / "nvidia-smi"
    lister.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: NVIDIA H100"; done\n')
    lister.chmod(0o755)
    env = script_environment()
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    done = subprocess.run([SCRIPT, "--dry_run"], env=env, capture_output=True, text=True, check=True)
    commands = [line for line in done.stdout.splitlines() if line.startswith("deepspeed ")]
    published = (
        "--num_gpus=4", "--num_layers 32", "--hidden_dim 4096", "--num_heads 32", "--batch_size 1", "--num_steps 1000",
        "--activation_checkpointing", "--use_real_data", "--seed 42",
    )  # fmt: skip
    assert len(commands) == 3 and all(part in line for line in commands for part in published)
    assert "--dataset" not in done.stdout and "on 4 GPUs" in done.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--no_such_option", "1"], "unknown option --no_such_option"),
        (["stray"], "unexpected argument stray"),
        (["--num_steps"], "needs a value"),
        (["--seed", "1", "--seeds", "2,3"], "not both"),
        (["--configs", "baseline,none"], "no config"),
    ],
)
def test_a_mistake_is_an_error_with_code_2(tmp_path, arguments, message):
    code, _, stderr = finish(start(*arguments, cwd=tmp_path))
    assert code == 2
    assert message in stderr.splitlines()[-1]
    if message.startswith("un"):
        assert "usage: run_comparison.sh" in stderr


def test_seeds_are_runs_of_their_own_in_alternating_order(tmp_path):
    code, stdout, _ = finish(start("--dry_run", "--seeds", "7,8,9", "--configs", "baseline,bf16_full", cwd=tmp_path))
    assert code == 0
    commands = [shlex.split(line) for line in stdout.splitlines() if "--loss_log_file" in line]
    names = [command[command.index("--loss_log_file") + 1] for command in commands]
    order = [
        "baseline_seed7",
        "bf16_full_seed7",
        "bf16_full_seed8",
        "baseline_seed8",
        "baseline_seed9",
        "bf16_full_seed9",
    ]
    assert [Path(name).name.removesuffix("_loss.csv") for name in names] == order
    assert [line.split("--seed ")[1].split()[0] for line in stdout.splitlines() if "--seed " in line] == list("778899")
    plot = stdout.splitlines()[-1]
    assert plot.count("--run baseline=") == 3 and plot.count("--run bf16_full=") == 3


def test_help(tmp_path):
    code, stdout, _ = finish(start("--help", cwd=tmp_path))
    assert code == 0
    for option in ("--num_gpus", "--log_dir", "--dry_run", "--hidden_dim", "--zero_stage", "--tokenizer", "--seed"):
        assert option in stdout


def test_a_failed_run_stops_it_with_that_runs_code_and_names_the_log(tmp_path):
    code, stdout, stderr = finish(start(*SMALL, "--seq_length=900000", "--log_dir", tmp_path, cwd=tmp_path))
    assert code == 2
    assert "baseline failed, see ./baseline.log" in stderr.splitlines()[-1]
    assert "too short" in (tmp_path / "baseline.log").read_text()
    assert "== bf16_full" not in stdout


def test_a_run_whose_launcher_is_killed_has_failed_although_deepspeed_exits_with_0(tmp_path):
    process = start(*SMALL, "--num_steps=100000", "--log_dir", tmp_path, cwd=tmp_path)
    csv = tmp_path / "baseline_loss.csv"
    wait_for_rows(process, csv, 2)
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in family if "train.py" in " ".join(child.cmdline())]
    # The launcher that watches the ranks first, or it would see them die and report it.
    ranks.sort(key=lambda child: "deepspeed.launcher.launch" not in child.cmdline())
    for child in ranks:
        if Path(child.cmdline()[1]).name != "deepspeed":  # the command itself lives, and exits with 0
            child.send_signal(signal.SIGKILL)
    code, _, stderr = finish(process)
    assert code == 1
    assert "baseline failed" in stderr
    assert json.loads(csv.with_suffix(".json").read_text())["status"] == "running"


@pytest.mark.slow
def test_stopped_and_resumed_it_skips_what_is_finished_and_continues_what_is_not(tmp_path):
    arguments = [*SMALL, "--num_steps=150", "--configs", "baseline,bf16_full", "--checkpoint_interval=20", "--log_dir"]
    process = start(*arguments, tmp_path, cwd=tmp_path)
    csv = tmp_path / "bf16_full_loss.csv"
    wait_for_rows(process, csv, 30)
    process.send_signal(signal.SIGTERM)
    code, stdout, stderr = finish(process)
    assert code == 143, stdout + stderr
    assert "bf16_full interrupted at step " in stderr.splitlines()[-1]
    interrupted = csv.read_text().splitlines()
    assert 30 < len(interrupted) < 151

    code, stdout, stderr = finish(start(*arguments, tmp_path, "--resume", cwd=tmp_path))
    assert code == 0, stdout + stderr
    assert "== baseline: completed already" in stdout and "== bf16_full\n" in stdout
    assert f"at step {len(interrupted) - 1}" in stdout
    assert csv.read_text().splitlines()[: len(interrupted)] == interrupted
    assert json.loads(csv.with_suffix(".json").read_text())["steps_completed"] == 150
    assert "| bf16_full |" in (tmp_path / "summary.md").read_text()

    code, _, stderr = finish(start(*arguments, tmp_path, "--resume", "--num_steps=200", cwd=tmp_path))
    assert code == 2
    assert "completed run with num_steps 150: choose another --log_dir" in stderr.splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_stops_it_with_130(tmp_path):
    process = start(*SMALL, "--num_steps=100000", "--log_dir", tmp_path, cwd=tmp_path)
    csv = tmp_path / "baseline_loss.csv"
    wait_for_rows(process, csv, 2)
    process.send_signal(signal.SIGINT)
    code, _, stderr = finish(process)
    assert code == 130
    assert "baseline interrupted at step " in stderr.splitlines()[-1]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
