"""What a run measures and leaves behind: CSV rows, step by step, and the run record beside them."""

import contextlib
import csv
import fcntl
import hashlib
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

import flops
from errors import UserError
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


class RowsFile:
    """The CSV on disk: whole rows only, appended as they come, the first run's alone until it ends.

    What cannot be written, because the disk is full or the folder gone, is kept and written when it can be; `close`
    leaves it in a temporary folder if it never could. A file that somebody else changed or replaced in the meantime is
    written anew. Raises UserError where another run writes the same file.
    """

    def __init__(self, path):
        self.path, self.rows, self.complained = path, [], False
        self.written = self.size = 0  # rows and bytes in the file
        self.is_new = not path.exists()
        try:
            self.file = self.open()
        except BlockingIOError:
            raise UserError(f"--loss_log_file {path}: another run writes to it") from None

    def open(self):
        """The file, made if need be, and locked: nobody else's until it is closed."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file

    def withdraw(self):
        """Leave no file behind that was not there before: the run does not begin."""
        if self.is_new:
            self.path.unlink(missing_ok=True)

    def begin(self, first_step):
        """Cut the file to its header and the rows before first_step; returns those, as dicts of text."""
        kept = []
        if first_step:
            with self.path.open(newline="") as file, contextlib.suppress(csv.Error, UnicodeDecodeError):
                for row in csv.DictReader(file):
                    if row.get("step") != str(len(kept)) or len(kept) == first_step or None in row.values():
                        break
                    kept.append(row)
        self.rows = [as_line(COLUMNS)] + [as_line(row.get(key) or "" for key in COLUMNS) for row in kept]
        text = "".join(self.rows).encode()
        if os.pread(self.file, len(text), 0) == text:
            # In place: the rows that stay are the file's first bytes, and a reader never finds it gone.
            os.ftruncate(self.file, len(text))
            self.written, self.size = len(self.rows), len(text)
        self.append([])
        return kept

    def append(self, rows):
        """Write `rows`, lists of text by column, and whatever could not be written before."""
        self.rows += [as_line(row) for row in rows]
        try:
            status = os.fstat(self.file)
            if status.st_nlink == 0:  # deleted or replaced: a new file gets all rows
                replaced, self.file, self.size = self.file, self.open(), -1
                os.close(replaced)
            if self.size != os.fstat(self.file).st_size:
                os.ftruncate(self.file, 0)
                self.written = self.size = 0
            self.write("".join(self.rows[self.written :]).encode())
            self.written, self.complained = len(self.rows), False
        except OSError as error:
            if not self.complained:
                line = f"WARNING: rows cannot be written to {self.path}: {error.strerror}"
                print(f"{line}; training goes on, they are kept in memory", file=sys.stderr, flush=True)
            self.complained = True

    def write(self, data):
        """All of `data` or nothing of it."""
        try:
            left = data
            while left:
                left = left[os.write(self.file, left) :]
        except OSError:
            os.ftruncate(self.file, self.size)
            raise
        self.size += len(data)

    def close(self):
        """Try once more; what still cannot be written goes to a temporary folder, whose path is printed."""
        self.append([])
        if self.written < len(self.rows):
            rescue = Path(tempfile.mkdtemp(prefix="rows_"), self.path.name)
            rescue.write_text("".join(self.rows))
            print(f"WARNING: all rows are in {rescue}", file=sys.stderr, flush=True)


def as_line(cells):
    return ",".join(cells) + "\n"


class RunLog:
    """The CSV rows and the run record of one run. Every rank adds and flushes; global rank 0 alone writes.

    Losses and norms stay on the device until `flush`, which reduces them over the ranks: losses are averaged, step
    time and memory are the largest of any rank. A resumed run goes on at first_step from `state`, and what the CSV had
    from there on is cut.

    rows: the RowsFile on rank 0, else None.
    """

    def __init__(self, path, rows, record, device, first_step=0, state=None):
        self.path, self.file, self.record, self.device, self.first_step = path, rows, record, device, first_step
        self.pending, self.rows, self.added = [], [], 0
        self.fingerprint, self.skipped_steps, self.skipped_in_a_row = state or ("", 0, 0)
        if rows is not None:
            kept = rows.begin(first_step)
            self.rows = [{key: float(value) if value else None for key, value in row.items()} for row in kept]
            if len(kept) < first_step:
                print(f"{path}: the rows of steps {len(kept)} to {first_step - 1} are missing", flush=True)
            if first_step:
                record |= self.measured_before()
        self.write_record("running")

    def measured_before(self):
        """What the record of the interrupted run measured and this one may not: memory, and the last validation."""
        losses = [row["validation_loss"] for row in self.rows if row.get("validation_loss") is not None]
        found = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            left = json.loads(self.path.with_suffix(".json").read_text())
            if left["memory"].keys() == self.record["memory"].keys():
                found["memory"] = left["memory"]
            if losses and math.isclose(left["validation"]["loss"], losses[-1], rel_tol=1e-8):
                found["validation"] = left["validation"]
        return found

    def state(self):
        """What a checkpoint has to keep of this rank's log."""
        return self.fingerprint, self.skipped_steps, self.skipped_in_a_row

    @property
    def next_step(self):
        """The step that no row has been added for yet."""
        return self.first_step + self.added

    def see(self, blocks):
        """Chain a micro batch of blocks (still in host memory) into the fingerprint of the data order."""
        self.fingerprint = hashlib.sha256(self.fingerprint.encode() + blocks.numpy().tobytes()).hexdigest()

    def count_skipped(self, skipped):
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def add(self, row):
        """One step's row by column; `clock` stands for the step time, the device's memory is read here."""
        self.added += 1
        self.pending.append(row | dict(zip(MEMORY, memory_bytes(), strict=True)))

    def flush(self):
        """Reduce and write the pending rows; returns the last one, without what it does not have. Collective."""
        if not self.pending:
            return None
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
        if self.file is not None:
            self.file.append([[as_text(row.get(key)) for key in COLUMNS] for row in self.pending])
        self.rows += self.pending
        self.pending = []
        return self.rows[-1]

    def finish(self, status):
        """Complete the run record with what the run measured, and close the CSV. Collective."""
        fingerprints = [None] * dist.get_world_size()
        dist.all_gather_object(fingerprints, self.fingerprint)
        warmup = self.record["arguments"]["warmup_steps"]
        times = [row["step_time_s"] for row in self.rows if row["step"] >= warmup]
        lost = [row["lost_update_fraction"] for row in self.rows if row.get("lost_update_fraction") is not None]
        self.record |= {
            "data_fingerprint": hashlib.sha256("".join(fingerprints).encode()).hexdigest(),
            "steps_completed": self.next_step,
            "skipped_steps": self.skipped_steps,
            "final_loss": self.rows[-1]["loss"] if self.rows else None,
            "lost_update_fraction": sum(lost) / len(lost) if lost else None,
            "mean_step_time_s": sum(times) / len(times) if times else None,
            "speed": self.speed(sum(times) / len(times)) if times else None,
            **{key: int(self.rows[-1][key]) if self.rows else None for key in MEMORY},
        }
        self.write_record(status)
        if self.file is not None:
            self.file.close()

    def speed(self, step_time_s):
        known = ("tokens_per_step", "world_size", "device")
        of_the_run = {key: self.record[key] for key in known}
        return flops.speed(self.record["model_flops_per_token"], step_time_s=step_time_s, **of_the_run)

    def write_record(self, status):
        self.record["status"] = status
        if self.file is None:
            return
        partial = self.path.with_suffix(".json.partial")
        try:  # beside it first, so that a reader never meets half a record
            partial.write_text(json.dumps(self.record, indent=2) + "\n")
            partial.replace(self.path.with_suffix(".json"))
        except OSError as error:
            print(
                f"WARNING: the record of {self.path} cannot be written: {error.strerror}", file=sys.stderr, flush=True
            )


