"""Predicted bytes against live tensors, and what a run says when there is not enough memory."""

import functools
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, environment, flags, free_port, launch

import memory_model

MODEL = memory_model.Model(num_layers=3, hidden_dim=45, num_heads=3, vocab_size=257, seq_length=32)  # as in the probe
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.json"))
# DeepSpeedCPUAdam is compiled at its first use, which takes a minute or several: with the long tables.
OFFLOADED = [name for name in CONFIGS if name.endswith("offload")]
ON_GPU = [name for name in CONFIGS if name not in OFFLOADED]
STATES = {"model parameters", "master weights", "exp_avg", "exp_avg_sq"}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def probe():
    """probe(ranks, configs): {(config, stage): report} of one launch; equal calls share it."""

    @functools.cache
    def run(ranks, configs):
        done = launch(ROOT / "tests" / "probe_memory.py", *configs, ranks=ranks, timeout=900)
        assert done.code == 0, done.stdout + done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("PROBE "))
        reports = json.loads(line.removeprefix("PROBE "))
        return {(report["config"], report["stage"]): report for report in reports}

    return run


TABLE = [(2, tuple(ON_GPU)), slow(2, tuple(OFFLOADED)), slow(1, tuple(CONFIGS)), slow(4, tuple(CONFIGS))]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks, configs", TABLE)
def test_every_component_measures_what_is_predicted(probe, ranks, configs, stage):
    found = probe(ranks, configs)
    for config in configs:
        kept = [row for row in found[config, stage]["memory"]["components"] if not row["transient"]]
        assert {row["component"] for row in kept} >= STATES | ({"gradients", "reduce buckets"} if stage == 3 else set())
        for row in kept:
            assert row["measured_bytes"] == row["predicted_bytes"], (config, row)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks, configs", [row for row in TABLE if row != TABLE[1]])
def test_measured_bytes_follow_from_the_parameter_count_alone(probe, ranks, configs, stage):
    found = probe(ranks, configs)
    count = memory_model.num_parameters(MODEL)
    assert count % 2 == 1  # it divides by no even number of ranks
    for config, bytes_a_parameter in {"baseline": 4, "bf16_full": 2, "bf16_full_sr": 2}.items():
        rows = {row["component"]: row for row in found[config, stage]["memory"]["components"]}
        for name in ("master weights", "exp_avg", "exp_avg_sq"):
            share = rows[name]["measured_bytes"] / (bytes_a_parameter * count / ranks)
            assert 1 <= share < 1.01, (config, name)  # above the share by padding only
            assert rows[name]["dtype"] == ("fp32" if config == "baseline" else "bf16")


@pytest.mark.parametrize("ranks, configs", TABLE)
def test_what_is_counted_is_what_deepspeed_s_accessors_show(probe, ranks, configs):
    found = probe(ranks, configs)
    assert all(found[config, 3]["accessors"] for config in configs)


def test_the_record_and_the_summary_hold_prediction_and_measurement(train):
    run = train("bf16_full")
    rows = {row["component"]: row for row in run.record["memory"]["components"]}
    assert rows["exp_avg"] == {
        "component": "exp_avg",
        "dtype": "bf16",
        "device": "cpu",
        "transient": False,
        "offloaded": False,
        "predicted_bytes": rows["exp_avg"]["predicted_bytes"],
        "measured_bytes": rows["exp_avg"]["predicted_bytes"],
    }
    assert rows["activations"]["measured_bytes"] is None
    size = rows["exp_avg"]["measured_bytes"] / 2**20
    assert re.search(rf"exp_avg bf16 +{size:.2f} \| +{size:.2f} \| +\+0\.00\n", run.stdout)


# ------------------------------------------------------------------------------------------------ out of memory


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """A run whose rank 1 is refused memory at step 5: (Run, seconds from there to the end of every process)."""
    csv = tmp_path_factory.mktemp("refused") / "loss.csv"
    options = {"num_layers": 2, "hidden_dim": 64, "seq_length": 64, "num_steps": 1000, "log_interval": 4}
    options |= {"deepspeed_config": ROOT / "configs" / "baseline.json", "loss_log_file": csv, "batch_size": 2}
    started = time.time()
    run = launch(ROOT / "tests" / "probe_out_of_memory.py", *flags(options), timeout=120)
    run.csv = csv
    return run, time.time() - max(started, csv.stat().st_mtime)


def test_out_of_memory_on_one_rank_ends_all_of_them(refused):
    run, seconds = refused
    assert run.code == 1
    assert seconds < 30
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(run.csv) in (p.info["cmdline"] or ())]


def test_the_message_says_where_how_much_and_what_to_change(refused):
    run, _ = refused
    (start,) = re.findall(r"train\.py: out of memory at step 5 on rank 1, asking for \d+", run.stderr)
    message = run.stderr[run.stderr.index(start) :].splitlines()[:5]
    assert re.fullmatch(
        r"  predicted  \d+\.\d\d GB allocated, \d+\.\d\d GB peak \(.+\), of \d+\.\d\d GB a rank", message[1]
    )
    assert re.fullmatch(r"  measured   \d+\.\d\d GB resident, \d+\.\d\d GB peak", message[2])
    assert "the model says that this fits" in message[3]  # so tiny a model does
    assert re.match("  smallest change that fits: |  no single change fits", message[4])
    assert "Traceback" not in run.stderr


def test_rows_that_were_written_are_kept(refused):
    run, _ = refused
    assert [row["step"] for row in run.rows] == ["0", "1", "2", "3"]


def test_a_run_that_cannot_fit_warns_before_and_explains_after(tmp_path):
    limit = 24 * 2**30  # of address space, less than half of the logits below
    options = {"num_layers": 1, "hidden_dim": 8, "num_heads": 1, "seq_length": 2048, "batch_size": 256, "num_steps": 1}
    options |= {"deepspeed_config": ROOT / "configs" / "bf16_full.json", "loss_log_file": tmp_path / "loss.csv"}
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus=1"]
    command += [f"--master_port={free_port()}", "--log_level=error", ROOT / "train.py", *flags(options)]
    done = subprocess.run(
        list(map(str, command)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert re.search(r"warning: predicted peak of \d+\.\d\d GB a rank \(.+\) exceeds the device's", done.stdout)
    assert "train.py: out of memory at step 0 on rank 0, asking for " in done.stderr
    assert "smallest change that fits: " in done.stderr
    assert done.returncode == 1
    assert json.loads((tmp_path / "loss.json").read_text())["status"] == "failed: out of memory at step 0"


def test_a_memory_snapshot_needs_cuda(train, tmp_path):
    run = train(memory_snapshot=tmp_path / "snapshot.pickle")
    assert run.code == 2
    assert "--memory_snapshot records the CUDA allocator, and this run is on the CPU" in run.stderr
    assert "Traceback" not in run.stderr
