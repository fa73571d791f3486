"""sweep.py: real runs at two values of beta2, and the table it makes of them."""

import json
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment

SMALL = "--num_layers 1 --hidden_dim 32 --num_heads 2 --seq_length 32 --vocab_size 2048 --num_steps 4".split()
SMALL += "--use_real_data --dataset builtin --tokenizer builtin --eval_batches 2".split()


def sweep(*arguments):
    command = [sys.executable, ROOT / "sweep.py", *arguments]
    return subprocess.run(
        list(map(str, command)), env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=200
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("a sweep")
    arguments = ["--configs", "bf16_full", "--learning_rates", "1e-2", "--beta2s", "0.95,0.999", "--jobs", 2]
    arguments += ["--log_dir", folder, *SMALL]
    return folder, arguments, sweep(*arguments)


def test_every_cell_is_trained_with_its_own_learning_rate_and_beta2(done):
    folder, _, result = done
    assert result.returncode == 0, result.stdout + result.stderr
    for beta2 in ("0.95", "0.999"):
        record = json.loads((folder / f"lr1e-2_beta2_{beta2}" / "bf16_full_seed42_loss.json").read_text())
        params = record["deepspeed_config"]["optimizer"]["params"]
        assert (params["lr"], params["betas"]) == (0.01, [0.9, float(beta2)])
        assert (
            f"lr1e-2_beta2_{beta2}/bf16_full_seed42: validation loss {record['validation']['loss']:.4f}"
            in result.stdout
        )
    assert re.search(r"\| bf16_full \| \d\.\d{4} \| \d\.\d{4} \|\n\n\| Lost updates \|", result.stdout)


def test_a_finished_sweep_only_prints_its_table(done):
    _, arguments, first = done
    started = time.perf_counter()
    again = sweep(*arguments)
    assert again.stdout == first.stdout[first.stdout.index("| Validation loss") :]
    assert time.perf_counter() - started < 5  # a run takes over ten


@pytest.mark.slow
def test_a_run_that_fails_is_named(tmp_path):
    arguments = ["--configs", "baseline", "--learning_rates", "1e-4", "--beta2s", "0.9", "--log_dir", tmp_path]
    result = sweep(*arguments, *SMALL, "--num_heads", "5")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"sweep.py: error: lr1e-4_beta2_0.9/baseline_seed42 left .+, see .+\.log\n", result.stderr)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--beta2s", "x"], "argument --beta2s: invalid numbers value: 'x'"),
        (["--beta2s", "0.9", "--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--beta2s", "0.9", "--configs", "none"], "cannot read DeepSpeed config"),
    ],
)
def test_mistakes_are_one_line_before_any_run(flags, message):
    result = sweep("--learning_rates", "1", *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("sweep.py: error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_table_pairs_configs_by_seed(tmp_path):
    losses = {("baseline", 1): 4.0, ("baseline", 2): 5.0, ("bf16_full", 1): 4.4, ("bf16_full", 2): 5.25}
    lost = {"baseline": 0.0, "bf16_full": 0.25}
    for (config, seed), loss in losses.items():
        path = tmp_path / "lr1e-4_beta2_0.95" / f"{config}_seed{seed}_loss.json"
        path.parent.mkdir(exist_ok=True)
        record = {"status": "completed", "validation": {"loss": loss}, "lost_update_fraction": seed * lost[config]}
        path.write_text(json.dumps(record))
    flags = ["--configs", "baseline,bf16_full", "--learning_rates", "1e-4", "--beta2s", "0.95", "--seeds", "1,2"]
    result = sweep(*flags, "--log_dir", tmp_path)
    # By hand: 10 % and 5 % above the baseline of the same seed; the means of the losses are 4.5 and 4.825.
    assert "| baseline | 4.5000 |\n| bf16_full | 4.8250 (+7.50 %, +5.00 to +10.00) |\n\n" in result.stdout
    assert result.stdout.endswith("| baseline | 0.0 % |\n| bf16_full | 37.5 % |\n")
