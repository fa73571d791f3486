"""What a run measures and leaves behind: CSV rows, step by step, and the run record beside them."""

import hashlib
import json
import math
import time

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from measured_memory import component_lines, memory_bytes

MEMORY = ("allocated_bytes", "reserved_bytes", "peak_bytes")
COLUMNS = (
    "step", "loss", "learning_rate", "grad_norm", "step_time_s", "tokens_per_s", *MEMORY,
    "lost_update_fraction", "validation_loss",
)  # fmt: skip


def as_text(value):
    """A CSV cell: empty for what was not measured; 9 significant digits hold an fp32 number exactly."""
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.9g}"


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
        self.pending, self.rows, self.fingerprint, self.skipped_steps = [], [], "", 0
        self.is_writer = dist.get_rank() == 0
        if self.is_writer:
            self.path.write_text(",".join(COLUMNS) + "\n")
        self.write_record("running")

    @property
    def next_step(self):
        """The step that no row has been added for yet."""
        return len(self.rows) + len(self.pending)

    def see(self, blocks):
        """Chain a micro batch of blocks (still in host memory) into the fingerprint of the data order."""
        self.fingerprint = hashlib.sha256(self.fingerprint.encode() + blocks.numpy().tobytes()).hexdigest()

    def add(self, row):
        """One step's row by column; `clock` stands for the step time, the device's memory is read here."""
        self.pending.append(row | dict(zip(MEMORY, memory_bytes(), strict=True)))

    def flush(self):
        """Reduce and write the pending rows; returns the last one, without what it does not have."""
        measured = [
            [row["clock"].seconds(), *(row[name] for name in MEMORY), row.get("lost_update_fraction", math.nan)]
            for row in self.pending
        ]
        losses = torch.stack([row["loss"].double() for row in self.pending])
        local = torch.cat([losses[:, None], torch.tensor(measured, dtype=torch.double, device=self.device)], dim=1)
        ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, local)
        ranks = torch.stack(ranks).cpu()  # (ranks, steps, 6)
        means, largest = ranks.mean(dim=0).tolist(), ranks.amax(dim=0).tolist()
        for row, (loss, *_, lost), (_, seconds, *memory, _) in zip(self.pending, means, largest, strict=True):
            row |= {"loss": loss, "step_time_s": seconds, "tokens_per_s": self.record["tokens_per_step"] / seconds}
            row |= zip(MEMORY, map(int, memory), strict=True)
            row |= {"grad_norm": float(row["grad_norm"]), "lost_update_fraction": None if math.isnan(lost) else lost}
        if self.is_writer:
            with self.path.open("a") as file:
                file.writelines(",".join(as_text(row.get(key)) for key in COLUMNS) + "\n" for row in self.pending)
        self.rows += self.pending
        self.pending = []
        return self.rows[-1]

    def finish(self):
        """Complete the run record with what the run measured."""
        fingerprints = [None] * dist.get_world_size()
        dist.all_gather_object(fingerprints, self.fingerprint)
        times = [row["step_time_s"] for row in self.rows[self.record["arguments"]["warmup_steps"] :]]
        lost = [row["lost_update_fraction"] for row in self.rows if row["lost_update_fraction"] is not None]
        self.record |= {
            "data_fingerprint": hashlib.sha256("".join(fingerprints).encode()).hexdigest(),
            "steps_completed": len(self.rows),
            "skipped_steps": self.skipped_steps,
            "final_loss": self.rows[-1]["loss"],
            "lost_update_fraction": sum(lost) / len(lost) if lost else None,
            "mean_step_time_s": sum(times) / len(times) if times else None,
            **{key: int(self.rows[-1][key]) for key in MEMORY},
        }
        self.write_record("completed")

    def write_record(self, status):
        self.record["status"] = status
        if self.is_writer:  # beside it first, so that a reader never meets half a record
            partial = self.path.with_suffix(".json.partial")
            partial.write_text(json.dumps(self.record, indent=2) + "\n")
            partial.replace(self.path.with_suffix(".json"))


def print_summary(record, path):
    """A short block for people, then one line for programs."""
    gigabytes = {key: record[f"{key}_bytes"] / 2**30 for key in ("allocated", "reserved", "peak")}
    step_time = record["mean_step_time_s"]
    lines = [
        f"{record['config_name']}: {record['steps_completed']} steps of {record['tokens_per_step']} tokens, "
        f"{record['parameter_count']:,} parameters, ZeRO-{record['zero_stage']} on {record['world_size']} ranks",
        f"  final loss        {record['final_loss']:.4f}",
        f"  memory            {gigabytes['allocated']:.2f} GB allocated, {gigabytes['peak']:.2f} GB peak "
        f"({record['memory_kind']}, largest rank, GB = 2^30 bytes)",
        "  mean step time    " + (f"{step_time:.4f} s" if step_time else "not measured: no step after --warmup_steps"),
        f"  rows and record   {path}, {path.with_suffix('.json')}",
    ]
    if validation := record["validation"]:
        lines.insert(
            2,
            "  validation loss   {loss:.4f}, perplexity {perplexity:.2f}, {bits_per_byte:.4f} bits a byte "
            "({tokens} tokens)".format(**validation),
        )
    if record["lost_update_fraction"] is not None:
        lines.insert(2, f"  lost updates      {record['lost_update_fraction']:.1%} of the weights, mean over the run")
    if record["skipped_steps"]:
        lines.insert(2, f"  skipped steps     {record['skipped_steps']}: their gradients were not finite")
    print("\n".join([*lines, *component_lines(record["memory"])]))
    names = (
        "config_name", "status", "steps_completed", "skipped_steps", "final_loss", "validation",
        "lost_update_fraction", "mean_step_time_s",
        "allocated_bytes", "peak_bytes", "parameter_count", "world_size", "zero_stage",
    )  # fmt: skip
    print("RESULT " + json.dumps({key: record[key] for key in names}), flush=True)
