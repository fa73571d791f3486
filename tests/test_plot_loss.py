"""What plot_loss.py prints, writes and refuses."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
import plot_loss

ROOT = Path(__file__).parents[1]
REFERENCE = Path(os.environ.get("REFERENCE_DIR", ROOT.parent / "shared" / "reference"))
GB = 2**30
RECORD = {
    "status": "completed",
    "config_name": "baseline",
    "device": "cpu",
    "memory_kind": "resident memory",
    "world_size": 2,
    "parameter_count": 1868544,
    "tokens_per_step": 2048,
    "data_fingerprint": "ab",
    "arguments": {
        "num_layers": 4,
        "hidden_dim": 128,
        "num_heads": 4,
        "vocab_size": 4096,
        "seq_length": 256,
        "batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_steps": 100,
        "seed": 42,
        "warmup_steps": 5,
        "use_real_data": True,
        "dataset": "builtin",
        "tokenizer": "builtin",
        "learning_rate": 1e-4,
    },
}


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_run(name, losses, record=None, **columns):
    """A CSV and, with `record` (changes to RECORD, arguments included), the record beside it."""
    columns = {"step": range(len(losses)), "loss": losses, **columns}
    rows = zip(*columns.values(), strict=True)
    Path(f"{name}.csv").write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    if record is not None:
        arguments = {key: record.get(key, value) for key, value in RECORD["arguments"].items()}
        rest = {key: value for key, value in record.items() if key not in arguments}
        Path(f"{name}.json").write_text(json.dumps(RECORD | rest | {"arguments": arguments}))
    return f"{name}.csv"


def losses(steps=100, offset=0.0, noise_seed=0, spread=0.002):
    """A falling curve, the same for every call, plus `offset` and a little noise of its own."""
    noise = np.random.default_rng(noise_seed).standard_normal(steps) * spread
    return 4 + 4 * np.exp(-np.arange(steps) / 10) + offset + noise


def compare(capsys, *arguments):
    """What is printed. Without --output nothing is drawn: drawing is slow, and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        if "--output" not in arguments:
            patch.setattr(plot_loss, "draw_figure", lambda *_: b"")
        plot_loss.main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refuse(*arguments):
    """The one line on stderr of a run that must end with exit code 2 and leave no figure."""
    result = subprocess.run([sys.executable, ROOT / "plot_loss.py", *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert result.stderr.endswith("\n") and result.stderr.count("\n") == 1
    assert not list(Path().rglob("*.png"))
    return result.stderr.strip()


def error(*arguments):
    """The same in this process, for the many cases."""
    with pytest.raises(plot_loss.UserError) as caught:
        plot_loss.main([str(argument) for argument in arguments])
    assert not list(Path().rglob("*.png"))
    return plot_loss.clean(caught.value, 1000)


def row(tables, title, label):
    """The cells of the row of `label` in the table under the heading that starts with `title`."""
    section = re.search(rf"### {re.escape(title)}.*?(?=\n###|\Z)", tables, re.DOTALL).group()
    line = next(line for line in section.split("\n") if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[2:-1]]


# Numbers


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published logs are not here")
def test_published_logs_give_the_published_table(capsys):
    tables = compare(
        capsys,
        "--baseline",
        REFERENCE / "baseline_loss.csv",
        "--bf16",
        REFERENCE / "bf16_full_loss.csv",
        "--output",
        "loss_comparison.png",
    )
    assert row(tables, "Training loss", "baseline")[:3] == ["3.09", "2.78", "1.56"]
    assert row(tables, "Training loss", "bf16_full")[:3] == ["3.12", "2.90", "2.37"]
    assert "No table of memory and step time" in tables and "### Memory" not in tables
    assert "could not be checked" in tables
    assert Path("loss_comparison.png").read_bytes().startswith(b"\x89PNG")


def test_loss_statistics_by_hand(capsys):
    # 1, 2, 3, 6: mean 3, population variance (4 + 1 + 0 + 9) / 4 = 3.5, its root 1.8708 (the sample's would be 2.16).
    assert row(compare(capsys, "--baseline", write_run("a", [1, 2, 3, 6])), "Training loss", "baseline")[:4] == [
        "6.00",
        "3.00",
        "1.87",
        "4",
    ]


def test_memory_and_time_as_in_the_published_table(capsys):
    # The published 25.74 -> 16.17 and 31.38 -> 18.93 GB (2**30 bytes), 0.6016 -> 0.6427 s. Savings by hand.
    for name, held, most, seconds in (("a", 25.74, 31.38, 0.6016), ("b", 16.17, 18.93, 0.6427)):
        write_run(
            name,
            losses(10),
            {"memory_kind": "allocator"},
            step_time_s=[9] * 5 + [seconds] * 5,
            allocated_bytes=[1] * 9 + [int(held * GB)],
            peak_bytes=[5, int(most * GB)] + [7] * 8,
        )
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")
    assert row(tables, "Memory", "baseline") == ["25.74", "", "31.38", "", "0.6016", ""]
    assert row(tables, "Memory", "bf16_full") == [
        "16.17",
        "9.57 GB (37.2 %)",
        "18.93",
        "12.45 GB (39.7 %)",
        "0.6427",
        "+0.0411 s (+6.8 %)",
    ]
    assert "### Memory (allocator; GB are 2^30 bytes, GiB)" in tables


def test_memory_table_says_when_it_is_resident_memory_or_unknown(capsys):
    write_run("a", losses(10), {}, peak_bytes=[GB] * 10)
    assert "### Memory (resident memory;" in compare(capsys, "--baseline", "a.csv")
    write_run("b", losses(10), peak_bytes=[GB] * 10)
    tables = compare(capsys, "--baseline", "b.csv")
    assert "### Memory (kind not recorded;" in tables
    assert row(tables, "Memory", "baseline") == ["n/a", "", "1.000", "", "n/a", ""]


def test_step_time_prefers_the_record_then_its_warmup(capsys):
    times = [8.0] * 7 + [1.0] * 3
    write_run("recorded", losses(10), {"mean_step_time_s": 0.25}, step_time_s=times)
    write_run("warm", losses(10), {"warmup_steps": 7}, step_time_s=times)
    write_run("bare", losses(10), step_time_s=times)  # 5 rows of warm-up: (8 + 8 + 1 + 1 + 1) / 5
    for name, mean in (("recorded", "0.2500"), ("warm", "1.0000"), ("bare", "3.8000")):
        assert row(compare(capsys, "--baseline", f"{name}.csv"), "Memory", "baseline")[4] == mean


def test_validation_and_lost_updates_are_tabled(capsys):
    record = {"validation": {"loss": 2.0, "perplexity": 7.389, "bits_per_byte": 0.9, "tokens": 5}}
    write_run("a", losses(10), record, lost_update_fraction=[0.9] * 8 + [0.1, 0.3])  # last 20 %: two rows
    write_run("b", losses(10), {}, validation_loss=["", "", 5.0, "", 3.0] + [""] * 5)
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")
    assert row(tables, "Training loss", "baseline")[4] == "20.0 %"
    assert row(tables, "Training loss", "bf16_full")[4] == "n/a"
    assert row(tables, "Validation", "baseline") == ["9", "2.0000", "7.39", "0.9000"]
    assert row(tables, "Validation", "bf16_full") == ["4", "3.0000", "20.09", "n/a"]  # e**3 = 20.0855
    assert "final validation loss" not in tables  # measured at different steps: no difference is taken


def component(name, predicted, measured, dtype="bf16", transient=False, offloaded=False):
    return {
        "component": name,
        "dtype": dtype,
        "transient": transient,
        "offloaded": offloaded,
        "predicted_bytes": predicted,
        "measured_bytes": measured,
    }


def memory_record(*components, allocated=6 * GB, peak=9 * GB):
    totals = {"predicted_allocated_bytes": allocated, "predicted_peak_bytes": peak}
    return {"memory": totals | {"components": list(components)}, "memory_kind": "allocator"}


STATES = [
    component("exp_avg", 4 * GB, 4 * GB + GB // 4, "fp32"),
    component("gradients", 2 * GB, 2 * GB),
    component("activations", GB, None, transient=True),
]


def test_components_are_the_third_table_predicted_beside_measured(capsys):
    write_run("a", losses(5), memory_record(*STATES), allocated_bytes=[7 * GB] * 5, peak_bytes=[8 * GB] * 5)
    offloaded = component("exp_avg", 2 * GB, 2 * GB, offloaded=True)
    write_run("b", losses(5), memory_record(offloaded) | {"memory_kind": "resident memory"}, peak_bytes=[GB] * 5)
    write_run("c", losses(5))
    named = [part for name in "abc" for part in ("--run", f"{name}={name}.csv")]
    tables = compare(capsys, *named, "--allow_mismatch")
    assert re.findall(r"### (.+)", tables)[2].startswith("Memory by component")
    name = "Memory by component, predicted / measured in GB"
    assert row(tables, name, "exp_avg") == ["4.00 / 4.25 fp32", "2.00 / 2.00 bf16 *host*"]
    assert row(tables, name, "gradients") == ["2.00 / 2.00 bf16", ""]
    assert row(tables, name, "activations") == ["1.00 / – bf16", ""]
    assert row(tables, name, "allocated, after a step") == ["6.00 / 7.00", "6.00 / –"]  # resident is not allocated
    assert row(tables, name, "peak") == ["9.00 / 8.00", "9.00 / –"]


def test_components_are_stacked_predicted_above_measured():
    from matplotlib.figure import Figure

    write_run("a", losses(5), memory_record(*STATES), allocated_bytes=[7 * GB] * 5, peak_bytes=[8 * GB] * 5)
    groups = plot_loss.group_runs([plot_loss.read_run("a", Path("a.csv"))])
    ax = Figure().subplots()
    plot_loss.draw_components(ax, groups)
    bars = sorted((bar.get_y(), bar.get_x(), bar.get_width()) for bar in ax.patches)
    assert [(x, width) for _, x, width in bars] == [(0, 4), (4, 2), (6, 3), (0, 4.25), (4.25, 2), (6.25, 1.75)]
    marks = sorted((line.get_ydata()[0], line.get_xdata()[0]) for line in ax.lines)
    assert [x for _, x in marks] == [6, 9, 7, 8]  # allocated and peak: predicted, then measured
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a, predicted", "a, measured"]


# Verdicts


@pytest.mark.parametrize(
    ("offset", "spread", "word"),
    [
        (0.3, 0.002, "worse"),
        (-0.3, 0.002, "better"),
        (0.0, 0.002, "same within noise"),
        (0.0, 0.3, "cannot tell (20 steps are too few)"),
    ],
)
def test_the_verdict_is_about_the_last_fifth(capsys, offset, spread, word):
    late = np.where(np.arange(100) < 80, 5.0, 0.0)  # must not count
    write_run("a", losses(noise_seed=1, spread=spread), {})
    write_run("b", losses(noise_seed=2, spread=spread) + late + offset, {"config_name": "bf16_full"})
    found = row(compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv"), "Verdict", "bf16_full")
    assert found[0] == "training loss, steps 80 to 99"
    assert found[3] == word


def test_a_short_run_cannot_tell(capsys):
    write_run("a", losses(30))
    write_run("b", losses(30, offset=1))
    assert row(compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv"), "Verdict", "bf16_full") == [
        "training loss, steps 24 to 29",
        "+1.0000",
        "none",
        "cannot tell (6 steps are too few)",
    ]


def test_identical_runs_are_the_same(capsys):
    write_run("a", losses())
    write_run("b", losses())
    assert row(compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv"), "Verdict", "bf16_full")[1:] == [
        "+0.0000",
        "+0.0000 to +0.0000",
        "same within noise",
    ]


def test_seeds_are_paired_by_their_records_whatever_the_order(capsys):
    arguments = []
    for seed, offset in ((1, 0.1), (2, 0.2), (3, 0.3)):
        for label in ("baseline", "bf16"):
            record = {
                "seed": seed,
                "data_fingerprint": f"f{seed}",
                "config_name": label,
                "validation": {"loss": seed + offset * (label == "bf16")},
            }
            write_run(f"{label}{seed}", losses(offset=10 * seed + offset * (label == "bf16")), record)
    arguments += [f"--baseline=baseline{seed}.csv" for seed in (1, 2, 3)]
    arguments += [f"--bf16=bf16{seed}.csv" for seed in (3, 1, 2)]
    tables = compare(capsys, *arguments)
    # Differences 0.1, 0.2, 0.3: mean 0.2, sample deviation 0.1, 4.3027 * 0.1 / sqrt(3) = 0.2484.
    assert row(tables, "Verdict", "bf16_full")[1:] == [
        "+0.2000",
        "-0.0484 to +0.4484",
        "cannot tell (3 seeds are too few)",
    ]
    assert tables.count("-0.0484 to +0.4484") == 2  # the validation losses as well
    assert "Seeds: baseline 3, bf16_full 3" in tables


def test_seeds_without_partner_are_left_out_and_said(capsys):
    for name, seed in (("a1", 1), ("a2", 2), ("b2", 2)):
        write_run(name, losses(offset=seed), {"seed": seed, "data_fingerprint": f"f{seed}"})
    tables = compare(capsys, "--baseline=a1.csv", "--baseline=a2.csv", "--bf16=b2.csv")
    assert "1 of its 1 runs could be paired with the 2 of baseline" in tables
    assert row(tables, "Verdict", "bf16_full")[1] == "+0.0000"


def test_without_records_seeds_are_paired_in_order(capsys):
    for name, offset in (("a1", 1), ("a2", 2), ("b1", 1.5), ("b2", 2.5)):
        write_run(name, losses(offset=offset))
    tables = compare(capsys, "--baseline=a1.csv", "--baseline=a2.csv", "--bf16=b1.csv", "--bf16=b2.csv")
    assert row(tables, "Verdict", "bf16_full")[1:] == ["+0.5000", "+0.5000 to +0.5000", "worse"]


def test_one_run_given_twice_is_not_two_seeds():
    write_run("a", losses())
    write_run("b", losses())
    assert "are one run (the same losses), not two seeds" in error("--baseline=a.csv", "--baseline=b.csv")
    write_run("c", losses(), {})
    write_run("d", losses(offset=1), {})
    assert "(seed 42)" in error("--baseline=c.csv", "--baseline=d.csv")


def test_a_diverged_run_is_worse_and_its_final_loss_is_nan(capsys):
    write_run("a", losses())
    write_run("b", [*losses(60), *["nan"] * 20, *["inf"] * 20])
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")
    assert row(tables, "Training loss", "bf16_full")[0] == "nan"
    assert row(tables, "Verdict", "bf16_full")[3] == "worse (its last loss is not finite)"
    assert "b.csv: the loss is not finite at 40 of 100 steps" in tables
    tables = compare(capsys, "--baseline", "b.csv", "--bf16", "a.csv")
    assert row(tables, "Verdict", "bf16_full")[3].startswith("cannot tell (the reference's last loss")


def test_baseline_is_the_reference_wherever_it_stands(capsys):
    write_run("a", losses())
    write_run("b", losses(offset=1))
    assert "difference from baseline" in compare(capsys, "--bf16", "b.csv", "--baseline", "a.csv")
    assert "difference from x" in compare(capsys, "--run", "x=b.csv", "--run", "y=a.csv")


# What may be compared


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 6),
        ("vocab_size", 99),
        ("parameter_count", 5),
        ("data_fingerprint", "cd"),
        ("seed", 43),
        ("world_size", 4),
        ("batch_size", 8),
        ("num_steps", 50),
        ("dataset", "other"),
        ("memory_kind", "allocator"),
    ],
)
def test_runs_that_differ_in_more_than_the_config_are_refused(capsys, name, value):
    was = RECORD.get(name, RECORD["arguments"].get(name))
    write_run("a", losses(), {})
    write_run("b", losses(), {name: value})
    message = error("--baseline", "a.csv", "--bf16", "b.csv")
    assert f"baseline and bf16_full are not comparable: {name}: {was} vs {value} (" in message
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv", "--allow_mismatch")
    assert f"**bf16_full (not comparable)**: {name}: {was} vs {value}" in tables
    assert row(tables, "Training loss", "bf16_full (not comparable)")
    assert row(tables, "Verdict", "bf16_full (not comparable)")


def test_a_mismatch_marks_the_figure():
    write_run("a", losses(), {})
    write_run("b", losses(), {"seed": 43})
    plot_loss.main(["--baseline=a.csv", "--bf16=b.csv", "--allow_mismatch", "--output=f.svg"])
    marked = Path("f.svg").read_bytes()
    Path("b.json").unlink()
    plot_loss.main(["--baseline=a.csv", "--bf16=b.csv", "--output=f.svg"])
    assert b"not comparable" in marked and b"not comparable" not in Path("f.svg").read_bytes()


@pytest.mark.parametrize("same", [{"learning_rate": 1.0}, {"config_name": "bf16_full"}, {"status": "running"}])
def test_the_config_is_the_experiment_not_a_mismatch(capsys, same):
    write_run("a", losses(), {})
    write_run("b", losses(), same)
    assert "not comparable" not in compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")


def test_the_seeds_of_one_label_share_a_config():
    write_run("a", losses(), {})
    write_run("b", losses(offset=1), {"seed": 43, "config_name": "other"})
    assert "config_name: baseline vs other" in error("--baseline=a.csv", "--baseline=b.csv")


@pytest.mark.parametrize("status", ["interrupted at step 60", "failed: out of memory", "running"])
def test_a_run_that_did_not_complete_is_marked(capsys, status):
    write_run("a", losses(), {})
    write_run("b", losses(60), {"status": status})
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv", "--output", "f.svg")
    assert row(tables, "Training loss", f"bf16_full ({status})")[3] == "60"
    assert row(tables, "Verdict", f"bf16_full ({status})")[0] == "training loss, steps 48 to 59"
    assert "do not have the same steps" in tables
    assert f"bf16_full ({status})" in Path("f.svg").read_text()


@pytest.mark.parametrize("record", [b"", b"{", b"[1]", b"null", b"\xff\xfe\0", b"[" * 100_000, b"9" * 5000])
def test_an_unreadable_record_is_treated_as_missing(capsys, record):
    write_run("a", losses(), {})
    write_run("b", losses())
    Path("b.json").write_bytes(record)
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")
    assert "b.json: not a readable run record; treated as missing" in tables
    assert "No run record for b.csv: whether model, data and seed agree could not be checked" in tables


def test_a_record_of_nonsense_does_no_harm(capsys):
    nonsense = [["x"] * 3, {"a": {"b": []}}, 10**400, -1, True, "\x1b[31m|$x$", "9" * 5000, None]
    for i, value in enumerate(nonsense):
        write_run("a", losses())
        names = [*RECORD, *RECORD["arguments"], "mean_step_time_s", "validation", "steps_completed"]
        Path("a.json").write_text(json.dumps(dict.fromkeys(names, value)))
        tables = compare(capsys, "--baseline", "a.csv")
        assert "\x1b" not in tables and "### Training loss" in tables, i


def test_a_memory_record_of_nonsense_does_no_harm(capsys):
    nonsense = [None, "x", [1], {}, -1, 10**400, 1e300, True, "|$\x1b[31m", [[]] * 1000, {"component": 5}]
    for i, value in enumerate(nonsense):
        fields = dict.fromkeys(("dtype", "transient", "offloaded", "predicted_bytes", "measured_bytes"), value)
        rows = [fields | {"component": "a|b\x1b$"}, value]
        for memory in (value, {"components": value}, memory_record(*rows, allocated=value, peak=value)["memory"]):
            write_run("a", losses(5), {"memory": memory})
            plot_loss.main(["--baseline", "a.csv", "--output", "f.svg"])
            tables = capsys.readouterr().out
            assert "\x1b" not in tables and "### Training loss" in tables, i


# Reading


def write_text(text, name="x.csv"):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        ("step,loss\n", "a header and no rows"),
        ("step,accuracy\n1,2\n", "no column 'loss' (the first line reads: step, accuracy)"),
        ("0,4.5\n1,4.4\n", "no column 'step'"),
        ("step;loss\n1;2\n", "no column 'step'"),
        ("step,loss,loss\n1,2,3\n", "more than one column 'loss'"),
        ("step,loss\na,b\n-1,2\n", "none of its 2 rows"),
        ("<html>\n<p>Not found</p>\n", "no column 'step'"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\x1b[31m" + bytes(range(256)), "no column 'step'"),
        ("step,loss\n1,2\n".encode("utf-16"), "no column 'step'"),
    ],
)
def test_a_file_without_losses_is_refused(text, message):
    line = error("--baseline", write_text(text))
    assert line.startswith("x.csv: ") and message in line and line.isprintable()


@pytest.mark.parametrize("path", ["missing.csv", ".", "a" * 300, "\x1b[31m.csv"])
def test_a_path_that_is_no_file_is_refused(path):
    assert error("--baseline", path).isprintable()


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("step,loss\n0,9\n1,abc\n2,\n3\n4,5\n", "3 of 5"),  # text, nothing, cut short
        ("step,loss\n0,9\nstep,loss\n4,5\n", "1 of 3"),  # a header again
        ("step,loss\n0,9\n-3,1\n1.5,2\n1e300,3\ninf,4\n4,5\n", "4 of 6"),  # steps that are none
        ("step,loss\n0,9\n1,2,3\n4,5\n", "1 of 3"),  # two rows written into one
        (b"step,loss\n0,9\n\0\0\0\n4,5\n", "1 of 3"),  # a hole left by a crash
        (b'step,loss\n0,9\n1,"2\n\xff\xfe,3\n4,5\n', "1 of 4"),  # a stray quote swallows no rows; bytes are not a step
        ("step,loss\n0,9\n1," + "x" * 1_000_000 + "\n4,5\n", "1 of 3"),
        ("step,loss\n0,9\n=1+1,=cmd()\n4,5\n", "1 of 3"),
    ],
)
def test_rows_that_cannot_be_used_are_counted(capsys, text, left_out):
    tables = compare(capsys, "--baseline", write_text(text))
    assert f"left out {left_out} rows without a usable step and loss" in tables
    assert row(tables, "Training loss", "baseline")[0] == "5.00"


