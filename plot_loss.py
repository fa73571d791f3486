"""Compare training runs: CSVs in, one figure, Markdown tables and a verdict out.

    python plot_loss.py --baseline logs/baseline_loss.csv --bf16 logs/bf16_full_loss.csv --output loss_comparison.png

A CSV needs the columns `step,loss`; memory, step time, validation loss and lost updates are used where it has them.
The run record train.py writes beside it (X.json beside X.csv) says what was run, and two runs that differ in more
than their configuration are not compared. Files of one label are seeds. What each number means is said by the
function that computes it; how a verdict is reached, by verdict.py.
"""

import argparse
import contextlib
import csv
import functools
import json
import math
import os
import sys
import textwrap
import warnings
from dataclasses import dataclass, field
from io import BytesIO, StringIO
from pathlib import Path

import numpy as np

from errors import UserError
from verdict import (
    LIKE_FOR_LIKE,
    MARGIN,
    SAME_ORDER,
    differences,
    judge_curves,
    judge_finals,
    last_part,
    pair_by_seed,
    shared_tail,
)

# pandas and matplotlib are imported where they are used: together they take a second, and --help needs neither.

WARMUP_STEPS = 5  # rows without representative step times, where the run record does not say how many
GB = 2**30
FIGURE_TYPES = (".png", ".pdf", ".svg")
HUGE = 1e30  # a loss beyond it is as good as infinite, and sums and squares of anything below stay finite
COMPONENT_LIMIT = 40  # memory components of one run; there are about twenty
TOTALS = {"allocated": "allocated, after a step", "peak": "peak"}
RECORD_LIMIT = 16 * 2**20  # bytes; a run record has a few thousand

# Columns that are read, with the values each can have; anything else in them is left out and counted.
COLUMNS = {
    "step": (0, 2**53),
    "loss": (-HUGE, HUGE),
    "step_time_s": (1e-9, HUGE),
    "allocated_bytes": (1, HUGE),
    "peak_bytes": (1, HUGE),
    "lost_update_fraction": (0, 1),
    "validation_loss": (-HUGE, HUGE),
}


# Arguments


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse_arguments(argv):
    parser = OneLineParser(prog="plot_loss.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--baseline",
        dest="named",
        action="append",
        type=lambda path: ("baseline", path),
        metavar="CSV",
        help="short for --run baseline=CSV, and always the reference",
    )
    parser.add_argument(
        "--bf16",
        dest="named",
        action="append",
        type=lambda path: ("bf16_full", path),
        metavar="CSV",
        help="short for --run bf16_full=CSV",
    )
    parser.add_argument(
        "--run",
        dest="named",
        action="append",
        type=split_label,
        metavar="LABEL=CSV",
        help="a run; repeat it for more runs, and one label for more seeds. The first is the reference",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("loss_comparison.png"),
        metavar="FILE",
        help=f"the figure ({', '.join(FIGURE_TYPES)}; default: %(default)s)",
    )
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the printed tables here, as Markdown")
    parser.add_argument(
        "--allow_mismatch",
        action="store_true",
        help="compare runs that differ in model, data or size, and mark the result",
    )
    arguments = parser.parse_args(argv)
    if not arguments.named:
        raise UserError("no runs to plot: give --baseline, --bf16 or --run (see --help)")
    arguments.named.sort(key=lambda named: named[0] != "baseline")  # stable: the rest keeps its order
    check_targets(arguments)
    return arguments


def split_label(text):
    """'LABEL=CSV' -> (label, path). The path may hold further '='."""
    label, equals, path = text.partition("=")
    if not (equals and label.strip() and path):
        raise argparse.ArgumentTypeError(f"expected LABEL=CSV, got {clean(text)!r}")
    return label.strip(), path


def check_targets(arguments):
    """Refuse, before any work, an --output or --summary that could not or must not be written."""
    if arguments.output.suffix.lower() not in FIGURE_TYPES:
        raise UserError(f"--output {clean(arguments.output)}: write a figure as one of {', '.join(FIGURE_TYPES)}")
    inputs = {os.path.realpath(path) for _, path in arguments.named}
    taken = inputs | {os.path.splitext(path)[0] + ".json" for path in inputs}
    for flag, path in (("--output", arguments.output), ("--summary", arguments.summary)):
        if path is None:
            continue
        if os.path.exists(path) and not os.path.isfile(path):  # a folder, or a device that os.replace would remove
            raise UserError(f"{flag} {clean(path)}: exists and is not a regular file")
        if os.path.realpath(path) in taken:
            raise UserError(f"{flag} {clean(path)}: would overwrite another file of this comparison")
        taken.add(os.path.realpath(path))


# Reading


