"""Kill a run at random moments, most of them within a save, and continue it, until it has the rows of one left alone.

    python tests/kill_loop.py --kills 50

After every kill the newest complete checkpoint has to be whole. Exits with 1 where a row differs.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from conftest import Running

import checkpoint

EXACT = ("step", "loss", "learning_rate", "grad_norm")


def exact(run):
    return [[row[key] for key in EXACT] for row in run.rows]


def kill_once(folder, options, moment):
    """Kill every process at once, `moment` seconds after another step was saved; None where the run ended before."""
    with Running(folder, "bf16_full_sr", **options, resume=True) as running:
        kept = options["checkpoint_dir"]
        before = max((found.step for found in checkpoint.complete(kept)), default=0)
        running.wait_until(
            lambda: (
                running.process.poll() is not None
                or max((found.step for found in checkpoint.complete(kept)), default=0) > before
            )
        )
        time.sleep(moment)
        if running.process.poll() is not None:
            return None
        os.killpg(running.process.pid, signal.SIGKILL)
    found = checkpoint.complete(kept)
    damage = [problem for one in found if (problem := checkpoint.damaged(one))]
    if damage:
        sys.exit(f"a checkpoint that calls itself complete is not: {damage}")
    return found[0].step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw, started = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A save takes longer than a step here, so that most kills fall into one.
        options = {"vocab_size": 512, "num_steps": 100 * args.kills, "checkpoint_interval": 1, "hidden_dim": 128}
        kills = in_a_save = 0
        while kills < args.kills:
            kept = folder / "killed" / "kept"
            step = kill_once(folder / "killed", {**options, "checkpoint_dir": kept}, draw.uniform(0, 0.4))
            if step is None:
                sys.exit(f"the run ended after {kills} kills: give it more steps")
            kills += 1
            in_a_save += any(kept.glob("*.partial"))
        options["num_steps"] = step + 2
        with Running(folder / "killed", "bf16_full_sr", **options, checkpoint_dir=kept, resume=True) as running:
            killed = running.end()
        with Running(folder / "whole", "bf16_full_sr", **options, checkpoint_dir=folder / "whole" / "kept") as running:
            whole = running.end()
        if killed.code or whole.code or exact(killed) != exact(whole):
            sys.exit(f"the rows differ:\n{killed.stdout[-2000:]}\n{exact(killed)[-3:]}\n{exact(whole)[-3:]}")
        what = f"{kills} kills, {in_a_save} of them within a save"
        print(f"{what}: the same rows of {len(whole.rows)} steps in the end ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
