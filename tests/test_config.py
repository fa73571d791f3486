"""The DeepSpeed JSON and the command line: what differs between configs, what wins, and what is refused in one line."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, environment, launch

import train
from ds_config import read_config, resolve_config
from errors import UserError


def config(name="baseline"):
    return read_config(ROOT / "configs" / f"{name}.json")


def test_bf16_full_differs_from_baseline_in_precision_and_nothing_else():
    baseline, bf16_full = config(), config("bf16_full")
    assert bf16_full.pop("bf16") == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    assert bf16_full.pop("torch_autocast") == {"enabled": True, "dtype": "bfloat16"}
    assert baseline.pop("bf16") == {"enabled": True}
    assert baseline.pop("torch_autocast") == {"enabled": False}
    assert baseline == bf16_full


def test_stochastic_rounding_is_one_key():
    plain, stochastic = config("bf16_full"), config("bf16_full_sr")
    assert stochastic["optimizer"]["params"].pop("bf16_stochastic_round") is True
    assert stochastic == plain


def test_the_offloaded_pair_differs_in_the_moments_only():
    full, master = config("bf16_full_offload"), config("bf16_master_offload")
    assert full["bf16"].pop("bf16_optimizer_states") is True
    assert full == master
    assert master["zero_optimization"].pop("offload_optimizer") == {"device": "cpu"}
    assert master["zero_optimization"] == config()["zero_optimization"]


def test_baseline_says_what_it_should():
    baseline = config()
    optimizer = baseline["optimizer"]["params"]
    assert (optimizer["lr"], optimizer["betas"], optimizer["eps"], optimizer["weight_decay"]) == (
        1e-4,
        [0.9, 0.999],
        1e-8,
        0.01,
    )
    assert baseline["optimizer"]["type"] == "AdamW"
    zero = baseline["zero_optimization"]
    assert zero["stage"] == 3 and zero["overlap_comm"] and zero["contiguous_gradients"]
    assert zero["reduce_bucket_size"] == 5e7 and zero["stage3_param_persistence_threshold"] == 0


def test_auto_is_filled_and_a_clash_is_won_by_the_command_line():
    resolved, notes = resolve_config(config(), micro_batch=4, accumulation=2, learning_rate=3e-4, zero_stage=2)
    assert resolved["train_micro_batch_size_per_gpu"] == 4
    assert resolved["gradient_accumulation_steps"] == 2
    assert resolved["optimizer"]["params"]["lr"] == 3e-4
    assert resolved["zero_optimization"]["stage"] == 2
    assert len(notes) == 2 and "0.0003" in notes[0] and "stage" in notes[1], "auto was no clash; lr and stage were"


def test_defaults_fill_auto_and_the_same_value_twice_is_no_clash():
    resolved, notes = resolve_config(config(), learning_rate=1e-4, zero_stage=3)
    assert (resolved["train_micro_batch_size_per_gpu"], resolved["gradient_accumulation_steps"]) == (1, 1)
    assert notes == []


def test_train_batch_size_of_the_json_stands_until_the_command_line_says_otherwise():
    given = config() | {"train_batch_size": 8}
    kept, notes = resolve_config(given)
    assert kept["train_batch_size"] == 8 and "train_micro_batch_size_per_gpu" not in kept and notes == []
    replaced, notes = resolve_config(given, micro_batch=2)
    assert "train_batch_size" not in replaced and replaced["train_micro_batch_size_per_gpu"] == 2 and len(notes) == 1


def test_resolving_leaves_the_given_config_alone():
    given = config()
    before = json.dumps(given)
    resolve_config(given, micro_batch=2, zero_stage=1)
    assert json.dumps(given) == before


MASTER = {"bf16_master_weights_and_grads": True}
STATES = {"bf16_optimizer_states": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# What is wrong: (section path, what is put there or None to remove it, what the one line says)
BAD_CONFIGS = {
    "no optimizer": ("optimizer", None, 'no "optimizer" section'),
    "optimizer without type": ("optimizer", {"type": None}, "no .type."),
    "optimizer not an object": ("optimizer", "AdamW", "must be a JSON object"),
    "states without master": ("bf16", STATES, "needs bf16_master_weights"),
    "master alone": ("bf16", MASTER, "only with the optimizer on the CPU"),
    "master without bf16": ("bf16", MASTER | STATES | {"enabled": False}, "needs bf16.enabled"),
    "both precisions": ("fp16", {"enabled": True}, "both enabled"),
    "auto nobody fills": ("zero_optimization", {"reduce_bucket_size": "auto"}, "zero_optimization.reduce_bucket_size"),
    "learning rate of words": ("optimizer", {"params": {"lr": "fast"}}, "lr must be a number"),
    "batch of zero": ("train_micro_batch_size_per_gpu", 0, "positive integer"),
    "batch true": ("train_micro_batch_size_per_gpu", True, "positive integer"),
    "stage 0": ("zero_optimization", {"stage": 0}, "stage must be 1, 2 or 3"),
}


STOCHASTIC = {"bf16_stochastic_round": True}
BAD_STOCHASTIC = {
    "fp32 master weights": ("bf16", {"enabled": True}, "kept in bf16"),
    "another optimizer": ("optimizer", {"type": "Adam"}, "AdamW only"),
    "offload": ("zero_optimization", OFFLOAD, "does not work with offload_optimizer"),
    "a parameter it lacks": ("optimizer", {"params": STOCHASTIC | {"lr": 1e-4, "amsgrad": True}}, "no amsgrad"),
}


def spoiled(section, change):
    bad = config()
    if change is None:
        del bad[section]
    elif isinstance(change, dict):
        bad[section] = bad.get(section, {}) | change
    else:
        bad[section] = change
    return bad


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_a_config_that_cannot_run_is_refused_in_one_line(case):
    section, change, message = BAD_CONFIGS[case]
    with pytest.raises(UserError, match=message) as caught:
        resolve_config(spoiled(section, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", BAD_STOCHASTIC)
def test_stochastic_rounding_in_the_wrong_place_is_refused_in_one_line(case):
    section, change, message = BAD_STOCHASTIC[case]
    bad = config("bf16_full_sr")
    bad[section] = change if section == "bf16" else bad[section] | change
    if case == "offload":
        del bad["optimizer"]["params"]["torch_adam"]
    with pytest.raises(UserError, match=message) as caught:
        resolve_config(bad)
    assert "\n" not in str(caught.value)


def test_master_weights_alone_need_deepspeeds_own_adam_on_the_cpu():
    offloaded = spoiled("bf16", MASTER)
    offloaded["zero_optimization"] |= OFFLOAD
    with pytest.raises(UserError, match="DeepSpeedCPUAdam"):
        resolve_config(offloaded)
    del offloaded["optimizer"]["params"]["torch_adam"], offloaded["optimizer"]["params"]["fused"]
    resolve_config(offloaded)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b"[" * 100_000, b"NaN"])
def test_a_file_that_is_not_a_json_object_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(UserError, match="bad.json") as caught:
        read_config(tmp_path / "bad.json")
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match="cannot read"):
            read_config(path)


BAD_ARGUMENTS = {
    "--num_heads 3": "not divisible",
    "--num_layers 0": "at least 1",
    "--hidden_dim -8": "at least 1",
    "--seq_length 0": "at least 1",
    "--batch_size 0": "at least 1",
    "--num_steps -1": "at least 1",
    "--vocab_size 0": "at least 1",
    "--log_interval 0": "at least 1",
    "--warmup_steps -1": "0 or more",
    "--seed -1": "0 or more",
    "--learning_rate nan": "finite",
    "--learning_rate -1": ">= 0",
    "--zero_stage 4": "invalid choice",
    "--num_steps many": "invalid",
    "--unknown_flag 1": "unrecognized",
    "--loss_log_file x.json": "run record",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_arguments_that_cannot_work_are_the_users_errors(arguments):
    with pytest.raises(UserError, match=BAD_ARGUMENTS[arguments]):
        train.parse_args(["--deepspeed_config", "x.json", *arguments.split()])


def test_help_explains_every_flag_with_its_default():
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "--help"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0
    for flag in (
        "deepspeed_config",
        "num_layers",
        "seq_length",
        "zero_stage",
        "use_real_data",
        "dataset",
        "tokenizer",
        "local_rank",
    ):
        assert f"--{flag}" in done.stdout
    assert "(default: 512)" in done.stdout and "(default: gpt2)" in done.stdout


def test_without_a_launcher_it_says_how_to_start(tmp_path):
    command = [sys.executable, ROOT / "train.py", "--deepspeed_config", ROOT / "configs/baseline.json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "deepspeed --num_gpus=N train.py" in done.stderr
    assert list(tmp_path.iterdir()) == []


def assert_refused(run, message):
    """One line on stderr from one rank, exit code 2."""
    assert run.code == 2, run.stdout + run.stderr
    (line,) = run.stderr.splitlines()
    assert message in line
    assert "Traceback" not in run.stdout


def test_the_launcher_ends_with_one_line_and_code_2_and_nothing_is_overwritten(tmp_path):
    kept = tmp_path / "loss.csv"
    kept.write_text("step,loss\n0,1.0\n")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    log = ["--loss_log_file", kept]
    assert_refused(launch(ROOT / "train.py", "--deepspeed_config", broken, *log), "is not JSON")
    baseline = ["--deepspeed_config", ROOT / "configs/baseline.json", *log]
    short = ["--use_real_data", "--dataset", "builtin", "--tokenizer", "builtin", "--seq_length", "200000"]
    assert_refused(launch(ROOT / "train.py", *baseline, *short), "too short")
    assert kept.read_text() == "step,loss\n0,1.0\n"
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".csv", ".json")] == []


@pytest.mark.slow
def test_what_only_deepspeed_refuses_and_an_unwritable_csv_end_in_one_line_too(tmp_path):
    odd = config()
    odd["zero_optimization"]["no_such_key"] = 1
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    assert_refused(launch(ROOT / "train.py", "--deepspeed_config", tmp_path / "odd.json"), "DeepSpeed refuses")
    (tmp_path / "file").write_text("")
    arguments = [
        "--deepspeed_config",
        ROOT / "configs/baseline.json",
        "--loss_log_file",
        tmp_path / "file" / "loss.csv",
    ]
    assert_refused(launch(ROOT / "train.py", *arguments), "cannot write --loss_log_file")


@pytest.mark.slow
def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tokenizer_folder):
    arguments = ["--deepspeed_config", ROOT / "configs/baseline.json", "--use_real_data", "--dataset", "builtin"]
    run = launch(ROOT / "train.py", *arguments, "--tokenizer", tokenizer_folder, "--vocab_size", "100", ranks=1)
    assert_refused(run, "smaller than the tokenizer's")