def test_values_a_column_cannot_have_are_counted(capsys):
    text = "step,loss,peak_bytes,lost_update_fraction,grad_norm\n0,9,-5,0.5,x\n1,5,oops,7,y\n2,4,1073741824,,z\n"
    tables = compare(capsys, "--baseline", write_text(text))
    assert "left out values that cannot be right: 2 in peak_bytes, 1 in lost_update_fraction." in tables
    assert row(tables, "Memory", "baseline")[2] == "1.000"


@pytest.mark.parametrize(
    "text",
    [
        "step,loss\n2,4\n0,8\n1,6\n",  # unordered
        "step,loss\n0,8\n1,99\n2,98\n1,6\n2,4\n",  # resumed at 1: the later rows count
        "\ufeffstep , loss\r\n0,8\r\n\r\n1,6\r\n2,4",  # Windows
        '"loss","later","step"\n8,,0\n6,x,1\n4,,2\n',  # quoted, another order, a new column
        "step,loss\n0,8,\n1,6,\n2,4,\n",  # trailing commas
    ],
)
def test_the_same_curve_however_it_is_written(capsys, text):
    tables = compare(capsys, "--baseline", write_text(text))
    assert row(tables, "Training loss", "baseline") == ["4.00", "6.00", "1.63", "3"]  # sqrt(8 / 3) = 1.633
    assert ("2 repeated steps" in tables) == ("99" in text)