@dataclass
class Run:
    """One CSV with its record. `columns[name]` pairs with `steps`, [rows], sorted; NaN where a row has no value."""

    label: str
    path: Path
    columns: dict[str, np.ndarray]
    record: dict | None
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self):
        return self.columns["step"]

    @property
    def losses(self):
        return self.columns["loss"]

    def at(self, steps):
        """The losses at `steps`, which the run must have. [steps]"""
        return self.losses[np.searchsorted(self.steps, steps)]

    def known(self, name):
        """The values of a column without its gaps; empty where the CSV lacks it."""
        values = self.columns.get(name, np.array([]))
        return values[np.isfinite(values)]

    @property
    def settings(self):
        """What was run, by name: the plain values of the record and of its arguments, in one dictionary."""
        record = self.record or {}
        arguments = record.get("arguments")
        flat = (arguments if isinstance(arguments, dict) else {}) | record
        return {name: value for name, value in flat.items() if isinstance(value, str | int | float)}

    @property
    def seed(self):
        seed = self.settings.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def status(self):
        """How the run ended, where its record says something other than that it completed; otherwise ''."""
        status = "completed" if self.record is None else self.settings.get("status", "end not recorded")
        return "" if status == "completed" else clean(status, 40)


def read_run(label, path):
    """One CSV and its record. Raises UserError where no loss can be read from it."""
    text = read_text(path)
    record, problem = read_record(path.with_suffix(".json"))
    columns, notes = parse_csv(text, clean(path))
    return Run(label, path, columns, record, notes + ([problem] if problem else []))


def read_text(path):
    if not os.path.isfile(path):
        raise UserError(f"{clean(path)}: " + ("not a regular file" if os.path.exists(path) else "no such file"))
    try:
        return path.read_bytes().decode("utf-8-sig", "replace")
    except OSError as error:
        raise UserError(f"{clean(path)}: {error.strerror}") from None


def read_record(path):
    """(record, problem): the run record, or None and, unless there simply is no file, one line on why."""
    try:
        if not path.is_file():
            return None, None
        if path.stat().st_size > RECORD_LIMIT:
            raise ValueError
        record = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: None)
        if not isinstance(record, dict):
            raise ValueError
        return record, None
    except (OSError, ValueError, RecursionError):  # ValueError: not JSON, not UTF-8, too long, not a record
        return None, f"{clean(path)}: not a readable run record; treated as missing."


def parse_csv(text, name):
    """(columns, notes) from the text of a CSV: numeric, sorted by step, one row a step.

    A row without a usable step and loss is left out, and so is a value its column cannot have; `notes` counts them.
    A loss that is NaN or infinite is not a gap but a result: the row stays, with NaN. Of a repeated step (a resumed
    run writes some twice) the last row counts.
    """
    header, rows, torn = split_rows(text, name)
    import pandas as pd

    table = pd.read_csv(
        StringIO("\n".join(rows)), names=range(len(header)), dtype=str, keep_default_na=False, quoting=csv.QUOTE_NONE
    )  # a stray quote must not swallow the rows after it
    frame, unusable = pd.DataFrame(index=table.index), {}
    for column, (low, high) in COLUMNS.items():
        if column not in header:
            continue
        text_values = table[header.index(column)].fillna("").str.strip(' "')
        values = pd.to_numeric(text_values, errors="coerce").astype(float)
        bad = values.isna() | (values < low) | (values > high) | ((column == "step") & (values % 1 != 0))
        frame[column] = values.mask(bad)
        if column == "loss":
            bad = values.isna() & ~text_values.str.lower().isin(["nan", "+nan", "-nan"])
        if column in ("step", "loss"):
            torn |= set(table.index[bad])
        elif count := int((bad & (text_values != "")).sum()):
            unusable[column] = count
    return tidy(frame, torn, unusable, len(rows), name)


