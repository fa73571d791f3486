"""Predictions against published measurements, hand-derived sums, and bytes counted in a real engine."""

import copy
import json
import math
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import memory_model as mm
from memory_model import GB, Model, Setup

ROOT = Path(mm.__file__).parent
CONFIGS = mm.load_configs()
PUBLISHED_MODEL = Model(num_layers=32, hidden_dim=4096, num_heads=32)  # vocabulary 50257, sequence length 512
SMALL = Model(num_layers=2, hidden_dim=64, num_heads=4, vocab_size=100, seq_length=16)


def changed(name="baseline", **sections):
    """A config with keys of its sections replaced; a section given as None is dropped."""
    config = copy.deepcopy(CONFIGS[name])
    for key, value in sections.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    return {key: value for key, value in config.items() if value is not None}


def published(name):
    return mm.predict(Setup(PUBLISHED_MODEL, CONFIGS[name], world_size=4))


def rows(setup):
    return {row.name: row for row in mm.components(setup)}


# ------------------------------------------------------------------------------------------ published numbers


def test_parameter_count_of_the_published_run():
    # 32 (12 h^2 + 13 h) + 2 V h + T h + 2 h with h = 4096, V = 50257, T = 512
    assert mm.num_parameters(PUBLISHED_MODEL) == 6_444_154_880 + 411_705_344 + 2_097_152 + 8_192 == 6_857_965_568


@pytest.mark.parametrize("name, allocated, peak", [("baseline", 25.74, 31.38), ("bf16_full", 16.17, 18.93)])
def test_published_measurements(name, allocated, peak):
    prediction = published(name)
    assert prediction.allocated_bytes / GB == pytest.approx(allocated, rel=0.05)
    assert prediction.peak_bytes / GB == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("name, bytes_per_param", [("baseline", 16), ("bf16_full", 10), ("bf16_full_sr", 10)])
def test_after_a_step_16n_or_10n_over_w_and_the_reduce_bucket(name, bytes_per_param):
    states = bytes_per_param * 6_857_965_568 // 4  # every shape divides by 4: no padding
    assert published(name).allocated_bytes == states + 50_000_000 * 2


def test_the_peak_moves_when_the_fp32_copies_go():
    # The fp32 update copies a sub-group of 1e9 gradients as bf16 + fp32; in bf16 a third of that is left, and the
    # gathered parameters of the backward pass are more.
    assert published("baseline").peak_moment == "optimizer step"
    assert published("bf16_full").peak_moment == "backward of a block"


def test_bookkeeping_table_is_the_published_one():
    table = mm.bookkeeping_table({name: CONFIGS[name] for name in ("baseline", "bf16_full")}, SMALL)
    assert table.splitlines() == [
        "| Component | baseline | bf16_full |",
        "|---|---|---|",
        "| model parameters | bf16, 2 B | bf16, 2 B |",
        "| gradients | bf16, 2 B | bf16, 2 B |",
        "| master weights | fp32, 4 B | bf16, 2 B |",
        "| master gradients | fp32, 4 B | bf16, 2 B |",
        "| exp_avg | fp32, 4 B | bf16, 2 B |",
        "| exp_avg_sq | fp32, 4 B | bf16, 2 B |",
        "| total, N parameters | 20N bytes | 12N bytes |",
    ]


# ---------------------------------------------------------------------------------------- the model, partitions


def test_numels_follow_the_shapes():
    assert mm.num_parameters(SMALL) == sum(math.prod(shape) for shape in mm.parameter_shapes(SMALL))


def test_parameter_shapes_of_one_layer():
    assert mm.parameter_shapes(Model(1, 2, 1, vocab_size=5, seq_length=3)) == [
        (5, 2),
        (3, 2),
        (2,),
        (2,),
        (6, 2),
        (6,),
        (2, 2),
        (2,),
        (2,),
        (2,),
        (8, 2),
        (8,),
        (2, 8),
        (2,),
        (2,),
        (2,),
        (5, 2),
    ]