def test_runs_without_common_steps(capsys):
    write_text("step,loss\n0,8\n1,7\n", "a.csv")
    write_text("step,loss\n5,6\n6,5\n", "b.csv")
    tables = compare(capsys, "--baseline", "a.csv", "--bf16", "b.csv")
    assert row(tables, "Verdict", "bf16_full") == ["training loss", "n/a", "none", "cannot tell (0 steps are too few)"]


cells = st.one_of(
    st.integers(-2, 30).map(str),
    st.floats().map(str),
    st.text(max_size=5),
    st.sampled_from(["nan", "", "-", '"', "1e999", "9" * 400]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(cells, min_size=1, max_size=4).map(",".join), max_size=12))
def test_any_rows_are_read_or_refused(rows):
    try:
        columns, notes = plot_loss.parse_csv("step,loss,peak_bytes\n" + "\n".join(rows), "x.csv")
    except plot_loss.UserError as refused:
        assert plot_loss.clean(refused, 1000) == str(refused)
        return
    steps = columns["step"]
    assert len(steps) and (np.diff(steps) > 0).all() and (steps >= 0).all() and (steps % 1 == 0).all()
    assert not np.isinf(columns["loss"]).any()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    path = Path(os.getcwd()) / "fuzz.csv"
    path.write_bytes(data)
    try:
        plot_loss.read_run("x", path)
    except plot_loss.UserError:
        pass


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=60))
def test_the_last_row_of_each_step_counts(rows):
    columns, _ = plot_loss.parse_csv("step,loss\n" + "\n".join(f"{step},{loss}" for step, loss in rows), "x.csv")
    assert dict(zip(columns["step"], columns["loss"], strict=True)) == dict(rows)


