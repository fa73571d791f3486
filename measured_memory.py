"""Memory as it is on this rank, beside what memory_model.py predicts: a warning before, a count after, help between."""

import contextlib
import os
import re
import resource
from pathlib import Path

import psutil
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

import memory_model

DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def memory_bytes():
    """(allocated, reserved, peak) bytes of this rank: the allocator's, or on the CPU resident memory for all three."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.memory_allocated(), accelerator.memory_reserved(), accelerator.max_memory_allocated()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident, peak = (int(status[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))  # proc(5) counts KiB
    return resident, resident, peak


def reset_peak_memory():
    """From here on, `memory_bytes` reports the peak of training, not that of building the model."""
    get_accelerator().reset_peak_memory_stats()
    if get_accelerator().device_name() == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM to the current VmRSS


def live_tensors(engine):
    """{component: [tensors]} of what the engine keeps from step to step on this rank, named as in memory_model.

    Master weights and moments are the keys and values of the torch optimizer's own state, the very tensors behind
    DeepSpeed's accessors (safe_get_local_fp32_param, safe_get_local_optimizer_state); the accessors themselves copy
    offloaded states to the device and gradients to fp32, and so hide what is to be measured.
    """
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    states = optimizer.optimizer.state
    gradients = [parameter.grad for parameter in parameters]
    if engine.zero_optimization_stage() == 3:
        gradients.append(optimizer.grad_partitions_flat_buffer)
    return {
        "model parameters": [getattr(parameter, "ds_tensor", parameter) for parameter in parameters],
        "gradients": gradients,
        "master weights": list(states),
        "master gradients": [master.grad for master in states],
        "exp_avg": [state.get("exp_avg") for state in states.values()],
        "exp_avg_sq": [state.get("exp_avg_sq") for state in states.values()],
        "reduce buckets": [buffer for bucket in optimizer.ipg_buckets.values() for buffer in buffers(bucket)],
        "persistent parameters": [p for p in parameters if getattr(p, "ds_persist", False)],
        "host offload buffers": [
            getattr(optimizer, "temp_grad_buffer_for_cpu_offload", None),
            *getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", []),
        ],
        "device offload buffer": [getattr(optimizer, "temp_grad_buffer_for_gpu_offload", None)],
    }


def buffers(bucket):
    """The tensors of one reduce bucket: one at ZeRO-3, up to two before."""
    found = bucket.buffer
    return found if isinstance(found, list) else [found]


def measure(engine):
    """[{"component", "dtype", "device", "bytes"}] on this rank: every storage once, whole, its padding included."""
    rows, seen = [], set()
    for component, tensors in live_tensors(engine).items():
        sizes = {}
        for tensor in tensors:
            if tensor is None or (storage := tensor.untyped_storage()).data_ptr() in seen or not storage.nbytes():
                continue
            seen.add(storage.data_ptr())
            kind = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tensor.device.type
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
        rows += [
            {"component": component, "dtype": dtype, "device": device, "bytes": size}
            for (dtype, device), size in sizes.items()
        ]
    return rows


class MemoryPlan:
    """What one run is predicted to need, in bytes a rank, held against what its device has and what it then uses.

    setup: a memory_model.Setup. The prediction is of the device's memory; on the CPU the device is the host, so what is
    offloaded counts too.
    """

    def __init__(self, setup):
        self.setup, self.prediction = setup, memory_model.predict(setup)
        self.on_cpu = get_accelerator().device_name() == "cpu"
        self.needed_bytes = self.prediction.peak_bytes + self.prediction.host_bytes * self.on_cpu
        self.device_bytes = device_bytes()

    def warning(self):
        """One line if the prediction exceeds the device's memory, else None."""
        if self.needed_bytes <= self.device_bytes:
            return None
        return (
            f"warning: predicted peak of {gigabytes(self.needed_bytes)} a rank ({self.prediction.peak_moment}) exceeds "
            f"the device's {gigabytes(self.device_bytes)}; {self.smallest_change(self.device_bytes)}"
        )

    def smallest_change(self, available_bytes):
        """One line: the least that would bring the peak down to available_bytes, according to the model."""
        stage = memory_model.resolve(self.setup.config).stage
        configs = {name: memory_model.with_stage(config, stage) for name, config in memory_model.load_configs().items()}
        return memory_model.suggest_fix(self.setup, available_bytes, configs)

    def describe(self):
        """The run record's "memory" before anything is measured; every size in bytes a rank."""
        prediction = self.prediction
        return {
            "device_bytes": self.device_bytes,
            "predicted_allocated_bytes": prediction.allocated_bytes,
            "predicted_peak_bytes": prediction.peak_bytes,
            "predicted_peak_moment": prediction.peak_moment,
            "predicted_host_bytes": prediction.host_bytes,
            "not_modelled": list(prediction.not_modelled),
            "components": [
                {
                    "component": row.name,
                    "dtype": row.dtype,
                    "transient": row.transient,
                    "offloaded": row.device != "gpu",
                    "predicted_bytes": row.bytes,
                    "measured_bytes": None,
                }
                for row in prediction.components
            ],
        }

    def measure(self, engine):
        """`describe`, with the live tensors counted: the largest over the ranks. Collective; call it after a step."""
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, measure(engine))
        largest = {}
        for row in (row for rows in ranks for row in rows):
            if row["bytes"] > largest.get(row["component"], {"bytes": 0})["bytes"]:
                largest[row["component"]] = row
        memory = self.describe()
        for row in memory["components"]:
            if not row["transient"]:
                found = largest.pop(row["component"], {"bytes": 0})
                row["measured_bytes"] = found.pop("bytes")
                row |= found
        memory["components"] += [  # what the model knows nothing of
            {
                "transient": False,
                "offloaded": False,
                "predicted_bytes": 0,
                "measured_bytes": found.pop("bytes"),
                **found,
            }
            for found in largest.values()
        ]
        return memory

    @contextlib.contextmanager
    def explain_out_of_memory(self, stop):
        """End the run with exit code 1 and a message that helps, if the allocator refuses within the block.

        stop: the Interruption, whose log, once there is one, knows the step.
        """
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            step = None if stop.log is None else stop.log.next_step
            reason = "out of memory " + ("before the first step" if step is None else f"at step {step}")
            stop.fail(reason, message=self.out_of_memory(error, step))

    def out_of_memory(self, error, step):
        """What happened, what was predicted, what was measured, and what to change."""
        allocated, _, peak = memory_bytes()
        asked = re.search(r"allocate ([\d.]+ ?\w+)", str(error))
        fits = self.needed_bytes <= self.device_bytes
        target = int(0.9 * self.needed_bytes) if fits else self.device_bytes
        when = "before the first step" if step is None else f"at step {step}"
        kind = "resident" if self.on_cpu else "allocated"
        lines = [
            f"train.py: out of memory {when} on rank {dist.get_rank()}" + (f", asking for {asked[1]}" if asked else ""),
            f"  predicted  {gigabytes(self.prediction.allocated_bytes)} allocated, {gigabytes(self.needed_bytes)} peak "
            f"({self.prediction.peak_moment}), of {gigabytes(self.device_bytes)} a rank",
            f"  measured   {gigabytes(allocated)} {kind}, {gigabytes(peak)} peak",
        ]
        if fits:
            lines.append("  the model says that this fits: does something else use the device's memory?")
        return "\n".join([*lines, f"  {self.smallest_change(target)}"])