@pytest.mark.parametrize("stage, partitioned", [(0, ""), (1, "mMeE"), (2, "gmMeE"), (3, "pgmMeE")])
def test_what_each_stage_partitions(stage, partitioned):
    states = mm.components(Setup(SMALL, mm.with_stage(CONFIGS["baseline"], stage), world_size=4))[:6]
    assert "".join(k for k, row in zip("pgmMeE", states, strict=True) if row.partitioned) == partitioned


@pytest.mark.parametrize(
    "stage, aligned, expected",
    [
        (3, False, 2 + 1 + 1),  # ceil of each: 5/4, 3/4, 1/4
        (1, False, 4),
        (2, False, 4),  # 9, aligned to 2 x 4: 16
        (1, True, 6),  # bf16 starts at multiples of 8: 8 + 8 + 1, aligned to 8: 24
    ],
)
def test_padding_by_hand(stage, aligned, expected):
    plan = mm.resolve(changed(zero_optimization={"stage": stage, "parameter_alignment": aligned}))
    assert mm.partition_numel((5, 3, 1), plan, 4) == expected


# Bytes counted in a deepspeed 0.19.8 engine on CPU: 2 layers x 35, vocabulary 101, 7 positions (37 695 parameters).
COUNTED = [  # config, stage, ranks, parameters, gradients, master weights, exp_avg
    ("baseline", 1, 2, 75_392, None, 75_392, 75_392),
    ("baseline", 2, 4, 75_392, None, 37_696, 37_696),
    ("baseline", 3, 2, 37_718, 37_718, 75_436, 75_436),
    ("baseline", 3, 4, 18_864, 18_864, 37_728, 37_728),
    ("bf16_full", 1, 2, 75_392, None, 37_696, 37_696),
    ("bf16_full", 3, 4, 18_864, 18_864, 18_864, 18_864),
    ("bf16_master_offload", 2, 2, 75_392, None, 37_696, 75_392),
    ("bf16_master_offload", 3, 2, 37_718, 37_718, 37_718, 75_436),
]


@pytest.mark.parametrize("name, stage, ranks, parameters, gradients, master, moment", COUNTED)
def test_persistent_bytes_counted_in_an_engine(name, stage, ranks, parameters, gradients, master, moment):
    row = rows(Setup(Model(2, 35, 5, 101, 7), mm.with_stage(CONFIGS[name], stage), ranks))
    assert row["model parameters"].bytes == parameters
    assert row["master weights"].bytes == master
    assert row["exp_avg"].bytes == row["exp_avg_sq"].bytes == moment
    assert row["gradients"].transient if gradients is None else row["gradients"].bytes == gradients


def test_sub_groups_close_with_the_parameter_that_reaches_the_size():
    plan = mm.resolve(changed(zero_optimization={"sub_group_size": 10}))
    assert mm.largest_sub_group((12, 12, 12, 4), plan, 2) == 12  # 6 + 6 | 6 + 2
    assert mm.largest_sub_group((12, 2), plan, 2) == 7  # everything fits in one
    assert mm.largest_sub_group((12, 12, 12, 4), replace(plan, stage=2), 2) == 20  # stage 2 has none


# ------------------------------------------------------------------------------ parameters gathered by ZeRO-3


def test_gathered_parameters_follow_the_real_coordinator():
    """Numbers read from PartitionedParameterCoordinator in a 2-rank run of this model with these limits."""
    limits = {
        "stage3_prefetch_bucket_size": 12410,
        "stage3_max_live_parameters": 248200,
        "stage3_max_reuse_distance": 248200,
    }
    plan = mm.resolve(changed(zero_optimization=limits))
    coordinator = mm._Coordinator(Model(8, 64, 4, 800, 32), plan, 2, checkpointing=True)
    available = []
    for what, module in coordinator.calls:
        (coordinator.fetch if what == "fetch" else coordinator.release)(module)
        available.append(coordinator.available)
    assert len(available) == 337
    assert available[:8] == [51200, 65664, 14464, 35328, 33280, 49920, 62400, 62272]
    assert max(available) == 288640
    assert available[-1] == 53248