HOSTILE = (
    "9" * 200_000,
    "x" * 200_000,
    "1e999999",
    "=cmd|'/C touch owned'!A0",
    "__import__('os').system('touch owned')",
    "$(touch owned)",
    "\x1b[2J\x00\r",
    '"' * 7,
    "../../owned",
    "<script>owned</script>",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_cells_and_records_are_data(capsys, text):
    """As a loss, as a cell of a column of its own, and as every text of the record."""
    nested = text
    for _ in range(200):
        nested = {"deeper": [nested]}
    record = {"status": text, "config_name": text, "device": text, "memory_kind": text, "versions": nested}
    write_run("a", losses(40), {})
    write_run("b", losses(40), record, another=[text] * 40)
    written = Path("b.csv").read_text().splitlines()
    written[5] = f"4,{text},{text}"
    Path("b.csv").write_text("\n".join(written) + "\n")
    try:
        tables = compare(capsys, "--run", "ref=a.csv", "--run", "b=b.csv", "--output", "out/f.svg", "--allow_mismatch")
    except plot_loss.UserError as refused:
        tables = plot_loss.clean(refused, 1000)
        assert str(refused).isprintable() or plot_loss.clean(refused, 1000).isprintable()
    assert all(line.isprintable() for line in tables.split("\n"))
    files = {path.relative_to(Path()).as_posix() for path in Path().rglob("*")}
    assert files <= {"a.csv", "a.json", "b.csv", "b.json", "out", "out/f.svg"}
    assert not any((parent / "owned").exists() for parent in [Path.cwd(), *Path.cwd().parents])


def test_flops_are_shown_where_they_are_recorded(capsys):
    speed = {"tflops_per_device": 400.25, "mfu": 0.4047, "peak_tflops": 989}
    write_run("a", losses(), {"mean_step_time_s": 0.5, "speed": speed})
    write_run("b", losses(), {"mean_step_time_s": 0.5, "speed": {"tflops_per_device": "=1+1", "mfu": None}})
    tables = compare(capsys, "--run", "ref=a.csv", "--run", "b=b.csv")
    assert "| TFLOP/s a device | MFU |" in tables
    assert row(tables, "Memory", "ref")[-2:] == ["400.2", "40.5 %"]
    assert row(tables, "Memory", "b")[-2:] == ["n/a", "n/a"]
    write_run("c", losses(), {"mean_step_time_s": 0.5})
    assert "TFLOP" not in compare(capsys, "--run", "ref=c.csv")


# Labels, figure, files


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("a|b", r"a\|b"),
        ("$\\alpha$", r"$\\alpha$"),
        ("\x1b[31mred\n", r"?\[31mred"),
        ("../../etc", "../../etc"),
        ("=1+1", None),
        ("_hidden", "_hidden"),
        ("损失", "损失"),
        ("x\u202ey", "x?y"),
        ("<b>", r"\<b>"),
        ("$", "$"),
        ("$\\nosuch{$", r"$\\nosuch{$"),
        ("long" * 50, "long" * 9 + "l..."),
    ],
)
def test_hostile_labels_are_shown_as_text(capsys, label, shown):
    write_run("a", losses())
    write_run("b", losses(offset=1))
    if shown is None:  # LABEL=CSV is split at the first '='
        assert "expected LABEL=CSV" in error("--run", f"{label}=b.csv")
        return
    tables = compare(capsys, "--run", "ref=a.csv", "--run", f"{label}=b.csv", "--output", "out/f.svg")
    assert row(tables, "Training loss", shown)[3] == "100"
    assert all(line.isprintable() for line in tables.split("\n"))
    assert '<g id="legend' in Path("out/f.svg").read_text()
    assert sorted(path.name for path in Path().rglob("*")) == ["a.csv", "b.csv", "f.svg", "out"]


