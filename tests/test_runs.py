"""Whole runs of train.py through the real launcher: config x ZeRO stage x ranks, and what must not depend on them."""

import json
import math
import re

import pytest
from conftest import ROOT, TINY, launch

PUBLISHED = ("baseline", "bf16_full")
CONFIGS = (*PUBLISHED, "bf16_full_sr", "bf16_full_offload", "bf16_master_offload")
GLOBAL_BATCH = 4
VOCAB = 512
# What every row of the table trains on: the same 8 global batches of random tokens.
RANDOM = {"vocab_size": VOCAB, "learning_rate": 1e-3}
# Between stages and rank counts only the order of additions differs. A bf16 gradient or weight carries 8 bits, so one
# that falls on the other side of a rounding boundary moves by 2^-8 of itself; over 8 steps that shows in the loss's
# fourth decimal. A wrong shard, scale or sum shows in the first or second.
SAME_LOSS = 2e-3

CORE = [("baseline", 3, 2), ("bf16_full", 3, 2), ("bf16_full_sr", 1, 2), ("bf16_full_sr", 3, 2)]
ALL = [(config, stage, ranks) for config in PUBLISHED for stage in (1, 2, 3) for ranks in (1, 2, 4)]
ALL += [(config, stage, 2) for config in CONFIGS[2:] for stage in (1, 2, 3)]
TABLE = [pytest.param(*row, marks=[] if row in CORE else pytest.mark.slow, id="-".join(map(str, row))) for row in ALL]


