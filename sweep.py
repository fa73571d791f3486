"""Where do bf16 states harm? Train every config at every learning rate x beta2, and print what became of the loss.

    python sweep.py --learning_rates 1e-4,1e-3 --beta2s 0.95,0.999 --seeds 1,2,3 --log_dir logs/sweep \\
      --num_layers 4 --hidden_dim 128 --use_real_data

What it does not know goes to train.py. Runs that are completed already are kept, so a stopped sweep goes on where it
was, and a finished one prints its table at once.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ds_config import read_config
from errors import UserError

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Cell:
    """One run of the sweep. `lr` and `beta2` stay as they were written: they are part of file names."""

    config: str
    lr: str
    beta2: str
    seed: str

    @property
    def name(self):
        return f"lr{self.lr}_beta2_{self.beta2}/{self.config}_seed{self.seed}"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


def names(text):
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(text):
    """Comma-separated numbers, each as it was written."""
    for part in names(text):
        float(part)
    return names(text)


def parse_args(argv=None):
    """(arguments, what goes on to train.py). Raises UserError."""
    parser = Parser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add(
        "--configs", type=names, default="baseline,bf16_full,bf16_full_sr", help="names under configs/, reference first"
    )
    add("--learning_rates", type=numbers, required=True, help="comma-separated")
    add("--beta2s", type=numbers, required=True, help="comma-separated; each in place of the JSON's second beta")
    add("--seeds", type=names, default="42", help="comma-separated")
    add("--num_gpus", default="1", help="GPUs, or CPU ranks, of one run")
    add("--jobs", type=int, default=1, help="runs at once; for CPU ranks, with OMP_NUM_THREADS set")
    add("--table_only", action="store_true", help="print the table of the runs there are, and train nothing")
    add("--log_dir", type=Path, default=Path("logs/sweep"), help="CSVs, records, logs and JSONs")
    args, train_arguments = parser.parse_known_args(argv)
    if args.jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {args.jobs}")
    for name in args.configs:
        read_config(HERE / "configs" / f"{name}.json")  # before any run, not after hours of them
    return args, train_arguments


def outcome(cell, log_dir):
    """(final validation loss, mean fraction of lost updates) of a completed run; None where there is none yet."""
    try:
        record = json.loads((log_dir / f"{cell.name}_loss.json").read_text())
    except (OSError, ValueError):
        return None
    if record["status"] != "completed" or not record["validation"]:
        return None
    return record["validation"]["loss"], record["lost_update_fraction"]


def write_config(cell, log_dir):
    """The cell's DeepSpeed JSON: the config with another second beta. Returns its path, LOG_DIR/.../CONFIG.json."""
    config = read_config(HERE / "configs" / f"{cell.config}.json")
    params = config["optimizer"]["params"]
    params["betas"] = [params["betas"][0], float(cell.beta2)]
    path = log_dir / Path(cell.name).parent / f"{cell.config}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def run(cell, args, train_arguments):
    """Train one cell under the deepspeed launcher. Raises UserError when it leaves no completed record."""
    if outcome(cell, args.log_dir):
        return
    stem = args.log_dir / cell.name
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    launcher = [Path(sys.executable).with_name("deepspeed"), f"--num_gpus={args.num_gpus}", f"--master_port={port}"]
    command = [
        *launcher,
        "--log_level=error",
        HERE / "train.py",
        "--deepspeed_config",
        write_config(cell, args.log_dir),
    ]
    command += ["--learning_rate", cell.lr, "--seed", cell.seed, "--loss_log_file", f"{stem}_loss.csv"]
    with open(f"{stem}.log", "w") as log:
        subprocess.run(list(map(str, command + train_arguments)), stdout=log, stderr=subprocess.STDOUT, check=False)
    done = outcome(cell, args.log_dir)
    if done is None:
        raise UserError(f"{cell.name} left no validation loss, see {stem}.log")
    print(f"{cell.name}: validation loss {done[0]:.4f}", flush=True)


def table(title, cell, args):
    """Markdown: `cell(config, learning rate, beta2)` for every config, a row each."""
    columns = list(itertools.product(args.learning_rates, args.beta2s))
    lines = [f"| {title} | " + " | ".join(f"lr {lr}, beta2 {beta2}" for lr, beta2 in columns) + " |"]
    lines.append("| --- " + "| ---: " * len(columns) + "|")
    lines += [
        f"| {config} | " + " | ".join(cell(config, lr, beta2) for lr, beta2 in columns) + " |"
        for config in args.configs
    ]
    return "\n".join(lines)


def loss_cell(config, lr, beta2, args):
    """Mean validation loss and, paired by seed, its difference from the first config in percent: mean and range."""
    pairs = []
    for seed in args.seeds:
        found = [outcome(Cell(name, lr, beta2, seed), args.log_dir) for name in (args.configs[0], config)]
        if all(found):
            pairs.append([loss for loss, _ in found])
    if not pairs:
        return "not run"
    text = f"{sum(loss for _, loss in pairs) / len(pairs):.4f}"
    if config == args.configs[0]:
        return text
    percents = [100 * (loss / reference - 1) for reference, loss in pairs]
    spread = f", {min(percents):+.2f} to {max(percents):+.2f}" if len(percents) > 1 else ""
    return f"{text} ({sum(percents) / len(percents):+.2f} %{spread})"


def lost_cell(config, lr, beta2, args):
    """Updates lost to rounding in percent, mean over the run and the seeds."""
    found = [outcome(Cell(config, lr, beta2, seed), args.log_dir) for seed in args.seeds]
    lost = [fraction for _, fraction in filter(None, found) if fraction is not None]
    return f"{100 * sum(lost) / len(lost):.1f} %" if lost else "not run"


def main(argv=None):
    args, train_arguments = parse_args(argv)
    cells = [
        Cell(config, lr, beta2, seed)
        for seed, lr, beta2, config in itertools.product(args.seeds, args.learning_rates, args.beta2s, args.configs)
    ]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for done in [pool.submit(run, cell, args, train_arguments) for cell in cells if not args.table_only]:
            done.result()
    print(table("Validation loss", functools.partial(loss_cell, args=args), args), end="\n\n")
    print(table("Lost updates", functools.partial(lost_cell, args=args), args))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"sweep.py: error: {error}", file=sys.stderr)
        sys.exit(2)