def test_a_label_with_an_underscore_is_in_the_legends():  # where matplotlib's own default leaves it out
    write_run("a", losses())
    write_run("b", losses(offset=1))
    plot_loss.main(["--run", "ref=a.csv", "--run", "_hidden=b.csv", "--output", "f.svg"])
    text = Path("f.svg").read_text()
    assert "<!-- _hidden -->" in text and "<!-- _hidden: worse" in text


def test_labels_that_print_alike_are_refused():
    write_run("a", losses())
    assert "cannot be told apart" in error("--run", "x\x01=a.csv", "--run", "x\x02=a.csv")


def test_summary_is_what_is_printed_and_folders_are_made(capsys):
    write_run("a", losses(), {})
    printed = compare(capsys, "--baseline", "a.csv", "--output", "new/deep/f.pdf", "--summary", "other/s.md")
    assert Path("other/s.md").read_text() == printed
    assert Path("new/deep/f.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in Path().rglob("*.*")) == ["a.csv", "a.json", "f.pdf", "s.md"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output", "f.jpeg.exe"], "write a figure as one of .png, .pdf, .svg"),
        (["--output", "f"], "write a figure as one of"),
        (["--output", "a.csv/f.png"], "cannot be written"),
        (["--output", "x" * 300 + ".png"], "cannot be written"),
        (["--summary", "."], "not a regular file"),
        (["--summary", "/dev/null"], "not a regular file"),
        (["--summary", "a.csv"], "would overwrite"),
        (["--summary", "./a.json"], "would overwrite"),
        (["--summary", "f.png", "--output", "f.png"], "would overwrite"),
    ],
)
def test_targets_that_cannot_or_must_not_be_written(flags, message):
    write_run("a", losses(10), {})
    before = Path("a.csv").read_bytes()
    line = error("--baseline", "a.csv", *flags)
    assert message in line
    assert Path("a.csv").read_bytes() == before and sorted(os.listdir()) == ["a.csv", "a.json"]