def split_rows(text, name):
    """(header, rows, torn) of a CSV: `torn` are the indices of rows that cannot be split into the header's columns."""
    lines = [line for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n") if line.strip(" ,\t")]
    if not lines:
        raise UserError(f"{name}: the file is empty")
    header = [column.strip(' "') for column in lines[0].split(",")]
    for column in ("step", "loss"):
        if column not in header:
            found = clean(", ".join(header), 60)
            raise UserError(f"{name}: no column '{column}' (the first line reads: {found}); expected a CSV of train.py")
    if twice := [column for column in COLUMNS if header.count(column) > 1]:
        raise UserError(f"{name}: more than one column '{twice[0]}'")
    if len(lines) == 1:
        raise UserError(f"{name}: a header and no rows; has the run logged a step yet?")
    torn = {i for i, line in enumerate(lines[1:]) if line.rstrip(", ").count(",") >= len(header) or "\0" in line}
    blank = "," * (len(header) - 1)
    rows = [blank if i in torn else ",".join(line.split(",")[: len(header)]) for i, line in enumerate(lines[1:])]
    return header, rows, torn


def tidy(frame, torn, unusable, total, name):
    """The last steps of `parse_csv`: leave out the `torn` rows, keep the last of each step, sort, and say so."""
    frame = frame.drop(index=list(torn))
    if frame.empty:
        raise UserError(f"{name}: none of its {total} rows has a usable step and loss")
    notes = []
    if torn:
        notes.append(f"{name}: left out {len(torn)} of {total} rows without a usable step and loss.")
    if unusable:
        listed = ", ".join(f"{count} in {column}" for column, count in unusable.items())
        notes.append(f"{name}: left out values that cannot be right: {listed}.")
    if repeated := int(frame["step"].duplicated().sum()):
        notes.append(f"{name}: {repeated} repeated steps (a resumed run?); the last row of each counts.")
    frame = frame.drop_duplicates("step", keep="last").sort_values("step")
    if bad := int(frame["loss"].isna().sum()):
        notes.append(
            f"{name}: the loss is not finite at {bad} of {len(frame)} steps; "
            "mean and standard deviation are over the others."
        )
    return {column: frame[column].to_numpy() for column in frame}, notes


# Comparing


@dataclass
class Group:
    """The runs of one label: one, or one a seed."""

    label: str
    runs: list[Run]
    mismatch: list[str] = field(default_factory=list)  # how it differs from the reference, or within itself
    pairs: list[tuple[Run, Run]] = field(default_factory=list)  # (reference run, run)

    @property
    def name(self):
        """The label as it may be shown, with how the runs ended if not as they should have."""
        endings = sorted({run.status for run in self.runs} - {""})
        marks = endings + (["not comparable"] if self.mismatch else [])
        return clean(self.label, 40) + (f" ({'; '.join(marks)})" if marks else "")

    def average(self, measure):
        """Mean of `measure(run)` over the runs; None where one of them lacks it."""
        values = [measure(run) for run in self.runs]
        return None if any(value is None for value in values) else sum(values) / len(values)


def group_runs(runs):
    """Groups by label, in the order of the runs. One run given twice is an error, not two seeds."""
    groups = {}
    for run in runs:
        groups.setdefault(run.label, Group(run.label, [])).runs.append(run)
    shown = [clean(label, 40) for label in groups]
    if len(set(shown)) < len(shown):
        raise UserError(f"two labels cannot be told apart when printed: {', '.join(shown)}")
    for group in groups.values():
        for i, run in enumerate(group.runs):
            for other in group.runs[:i]:
                same_seed = run.seed is not None and run.seed == other.seed
                if same_seed or np.array_equal(run.losses, other.losses, equal_nan=True):
                    raise UserError(
                        f"{clean(other.path)} and {clean(run.path)} are one run "
                        f"({f'seed {run.seed}' if same_seed else 'the same losses'}), not two seeds"
                    )
    return list(groups.values())


def pair_groups(groups, allow_mismatch):
    """Pair every group's runs with the reference's, and return notes. Raises UserError on a mismatch not allowed."""
    reference, notes = groups[0], []
    for group in groups:
        group.pairs = pair_by_seed(reference.runs, group.runs)
        checks = [(one, other, LIKE_FOR_LIKE + SAME_ORDER) for one, other in group.pairs]
        # The seeds of one label must also share what may differ between labels.
        checks += [(group.runs[0], other, LIKE_FOR_LIKE + ("config_name", "learning_rate")) for other in group.runs[1:]]
        found = [
            f"{name}: {clean(a, 20)} vs {clean(b, 20)}"
            for one, other, names in checks
            for name, a, b in differences(one, other, names)
        ]
        group.mismatch = list(dict.fromkeys(found))  # once each, in order
        if group.mismatch and not allow_mismatch:
            between = (
                f"{clean(reference.label, 40)} and {clean(group.label, 40)}"
                if group is not reference
                else f"the runs of {clean(group.label, 40)}"
            )
            raise UserError(
                f"{between} are not comparable: {'; '.join(group.mismatch)} "
                "(--allow_mismatch compares them all the same)"
            )
        if len(group.pairs) < max(len(reference.runs), len(group.runs)):
            notes.append(
                f"{group.name}: {len(group.pairs)} of its {len(group.runs)} runs could be paired with the "
                f"{len(reference.runs)} of {reference.name}; differences are over those."
            )
        if any(not np.array_equal(one.steps, other.steps) for one, other in group.pairs):
            notes.append(
                f"{group.name} and {reference.name} do not have the same steps; differences are over those they share."
            )
    return notes


# What one run measured


def step_time(run):
    """Seconds a step: the record's mean, else that of the CSV after the warm-up rows; None without either."""
    recorded = number((run.record or {}).get("mean_step_time_s"))
    if recorded is not None and recorded > 0:
        return recorded
    warmup = number(run.settings.get("warmup_steps"))
    skipped = WARMUP_STEPS if warmup is None or warmup < 0 else int(min(warmup, len(run.steps)))
    times = run.columns.get("step_time_s", np.array([]))[skipped:]
    return float(np.nanmean(times)) if np.isfinite(times).any() else None


def allocated(run):
    """Bytes that stay after a step: the last row's."""
    return float(run.known("allocated_bytes")[-1]) if len(run.known("allocated_bytes")) else None


def peak(run):
    return float(run.known("peak_bytes").max()) if len(run.known("peak_bytes")) else None


def recorded_speed(name):
    """A measure of a run: tflops_per_device or mfu of its record's "speed"; None without."""

    def measure(run):
        recorded = (run.record or {}).get("speed")
        value = number(recorded.get(name)) if isinstance(recorded, dict) else None
        return value if value is not None and value > 0 else None

    return measure


def lost_updates(run):
    """Mean fraction of weight updates that rounding lost, over the last 20 % of the run's steps."""
    values = last_part(run.columns.get("lost_update_fraction", np.array([np.nan])))
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def validation(run):
    """The final evaluation: its step, loss (nats a token), perplexity and bits_per_byte; None for what is not known."""
    recorded = (run.record or {}).get("validation")
    names = ("loss", "perplexity", "bits_per_byte")
    result = {name: number(recorded.get(name)) if isinstance(recorded, dict) else None for name in names}
    result["step"] = int(run.steps[-1])
    if result["loss"] is None and len(run.known("validation_loss")):
        steps = run.steps[np.isfinite(run.columns["validation_loss"])]
        result |= {"loss": float(run.known("validation_loss")[-1]), "step": int(steps[-1]), "perplexity": None}
    if result["perplexity"] is None and result["loss"] is not None and result["loss"] < 700:  # exp(710) overflows
        result["perplexity"] = math.exp(result["loss"])
    return result


@dataclass(frozen=True)
class Component:
    """One part of a rank's memory. Sizes in bytes; `measured` is None for what comes and goes within a step."""

    name: str
    dtype: str
    transient: bool
    offloaded: bool
    predicted: float
    measured: float | None


def memory_components(run):
    """The components of the run's record, [] where it has none that can be read."""
    rows = memory_record(run).get("components")
    found = []
    for row in rows[:COMPONENT_LIMIT] if isinstance(rows, list) else []:
        if not isinstance(row, dict) or not isinstance(row.get("component"), str):
            continue
        predicted, measured = (byte_count(row.get(f"{kind}_bytes")) for kind in ("predicted", "measured"))
        names = clean(row["component"], 40), clean(row.get("dtype", ""), 10)
        flags = bool(row.get("transient")), bool(row.get("offloaded"))
        found.append(Component(*names, *flags, predicted or 0.0, measured))
    return found


def memory_record(run):
    memory = (run.record or {}).get("memory")
    return memory if isinstance(memory, dict) else {}


def byte_count(value):
    """A record's value as a size in bytes, or None."""
    value = number(value)
    return value if value is not None and 0 <= value < 2**63 else None


def predicted_total(run, name):
    """Predicted bytes of the whole, `name` being "allocated" or "peak"; None where the record has none."""
    return byte_count(memory_record(run).get(f"predicted_{name}_bytes"))


def measured_total(run, name):
    """What the allocator measured of the same; None on the CPU, where only the whole process can be measured."""
    measure = {"allocated": allocated, "peak": peak}[name]
    return measure(run) if run.settings.get("memory_kind") == "allocator" else None


def memory_kind(groups):
    kinds = {run.settings.get("memory_kind") for group in groups for run in group.runs}
    return " / ".join(sorted(clean(kind, 40) if kind else "kind not recorded" for kind in kinds))


def number(value):
    """A record's value as a finite float, or None: a record is a file, and may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        return None
    return float(value) if math.isfinite(value) else None


# Tables


def report(groups, notes):
    """All tables and notes, as Markdown."""
    parts = ["## Comparison of training runs"]
    parts += [f"**{escape(group.name)}**: {escape('; '.join(group.mismatch))}" for group in groups if group.mismatch]
    parts += [loss_table(groups)]
    memory, no_memory = memory_table(groups)
    parts += [memory, component_table(groups), validation_table(groups), verdict_table(groups)]
    notes = [no_memory, *seed_notes(groups), *notes]
    parts += ["\n".join(f"- {escape(note)}" for note in notes if note)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(title, header, rows):
    """A Markdown table; columns of words are aligned left, numbers right."""
    ruler = ["---" if name in ("Configuration", "Measure", "Verdict", "Component") else "---:" for name in header]
    return "\n".join([f"### {escape(title)}", "", *("| " + " | ".join(line) + " |" for line in [header, ruler, *rows])])


def loss_table(groups):
    """Final, mean and population standard deviation of the training loss, over all steps; means over the seeds."""
    rows = []
    lost = [group.average(lost_updates) for group in groups]
    for group, fraction in zip(groups, lost, strict=True):
        final = group.average(lambda run: float(run.losses[-1]))
        mean = group.average(lambda run: finite_or_nan(np.mean, run))
        deviation = group.average(lambda run: finite_or_nan(np.std, run))
        steps = " / ".join(dict.fromkeys(str(len(run.steps)) for run in group.runs))
        rows.append([escape(group.name), f"{final:.2f}", f"{mean:.2f}", f"{deviation:.2f}", steps])
        if any(value is not None for value in lost):
            rows[-1].append("n/a" if fraction is None else f"{100 * fraction:.1f} %")
    header = ["Configuration", "Final loss", "Mean loss", "Loss std", "Steps"]
    return table("Training loss", header + (["Lost updates"] if len(rows[0]) > len(header) else []), rows)


def finite_or_nan(statistic, run):
    return float(statistic(run.known("loss"))) if len(run.known("loss")) else math.nan


def memory_table(groups):
    """(table, note): memory and step time with what is saved against the reference; one of the two is None."""
    measured = [(group, [group.average(measure) for measure in (allocated, peak, step_time)]) for group in groups]
    if all(value is None for _, values in measured for value in values):
        return None, "No table of memory and step time: the CSVs have no such columns."
    reference = measured[0][1]
    rows = []
    for group, (held, most, seconds) in measured:
        row = [escape(group.name)]
        for value, base in ((held, reference[0]), (most, reference[1])):
            row += [
                "n/a" if value is None else f"{value / GB:.{gb_digits(base)}f}",
                "" if group is groups[0] else saving(value, base),
            ]
        row += [
            "n/a" if seconds is None else f"{seconds:.4f}",
            "" if group is groups[0] else slowdown(seconds, reference[2]),
        ]
        rows.append(row)
    title = f"Memory ({memory_kind(groups)}; GB are 2^30 bytes, GiB) and step time"
    header = ["Configuration", "Allocated (GB)", "saved", "Peak (GB)", "saved", "Avg step (s)", "change"]
    for name, heading, style in (("tflops_per_device", "TFLOP/s a device", "{:.4g}"), ("mfu", "MFU", "{:.1%}")):
        values = [group.average(recorded_speed(name)) for group in groups]
        if any(value is not None for value in values):
            header.append(heading)
            for row, value in zip(rows, values, strict=True):
                row.append("n/a" if value is None else style.format(value).replace("%", " %"))
    return table(title, header, rows), None


def component_table(groups):
    """Where the bytes of a rank are: every component, predicted and measured; of several seeds, the first. Or None.

    What comes and goes within a step is predicted only. The totals are not sums: the components of the peak are those
    of its moment.
    """
    shown = [(group, group.runs[0]) for group in groups if memory_components(group.runs[0])]
    if not shown:
        return None
    cells = {group.label: {c.name: c for c in memory_components(run) if not c.transient} for group, run in shown}
    for group, run in shown:  # one name may both stay and come again: what stays is measured, so that is shown
        cells[group.label] |= {c.name: c for c in memory_components(run) if c.name not in cells[group.label]}
    sizes = [c.predicted for found in cells.values() for c in found.values()]
    sizes += [total for _, run in shown for name in TOTALS if (total := predicted_total(run, name))]
    unit, unit_name = (GB, "GB of 2^30 bytes") if max(sizes) >= GB else (2**20, "MB of 2^20 bytes")
    rows = []
    for name in dict.fromkeys(name for found in cells.values() for name in found):
        rows.append([escape(name), *(component_cell(cells[group.label].get(name), unit) for group, _ in shown)])
    for name, label in TOTALS.items():
        totals = [(predicted_total(run, name), measured_total(run, name)) for _, run in shown]
        rows.append([label, *(" / ".join(size_cell(value, unit) for value in pair) for pair in totals)])
    title = f"Memory by component, predicted / measured in {unit_name} a rank"
    note = "A dash is not measured: what is freed within the step, and on the CPU the totals. *host*: offloaded."
    return table(title, ["Component", *(escape(group.name) for group, _ in shown)], rows) + f"\n\n{note}"


def component_cell(component, unit):
    if component is None:
        return ""
    sizes = size_cell(component.predicted, unit), size_cell(component.measured, unit)
    return " / ".join(sizes) + f" {escape(component.dtype)}" + (" *host*" if component.offloaded else "")


def size_cell(size, unit):
    return "–" if size is None else f"{size / unit:.2f}"


def gb_digits(reference):
    """Decimals to print: two, as in published tables, and three for small models."""
    return 2 if reference is None or reference >= 10 * GB else 3


def saving(value, reference):
    if value is None or reference is None:
        return "n/a"
    saved = reference - value
    return f"{saved / GB:.{gb_digits(reference)}f} GB ({100 * saved / reference:.1f} %)"


def slowdown(seconds, reference):
    if seconds is None or reference is None:
        return "n/a"
    return f"{seconds - reference:+.4f} s ({100 * (seconds / reference - 1):+.1f} %)"


def validation_table(groups):
    """Final validation loss, perplexity and bits per byte, means over the seeds; None without any."""
    rows = []
    for group in groups:
        finals = [validation(run) for run in group.runs]
        steps = " / ".join(dict.fromkeys(str(final["step"]) for final in finals if final["loss"] is not None))
        rows.append([escape(group.name), steps or "n/a"])
        for name, digits in (("loss", 4), ("perplexity", 2), ("bits_per_byte", 4)):
            value = group.average(lambda run, name=name: validation(run)[name])
            rows[-1].append("n/a" if value is None else f"{value:.{digits}f}")
    if all(row[1] == "n/a" for row in rows):
        return None
    return table("Validation", ["Configuration", "At step", "Validation loss", "Perplexity", "Bits per byte"], rows)


def verdict_table(groups):
    """Paired differences from the reference, one row a group and measure; None with nothing to compare."""
    rows = []
    for group in groups[1:]:
        tails = [tail for pair in group.pairs if len(tail := shared_tail(pair))]
        first, last = min([tail[0] for tail in tails], default=0), max([tail[-1] for tail in tails], default=0)
        where = f", steps {first:.0f} to {last:.0f}" if tails else ""
        finals = [[validation(run) for run in pair] for pair in group.pairs]
        same_step = all(one["step"] == other["step"] for one, other in finals)
        verdicts = {
            f"training loss{where}": judge_curves(group.pairs),
            "final validation loss": judge_finals(
                [(one["loss"], other["loss"]) for one, other in finals] if same_step else []
            ),
        }
        rows += [
            [escape(group.name), measure, *difference_cells(verdict), escape(verdict.word)]
            for measure, verdict in verdicts.items()
            if verdict is not None
        ]
    if not rows:
        return None
    title = f"Verdict: difference from {groups[0].name}, positive is a higher loss"
    note = (
        f"The 95 % interval allows for correlated steps. *same within noise*: it contains 0 and stays within "
        f"{100 * MARGIN:.1f} % of the reference's loss."
    )
    return table(title, ["Configuration", "Measure", "Difference", "95 % interval", "Verdict"], rows) + f"\n\n{note}"


def difference_cells(verdict):
    difference = "n/a" if verdict.difference is None else f"{verdict.difference:+.4f}"
    return difference, "none" if verdict.low is None else f"{verdict.low:+.4f} to {verdict.high:+.4f}"


def seed_notes(groups):
    """What the tables cannot say for themselves: how many seeds stand behind them, and runs without a record."""
    counts = {len(group.runs) for group in groups}
    if max(counts) > 1:
        listed = ", ".join(f"{group.name} {len(group.runs)}" for group in groups)
        yield f"Seeds: {listed}. Tables give means over seeds; intervals are over seeds where there are several."
    elif len(groups) > 1:
        yield "One run each: an interval covers the noise of the steps, not that of another seed."
    if bare := [clean(run.path) for group in groups for run in group.runs if run.record is None]:
        yield f"No run record for {', '.join(bare)}: whether model, data and seed agree could not be checked."
    devices = {clean(device, 60) for group in groups for run in group.runs if (device := run.settings.get("device"))}
    if len(devices) > 1:
        yield f"Different devices ({'; '.join(sorted(devices))}): step times do not compare."


def clean(value, limit=200):
    """Text that is safe to print: one line, no control or invisible characters, not endless."""
    text = "".join(character if character.isprintable() else "?" for character in str(value)[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."


def escape(text):
    """`text` with what Markdown would take for markup, or for the end of a table cell, escaped."""
    return "".join("\\" + character if character in "\\|`*<[" else character for character in text)


# Figure

# Okabe and Ito's colours, readable with any colour vision, ordered so that neighbours differ in grey as well; line
# style, marker and hatch tell the rest.
STYLES = (
    ("#0072B2", "-", "o", ""),
    ("#E69F00", "--", "s", "///"),
    ("#009E73", "-.", "^", "..."),
    ("#CC79A7", (0, (5, 1, 1, 1, 1, 1)), "D", "xx"),
    ("#000000", ":", "v", "\\\\\\"),
    ("#56B4E9", (0, (8, 2)), "P", "++"),
    ("#D55E00", (0, (1, 1)), "X", "oo"),
)
LOOK = {
    "text.parse_math": False,
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "plot_loss",
}

# Paul Tol's "muted" scheme (personal.sron.nl/~pault): apart for any colour vision, and unlike the configurations' own.
COMPONENT_COLORS = (
    "#332288", "#88CCEE", "#117733", "#DDCC77", "#CC6677", "#AA4499", "#44AA99", "#999933", "#882255", "#661100",
)  # fmt: skip
HOLLOW = {"linestyle": "none", "markersize": 7, "markerfacecolor": "white", "markeredgewidth": 1.5, "zorder": 4}
MEMORY_BARS = (("allocated", allocated, GB, 2, 1.0), ("peak", peak, GB, 2, 0.6))  # name, measure, unit, digits, opacity
TIME_BARS = (("", step_time, 1, 4, 1.0),)


def draw_figure(groups, file_type):
    """The figure as bytes of `file_type`: losses, differences, and what else the CSVs have, a row each."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [("losses", 3.6)]
    rows += [("differences", 2.4 + 0.2 * len(groups))] if len(groups) > 1 else []
    rows += [("lost updates", 1.6)] if any(group.average(lost_updates) is not None for group in groups) else []
    measured = [
        name
        for name, *values in (("memory", allocated, peak), ("step time", step_time))
        if any(group.average(value) is not None for group in groups for value in values)
    ]
    rows += [("/".join(measured), 0.6 + 0.55 * len(groups))] if measured else []
    if any(memory_components(group.runs[0]) for group in groups):
        rows += [("components", 1.2 + 0.6 * len(groups))]
    mosaic = [(row.split("/") * 2)[:2] if "/" in row else [row, row] for row, _ in rows]
    window = smoothing_window(max(len(run.steps) for group in groups for run in group.runs))
    with rc_context(LOOK), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a label in a script the font lacks is no reason for noise
        figure = Figure(figsize=(9, sum(height for _, height in rows) + 0.3), layout="constrained", dpi=150)
        axes = figure.subplot_mosaic(mosaic, height_ratios=[height for _, height in rows], width_ratios=[3, 2])
        curves = {"losses": draw_losses, "differences": draw_differences, "lost updates": draw_lost_updates}
        for row in curves.keys() & axes.keys():
            curves[row](axes[row], groups, window)
            axes[row].set_xlabel("step", loc="right", labelpad=-1)
        for row in curves.keys() & axes.keys():
            axes[row].set_xlim(axes["losses"].get_xlim())
        if "memory" in axes:
            draw_bars(axes["memory"], groups, f"Memory in GB ({memory_kind(groups)})", MEMORY_BARS, True)
        if "step time" in axes:
            draw_bars(axes["step time"], groups, "Average step time in s", TIME_BARS, "memory" not in axes)
        if "components" in axes:
            draw_components(axes["components"], groups)
        mark_mismatches(figure, groups)
        buffer = BytesIO()
        figure.savefig(buffer, format=file_type)
        return buffer.getvalue()


def mark_mismatches(figure, groups):
    lines = [f"{group.name}: {'; '.join(group.mismatch)}" for group in groups if group.mismatch]
    if lines:
        figure.suptitle("\n".join(clean(line, 110) for line in lines), color="#B00000", fontsize=9, weight="bold")


def smoothing_window(rows):
    """Steps in the moving average, an odd number: a twentieth of the longest run, at most 501; none (1) under 10."""
    return 1 if rows < 10 else min(max(3, rows // 20), 501) | 1


def smooth(values, window):
    """Centred moving average of `values`, [steps]: NaN where the window is not full, so no edge is made up."""
    if len(values) < window:
        return np.full(len(values), np.nan)
    inner = np.convolve(values, np.full(window, 1 / window), mode="valid")
    return np.pad(inner, window // 2, constant_values=np.nan)


def draw_curves(ax, curves, window, style):
    """Several seeds' curves, [(steps, values)]: each faint, their smoothed range a band, their smoothed mean strong.

    Returns the line of the mean, for the legend.
    """
    color, line, marker, _ = style
    for steps, values in curves:
        ax.plot(steps, values, color=color, alpha=0.25, linewidth=0.7, zorder=1)
    shared = functools.reduce(np.intersect1d, [steps for steps, _ in curves])
    smoothed = np.array([smooth(values[np.searchsorted(steps, shared)], window) for steps, values in curves])
    if len(curves) > 1:
        ax.fill_between(shared, smoothed.min(axis=0), smoothed.max(axis=0), color=color, alpha=0.25, linewidth=0)
    return ax.plot(
        shared,
        smoothed.mean(axis=0),
        color=color,
        linestyle=line,
        linewidth=1.8,
        marker=marker,
        markersize=4.5,
        markevery=max(1, len(shared) // 12),
        zorder=3,
    )[0]


def add_legend(ax, entries, **place):
    """A legend of `entries`, {label: artist}: given outright, because matplotlib hides labels that start with '_'."""
    if entries:
        ax.legend(entries.values(), entries.keys(), **place)


def draw_losses(ax, groups, window):
    shown, legend, hollow = [], {}, None
    for group, style in zip(groups, styles(groups), strict=True):
        curves = [(run.steps, run.losses) for run in group.runs]
        seeds = f": mean of {len(curves)} seeds, band from lowest to highest" if len(curves) > 1 else ""
        legend[group.name + seeds] = draw_curves(ax, curves, window, style)
        points = [
            (run.steps, run.columns["validation_loss"]) for run in group.runs if len(run.known("validation_loss"))
        ]
        for steps, values in points:
            ax.plot(steps, values, marker=style[2], markeredgecolor=style[0], **HOLLOW)
            (hollow,) = ax.plot([], [], marker="o", markeredgecolor="grey", **HOLLOW)
        shown += curves + points
    average = f"; strong: moving average of {window} steps" if window > 1 else ""
    ax.set(title=f"Training loss (faint: every step{average})", ylabel="loss")
    set_range(ax, shown, 2)
    add_legend(ax, legend | ({"validation loss (hollow)": hollow} if hollow else {}), loc="upper right")


def draw_differences(ax, groups, window):
    """Paired differences from the reference, with the steps of the verdict shaded and the verdict in the legend."""
    ax.axhline(0, color=STYLES[0][0], linewidth=1.2, zorder=2)
    shown, legend = [], {}
    for group, style in list(zip(groups, styles(groups), strict=True))[1:]:
        curves = [
            (steps, run.at(steps) - one.at(steps))
            for one, run in group.pairs
            if len(steps := np.intersect1d(one.steps, run.steps))
        ]
        verdict = judge_curves(group.pairs)
        difference, interval = difference_cells(verdict)
        label = f"{group.name}: {verdict.word}, {difference}" + ("" if verdict.low is None else f" ({interval})")
        if curves:
            legend[label] = draw_curves(ax, curves, window, style)
            shown += curves
    if tails := [tail for group in groups[1:] for pair in group.pairs if len(tail := shared_tail(pair))]:
        legend["the steps verdicts are about, with their mean difference and its 95 % interval"] = ax.axvspan(
            min(tail[0] for tail in tails), max(tail[-1] for tail in tails), color="black", alpha=0.06, linewidth=0
        )
    ax.set(title=f"Paired difference from {groups[0].name} (above 0: higher loss)", ylabel="loss difference")
    set_range(ax, shown, 5)
    add_legend(ax, legend, loc="upper left", bbox_to_anchor=(0, -0.12), borderaxespad=0)  # below, not over, the curves


def draw_lost_updates(ax, groups, window):
    for group, style in zip(groups, styles(groups), strict=True):
        curves = [
            (run.steps[known], 100 * run.columns["lost_update_fraction"][known])
            for run in group.runs
            if "lost_update_fraction" in run.columns
            and (known := np.isfinite(run.columns["lost_update_fraction"])).any()
        ]
        if curves:  # logged less often than the loss, so smoothed over fewer rows
            draw_curves(ax, curves, min(window, smoothing_window(min(len(steps) for steps, _ in curves))), style)
    ax.set(title="Weight updates lost to rounding, last 20 % in the table", ylabel="% of weights")
    ax.set_ylim(bottom=0)


def draw_bars(ax, groups, title, bars, named):
    """Horizontal bars, a block a group; `bars` are (what it is, measure, unit, digits, opacity)."""
    height = 0.8 / len(bars)
    for i, (group, style) in enumerate(zip(groups, styles(groups), strict=True)):
        for j, (name, measure, unit, digits, opacity) in enumerate(bars):
            value = group.average(measure)
            bar = ax.barh(
                i + (j - (len(bars) - 1) / 2) * height,
                (value or 0) / unit,
                height * 0.94,
                color=style[0],
                alpha=opacity,
                hatch=style[3],
                edgecolor="white",
                linewidth=0,
            )
            ax.bar_label(
                bar, [f"n/a {name}" if value is None else f"{value / unit:.{digits}f} {name}"], padding=3, fontsize=8
            )
    ax.set_yticks(range(len(groups)), [textwrap.fill(group.name, 22) if named else "" for group in groups])
    ax.set(title=title)
    ax.invert_yaxis()
    ax.margins(x=0.25)
    ax.grid(axis="y", visible=False)


def draw_components(ax, groups):
    """Stacked bars of what stays on the device, predicted above measured, and marks for allocated and peak."""
    totals = [predicted_total(group.runs[0], name) or 0 for group in groups for name in TOTALS]
    unit, unit_name = (GB, "GB") if max(totals) >= GB else (2**20, "MB")
    legend, ticks = {}, []
    for i, group in enumerate(groups):
        run = group.runs[0]
        kept = [c for c in memory_components(run) if not (c.transient or c.offloaded)]
        for j, (kind, total) in enumerate((("predicted", predicted_total), ("measured", measured_total))):
            y, left = i + (j - 0.5) * 0.38, 0.0
            for component in kept:
                size = (getattr(component, kind) or 0) / unit
                color = COMPONENT_COLORS[len(legend) % len(COMPONENT_COLORS)]
                if component.name in legend:
                    color = legend[component.name].patches[0].get_facecolor()
                bar = ax.barh(y, size, 0.34, left, color=color, edgecolor="white", linewidth=0.5)
                legend.setdefault(component.name, bar)
                left += size
            if (most := total(run, "peak")) is not None and most / unit > left:
                legend["working memory at the peak"] = ax.barh(
                    y, most / unit - left, 0.34, left, color="#DDDDDD", hatch="///", edgecolor="white", linewidth=0
                )
            for name, marker in (("allocated", "|"), ("peak", "D")):
                if (value := total(run, name)) is not None:
                    style = {"color": "black", "linestyle": "none", "markersize": 14 if marker == "|" else 5}
                    (legend[name],) = ax.plot(value / unit, y, marker, clip_on=False, zorder=5, **style)
            ticks.append((y, f"{textwrap.shorten(group.name, 28)}, {kind}"))
    ax.set_yticks(*zip(*ticks, strict=True))
    ax.set(title=f"Memory by component in {unit_name} a rank, without what is offloaded")
    ax.invert_yaxis()
    ax.set_xlim(left=0)
    ax.grid(axis="y", visible=False)
    add_legend(ax, legend, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, fontsize=8, borderaxespad=0)


def set_range(ax, curves, percent):
    """Axis limits that a spike cannot ruin; what they cut off is said on the right of the title.

    The limits hold all values of `curves`, [(steps, values)], unless the outermost `percent` at either end
    would take more than a third of the axis.
    """
    steps, values = (np.concatenate(parts) for parts in zip(*curves, strict=True)) if curves else (np.zeros(0),) * 2
    steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
    if not len(values):
        return
    low, high = np.percentile(values, [percent, 100 - percent])
    if values.max() - values.min() <= 1.5 * (high - low):
        low, high = values.min(), values.max()
    margin = 0.06 * (high - low) or 0.01 * max(abs(high), 1)
    ax.set_ylim(low - margin, high + margin)
    beyond = np.flatnonzero((values < low - margin) | (values > high + margin))
    if len(beyond):
        worst = beyond[np.argmax(np.abs(values[beyond]))]
        ax.set_title(
            f"{len(beyond)} points off scale, to {values[worst]:.4g} at step {steps[worst]:.0f}",
            loc="right",
            fontsize=8,
            style="italic",
        )


def styles(groups):
    return [STYLES[i % len(STYLES)] for i in range(len(groups))]


# Writing


def write(path, data):
    """Write `data` so that `path` is complete or untouched: to a file beside it, then renamed. Creates the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{clean(path)}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):  # gone already, unless something went wrong
            temporary.unlink()


def main(argv=None):
    arguments = parse_arguments(argv)
    runs = [read_run(label, Path(path)) for label, path in arguments.named]
    groups = group_runs(runs)
    notes = [note for run in runs for note in run.notes] + pair_groups(groups, arguments.allow_mismatch)
    tables = report(groups, notes)
    write(arguments.output, draw_figure(groups, arguments.output.suffix[1:].lower()))
    if arguments.summary:
        write(arguments.summary, tables.encode())
    sys.stdout.reconfigure(errors="backslashreplace")  # a label may hold what the terminal's encoding does not
    print(tables, end="", flush=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"plot_loss.py: {clean(error, 1000)}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # `| head` has read enough; the files are written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