def test_gathered_parameters_stop_near_max_live():
    live = mm.gathered_numel(PUBLISHED_MODEL, mm.resolve(CONFIGS["baseline"]), 4, True)
    largest = 50257 * 4096
    assert 1e9 < live.backward < 1e9 + 5e7 + 2 * largest


def test_nothing_is_gathered_on_one_gpu_or_below_stage_3():
    config = CONFIGS["baseline"]
    for setup in (Setup(SMALL, config, 1), Setup(SMALL, mm.with_stage(config, 2), 4)):
        assert "gathered parameters" not in rows(setup)


def test_persistent_parameters_stay_whole_on_every_rank():
    config = changed(zero_optimization={"stage3_param_persistence_threshold": 64})
    # of SMALL: both LayerNorms of two blocks (8 x 64), the biases of proj and out (4 x 64), the final one (2 x 64)
    assert rows(Setup(SMALL, config, 2))["persistent parameters"].bytes == 14 * 64 * 2
    assert "persistent parameters" not in rows(Setup(SMALL, config, 1))


# -------------------------------------------------------------------------------------------------- activations


def test_activations_by_hand():
    model, batch = Model(3, 64, 4, vocab_size=1000, seq_length=16), 2
    tokens, th = 32, 32 * 64
    block = 32 * th + 2 * tokens * 8 + tokens * 4 * 4  # 32 bytes per token and h, LayerNorm statistics, logsumexp
    final = 4 * th + tokens * 8  # the last LayerNorm's input and the head's
    kept = mm.activation_bytes(model, batch, checkpointing=True)
    everything = mm.activation_bytes(model, batch, checkpointing=False)
    assert kept.kept == 3 * 2 * th + final
    assert everything.kept == 3 * block + final
    assert kept.block - everything.block == block  # one block is recomputed at a time
    assert kept.logits == everything.logits == 12 * tokens * 1000
    assert kept.logits_grad == 2 * tokens * 1000


def test_autocast_keeps_layernorm_inputs_in_fp32():
    plain, autocast = (mm.activation_bytes(SMALL, 1, False, autocast=on) for on in (False, True))
    layernorms = 2 * SMALL.num_layers + 1
    assert autocast.kept - plain.kept == layernorms * 2 * SMALL.seq_length * SMALL.hidden_dim


def test_a_chunked_loss_bounds_the_logits():
    chunked, long = (mm.activation_bytes(SMALL, 4, True, loss_chunk_tokens=n) for n in (16, 10**9))
    tokens, vocab = 4 * SMALL.seq_length, SMALL.vocab_size
    assert chunked.logits == 2 * tokens * vocab + (4 + 4) * 16 * vocab, "all logits in bf16, one chunk twice in fp32"
    assert long.logits == (2 + 4 + 4) * tokens * vocab, "a chunk is never longer than the batch"
    big = Setup(replace(SMALL, vocab_size=50257), CONFIGS["bf16_full"], 2, micro_batch=4096)
    assert mm.predict(replace(big, loss_chunk_tokens=1024)).peak_bytes < mm.predict(big).peak_bytes


def test_a_larger_batch_changes_the_peak_and_not_what_stays():
    one, many = (mm.predict(Setup(PUBLISHED_MODEL, CONFIGS["bf16_full"], 4, batch)) for batch in (1, 16))
    assert one.allocated_bytes == many.allocated_bytes
    assert one.peak_bytes < many.peak_bytes
    assert mm.predict(Setup(PUBLISHED_MODEL, CONFIGS["bf16_full"], 4, 16, False)).peak_bytes > many.peak_bytes


# -------------------------------------------------------------------------------------------- any DeepSpeed JSON


