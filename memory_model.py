"""Bytes per GPU, by component, for any model x DeepSpeed config x ZeRO stage x world size. No torch needed.

    python memory_model.py --num_layers 32 --hidden_dim 4096 --num_gpus 4        # every file in configs/, side by side
    python memory_model.py --num_params 70e9 --num_gpus 64 --zero_stage 3 --gpu_memory 80      # does it fit?
    python memory_model.py --gpu_memory 80 --num_gpus 8 --largest                # the largest model that fits

Every term comes from the configuration, the model's shapes, or the DeepSpeed code named in the docstring beside it
(read in version 0.19.8; paths are relative to deepspeed/runtime). Nothing is fitted. What is predicted is what the
CUDA allocator calls *allocated*: the CUDA context, NCCL's buffers and fragmentation come on top. "GB" is 2^30 bytes.
"""

import argparse
import copy
import functools
import itertools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from errors import UserError

GB = 2**30
DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_NAMES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"} | {d: d for d in DTYPE_BYTES}
LOSS_CHUNK_TOKENS = 128  # of train.py's loss: tokens whose logits are widened to fp32 at once
MAX_GPUS = 1024  # where the search for "more GPUs" gives up


# ---------------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Model:
    """A GPT-2-style decoder with learned positions and an untied output head. It reads `seq_length` tokens."""

    num_layers: int
    hidden_dim: int
    num_heads: int
    vocab_size: int = 50257
    seq_length: int = 512


@dataclass(frozen=True)
class Setup:
    """One run. `micro_batch` is sequences per GPU, `loss_chunk_tokens` the chunk of the loss (None: plain)."""

    model: Model
    config: dict
    world_size: int = 1
    micro_batch: int = 1
    activation_checkpointing: bool = True
    loss_chunk_tokens: int | None = None


def module_shapes(model):
    """[(module name, [parameter shapes])] in construction order, modules without own parameters included.

    The empty ones count: ZeRO-3 prefetches once per module call, whether or not the module owns parameters.
    """
    h, v = model.hidden_dim, model.vocab_size
    block = [
        ("", []),
        ("ln_1", [(h,), (h,)]),
        ("qkv", [(3 * h, h), (3 * h,)]),
        ("proj", [(h, h), (h,)]),
        ("ln_2", [(h,), (h,)]),
        ("fc", [(4 * h, h), (4 * h,)]),
        ("out", [(h, 4 * h), (h,)]),
    ]
    modules = [("", []), ("wte", [(v, h)]), ("wpe", [(model.seq_length, h)])]
    for layer in range(model.num_layers):
        modules += [(f"blocks.{layer}.{name}", shapes) for name, shapes in block]
    return [*modules, ("ln_f", [(h,), (h,)]), ("head", [(v, h)])]


def parameter_shapes(model):
    """Shapes of all parameters, in `model.parameters()` order."""
    return [shape for _, shapes in module_shapes(model) for shape in shapes]


@functools.lru_cache(maxsize=64)
def _numels(model):
    one = tuple(math.prod(shape) for shape in parameter_shapes(replace(model, num_layers=1)))
    return one[:2] + one[2:-3] * model.num_layers + one[-3:]  # embeddings, blocks, final LayerNorm and head


def num_parameters(model):
    """Number of parameters: L(12h^2 + 13h) + 2Vh + Th + 2h."""
    return sum(_numels(model))