def test_a_failed_write_leaves_the_old_figure(monkeypatch):
    write_run("a", losses(10))
    Path("f.svg").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert "f.svg: cannot be written (No space left on device)" in error("--baseline=a.csv", "--output=f.svg")
    assert Path("f.svg").read_text() == "old" and sorted(os.listdir()) == ["a.csv", "f.svg"]


@pytest.mark.parametrize(
    ("steps", "seeds", "extra"),
    [
        (1, 1, {}),
        (2, 1, {}),
        (30, 1, {}),
        (300, 3, {"step_time_s": 0.1}),
        (50, 2, {"lost_update_fraction": 0.5}),
        (40, 1, {"peak_bytes": GB, "allocated_bytes": GB, "validation_loss": 4.2, "step_time_s": 0.1}),
    ],
)
def test_figures_of_all_shapes_are_drawn(steps, seeds, extra):
    arguments = []
    for label in ("r", "s", "t"):
        for seed in range(seeds):
            write_run(f"{label}{seed}", losses(steps, noise_seed=seed), **{k: [v] * steps for k, v in extra.items()})
            arguments += ["--run", f"{label}={label}{seed}.csv"]
    plot_loss.main([*arguments, "--output", "f.svg"])
    text = Path("f.svg").read_text()
    assert "Training loss" in text and "Paired difference from r" in text
    assert ("band from lowest to highest" in text) == (seeds > 1)
    assert ("Memory in GB" in text) == ("peak_bytes" in extra)
    assert ("Average step time" in text) == ("step_time_s" in extra)
    assert ("lost to rounding" in text) == ("lost_update_fraction" in extra)
    assert ("validation loss (hollow)" in text) == ("validation_loss" in extra)