def table_run(train, config, stage, ranks):
    return train(config, ranks, zero_stage=stage, batch_size=GLOBAL_BATCH // ranks, **RANDOM)


@pytest.mark.parametrize("config, stage, ranks", TABLE)
def test_table(train, config, stage, ranks):
    run = table_run(train, config, stage, ranks)
    assert run.code == 0, run.stdout + run.stderr
    assert run.stderr == ""
    assert [int(row["step"]) for row in run.rows] == list(range(8))
    assert abs(run.losses[0] - math.log(VOCAB)) < 0.1, "initialisation is lost"
    record = run.record
    assert (record["status"], record["world_size"], record["zero_stage"]) == ("completed", ranks, stage)
    assert record["tokens_per_step"] == GLOBAL_BATCH * TINY["seq_length"]
    reference = table_run(train, config, 3, 2)
    assert run.losses == pytest.approx(reference.losses, abs=SAME_LOSS)


def test_both_configs_start_from_the_same_weights_and_see_the_same_blocks(train):
    baseline, bf16_full = (table_run(train, config, 3, 2) for config in PUBLISHED)
    assert baseline.losses[0] == bf16_full.losses[0]
    assert baseline.record["data_fingerprint"] == bf16_full.record["data_fingerprint"]
    assert baseline.losses != bf16_full.losses, "fp32 and bf16 states cannot agree to the last digit"


def test_csv_columns_and_units(train):
    run = table_run(train, "baseline", 3, 2)
    header = run.csv.read_text().splitlines()[0]
    assert header.startswith(
        "step,loss,learning_rate,grad_norm,step_time_s,tokens_per_s,allocated_bytes,reserved_bytes,peak_bytes"
    )
    for row in run.rows:
        assert float(row["learning_rate"]) == 1e-3
        assert float(row["grad_norm"]) > 0
        assert float(row["tokens_per_s"]) * float(row["step_time_s"]) == pytest.approx(
            GLOBAL_BATCH * TINY["seq_length"]
        )
        assert 2**20 < int(row["allocated_bytes"]) <= int(row["peak_bytes"]) < 2**36, "bytes of one process"


def test_record_tells_what_ran(train):
    record = table_run(train, "bf16_full", 3, 2).record
    assert record["config_name"] == "bf16_full"
    assert record["arguments"]["num_layers"] == TINY["num_layers"]
    assert record["deepspeed_config"]["optimizer"]["params"]["lr"] == 1e-3
    assert record["deepspeed_config"]["train_micro_batch_size_per_gpu"] == GLOBAL_BATCH // 2
    assert record["memory_kind"] == "resident memory"
    assert record["versions"].keys() >= {"python", "torch", "deepspeed", "datasets", "transformers"}
    hidden, layers, length = TINY["hidden_dim"], TINY["num_layers"], TINY["seq_length"]
    block = 12 * hidden**2 + 13 * hidden  # four weight matrices of 12 h^2, their biases 9 h, two LayerNorms 4 h
    assert record["parameter_count"] == layers * block + (2 * VOCAB + length) * hidden + 2 * hidden


def test_summary_and_machine_readable_line(train):
    run = table_run(train, "bf16_full", 3, 2)
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["status"] == "completed"
    assert result["final_loss"] == run.record["final_loss"] == pytest.approx(run.losses[-1], rel=1e-8)
    assert result["peak_bytes"] == max(int(row["peak_bytes"]) for row in run.rows)
    assert "mean step time" in run.stdout and "final loss" in run.stdout


def test_speed_in_flops_is_in_the_record_and_the_summary(train):
    """Eight steps are all warm-up by default: this run counts them."""
    run = train("bf16_full_sr", warmup_steps=0, num_steps=4, vocab_size=VOCAB, activation_checkpointing=True)
    hidden, layers, length = TINY["hidden_dim"], TINY["num_layers"], TINY["seq_length"]
    per_token = 6 * (12 * layers * hidden**2 + VOCAB * hidden) + 12 * layers * hidden * length
    times = [float(row["step_time_s"]) for row in run.rows]
    tokens_per_s = 2 * length / (sum(times) / 4)
    speed = run.record["speed"]
    assert speed["tflops_per_device"] == pytest.approx(per_token * tokens_per_s / 2 / 1e12)
    assert (speed["mfu"], speed["peak_tflops"]) == (None, None), "no peak is known for this device"
    assert re.search(r"  speed             \d[\d.e-]* TFLOP/s a device; recomputing adds \d\d%\n", run.stdout)


@pytest.mark.slow
def test_output_is_quiet_unless_verbose(train):
    quiet, verbose = table_run(train, "baseline", 3, 2), train("baseline", ranks=1, num_steps=2, verbose=True)
    assert "DeepSpeed" not in quiet.stdout
    assert "DeepSpeed" in verbose.stdout
    assert "step 4/8" in quiet.stdout


def test_command_line_wins_over_the_json_and_says_so_once(train):
    run = table_run(train, "bf16_full_sr", 1, 2)
    assert run.stdout.count("stage: the command line's 1 replaces the config's 3") == 1
    assert run.stdout.count("lr: the command line's 0.001 replaces the config's 0.0001") == 1


@pytest.mark.parametrize("config", [pytest.param("baseline", marks=pytest.mark.slow), "bf16_full"])
def test_activation_checkpointing_does_not_change_the_loss(train, config):
    plain = table_run(train, config, 3, 2)
    recomputed = train(config, zero_stage=3, batch_size=2, activation_checkpointing=True, **RANDOM)
    assert recomputed.code == 0, recomputed.stderr
    assert recomputed.losses == plain.losses


@pytest.mark.slow
def test_gradient_accumulation_equals_the_larger_batch(train):
    whole = table_run(train, "baseline", 3, 2)
    halves = train("baseline", zero_stage=3, batch_size=1, gradient_accumulation_steps=2, **RANDOM)
    assert halves.losses == pytest.approx(whole.losses, abs=SAME_LOSS)
    assert halves.record["tokens_per_step"] == whole.record["tokens_per_step"]


@pytest.mark.slow
def test_stochastic_rounding_is_reproducible_from_the_seed(train):
    first = table_run(train, "bf16_full_sr", 3, 2)
    again = train("bf16_full_sr", zero_stage=3, batch_size=GLOBAL_BATCH // 2, warmup_steps=0, **RANDOM)
    assert again.losses == first.losses
    assert first.losses != table_run(train, "bf16_full", 3, 2).losses


def lost(run):
    return [float(row["lost_update_fraction"]) for row in run.rows if row["lost_update_fraction"]]


def test_lost_updates_are_logged_at_every_interval_and_show_the_trap(train):
    baseline, bf16_full = (table_run(train, config, 3, 2) for config in PUBLISHED)
    assert [bool(row["lost_update_fraction"]) for row in baseline.rows] == [False, False, False, True] * 2
    assert max(lost(baseline)) < 0.001, "fp32 master weights keep nearly every update"
    assert min(lost(bf16_full)) > 0.05, "bf16 ones do not"
    assert bf16_full.record["lost_update_fraction"] == pytest.approx(sum(lost(bf16_full)) / 2)


def test_lost_updates_are_the_same_measure_at_every_stage(train):
    by_stage = [lost(table_run(train, "bf16_full_sr", stage, 2)) for stage in (1, 3)]
    assert by_stage[0] == pytest.approx(by_stage[1], abs=0.02)


def test_validation_is_in_the_csv_the_record_and_the_summary(train, wikitext_folder, tokenizer_folder):
    options = {"use_real_data": True, "dataset": wikitext_folder, "tokenizer": tokenizer_folder}
    run = train("bf16_full", batch_size=2, learning_rate=3e-3, eval_interval=3, eval_batches=2, **options)
    values = {int(row["step"]): float(row["validation_loss"]) for row in run.rows if row["validation_loss"]}
    assert list(values) == [2, 5, 7], "every third step, and after the last"
    assert values[7] < values[2]
    validation = run.record["validation"]
    assert validation["loss"] == pytest.approx(values[7])
    assert validation["perplexity"] == pytest.approx(math.exp(values[7]))
    assert validation["tokens"] == 2 * 2 * 2 * TINY["seq_length"], "batches x micro batch x ranks x length"
    assert f"validation loss   {values[7]:.4f}" in run.stdout


def test_random_data_has_no_validation(train):
    run = table_run(train, "baseline", 3, 2)
    assert run.record["validation"] is None
    assert all(row["validation_loss"] == "" for row in run.rows)


def test_validation_is_exact_over_ranks_with_an_uneven_last_batch():
    """Against the mean over single blocks, computed through the same engine one block at a time."""
    run = launch(ROOT / "tests/probe_validation.py", "--deepspeed_config", ROOT / "configs/bf16_full.json")
    assert run.code == 0, run.stdout + run.stderr
    report = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
    assert report["blocks"] % 6 == 2, "rank 0 has two blocks of the last batch, rank 1 none"
    assert max(report["block_losses"]) > 1.2 * min(report["block_losses"]), "else any weighting would pass"
    # bf16 products of three blocks at once or of one are rounded alike but for the order of sums
    assert report["loss"] == pytest.approx(sum(report["block_losses"]) / report["blocks"], rel=1e-3)
    assert report["bits_per_byte"] == pytest.approx(report["loss"] / math.log(2) / report["bytes_per_token"])
    assert report["again"] == report["loss"], "the same batches every time"


@pytest.fixture(scope="module")
def probe():
    """probe(config): what a live engine holds after one step, a report per stage."""
    reports = {}

    def run(config):
        if config not in reports:
            done = launch(ROOT / "tests/probe_engine.py", "--deepspeed_config", ROOT / "configs" / f"{config}.json")
            assert done.code == 0, done.stdout + done.stderr
            (line,) = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
            reports[config] = json.loads(line.removeprefix("PROBE "))
        return reports[config]

    return run


@pytest.mark.parametrize(
    "config", [*(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED), "bf16_full_sr"]
)
def test_dtype_of_every_state_at_every_stage(probe, config):
    kept = "torch.float32" if config == "baseline" else "torch.bfloat16"
    for report in probe(config):
        assert report["dtypes"] == {
            "parameters": ["torch.bfloat16"], "gradients": [kept], "master_weights": [kept],
            "exp_avg": [kept], "exp_avg_sq": [kept],
        }  # fmt: skip


@pytest.mark.slow
def test_stochastic_rounding_keeps_the_bytes_of_bf16_full(probe):
    for plain, stochastic, baseline in zip(probe("bf16_full"), probe("bf16_full_sr"), probe("baseline"), strict=True):
        assert stochastic["bytes"] == plain["bytes"]
        assert baseline["bytes"] == 2 * plain["bytes"], "the measure itself can see fp32"


def test_no_rank_ever_holds_the_whole_model_under_zero_3(probe):
    by_stage = {report["stage"]: report for report in probe("bf16_full_sr")}
    total = by_stage[3]["parameters"]
    largest_layer = 4 * 64 * 64 + 4 * 64  # the MLP's input layer, whole for a moment before it is partitioned
    assert by_stage[3]["resident_peak"] <= total / 2 + largest_layer
    assert by_stage[1]["resident_peak"] == total, "the measure itself can see a whole model"


@pytest.mark.slow
def test_every_stage_and_config_starts_from_the_same_weights(probe):
    losses = {report["loss"] for config in PUBLISHED for report in probe(config)}
    assert len(losses) == 1
    assert abs(losses.pop() - math.log(256)) < 0.1