def as_json(arguments):
    """Arguments as JSON can hold them."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in arguments.items()}


class Progress:
    """Rank 0's progress: a bar on a terminal, else a plain line whenever rows are written."""

    def __init__(self, num_steps, first_step):
        self.show = dist.get_rank() == 0
        hidden = not (self.show and sys.stderr.isatty())
        self.bar = tqdm(total=num_steps, initial=first_step, unit="step", disable=hidden)

    def advance(self, row):
        """One step further; `row` is the last one written, None between writes."""
        self.bar.update()
        if row is None or not self.show:
            return
        report = f"loss {row['loss']:.4f}  {row['step_time_s'] * 1000:.0f} ms  peak {row['peak_bytes'] / 2**30:.2f} GB"
        if "validation_loss" in row:
            report += f"  validation {row['validation_loss']:.4f}"
        self.bar.set_postfix_str(report)
        if self.bar.disable:
            print(f"step {row['step'] + 1:.0f}/{self.bar.total}  {report}", flush=True)

    def close(self):
        self.bar.close()


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
    if speed := record["speed"]:
        share = "" if speed["mfu"] is None else f", MFU {speed['mfu']:.1%} of {speed['peak_tflops']} (dense bf16)"
        recomputed = record["recomputed_flops_per_token"] / record["model_flops_per_token"]
        extra = f"; recomputing adds {recomputed:.0%}" if recomputed else ""
        lines.insert(-1, f"  speed             {speed['tflops_per_device']:.4g} TFLOP/s a device{share}{extra}")
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