def device_bytes():
    """Memory that one rank may use: the device's, or on the CPU its share of the host's, within the process's limit."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return accelerator.total_memory()
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    share = psutil.virtual_memory().total // ranks_here
    return share if limit == resource.RLIM_INFINITY else min(share, limit)


def is_out_of_memory(error):
    """Whether an allocator refused: CUDA's, torch's on the CPU (which raises a plain RuntimeError), or Python's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def gigabytes(size):
    return f"{size / memory_model.GB:.2f} GB"


def component_lines(memory):
    """The summary's table: predicted | measured | difference of every component that stays, in MB of 2^20 bytes."""
    yield f"  {'MB (2^20 bytes) a rank':<28}{'predicted':>10} | {'measured':>10} | {'difference':>10}"
    for row in memory["components"]:
        predicted, measured = row["predicted_bytes"] / 2**20, row["measured_bytes"]
        label = f"    {row['component'] + ' ' + row['dtype']:<26}{predicted:>10,.2f} | "
        if measured is not None:
            yield label + f"{measured / 2**20:>10,.2f} | {measured / 2**20 - predicted:>+10,.2f}"
        elif row["component"] == "gradients":
            yield label + f"{'freed in the step':>23}"


@contextlib.contextmanager
def memory_snapshot(path):
    """Record the CUDA allocator's history in the block, for https://pytorch.org/memory_viz; rank 0 writes `path`."""
    torch.cuda.memory._record_memory_history()
    try:
        yield
        if dist.get_rank() == 0:
            torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