def test_smoothing_invents_nothing_at_the_edges():
    smoothed = plot_loss.smooth(np.array([1.0, 2, 6, 7, 8]), 3)
    assert np.isnan(smoothed[[0, -1]]).all()
    assert smoothed[1:-1] == pytest.approx([3, 5, 7])
    assert np.isnan(plot_loss.smooth(np.array([1.0, 2]), 3)).all()


def test_a_spike_does_not_ruin_the_axis_and_is_not_hidden():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    curve = losses(1000)
    curve[3] = 1000
    plot_loss.set_range(ax, [(np.arange(1000), curve)], 2)
    assert ax.get_ylim()[1] < 10
    assert "off scale, to 1000 at step 3" in ax.get_title("right")
    ax = Figure().subplots()
    plot_loss.set_range(ax, [(np.arange(30), losses(30))], 2)  # an ordinary curve is shown whole
    assert ax.get_ylim()[1] > 8 and not ax.get_title("right")


# The program


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no runs to plot"),
        (["--baseline"], "expected one argument"),
        (["--run", "x.csv"], "expected LABEL=CSV"),
        (["--run", "=x.csv"], "expected LABEL=CSV"),
        (["--base", "a.csv"], "unrecognized arguments"),
        (["--baseline", "\x1b[2Jno.csv"], "?[2Jno.csv: no such file"),
        (["--\x1b[2J\n"], "unrecognized arguments: --?[2J?"),
        (["--baseline", "a.csv", "--bf16", "b.csv"], "num_layers: 4 vs 6"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(arguments, message):
    write_run("a", losses(), {})
    write_run("b", losses(), {"num_layers": 6})
    line = refuse(*arguments)
    assert message in line and "Traceback" not in line


def test_help_is_quick_and_imports_no_plotting():
    code = (
        "import sys, plot_loss\ntry: plot_loss.main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('pandas', 'matplotlib', 'torch', 'deepspeed') if name in sys.modules])"
    )
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "--allow_mismatch" in result.stdout and result.stdout.endswith("[]\n")
    assert time.monotonic() - start < 10  # typically half a second; the machine may be busy


@pytest.mark.parametrize("command", ["{} | head -1", "PYTHONIOENCODING=ascii {} | cat"])
def test_output_survives_a_closed_pipe_and_a_narrow_encoding(command):
    write_run("a", losses(10))
    program = shlex.join([sys.executable, str(ROOT / "plot_loss.py"), "--run", "损失=a.csv", "--output", "f.svg"])
    result = subprocess.run(command.format(program), shell=True, capture_output=True, text=True)
    assert "Comparison" in result.stdout and result.stderr == ""
