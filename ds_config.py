"""The DeepSpeed JSON of one run: read, filled in from the command line, and checked before anything starts.

Imports neither torch nor deepspeed, so that a mistake in the file is reported in milliseconds.
"""

import json
import math
from pathlib import Path

from errors import UserError

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN_BATCH = "train_batch_size"
STOCHASTIC_ROUND = "bf16_stochastic_round"  # ours, in the optimizer's params: DeepSpeed never sees it


def read_config(path):
    """The DeepSpeed JSON at `path` as a dict. Raises UserError when it is missing or is not a JSON object."""
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"cannot read DeepSpeed config {path}: {reason}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"DeepSpeed config {path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"DeepSpeed config {path} must hold a JSON object, not a {type(config).__name__}")
    return config


def resolve_config(config, micro_batch=None, accumulation=None, learning_rate=None, zero_stage=None):
    """Fill every "auto" of `config` and let the command line win where both give a number.

    The four arguments are the command line's values, None where the user gave none. Returns the resolved copy
    and a list of one-line notes, one for each value that the command line overrode. Raises UserError.
    """
    config = json.loads(json.dumps(config))  # a deep copy, and a proof that the record can hold it
    notes = []

    def settle(section, key, cli_value, default):
        value = section.get(key, "auto")
        if cli_value is not None and value not in ("auto", cli_value):
            notes.append(f"{key}: the command line's {cli_value} replaces the config's {value}")
        section[key] = cli_value if cli_value is not None else default if value == "auto" else value

    optimizer = _section(config, "optimizer", required=True)
    train_batch = config.get(TRAIN_BATCH, "auto")
    if train_batch == "auto" or micro_batch is not None or accumulation is not None:
        # DeepSpeed derives the train batch from the other two and the world size; a number kept here would clash.
        if config.pop(TRAIN_BATCH, "auto") != "auto":
            notes.append(f"{TRAIN_BATCH}: the config's {train_batch} gives way to the command line's batch size")
        settle(config, MICRO_BATCH, micro_batch, default=1)
        settle(config, ACCUMULATION, accumulation, default=1)
    else:  # DeepSpeed derives what is "auto" from the train batch it was given
        for key in (MICRO_BATCH, ACCUMULATION):
            if config.get(key) == "auto":
                del config[key]
    _section(optimizer, "params")
    settle(optimizer.setdefault("params", {}), "lr", learning_rate, default=1e-4)
    _section(config, "zero_optimization")
    settle(config.setdefault("zero_optimization", {}), "stage", zero_stage, default=3)
    check_config(config)
    return config, notes


def check_config(config):
    """Raise UserError for what DeepSpeed would refuse with an obscure assert, or accept and do otherwise."""
    for path, value in _leaves(config):
        if value == "auto":
            raise UserError(f'"auto" for {path} cannot be filled in from the command line: give a value')
    for key in (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH):
        if key in config and not _is_number(config[key], int, minimum=1):
            raise UserError(f"{key} must be a positive integer, not {json.dumps(config[key])}")
    optimizer = _section(config, "optimizer", required=True)
    if not isinstance(optimizer.get("type"), str):
        raise UserError('the config\'s optimizer has no "type" (for example "AdamW")')
    if not _is_number(optimizer["params"]["lr"], (int, float), minimum=0):
        raise UserError(f"optimizer.params.lr must be a number >= 0, not {json.dumps(optimizer['params']['lr'])}")
    stage = _section(config, "zero_optimization").get("stage")
    if not _is_number(stage, int, minimum=1) or stage > 3:
        raise UserError(f"zero_optimization.stage must be 1, 2 or 3, not {json.dumps(stage)}")
    _check_precision(config)
    if config["optimizer"]["params"].get(STOCHASTIC_ROUND, False):
        _check_stochastic_round(config)


def _check_precision(config):
    bf16, fp16 = _section(config, "bf16"), _section(config, "fp16")
    master, states = (bf16.get(f"bf16_{key}", False) for key in ("master_weights_and_grads", "optimizer_states"))
    offloaded = offloads_optimizer(config)
    torch_adam = config["optimizer"]["params"].get("torch_adam", False)
    if bf16.get("enabled") and fp16.get("enabled"):
        raise UserError("bf16 and fp16 are both enabled: choose one")
    if states and not master:
        raise UserError("bf16_optimizer_states needs bf16_master_weights_and_grads: true beside it")
    if master and not bf16.get("enabled"):
        raise UserError("bf16_master_weights_and_grads needs bf16.enabled: true beside it")
    if master and not states and not offloaded:
        raise UserError(
            "bf16_master_weights_and_grads alone (fp32 optimizer states) works only with the optimizer on the CPU: "
            'add "bf16_optimizer_states": true, or zero_optimization.offload_optimizer with "device": "cpu"'
        )
    if master and offloaded and torch_adam:
        raise UserError(
            "bf16 master weights with offload_optimizer need DeepSpeedCPUAdam: remove torch_adam from the optimizer"
        )


def _check_stochastic_round(config):
    optimizer = config["optimizer"]
    if not _section(config, "bf16").get("bf16_optimizer_states"):
        raise UserError(
            f"{STOCHASTIC_ROUND} rounds weights and moments that are kept in bf16: set bf16_master_weights_and_grads "
            "and bf16_optimizer_states too, or remove it"
        )
    if optimizer["type"].lower() != "adamw":
        raise UserError(f"{STOCHASTIC_ROUND} works with the optimizer AdamW only, not {optimizer['type']}")
    if offloads_optimizer(config):
        raise UserError(f"{STOCHASTIC_ROUND} does not work with offload_optimizer: DeepSpeedCPUAdam rounds to nearest")
    known = {"lr", "betas", "eps", "weight_decay", "torch_adam", "fused", STOCHASTIC_ROUND}
    if unknown := sorted(set(optimizer["params"]) - known):
        raise UserError(f"{STOCHASTIC_ROUND}: the optimizer takes no {', '.join(unknown)}")


def offloads_optimizer(config):
    """Whether the optimizer's states live on the CPU or NVMe rather than on the accelerator."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    return offload.get("device", "none") != "none"


def _section(config, key, required=False):
    """The JSON object at `key`, empty where it is missing. Raises UserError when it is anything else."""
    if required and key not in config:
        raise UserError(f'the config has no "{key}" section')
    section = config.get(key, {})
    if not isinstance(section, dict):
        raise UserError(f'"{key}" must be a JSON object, not {json.dumps(section)[:40]}')
    return section


def _leaves(value, path=""):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _is_number(value, kinds, minimum):
    return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value) and value >= minimum
