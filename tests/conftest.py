"""Real runs, through the real `deepspeed` launcher on CPU ranks, shared by all tests that look at them."""

import contextlib
import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

# For the tests in this process, before any Hugging Face library is imported: no test asks the real Hub.
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parent.parent
TINY = {"num_layers": 2, "hidden_dim": 64, "num_heads": 4, "seq_length": 64, "log_interval": 4}


@dataclass
class Run:
    """What a finished command left behind."""

    code: int
    stdout: str
    stderr: str
    csv: Path

    @property
    def rows(self):
        with self.csv.open() as file:
            return list(csv.DictReader(file))

    @property
    def losses(self):
        return [float(row["loss"]) for row in self.rows]

    @property
    def record(self):
        return json.loads(self.csv.with_suffix(".json").read_text())


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def environment(**extra):
    """The tests' own environment with CPU ranks and no Hub, unless `extra` says otherwise."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", **extra}


def launcher_command(script, *arguments, ranks=2):
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [launcher, f"--num_gpus={ranks}", f"--master_port={free_port()}", "--log_level=error", script, *arguments]
    return list(map(str, command))


def launch(script, *arguments, ranks=2, env=None, cwd=None, timeout=600):
    """Run `script` under the deepspeed launcher; returns a Run (without a CSV)."""
    command = launcher_command(script, *arguments, ranks=ranks)
    done = subprocess.run(command, env=env or environment(), cwd=cwd, timeout=timeout, capture_output=True, text=True)
    return Run(done.returncode, done.stdout, done.stderr, None)


class Running:
    """A run of train.py (or a probe that ends in it) that is still going on, in a session of its own.

    As a context it leaves no process behind, whatever happens.
    """

    def __init__(self, folder, config="baseline", ranks=2, script=ROOT / "train.py", env=None, command=None, **options):
        folder.mkdir(parents=True, exist_ok=True)
        self.csv, self.output = folder / "loss.csv", folder / "output.txt"
        arguments = flags({
            **TINY, "log_interval": 1, "num_steps": 8, "batch_size": 2, "loss_log_file": self.csv,
            "deepspeed_config": ROOT / "configs" / f"{config}.json", **options,
        })  # fmt: skip
        command = [*command, str(script), *arguments] if command else launcher_command(script, *arguments, ranks=ranks)
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, env=env or environment(), stdout=output, stderr=output, start_new_session=True
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def text(self):
        return self.output.read_text()

    def wait_until(self, condition, timeout=120):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        return self

    def wait_for_rows(self, count):
        return self.wait_until(lambda: self.csv.exists() and self.csv.read_text().count("\n") > count)

    def ranks(self):
        """The ranks' processes by rank, without their data workers."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if str(self.csv) in line and "deepspeed.launcher.launch" not in line and "-u" in line[:2]:
                with contextlib.suppress(psutil.Error):
                    if str(self.csv) not in (process.parent().cmdline() if is_rank(process.parent()) else ()):
                        found[int(process.environ()["RANK"])] = process
        return found

    def all_gone(self):
        """Whether no process of the run is left."""
        lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline", "status"])
                 if process.info["status"] != psutil.STATUS_ZOMBIE]  # fmt: skip
        return not any(str(self.csv) in line for line in lines)

    def end(self, timeout=120):
        """Wait for the end; the finished Run, its two outputs in one."""
        code = self.process.wait(timeout)
        return Run(code, self.text, self.text, self.csv)


def is_rank(process):
    line = process.cmdline()
    return "-u" in line[:2] and "deepspeed.launcher.launch" not in line


def flags(options):
    """{"batch_size": 2, "use_real_data": True} as command-line flags."""
    return [
        part for key, value in options.items() for part in ([f"--{key}"] if value is True else [f"--{key}", str(value)])
    ]


@pytest.fixture(scope="session")
def train(tmp_path_factory):
    """train(config, ranks=2, **flags): a finished run of train.py on a tiny model; equal calls share one run."""
    runs = {}

    def run(config="baseline", ranks=2, **options):
        options = {**TINY, "num_steps": 8, **options}
        key = (config, ranks, *sorted(options.items()))
        if key not in runs:
            path = tmp_path_factory.mktemp("run") / "a new folder" / "loss.csv"
            json_file = config if str(config).endswith(".json") else ROOT / "configs" / f"{config}.json"
            run = launch(
                ROOT / "train.py",
                "--deepspeed_config",
                json_file,
                "--loss_log_file",
                path,
                *flags(options),
                ranks=ranks,
            )
            run.csv = path
            runs[key] = run
        return runs[key]

    return run


@pytest.fixture(scope="session")
def text():
    """About 60 kB of English-like sentences, the same on every machine and in every Python."""
    draw = random.Random(7)
    subjects = "the parser|a generator|the compiler|every module|one class|the loop|an iterator|this object".split("|")
    verbs = "returns|yields|raises|defines|imports|binds|evaluates|contains".split("|")
    objects = "a value|the name|an exception|its argument|each element|the result|a new scope|nothing".split("|")
    sentences = (f"{draw.choice(subjects)} {draw.choice(verbs)} {draw.choice(objects)}" for _ in range(1800))
    return [sentence.capitalize() + ".\n" for sentence in sentences]


@pytest.fixture(scope="session")
def tokenizer_folder(text, tmp_path_factory):
    """A local tokenizer folder, as `save_pretrained` leaves it: byte-level BPE of 512 tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(text, vocab_size=512, show_progress=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def wikitext_folder(text, tmp_path_factory):
    """`text` in the layout of the Salesforce/wikitext repository: one folder a config, parquet shards, empty rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("wikitext")
    rows = [row for sentence in text for row in (" " + sentence, "")]
    half = len(rows) // 2
    for config, shards in {
        "wikitext-103-raw-v1": (rows[:half], rows[half:]),
        "wikitext-2-raw-v1": (["wrong config\n"],),
    }.items():
        (folder / config).mkdir()
        for index, shard in enumerate(shards):
            name = f"train-{index:05}-of-{len(shards):05}.parquet"
            pq.write_table(pa.table({"text": shard}), folder / config / name)
        pq.write_table(pa.table({"text": ["held out\n"] * 400}), folder / config / "validation-00000-of-00001.parquet")
    return folder