def model_of_width(hidden_dim, vocab_size=50257, seq_length=512):
    """The model this file means when only a size is known: hidden_dim = 128 x num_layers, heads 64 wide.

    That is the shape of GPT-3 6.7B (32 x 4096), 13B (40 x 5120) and 175B (96 x 12288): Brown et al. 2020, table 2.1.
    """
    return Model(max(1, round(hidden_dim / 128)), hidden_dim, hidden_dim // 64, vocab_size, seq_length)


def model_of_size(num_params, vocab_size=50257, seq_length=512):
    """The `model_of_width` whose parameter count is nearest to num_params (width in steps of 64)."""
    low, high = 1, 2
    while num_parameters(model_of_width(64 * high, vocab_size, seq_length)) < num_params:
        low, high = high, 2 * high
    candidates = (
        model_of_width(64 * k, vocab_size, seq_length)
        for k in _bracket(
            low, high, lambda k: num_parameters(model_of_width(64 * k, vocab_size, seq_length)) <= num_params
        )
    )
    return min(candidates, key=lambda m: abs(num_parameters(m) - num_params))


def _bracket(low, high, holds):
    """Neighbouring integers (a, a + 1) in [low, high] where the monotone predicate `holds` turns false."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


# ------------------------------------------------------------------------------------------- the DeepSpeed JSON


@dataclass(frozen=True)
class Plan:
    """What a DeepSpeed JSON decides about memory. Sizes are in elements."""

    stage: int
    accumulates: bool  # gradients over several micro-steps
    param_dtype: str
    grad_dtype: str
    master_dtype: str
    moment_dtype: str
    autocast: bool
    optimizer_device: str
    param_device: str
    step_temporaries: bool  # a moment-sized temporary during the update
    overlap_comm: bool
    contiguous_gradients: bool
    parameter_alignment: bool
    reduce_bucket: int
    sub_group: int
    prefetch_bucket: int
    max_live: int
    max_reuse: int
    persistence: int
    model_persistence: int
    not_modelled: tuple


# Keys whose every value leaves the bytes as they are, or that `resolve` reads.
_TOP_KEYS = """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps optimizer scheduler bf16 fp16
    torch_autocast zero_optimization gradient_clipping steps_per_print wall_clock_breakdown memory_breakdown dump_state
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients gradient_predivide_factor tensorboard
    wandb csv_monitor comms_logger flops_profiler checkpoint data_types bfloat16 seed""".split()
_ZERO_KEYS = """stage overlap_comm contiguous_gradients reduce_bucket_size allgather_bucket_size allgather_partitions
    reduce_scatter sub_group_size stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_param_persistence_threshold stage3_model_persistence_threshold prefetch_bucket_size max_live_parameters
    max_reuse_distance param_persistence_threshold model_persistence_threshold parameter_alignment
    offload_optimizer offload_param stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
    load_from_fp32_weights ignore_unused_parameters round_robin_gradients use_multi_rank_bucket_allreduce
    memory_efficient_linear compute_grad_norm log_trace_cache_warnings override_module_apply
    pipeline_loading_checkpoint enable_sanity_checks elastic_checkpoint""".split()
_OPTIMIZER_KEYS = """lr betas eps weight_decay torch_adam fused foreach adam_w_mode bias_correction
    fp32_optimizer_states bf16_stochastic_round capturable amsgrad""".split()
# Keys that switch something off when set like this, so that writing them out changes nothing.
_OFF = (None, False, 0, "none", {})


def _unknown(section, known, prefix):
    return [prefix + key for key, value in section.items() if key not in known and value not in _OFF]


def _number(section, key, default, notes, where="zero_optimization"):
    """A size in elements: `default` with a note for "auto", else an int; DeepSpeed also reads "stage3_" + key."""
    for name in (f"stage3_{key}", key):
        if name in section and section[name] is not None:
            if section[name] == "auto":
                notes.append(f'{where}.{name} = "auto" (DeepSpeed\'s default {default:g} assumed)')
                return default
            try:
                return int(float(section[name]))
            except (TypeError, ValueError):
                raise UserError(f"{where}.{name} must be a number, not {section[name]!r}") from None
    return default


def _section(config, key):
    section = config.get(key) or {}
    if not isinstance(section, Mapping):
        raise UserError(f'"{key}" must be an object, not {section!r}')
    return section


def _enabled(config, key, notes):
    section = _section(config, key)
    if section.get("enabled") == "auto":
        notes.append(f'{key}.enabled = "auto" (taken as off)')
        return {}
    return section if section.get("enabled", False) else {}


def _offload_device(zero, key, notes):
    section = _section(zero, key)
    device = section.get("device", "none") or "none"
    if device not in ("none", "cpu", "nvme"):
        raise UserError(f'zero_optimization.{key}.device must be "none", "cpu" or "nvme", not {device!r}')
    if device == "nvme":
        notes.append(f"zero_optimization.{key}.device = nvme (its host buffers)")
    if section.get("ratio", 1.0) != 1.0:
        notes.append(f"zero_optimization.{key}.ratio")
    return "gpu" if device == "none" else device


def resolve(config):
    """Read a DeepSpeed JSON (a dict) into a Plan.

    Defaults: zero/config.py DeepSpeedZeroConfig. Dtypes: engine.py get_data_types; base_optimizer.py
    _configure_master_weights. Moments take the master weights' dtype (torch: zeros_like), except in DeepSpeedCPUAdam,
    which keeps fp32 ones unless bf16_optimizer_states (engine.py get_optimizer_configuration).

    Raises:
        UserError: what DeepSpeed itself would refuse, or a value of the wrong kind.
    """
    notes = _unknown(config, _TOP_KEYS, "")
    zero = _section(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(f"zero_optimization.stage must be 0, 1, 2 or 3, not {stage!r}")
    notes += _unknown(zero, _ZERO_KEYS, "zero_optimization.")
    overlap = zero.get("overlap_comm")
    size = functools.partial(_number, zero, notes=notes)
    return Plan(
        stage=stage,
        accumulates=config.get("gradient_accumulation_steps", 1) not in (1, "auto", None),
        **_precision(config, zero, stage, notes),
        overlap_comm=stage == 3 if overlap is None else bool(overlap),
        contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
        parameter_alignment=bool(zero.get("parameter_alignment", False)),
        reduce_bucket=size("reduce_bucket_size", 500_000_000),
        sub_group=size("sub_group_size", 1_000_000_000),
        prefetch_bucket=size("prefetch_bucket_size", 50_000_000),
        max_live=size("max_live_parameters", 1_000_000_000),
        max_reuse=size("max_reuse_distance", 1_000_000_000),
        persistence=size("param_persistence_threshold", 100_000),
        model_persistence=size("model_persistence_threshold", sys.maxsize),
        not_modelled=tuple(notes),
    )


def _precision(config, zero, stage, notes):
    """The dtype, device and optimizer fields of a Plan. Notes and errors as in `resolve`."""
    if "bfloat16" in config and "bf16" not in config:
        config = config | {"bf16": config["bfloat16"]}
    bf16, fp16, autocast = (_enabled(config, key, notes) for key in ("bf16", "fp16", "torch_autocast"))
    if bf16 and fp16:
        raise UserError("bf16 and fp16 cannot both be enabled")
    param = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    if autocast and param == "fp32":
        notes.append("torch_autocast with fp32 parameters (its 16-bit weight copies)")
    low = bf16.get("bf16_master_weights_and_grads", False) or fp16.get("fp16_master_weights_and_grads", False)
    bf16_states = bool(bf16.get("bf16_optimizer_states", False))
    optimizer_device, param_device = (_offload_device(zero, f"offload_{x}", notes) for x in ("optimizer", "param"))
    if stage == 0 and (optimizer_device, param_device) != ("gpu", "gpu"):
        notes.append("zero_optimization.offload_* at stage 0")
    if stage == 0 and param != "fp32":
        notes.append("zero_optimization.stage 0 with 16-bit parameters (counted as fp32 master weights beside them)")
    if stage in (1, 2) and param_device != "gpu":
        notes.append(f"zero_optimization.offload_param at stage {stage}")
    cpu_adam, step_temporaries = _optimizer(config, optimizer_device, notes)
    if bf16_states and not low:
        raise UserError("bf16.bf16_optimizer_states requires bf16.bf16_master_weights_and_grads")
    if low and not bf16_states and not cpu_adam:
        raise UserError("16-bit master weights need bf16_optimizer_states, or offload_optimizer without torch_adam")
    if bf16_states and optimizer_device != "gpu" and not cpu_adam:
        raise UserError("bf16_optimizer_states with offload_optimizer requires DeepSpeed's CPU Adam (no torch_adam)")
    master = param if low else "fp32"
    grad = DTYPE_NAMES.get(_section(config, "data_types").get("grad_accum_dtype") or param)
    if grad is None:
        raise UserError("data_types.grad_accum_dtype must be fp32, fp16 or bf16")
    if grad != param and stage != 3:
        notes.append(f"data_types.grad_accum_dtype at stage {stage}")
    params = _section(_section(config, "optimizer"), "params")
    fp32_moments = cpu_adam and not bf16_states and params.get("fp32_optimizer_states", True)
    return {
        "param_dtype": param,
        "grad_dtype": grad,
        "master_dtype": master,
        "moment_dtype": "fp32" if fp32_moments else master,
        "autocast": bool(autocast),
        "optimizer_device": optimizer_device,
        "param_device": param_device,
        "step_temporaries": step_temporaries,
    }


def _optimizer(config, device, notes):
    """(whether DeepSpeedCPUAdam runs the step, whether the step makes a moment-sized temporary on the GPU).

    The temporary is exp_avg_sq_sqrt in torch.optim.adam._multi_tensor_adam, torch's default on CUDA; fused kernels
    (torch's and DeepSpeed's) make none.
    """
    section = _section(config, "optimizer")
    params = _section(section, "params")
    if not section:
        notes.append("optimizer (absent: two Adam moments assumed)")
    elif str(section.get("type", "")).lower() not in ("adam", "adamw"):
        notes.append(f"optimizer.type = {section.get('type')} (two Adam moments assumed)")
    notes += _unknown(params, _OPTIMIZER_KEYS, "optimizer.params.")
    if params.get("amsgrad"):
        notes.append("optimizer.params.amsgrad")
    torch_adam = bool(params.get("torch_adam", False))
    fused = params.get("fused", False) or params.get("bf16_stochastic_round", False)
    foreach = params.get("foreach") is not False
    return device != "gpu" and not torch_adam, torch_adam and not fused and foreach and device == "gpu"


# --------------------------------------------------------------------------------- partitions and their padding


def partition_numel(numels, plan, world_size):
    """Elements of one rank's partition, ZeRO's padding included.

    Stage 3 splits each parameter by itself, ceil(numel / W) (zero/partition_parameters.py _partition_param,
    _aligned_size). Stages 1 and 2 split one flat buffer, aligned to 2 x W elements; with "parameter_alignment" each
    parameter but the last is first padded to 16 bytes (zero/stage_1_and_2.py __init__: nccl_start_alignment_factor).
    """
    if plan.stage == 3:
        return sum(-(-n // world_size) for n in numels)
    if plan.stage == 0:
        return sum(numels)
    return flat_numel(numels, plan, world_size) // world_size


def flat_numel(numels, plan, world_size):
    """Elements of the whole flat parameter buffer of stages 1 and 2, padding included."""
    unit = 16 // DTYPE_BYTES[plan.param_dtype] if plan.parameter_alignment else 1
    total = sum(-(-n // unit) * unit for n in numels[:-1]) + numels[-1]
    return -(-total // (2 * world_size)) * 2 * world_size


def largest_sub_group(numels, plan, world_size):
    """Elements of the largest piece the optimizer updates at once (stage3.py _create_fp16_sub_groups).

    Stage 3 closes a sub-group with the parameter that reaches sub_group_size; the other stages update it all at once.
    """
    total = partition_numel(numels, plan, world_size)
    if plan.stage != 3 or plan.sub_group >= total:
        return total
    largest = current = 0
    for n in numels:
        current += -(-n // world_size)
        largest = max(largest, current)
        if current >= plan.sub_group:
            current = 0
    return largest


def _persistent_numel(numels, plan):
    """Which parameters stage 3 keeps whole on each rank (parameter_offload.py mark_persistent_parameters)."""
    kept, total = set(), 0
    for index, n in enumerate(numels):
        if n <= plan.persistence and total + n <= plan.model_persistence:
            kept.add(index)
            total += n
    return kept, total


# --------------------------------------------------------------------------- parameters ZeRO-3 gathers to compute


@dataclass(frozen=True)
class Gathered:
    """Elements of gathered parameters alive on a GPU, buffers in flight included, at three moments of a step."""

    forward: int = 0
    head: int = 0
    backward: int = 0


def module_calls(model, checkpointing):
    """[(what, module index)] for one forward and backward, as ZeRO-3's hooks see it; what is "fetch" or "release".

    Indices into `module_shapes`. Non-reentrant checkpointing recomputes a block when the backward of its last linear
    layer asks for its input, and stops there: that layer and the block see no forward release the second time.
    """

    def visit(*indices):
        return [(what, i) for i in indices for what in ("fetch", "release")]

    starts = [3 + 7 * layer for layer in range(model.num_layers)]
    ln_f = 3 + 7 * model.num_layers
    calls = [("fetch", 0), *visit(1, 2)]
    for b in starts:
        calls += [("fetch", b), *visit(*range(b + 1, b + 7)), ("release", b)]
    calls += [*visit(ln_f, ln_f + 1), ("release", 0), ("fetch", 0), *visit(ln_f + 1, ln_f)]
    for b in reversed(starts):
        recompute = [("fetch", b), *visit(*range(b + 1, b + 6)), ("fetch", b + 6)] if checkpointing else []
        calls += [
            ("fetch", b),
            ("fetch", b + 6),
            *recompute,
            ("release", b + 6),
            *visit(*range(b + 5, b, -1)),
            ("release", b),
        ]
    return [*calls, ("fetch", 2), ("fetch", 1)]


class _Coordinator:
    """ZeRO-3's fetch, prefetch and release rules (zero/partitioned_param_coordinator.py), replayed in elements.

    Each module call fetches what it needs, then prefetches the next parameters of the recorded trace: at least
    prefetch_bucket elements a time, until max_live are gathered. A parameter is released after its module unless a
    prefetch has skipped its next use, or that use is less than max_reuse elements away. So gathered parameters climb
    to about max_live and stay there, whatever the size of a layer.
    """

    def __init__(self, model, plan, world_size, checkpointing):
        numels, self.owned, first = _numels(model), [], 0
        persistent, _ = _persistent_numel(numels, plan)
        for _, shapes in module_shapes(model):
            self.owned.append([i for i in range(first, first + len(shapes)) if i not in persistent])
            first += len(shapes)
        self.numels, self.plan = numels, plan
        self.padded = [-(-n // world_size) * world_size for n in numels]
        self.calls = module_calls(model, checkpointing)
        self.order = [m for what, m in self.calls if what == "fetch"]
        self.queue = [(p, step) for step, m in enumerate(self.order) for p in self.owned[m]]
        self.uses = {m: [] for m in self.order}  # module -> steps at which it is fetched, earliest last
        for step in range(len(self.order) - 1, -1, -1):
            self.uses[self.order[step]].append(step)
        sizes = [sum(numels[p] for p in params) for params in self.owned]
        self.distance = [0, *itertools.accumulate(sizes[m] for m in self.order)]  # elements named before each step
        self.step = self.next = self.available = self.live = 0
        self.fetched_for = dict.fromkeys(range(len(numels)), -1)
        self.gathered, self.in_flight = set(), {}  # in_flight: parameter -> its bundle, [members, flat, copied]

    def gather(self, params):
        """Two or more parameters share a flat buffer and are copied out of it (partition_parameters.py
        _all_gather_dtype, AllGatherCoalescedHandle.wait); one alone is gathered in place."""
        flat = sum(map(self.padded.__getitem__, params))
        self.available += sum(map(self.numels.__getitem__, params))
        self.live += flat
        self.gathered.update(params)
        self.in_flight.update(dict.fromkeys(params, [params, flat, False]))

    def wait(self, param):
        bundle = self.in_flight.pop(param)
        if len(bundle[0]) == 1:
            return
        if not bundle[2]:
            self.live += sum(map(self.numels.__getitem__, bundle[0]))
            bundle[2] = True
        if not any(p in self.in_flight for p in bundle[0]):
            self.live -= bundle[1]

    def fetch(self, module):
        params = self.owned[module]
        missing = [p for p in params if p not in self.gathered]
        if missing:
            self.gather(missing)
        expected = 0
        for p in params:
            if p in self.in_flight:
                self.wait(p)
            expected += self.fetched_for[p] < self.step
        for param, step in self.queue[self.next : self.next + expected]:
            self.fetched_for[param] = step
        self.next += expected
        peak = self.live
        self.prefetch()
        self.step += 1
        return max(peak, self.live)

    def prefetch(self):
        limit = min(self.plan.max_live - self.available, self.plan.prefetch_bucket)
        chosen, numel = [], 0
        while self.next < len(self.queue) and numel < limit:
            param, step = self.queue[self.next]
            self.next += 1
            self.fetched_for[param] = max(self.fetched_for[param], step)
            if param not in self.gathered and param not in chosen:
                chosen.append(param)
                numel += self.numels[param]
        if chosen:
            self.gather(chosen)

    def release(self, module):
        uses = self.uses[module]
        while uses and uses[-1] < self.step:
            uses.pop()
        if uses and self.distance[uses[-1]] - self.distance[self.step] < self.plan.max_reuse:
            return
        for p in self.owned[module]:
            if p in self.gathered and p not in self.in_flight and self.fetched_for[p] <= self.step:
                self.gathered.discard(p)
                self.available -= self.numels[p]
                self.live -= self.numels[p]


def gathers(plan, world_size):
    """Whether parameters are gathered at all: at world size 1 they are views of their partition (NoGatherHandle)."""
    return plan.stage == 3 and (world_size > 1 or plan.param_device != "gpu")


@functools.lru_cache(maxsize=256)
def gathered_numel(model, plan, world_size, checkpointing):
    """Replay one step of a run that is under way (the first two record the trace and prefetch nothing)."""
    if not gathers(plan, world_size):
        return Gathered()
    coordinator = _Coordinator(model, plan, world_size, checkpointing)
    head = 4 + 7 * model.num_layers
    peaks, moment = {"forward": 0, "head": 0, "backward": 0}, "forward"
    for what, module in coordinator.calls:
        if what == "release":
            coordinator.release(module)
            moment = "between" if module == 0 else "backward" if (moment, module) == ("head", head) else moment
            continue
        moment = "head" if (moment, module) == ("between", head) else moment
        live = coordinator.fetch(module)
        if moment in peaks:
            peaks[moment] = max(peaks[moment], live)
    return Gathered(**peaks)


# ----------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Activations:
    """Bytes of activations per GPU. `kept` survives the forward pass; the others come on top, one at a time."""

    kept: int
    block: int  # one block's own, recomputed or first computed, with its widest gradients
    logits: int  # from the logits to their gradient, at the loss
    logits_grad: int  # what is left of that while the output head runs backward


def activation_bytes(model, micro_batch, checkpointing, element_bytes=2, autocast=False, loss_chunk_tokens=None):
    """Activations autograd saves, from the model's operations; flash attention, no dropout, so no score matrix.

    Per block and token, in h-wide tensors: the inputs of both LayerNorms (2), of qkv (1), q, k and v (3), the attention
    output (1), fc's input (1), gelu's input (4) and output (4): 16. Under autocast LayerNorm runs in fp32 and saves
    fp32 inputs. Added: LayerNorm's mean and 1/std, attention's logsumexp, all fp32. (The 34 bytes per token and h of
    Korthikanti et al. 2022, eq. 2, less the 2 bytes of dropout masks this model does not have.) During the block's
    backward pass: the gradients of its output (1), of gelu's output (4) and input (4); gelu's output (4) is freed
    between the last two, so 1 + 4 more.

    With checkpointing only the h-wide input of each block is kept, and one block is alive at a time. The V-wide logits
    of a plain loss pass through: 16-bit, an fp32 copy and its log-softmax in the forward pass (2 + 4 + 4 bytes);
    log-softmax, its gradient and the fp32 logits' gradient in the backward pass (4 + 4 + 4); then the 16-bit gradient.
    train.py's CrossEntropy walks over the tokens in chunks and writes each chunk's gradient over its logits: the 16-bit
    logits are all there ever is of full length, with an fp32 copy and its log-softmax (4 + 4) of one chunk.

    Args:
        element_bytes: of the parameters' dtype, which is the activations' dtype too.
        loss_chunk_tokens: the chunk of such a loss (None: a plain one).
    Returns:
        Activations, in bytes.
    """
    tokens, h = micro_batch * model.seq_length, model.hidden_dim
    act = min(element_bytes, 2) if autocast else element_bytes
    norm_input = 4 if autocast else element_bytes
    stats = tokens * 8
    block = tokens * h * (2 * norm_input + 14 * act) + 2 * stats + tokens * model.num_heads * 4
    final = tokens * h * (norm_input + act) + stats
    kept = model.num_layers * (tokens * h * element_bytes if checkpointing else block) + final
    gradients = tokens * h * act * 5
    logits_grad = tokens * model.vocab_size * act
    if loss_chunk_tokens is None:
        logits = tokens * model.vocab_size * max(8 + act, 12)
    else:
        logits = logits_grad + min(tokens, loss_chunk_tokens) * model.vocab_size * 8
    return Activations(kept, (block if checkpointing else 0) + gradients, logits, logits_grad)


# ------------------------------------------------------------------------------------------------ the components


@dataclass(frozen=True)
class Component:
    """One row of the answer; `bytes` are per rank. Transient ones come and go within a step: their largest counts."""

    name: str
    dtype: str
    bytes_per_param: float  # 0 for what does not grow with the parameter count
    bytes: int
    partitioned: bool
    device: str  # "gpu", "cpu" or "nvme"
    transient: bool


@dataclass(frozen=True)
class Prediction:
    """Per-GPU answer, in bytes. `moments` maps each moment of a step to the bytes allocated then."""

    allocated_bytes: int
    peak_bytes: int
    peak_moment: str
    components: tuple
    not_modelled: tuple
    moments: dict
    host_bytes: int


def components(setup):
    """All components of a Setup: the six model states of the published table first, then working memory.

    Lifetimes. Stage 3 keeps gradients in a flat buffer for the whole run (stage3.py _setup_for_real_optimizer,
    grad_partitions_flat_buffer); stages 1 and 2 free theirs in `step` (stage_1_and_2.py). Master gradients exist per
    sub-group during the update (stage3.py _prepare_fp32_grad_for_sub_group, _release_sub_group), or for the whole run
    when the optimizer is offloaded (initialize_optimizer_states). Where the master dtype is the gradients' own, the
    master gradient *is* the flattened copy, and no conversion is made.
    """
    plan = resolve(setup.config)
    return tuple(_standing_components(setup, plan) + _passing_components(setup, plan))


def allocated_bytes(rows):
    """Bytes on the GPU that stay after a step."""
    return sum(row.bytes for row in rows if row.device == "gpu" and not row.transient)


def _standing_components(setup, plan):
    numels = _numels(setup.model)
    buffers = [
        Component(name, plan.param_dtype, 0, size, False, "gpu", False)
        for name, size in _standing_buffers(setup, plan).items()
        if size
    ]
    return _state_components(plan, numels, setup.world_size) + _host_buffers(plan, numels, setup.world_size) + buffers


def _state_components(plan, numels, world_size):
    part = partition_numel(numels, plan, world_size)
    whole = sum(numels) if plan.stage in (0, 3) else flat_numel(numels, plan, world_size)
    offload = plan.optimizer_device != "gpu"
    group = part if offload else largest_sub_group(numels, plan, world_size)

    def row(name, dtype, numel, partitioned, device="gpu", transient=False):
        return Component(name, dtype, DTYPE_BYTES[dtype], numel * DTYPE_BYTES[dtype], partitioned, device, transient)

    stage, host = plan.stage, plan.optimizer_device
    parameters, gradients = part if stage == 3 else whole, part if stage >= 2 else whole
    return [
        row("model parameters", plan.param_dtype, parameters, stage == 3, plan.param_device),
        row("gradients", plan.grad_dtype, gradients, stage >= 2, host if stage == 3 else "gpu", stage != 3),
        row("master weights", plan.master_dtype, part, stage >= 1, host),
        row("master gradients", plan.master_dtype, group, stage >= 1, host, not offload),
        row("exp_avg", plan.moment_dtype, part, stage >= 1, host),
        row("exp_avg_sq", plan.moment_dtype, part, stage >= 1, host),
    ]


def _host_buffers(plan, numels, world_size):
    """Stages 1 and 2 with an offloaded optimizer (stage_1_and_2.py __init__): a 16-bit copy of the partition on the
    host, and one parameter-sized gradient buffer on each side."""
    if plan.optimizer_device == "gpu" or plan.stage not in (1, 2):
        return []
    size, part = DTYPE_BYTES[plan.param_dtype], partition_numel(numels, plan, world_size)
    return [
        Component("host offload buffers", plan.param_dtype, 0, (part + max(numels)) * size, False, "cpu", False),
        Component("device offload buffer", plan.param_dtype, 0, max(numels) * size, False, "gpu", False),
    ]


def _passing_components(setup, plan):
    """Working memory: each row's largest size over the moments of a step."""
    largest = {}
    for rows in _moments(setup, plan).values():
        for name, size in rows.items():
            largest[name] = max(largest.get(name, 0), size)
    dtypes = {
        "flattened gradients": plan.grad_dtype,
        "optimizer temporaries": plan.moment_dtype,
        "gradient norm": "fp64",
        "logits": "fp32",
    }
    return [
        Component(name, dtypes.get(name, plan.param_dtype), 0, size, False, "gpu", True)
        for name, size in largest.items()
        if size and name not in ("gradients", "master gradients")
    ]


def _standing_buffers(setup, plan):
    """Stage 3's reduce bucket (stage3.py _setup_for_real_optimizer, one per communication dtype) and persistent
    parameters, which are gathered again after each step (_post_step). Bytes."""
    size, numels = DTYPE_BYTES[plan.param_dtype], _numels(setup.model)
    if plan.stage != 3:
        return {}
    bucket_bytes = size + (2 if plan.autocast and size == 4 else 0)
    persistent = _persistent_numel(numels, plan)[1] * gathers(plan, setup.world_size)
    return {
        "reduce buckets": plan.reduce_bucket * bucket_bytes * plan.contiguous_gradients,
        "persistent parameters": persistent * size,
    }


def _moment_bytes(moments):
    return {name: sum(rows.values()) for name, rows in moments.items()}


def _moments(setup, plan, live=None):
    """{moment: {row: bytes}} of what is alive on the GPU at each moment beyond what stays allocated.

    Args:
        live: Gathered, to save its replay; the real one by default.
    """
    model, size = setup.model, DTYPE_BYTES[plan.param_dtype]
    numels = _numels(model)
    live = live or gathered_numel(model, plan, setup.world_size, setup.activation_checkpointing)
    act = activation_bytes(
        model, setup.micro_batch, setup.activation_checkpointing, size, plan.autocast, setup.loss_chunk_tokens
    )
    first, last = _backward_gradients(setup, plan, numels)
    reduce = _reduction_bytes(setup, plan, numels)
    held = _held_gradients(setup, plan, numels)
    # The rank's share of one gradient at a time, in fp64: get_grad_norm_direct, zero/utils.py get_norm_dtype.
    norm = (
        -(-max(numels) // setup.world_size)
        if plan.stage == 3
        else min(max(numels), partition_numel(numels, plan, setup.world_size))
    )
    head = {"gradients being computed": numels[-1] * size} | first | reduce
    block = {"gradients being computed": _block_gradient_numel(model, plan) * size} | first | reduce

    def moment(gathered, activations, *others):
        rows = {"gathered parameters": gathered * size, "activations": activations}
        for other in others:
            rows |= other
        return rows

    return {
        "forward pass": moment(live.forward, act.kept + act.block),
        "loss": moment(live.head, act.kept, {"logits": act.logits}),
        "backward of the output head": moment(live.head, act.kept, {"logits": act.logits_grad}, head),
        "backward of a block": moment(live.backward, act.kept + act.block, block),
        "end of the backward pass": moment(0, act.block + act.kept // model.num_layers, last, reduce),
        "gradient norm": {"gradient norm": norm * 8} | held,
        "optimizer step": _update_rows(setup, plan, numels) | held,
    }


def _block_gradient_numel(model, plan):
    """The gradient being computed, and the one before it if it is too big for the bucket and waits for its own
    reduction (stage3.py reduce_independent_p_g_buckets_and_remove_grads)."""
    largest = 4 * model.hidden_dim**2
    return largest * (2 if largest > plan.reduce_bucket or not plan.contiguous_gradients else 1)


def _backward_gradients(setup, plan, numels):
    """Rows for the gradients alive from the first and at the last moment of a backward pass.

    Stage 3 has its standing buffer. Stage 2 collects the gradients of the rank's own parameters in a buffer made for
    the first of them, and a second one while it accumulates (stage_1_and_2.py copy_grads_in_partition,
    independent_gradient_partition_epilogue); the last rank's parameters come first. Stages 0 and 1 gather them all on
    every rank: those of a single micro-step as activations go, those of several are there from the start. (Stage 1 with
    overlap_comm leaves some of them in its reduce buckets: counted here all the same.)
    """
    size = DTYPE_BYTES[plan.grad_dtype]
    if plan.stage == 3 or (plan.stage == 2 and plan.optimizer_device != "gpu"):
        return {}, {}
    if plan.stage == 2:
        rows = {"gradients": _owned_numel(numels, plan, setup.world_size) * size * (2 if plan.accumulates else 1)}
        return rows, rows
    rows = {"gradients": sum(numels) * size}
    return rows if plan.accumulates else {}, rows


def _owned_numel(numels, plan, world_size):
    """Elements of all parameters that a rank's partition touches, whole; the largest over ranks."""
    part = partition_numel(numels, plan, world_size)
    owned, start = [0] * world_size, 0
    for n in numels:
        for rank in range(start // part, (start + n - 1) // part + 1):
            owned[rank] += n
        start += n
    return max(owned)


def _reduction_bytes(setup, plan, numels):
    """Reduce buckets and the copy a reduction makes.

    Stage 3 concatenates a bucket of several gradients (comm/coalesced_collectives.py reduce_scatter_coalesced); its
    bucket itself stands. Stages 1 and 2 allocate theirs for each backward pass, two with overlap_comm
    (stage_1_and_2.py setup_buckets), and flatten the slices of what they reduce (allreduce_bucket).
    """
    size, total = DTYPE_BYTES[plan.param_dtype], sum(numels)
    copied = min(plan.reduce_bucket, total) * (setup.world_size > 1)
    if plan.stage == 3:
        return {"reduction copy": copied * size}
    if plan.stage == 0:
        return {"reduction copy": min(500_000_000, total) * size * (setup.world_size > 1)}
    buckets = plan.reduce_bucket * (2 if plan.overlap_comm else 1) * plan.contiguous_gradients
    largest = max(numels) * (setup.world_size > 1)  # an oversized gradient is reduced by itself
    return {"reduce buckets": buckets * size, "reduction copy": max(copied, largest) * size}


def _held_gradients(setup, plan, numels):
    """Gradients alive when the update starts: at stages 1 and 2 those of the parameters the rank's partition touches,
    at full length (stage_1_and_2.py copy_grads_in_partition; _clear_param_grad_only drops the others)."""
    if plan.stage == 3 or plan.optimizer_device != "gpu":
        return {}
    numel = sum(numels) if plan.stage == 0 else _owned_numel(numels, plan, setup.world_size)
    return {"gradients": numel * DTYPE_BYTES[plan.grad_dtype]}


def _update_rows(setup, plan, numels):
    """The largest sub-group's update: gradients flattened, then converted to the master dtype with both alive
    (stage3.py _prepare_fp32_grad_for_sub_group; stage_1_and_2.py step), then the optimizer's own temporaries. The
    flattened copy is gone when those come, so only the larger of the two counts."""
    if plan.optimizer_device != "gpu":
        return {}
    group = largest_sub_group(numels, plan, setup.world_size)
    flattened = 0 if plan.grad_dtype == plan.master_dtype else group * DTYPE_BYTES[plan.grad_dtype]
    temporaries = group * DTYPE_BYTES[plan.moment_dtype] * plan.step_temporaries
    rows = {"master gradients": group * DTYPE_BYTES[plan.master_dtype]}
    return rows | (
        {"optimizer temporaries": temporaries} if temporaries > flattened else {"flattened gradients": flattened}
    )


def predict(setup):
    """What stays allocated on a GPU after a step, the largest moment of a step, and every component.

    Returns:
        Prediction; all sizes in bytes on one rank (the largest over ranks).
    Raises:
        UserError: a configuration DeepSpeed refuses, or a world size or micro batch below 1.
    """
    if setup.world_size < 1 or setup.micro_batch < 1:
        raise UserError("world size and micro batch must be at least 1")
    plan, rows = resolve(setup.config), components(setup)
    allocated = allocated_bytes(rows)
    moments = {name: allocated + size for name, size in _moment_bytes(_moments(setup, plan)).items()}
    peak = max(moments, key=moments.get)
    host = sum(row.bytes for row in rows if row.device != "gpu" and not row.transient)
    return Prediction(allocated, moments[peak], peak, rows, plan.not_modelled, moments, host)


# ------------------------------------------------------------------------------------ what fits, and what would


def fits(setup, gpu_memory_bytes):
    """Whether the predicted peak is within gpu_memory_bytes."""
    return predict(setup).peak_bytes <= gpu_memory_bytes


def largest_model(setup, gpu_memory_bytes):
    """The largest `model_of_width` that fits in gpu_memory_bytes per GPU, or None if none does.

    Of setup.model only vocab_size and seq_length are used. Counting gathered parameters takes a replay of the whole
    step, so the search guesses them (max_live and two layers more), and gallops from the width that would fit then.
    """
    vocab, seq = setup.model.vocab_size, setup.model.seq_length
    plan = resolve(setup.config)

    def at(k):
        return replace(setup, model=model_of_width(64 * k, vocab, seq))

    def seems_to_fit(k):
        model = at(k).model
        gathered = min(plan.max_live + 8 * model.hidden_dim**2, num_parameters(model)) * gathers(plan, setup.world_size)
        moments = _moment_bytes(_moments(at(k), plan, Gathered(gathered, gathered, gathered)))
        return allocated_bytes(_standing_components(at(k), plan)) + max(moments.values()) <= gpu_memory_bytes

    high = 1
    while seems_to_fit(high):
        high *= 2

    def holds(k):
        return k == 0 or fits(at(k), gpu_memory_bytes)

    low = high = _bracket(high // 2, high, seems_to_fit)[0]
    step = 1
    while not holds(low):
        low, high, step = max(0, low - step), low, 2 * step
    while low == high or holds(high):
        low, high, step = high, high + step, 2 * step
    low = _bracket(low, high, holds)[0]
    return at(low).model if low else None


def suggest_fix(setup, gpu_memory_bytes, configs=None):
    """One line naming the smallest change that makes `setup` fit.

    Tried in the order of what they cost: activation checkpointing (time), a higher ZeRO stage (communication), another
    config (numerics), a smaller micro batch (throughput), more GPUs (money); then the first four together, with as many
    GPUs as that takes.

    Args:
        configs: {name: DeepSpeed JSON} to choose from; by default, bf16 master weights and states in setup.config.
    """
    checkpointed = replace(setup, activation_checkpointing=True)
    stage = resolve(setup.config).stage
    configs = {"bf16 master weights, gradients and states": _bf16_full(setup.config)} if configs is None else configs
    changes = [] if setup.activation_checkpointing else [("turn on activation checkpointing", checkpointed)]
    changes += [
        (f"ZeRO stage {s} instead of {stage}", replace(setup, config=with_stage(setup.config, s)))
        for s in range(stage + 1, 4)
    ]
    changes += [(f"config {name}", replace(setup, config=config)) for name, config in configs.items()]
    changes += [
        (f"micro batch {b} instead of {setup.micro_batch}", replace(setup, micro_batch=b))
        for b in range(setup.micro_batch - 1, 0, -1)
    ]
    changes += [
        (f"{w} GPUs instead of {setup.world_size}", replace(setup, world_size=w)) for w in _more_gpus(setup.world_size)
    ]
    for text, changed in changes:
        room = _room(changed, gpu_memory_bytes)
        if room >= 0:
            return f"smallest change that fits: {text} ({_gb(gpu_memory_bytes - room)} GB of {_gb(gpu_memory_bytes)})"
    return _suggest_all(replace(checkpointed, micro_batch=1), gpu_memory_bytes, configs)


def _suggest_all(setup, gpu_memory_bytes, configs):
    for config in [setup.config, *configs.values()]:
        for world_size in [setup.world_size, *_more_gpus(setup.world_size)]:
            changed = replace(setup, config=with_stage(config, 3), world_size=world_size)
            if _room(changed, gpu_memory_bytes) >= 0:
                name = next((n for n, c in configs.items() if c is config), None)
                return (
                    "no single change fits; together these do: activation checkpointing, micro batch 1, ZeRO-3"
                    + (f", config {name}" if name else "")
                    + (f", {world_size} GPUs" if world_size > setup.world_size else "")
                )
    return f"nothing fits: not even {MAX_GPUS} GPUs at ZeRO stage 3 with micro batch 1; the model must be smaller"


def _room(setup, gpu_memory_bytes):
    """Free bytes at the peak; negative when it does not fit, or DeepSpeed refuses the configuration."""
    try:
        return gpu_memory_bytes - predict(setup).peak_bytes
    except UserError:
        return -1


def _more_gpus(world_size):
    counts = []
    while 2 * world_size <= MAX_GPUS:
        world_size *= 2
        counts.append(world_size)
    return counts


def with_stage(config, stage):
    """A copy of a DeepSpeed JSON at another ZeRO stage."""
    return copy.deepcopy(config) | {"zero_optimization": dict(config.get("zero_optimization") or {}, stage=stage)}


def _bf16_full(config):
    return copy.deepcopy(config) | {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "fp16": {"enabled": False},
    }


# -------------------------------------------------------------------------------------------------- Markdown, text


def bookkeeping_table(configs, model, world_size=1):
    """The published bookkeeping: bytes per parameter of each model state, for any configs, as Markdown.

    Args:
        configs: {name: DeepSpeed JSON}.
    """
    rows = {name: components(Setup(model, config, world_size))[:6] for name, config in configs.items()}
    lines = ["| Component | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for parts in zip(*rows.values(), strict=True):
        cells = (f"{p.dtype}, {p.bytes_per_param} B" + ("" if p.device == "gpu" else f" ({p.device})") for p in parts)
        lines.append(f"| {parts[0].name} | " + " | ".join(cells) + " |")
    totals = (f"{sum(p.bytes_per_param for p in parts)}N bytes" for parts in rows.values())
    return "\n".join([*lines, "| total, N parameters | " + " | ".join(totals) + " |"])


def capacity_table(configs, setup, gpu_memory_bytes, gpu_counts=(1, 4, 8, 64)):
    """Markdown: the largest model, in parameters, that fits on each number of GPUs under each config.

    Args:
        setup: its micro batch, checkpointing, vocabulary and sequence length are used.
    """
    header = " | ".join(f"{w} GPU{'s' if w > 1 else ''}" for w in gpu_counts)
    lines = [f"| Config ({_gb(gpu_memory_bytes, 0)} GB per GPU) | {header} |", "|---" * (len(gpu_counts) + 1) + "|"]
    for name, config in configs.items():
        cells = (_capacity(replace(setup, config=config, world_size=w), gpu_memory_bytes) for w in gpu_counts)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _capacity(setup, gpu_memory_bytes):
    model = largest_model(setup, gpu_memory_bytes)
    if model is None:
        return "none"
    host = predict(replace(setup, model=model)).host_bytes
    return _billions(num_parameters(model)) + (f" (and {_gb(host, 0)} GB of host memory per GPU)" if host else "")


def memory_table(predictions):
    """Text table of {config name: Prediction}: one row per component, one column per config."""
    names = dict.fromkeys(row.name for p in predictions.values() for row in p.components)
    table = [["GB (2^30 bytes) per GPU; ~ transient", *predictions]]
    for name in names:
        table.append([name, *(_cell([r for r in p.components if r.name == name]) for p in predictions.values())])
    table.append(["allocated, after a step", *(_gb(p.allocated_bytes) for p in predictions.values())])
    table.append(["peak", *(_gb(p.peak_bytes) for p in predictions.values())])
    table.append(["  reached in", *(p.peak_moment for p in predictions.values())])
    if any(p.host_bytes for p in predictions.values()):
        table.append(["off the GPU, per rank", *(_gb(p.host_bytes) for p in predictions.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table)


def _cell(rows):
    if not rows:
        return "-"
    row = rows[0]
    device = "" if row.device == "gpu" else f" on {row.device}"
    return f"{'~ ' if row.transient else ''}{_gb(sum(r.bytes for r in rows))} {row.dtype}{device}"


def _gb(size, digits=2):
    return f"{size / GB:.{digits}f}"


def _billions(n):
    return f"{n / 1e9:,.1f} B" if n >= 1e9 else f"{n / 1e6:.1f} M"


# ------------------------------------------------------------------------------------------------- command line


def parse_args(argv=None):
    """The command line. Errors end in one line and exit code 2."""
    parser = argparse.ArgumentParser(description="Predict bytes per GPU for a model under DeepSpeed configs.")
    parser.error = lambda message: _fail(f"{message} (--help lists the arguments)")
    add = parser.add_argument
    add("--config", nargs="+", type=Path, help="DeepSpeed JSON files (default: every file in configs/)")
    add("--num_layers", type=_positive, help="with --hidden_dim: the model's shape")
    add("--hidden_dim", type=_positive)
    add("--num_heads", type=_positive, help="default: heads 64 wide")
    add("--num_params", type=_positive, help="instead of a shape: a size; its shape is hidden_dim = 128 x num_layers")
    add("--vocab_size", type=_positive, default=50257)
    add("--seq_length", type=_positive, default=512)
    add("--batch_size", type=_positive, default=1, help="sequences per GPU and micro-step")
    add("--num_gpus", type=_positive, default=1)
    add("--zero_stage", type=int, choices=(0, 1, 2, 3), help="instead of the configs' own stage")
    add("--activation_checkpointing", action=argparse.BooleanOptionalAction, default=True)
    add(
        "--loss_chunk_tokens",
        type=int,
        default=LOSS_CHUNK_TOKENS,
        help="tokens whose logits the loss widens to fp32 at once (default: train.py's %(default)s; 0: a plain loss)",
    )
    add("--gpu_memory", type=float, help="GB (2^30 bytes) per GPU; says what fits")
    add("--largest", action="store_true", help="the largest model that fits in --gpu_memory, per config")
    out = parser.add_mutually_exclusive_group()
    out.add_argument("--json", action="store_true", help="print the answer for programs; sizes are integers, in bytes")
    out.add_argument("--bookkeeping", action="store_true", help="print bytes per parameter as a Markdown table")
    out.add_argument("--capacity", action="store_true", help="print what fits on 1, 4, 8 and 64 GPUs as Markdown")
    args = parser.parse_args(argv)
    if args.largest and (args.num_params or args.hidden_dim):
        _fail("--largest finds the model: leave --num_params, --num_layers and --hidden_dim out")
    if (args.num_layers is None) != (args.hidden_dim is None):
        _fail("--num_layers and --hidden_dim belong together")
    if args.num_params and args.hidden_dim:
        _fail("give --num_params or --num_layers and --hidden_dim, not both")
    if not (args.num_params or args.hidden_dim or args.largest or args.capacity or args.bookkeeping):
        _fail("which model? give --num_layers and --hidden_dim, or --num_params, or --largest with --gpu_memory")
    if args.loss_chunk_tokens < 0:
        _fail(f"--loss_chunk_tokens must be 0 or more, not {args.loss_chunk_tokens}")
    if args.gpu_memory is not None and not 0 < args.gpu_memory < math.inf:
        _fail(f"--gpu_memory must be a positive number of GB, not {args.gpu_memory:g}")
    if (args.largest or args.capacity) and not args.gpu_memory:
        _fail("--largest and --capacity need --gpu_memory")
    return args


def _positive(text):
    try:
        value = float(text)
        if 1 <= value == int(value):
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text}")


def _fail(message):
    print(f"memory_model.py: {message}", file=sys.stderr)
    raise SystemExit(2)


def load_configs(paths=None):
    """{file stem: DeepSpeed JSON} of paths, or of configs/*.json beside this file. Raises UserError."""
    configs = {}
    for path in paths or sorted(Path(__file__).parent.glob("configs/*.json")):
        try:
            config = json.loads(path.read_text())
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(config, dict):
            raise UserError(f"{path} must hold a JSON object")
        name = path.stem if path.stem not in configs else str(path)
        configs[name] = config
    if not configs:
        raise UserError("no configs found; name some with --config")
    return configs


def chosen_model(args):
    """(Model, the line that says where its shape came from)."""
    if args.hidden_dim:
        heads = args.num_heads or max(1, args.hidden_dim // 64)
        model = Model(args.num_layers, args.hidden_dim, heads, args.vocab_size, args.seq_length)
        return model, f"{_billions(num_parameters(model))} parameters"
    model = model_of_size(args.num_params or 1, args.vocab_size, args.seq_length)
    return model, (
        f"{_billions(num_parameters(model))} parameters, taken as {model.num_layers} layers x "
        f"{model.hidden_dim} (hidden_dim = 128 x num_layers, as in GPT-3 6.7B, 13B and 175B)"
    )


def as_json(setups, predictions, gpu_memory):
    """The answer for programs: sizes in bytes, as integers."""
    configs = {}
    for name, p in predictions.items():
        configs[name] = asdict(p) | {"parameters": num_parameters(setups[name].model)}
        if gpu_memory:
            room = int(gpu_memory * GB) - p.peak_bytes
            configs[name] |= {"fits": room >= 0, "room_bytes": room}
        configs[name]["model"] = asdict(setups[name].model)
    return json.dumps(configs, indent=2)


def verdicts(setups, predictions, gpu_memory):
    """One line per config: fits or not, the room, and the smallest change that would fit."""
    size = int(gpu_memory * GB)
    for name, p in predictions.items():
        room = size - p.peak_bytes
        if room >= 0:
            yield f"{name}: fits, {_gb(room)} GB to spare of {gpu_memory:g}"
        else:
            fix = suggest_fix(setups[name], size)
            yield f"{name}: does not fit, {_gb(-room)} GB too large for {gpu_memory:g}; {fix}"


def main(argv=None):
    args = parse_args(argv)
    try:
        answer(args, load_configs(args.config))
    except UserError as error:
        _fail(error)


def answer(args, configs):
    """Print what was asked for."""
    if args.zero_stage is not None:
        configs = {name: with_stage(config, args.zero_stage) for name, config in configs.items()}
    model, origin = chosen_model(args)
    chunk = args.loss_chunk_tokens or None
    setup = Setup(model, {}, args.num_gpus, args.batch_size, args.activation_checkpointing, chunk)
    if args.bookkeeping:
        return print(bookkeeping_table(configs, model, args.num_gpus))
    if args.capacity:
        return print(capacity_table(configs, setup, int(args.gpu_memory * GB)))
    setups = {name: replace(setup, config=config) for name, config in configs.items()}
    if args.largest:
        found = {name: largest_model(s, int(args.gpu_memory * GB)) for name, s in setups.items()}
        setups = {name: replace(setups[name], model=m) for name, m in found.items() if m}
    predictions = {name: predict(s) for name, s in setups.items()}
    if args.json:
        return print(as_json(setups, predictions, args.gpu_memory))
    if args.largest:
        return print("\n".join(_largest_line(name, predictions.get(name), m, args) for name, m in found.items()))
    print(
        f"{origin}; {args.num_gpus} GPU{'s' if args.num_gpus > 1 else ''}, micro batch {args.batch_size}, "
        f"sequence length {model.seq_length}, vocabulary {model.vocab_size}, activation checkpointing "
        f"{'on' if args.activation_checkpointing else 'off'}, "
        f"{f'loss over {chunk} tokens at a time' if chunk else 'plain loss'}\n\n{memory_table(predictions)}"
    )
    if args.gpu_memory:
        print("", *verdicts(setups, predictions, args.gpu_memory), sep="\n")
    for name, p in predictions.items():
        for key in p.not_modelled:
            print(f"{name}: not modelled: {key}")


def _largest_line(name, prediction, model, args):
    if model is None:
        return f"{name}: no model fits in {args.gpu_memory:g} GB"
    host = f", and {_gb(prediction.host_bytes, 0)} GB of host memory per GPU" if prediction.host_bytes else ""
    return (
        f"{name}: {_billions(num_parameters(model))} parameters ({model.num_layers} layers x {model.hidden_dim}) "
        f"on {args.num_gpus} GPU{'s' if args.num_gpus > 1 else ''} of {args.gpu_memory:g} GB{host}"
    )


if __name__ == "__main__":
    main()
