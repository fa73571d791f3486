"""What a run measures and leaves behind: CSV rows, step by step, and the run record beside them."""

import hashlib
import json
import time
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

COLUMNS = (
    "step", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s",
    "allocated_bytes", "reserved_bytes", "peak_bytes",
)  # fmt: skip


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


class Clock:
    """Times one optimizer step without stalling the device: by events where it has them, read only when asked."""

    def __init__(self):
        self.event = get_accelerator().Event
        self.start = self.mark()

    def mark(self):
        if self.event is None:
            return time.perf_counter()
        event = self.event(enable_timing=True)
        event.record()
        return event

    def stop(self):
        self.end = self.mark()
        return self

    def seconds(self):
        if self.event is None:
            return self.end - self.start
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1000


class RunLog:
    """The CSV rows and the run record of one run. Every rank adds and flushes; global rank 0 alone writes.

    Losses and norms stay on the device until `flush`, which reduces them over the ranks: losses are averaged, step
    time and memory are the largest of any rank.
    """

    def __init__(self, path, record, device):
        self.path, self.record, self.device = path, record, device
        self.pending, self.step_times, self.fingerprint = [], [], ""
        self.is_writer = dist.get_rank() == 0
        if self.is_writer:
            self.path.write_text(",".join(COLUMNS) + "\n")
        self.write_record("running")

    def see(self, blocks):
        """Chain a micro batch of blocks (still in host memory) into the fingerprint of the data order."""
        self.fingerprint = hashlib.sha256(self.fingerprint.encode() + blocks.numpy().tobytes()).hexdigest()

    def add(self, step, loss, learning_rate, grad_norm, clock):
        self.pending.append((step, loss, learning_rate, grad_norm, clock, memory_bytes()))

    def flush(self):
        """Write the pending rows; returns the last one, by column."""
        losses = torch.stack([loss.double() for _, loss, *_ in self.pending])
        clocks = [[clock.seconds(), *memory] for *_, clock, memory in self.pending]
        local = torch.cat([losses[:, None], torch.tensor(clocks, dtype=torch.double, device=self.device)], dim=1)
        ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, local)
        ranks = torch.stack(ranks).cpu()
        losses, largest = ranks[:, :, 0].mean(dim=0).tolist(), ranks[:, :, 1:].amax(dim=0).tolist()

        rows = []
        for (step, _, learning_rate, grad_norm, *_), loss, (seconds, *memory) in zip(
            self.pending, losses, largest, strict=True
        ):
            self.step_times.append(seconds)
            values = step, loss, learning_rate, float(grad_norm), seconds, self.record["tokens_per_step"] / seconds
            rows.append([f"{value:.9g}" for value in values] + [str(int(value)) for value in memory])
        if self.is_writer:
            with self.path.open("a") as file:
                file.write("".join(",".join(row) + "\n" for row in rows))
        self.pending = []
        return dict(zip(COLUMNS, map(float, rows[-1]), strict=True))

    def finish(self, last_row, skipped_steps):
        """Complete the run record with what the run measured."""
        fingerprints = [None] * dist.get_world_size()
        dist.all_gather_object(fingerprints, self.fingerprint)
        measured = self.step_times[self.record["arguments"]["warmup_steps"] :]
        self.record |= {
            "data_fingerprint": hashlib.sha256("".join(fingerprints).encode()).hexdigest(),
            "steps_completed": len(self.step_times),
            "skipped_steps": skipped_steps,
            "final_loss": last_row["loss"],
            "mean_step_time_s": sum(measured) / len(measured) if measured else None,
            **{key: int(last_row[key]) for key in ("allocated_bytes", "reserved_bytes", "peak_bytes")},
        }
        self.write_record("completed")

    def write_record(self, status):
        self.record["status"] = status
        if self.is_writer:  # beside it first, so that a reader never meets half a record
            partial = self.path.with_suffix(".json.partial")
            partial.write_text(json.dumps(self.record, indent=2) + "\n")
            partial.replace(self.path.with_suffix(".json"))