@pytest.mark.parametrize(
    "config, total",
    [
        (changed(bf16={"enabled": False}), 4 + 4 + 4 + 4 + 8),
        (changed(bf16=None, fp16={"enabled": True}), 20),
        (changed(data_types={"grad_accum_dtype": "fp32"}), 4 + 2 + 4 + 4 + 8),
        (changed("bf16_master_offload"), 2 + 2 + 2 + 2 + 8),
        (
            changed("bf16_full", optimizer={"params": {}}, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
            12,
        ),
    ],
)
def test_bytes_per_parameter_of_other_precisions(config, total):
    setup = Setup(SMALL, config, 2)
    assert sum(row.bytes_per_param for row in mm.components(setup)) == total
    assert mm.predict(setup).not_modelled == ()


def test_offload_moves_states_off_the_gpu():
    row = rows(Setup(SMALL, CONFIGS["bf16_master_offload"], 2))
    assert {name: row[name].device for name in ("model parameters", "gradients", "master weights", "exp_avg")} == {
        "model parameters": "gpu",
        "gradients": "cpu",
        "master weights": "cpu",
        "exp_avg": "cpu",
    }
    assert not row["master gradients"].transient  # the host copy lives as long as the optimizer
    both = changed("bf16_master_offload", zero_optimization={"offload_param": {"device": "cpu"}})
    prediction = mm.predict(Setup(SMALL, both, 2))
    assert prediction.allocated_bytes == 50_000_000 * 2  # the reduce bucket
    assert prediction.host_bytes == (2 + 2 + 2 + 2 + 4 + 4) * mm.num_parameters(SMALL) // 2


@pytest.mark.parametrize(
    "change, key",
    [
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights"),
        ({"zero_optimization": {"stage3_max_live_parameters": "auto"}}, "zero_optimization.stage3_max_live_parameters"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer.device",
        ),
        ({"activation_checkpointing": {"partition_activations": True}}, "activation_checkpointing"),
        ({"optimizer": {"type": "Lion"}}, "optimizer.type = Lion"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": {"params": {"torch_adam": True, "fused": True, "amsgrad": True}}}, "optimizer.params.amsgrad"),
        ({"surprise": 3}, "surprise"),
    ],
)
def test_what_is_not_modelled_is_named(change, key):
    notes = mm.predict(Setup(SMALL, changed(**change), 2)).not_modelled
    assert any(note.startswith(key) for note in notes), notes


def test_keys_that_cost_nothing_are_silent():
    config = changed(
        gradient_clipping=1.0,
        wall_clock_breakdown=False,
        steps_per_print=10,
        zero_optimization={"zero_quantized_weights": False, "stage3_gather_16bit_weights_on_model_save": True},
    )
    assert mm.predict(Setup(SMALL, config, 2)).not_modelled == ()


@pytest.mark.parametrize(
    "config",
    [
        changed(zero_optimization={"stage": 4}),
        changed(zero_optimization={"reduce_bucket_size": "large"}),
        changed(zero_optimization=True),
        changed(optimizer="AdamW"),
        changed(bf16={"bf16_optimizer_states": True}),  # DeepSpeed: requires bf16_master_weights_and_grads
        changed(bf16={"bf16_master_weights_and_grads": True}),  # DeepSpeed: requires offload
        changed(fp16={"enabled": True}),
    ],
)
def test_what_deepspeed_refuses_is_an_error(config):
    with pytest.raises(mm.UserError):
        mm.predict(Setup(SMALL, config, 2))


def test_unfused_torch_adam_needs_a_temporary():
    config = changed(optimizer={"params": {"torch_adam": True}})
    # the bf16 copy (2 bytes) is gone when the square root of exp_avg_sq (4 bytes) comes
    temporary = mm.num_parameters(SMALL) // 2 * (4 - 2)
    fused, unfused = (mm.predict(Setup(SMALL, c, 2)).moments["optimizer step"] for c in (CONFIGS["baseline"], config))
    assert unfused - fused == temporary


# -------------------------------------------------------------------------------------------------- what fits


@pytest.mark.parametrize("name", CONFIGS)
def test_the_largest_model_fits_and_the_next_does_not(name):
    setup, memory = Setup(SMALL, CONFIGS[name], world_size=8), 24 * GB
    largest = mm.largest_model(setup, memory)
    assert mm.fits(replace(setup, model=largest), memory)
    wider = mm.model_of_width(largest.hidden_dim + 64, SMALL.vocab_size, SMALL.seq_length)
    assert not mm.fits(replace(setup, model=wider), memory)
    assert mm.largest_model(setup, GB // 100) is None


@pytest.mark.parametrize("size, layers, hidden", [(6.7e9, 32, 4096), (13e9, 40, 5120), (175e9, 96, 12288)])
def test_a_size_becomes_the_gpt3_shape(size, layers, hidden):
    model = mm.model_of_size(size)
    assert abs(model.num_layers - layers) <= 1
    assert model.hidden_dim == pytest.approx(hidden, rel=0.02)
    assert mm.num_parameters(model) == pytest.approx(size, rel=0.03)


def suggestion(config, gigabytes, **fields):
    return mm.suggest_fix(replace(Setup(PUBLISHED_MODEL, config, world_size=4), **fields), int(gigabytes * GB))


def test_the_smallest_change_that_would_fit():
    baseline = CONFIGS["baseline"]
    assert "activation checkpointing" in suggestion(baseline, 40, micro_batch=8, activation_checkpointing=False)
    assert "ZeRO stage 3 instead of 1" in suggestion(mm.with_stage(baseline, 1), 40)
    assert "config bf16" in suggestion(baseline, 24)
    assert "micro batch" in suggestion(CONFIGS["bf16_full"], 40, micro_batch=256)
    assert "8 GPUs instead of 4" in suggestion(CONFIGS["bf16_full"], 16)
    assert "nothing fits" in suggestion(baseline, 0.1)
    together = suggestion(mm.with_stage(baseline, 1), 20, micro_batch=128, activation_checkpointing=False)
    assert together.startswith("no single change fits")
    assert all("\n" not in text for text in (together, suggestion(baseline, 24)))


def test_the_capacity_table_has_a_cell_per_config_and_gpu_count():
    configs = {name: CONFIGS[name] for name in ("baseline", "bf16_full")}
    header, rule, *body = mm.capacity_table(configs, Setup(SMALL, {}), 8 * GB, gpu_counts=(1, 8)).splitlines()
    assert header == "| Config (8 GB per GPU) | 1 GPU | 8 GPUs |"
    assert [line.split(" | ")[0] for line in body] == ["| baseline", "| bf16_full"]
    sizes = [[float(cell.split()[0]) for cell in line.strip("| ").split(" | ")[1:]] for line in body]
    assert all(big > small for big, small in zip(sizes[1], sizes[0], strict=True))  # bf16 states fit more


# ------------------------------------------------------------------------------------------------ command line


def run(*args):
    return subprocess.run([sys.executable, str(ROOT / "memory_model.py"), *args], capture_output=True, text=True)


SHAPE = ("--num_layers", "32", "--hidden_dim", "4096", "--num_gpus", "4")


def test_all_configs_side_by_side():
    output = run(*SHAPE).stdout
    header = next(line for line in output.splitlines() if line.startswith("GB (2^30 bytes)"))
    assert header.split()[-len(CONFIGS) :] == sorted(CONFIGS)
    assert "25.64" in next(line for line in output.splitlines() if line.startswith("allocated"))


def test_json_says_the_same_in_integers():
    answer = json.loads(run(*SHAPE, "--json", "--gpu_memory", "24").stdout)
    baseline = answer["baseline"]
    assert set(answer) == set(CONFIGS)
    assert baseline["allocated_bytes"] == published("baseline").allocated_bytes
    assert isinstance(baseline["peak_bytes"], int)
    assert baseline["fits"] is False and answer["bf16_full"]["fits"] is True
    assert baseline["room_bytes"] == 24 * GB - baseline["peak_bytes"]
    assert baseline["components"][0]["name"] == "model parameters"


def test_fits_says_so_and_what_would_help():
    output = run(*SHAPE, "--gpu_memory", "24").stdout
    assert "baseline: does not fit" in output and "smallest change that fits: config" in output
    assert "bf16_full: fits" in output


def test_a_size_without_a_shape_says_which_shape_was_taken():
    output = run("--num_params", "70e9", "--num_gpus", "64", "--zero_stage", "3", "--gpu_memory", "80").stdout
    assert "taken as 70 layers x" in output and "baseline: fits" in output


def test_largest_needs_no_model():
    lines = run("--gpu_memory", "80", "--num_gpus", "8", "--largest").stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == sorted(CONFIGS)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("--num_layers", "2"),
        ("--num_params", "few"),
        ("--largest",),
        (*SHAPE, "--num_params", "1e9"),
        (*SHAPE, "--gpu_memory", "-1"),
        (*SHAPE, "--config", "missing.json"),
        (*SHAPE, "--zero_stage", "7"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(args):
    result = run(*args)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr


def test_a_broken_json_is_a_user_error(tmp_path):
    path = tmp_path / "broken.json"
    for text in ("{", "[]", '{"zero_optimization": {"stage": 9}}'):
        path.write_text(text)
        result = run(*SHAPE, "--config", str(path))
        assert result.returncode == 2 and len(result.stderr.splitlines()) == 1


def test_answers_fast_and_without_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys, memory_model; memory_model.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *SHAPE], cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 0.3


# ------------------------------------------------------------------------------------------------- a real engine


ENGINE_SCRIPT = '''
import argparse, json, sys
import deepspeed, torch, torch.distributed as dist
import memory_model as mm
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.add_argument("--out")
args = parser.parse_args()
model = mm.Model(2, 35, 5, 101, 7)
class Parameters(torch.nn.Module):
    """Only the parameters' shapes matter: ZeRO partitions them as it would the real model's."""
    def __init__(self):
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(s)) for s in mm.parameter_shapes(model))
    def forward(self):
        return sum(p.float().sum() for p in self.all)
counted = {}
for name in ("baseline", "bf16_full"):
    for stage in (1, 2, 3):
        config = mm.with_stage(mm.load_configs()[name], stage)
        config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
        engine, optimizer, *_ = deepspeed.initialize(model=Parameters(), config=config)
        engine.backward(engine())
        engine.step()
        if stage == 3:
            groups = [optimizer.lp_param_buffer], optimizer.fp32_partitioned_groups_flat
        else:
            groups = optimizer.bit16_groups_flat, optimizer.single_partition_of_fp32_groups
        groups += ([state["exp_avg"] for state in optimizer.optimizer.state.values()],)
        counted[f"{name} {stage}"] = [sum(t.numel() * t.element_size() for t in group) for group in groups]
        engine.destroy()
if dist.get_rank() == 0:
    json.dump(counted, open(args.out, "w"))
dist.barrier()
dist.destroy_process_group()
'''


@pytest.mark.slow
def test_persistent_bytes_under_the_launcher(tmp_path):
    pytest.importorskip("deepspeed")
    script, out = tmp_path / "count.py", tmp_path / "counted.json"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{ENGINE_SCRIPT}")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    subprocess.run(
        [Path(sys.executable).parent / "deepspeed", "--num_gpus=2", "--master_port", str(port), script, "--out", out],
        check=True,
        timeout=300,
    )
    for key, counted in json.loads(out.read_text()).items():
        name, stage = key.split()
        row = rows(Setup(Model(2, 35, 5, 101, 7), mm.with_stage(CONFIGS[name], int(stage)), 2))
        assert counted == [row[part].bytes for part in ("model parameters", "master weights", "exp_avg")], key
