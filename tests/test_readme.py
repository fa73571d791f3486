"""The README shows what the commands and the committed evidence say. Run as a script, this brings it up to date."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
# <!-- COMMAND or FILE --> ... <!-- end -->
SHOWN = re.compile(
    r"(?<=<!-- )(?P<source>(?:python|logs/)[^\n]+?)(?: -->\n)(?P<text>(?:(?!<!-- ).)*)(?=<!-- end -->)", re.S
)
EVIDENCE = ROOT / "logs" / "reference" / "cpu"


def produce(source):
    """The text that belongs there: a file's, without its title, or what a command prints."""
    if source.startswith("logs/"):
        text = (ROOT / source).read_text().split("\n", 2)[2]
    else:
        command = [sys.executable, *source.split()[1:]]
        text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return f"\n{text}\n" if "| ---" in text or "|---" in text else f"```text\n{text}```\n"


def write():
    README.write_text(SHOWN.sub(lambda shown: f"{shown['source']} -->\n{produce(shown['source'])}", README.read_text()))


SOURCES = {match["source"]: match["text"] for match in SHOWN.finditer(README.read_text())}


def test_there_is_something_to_check():
    assert README.read_text().count("<!-- end -->") == len(SOURCES) >= 5


@pytest.mark.parametrize("source", SOURCES)
def test_the_readme_shows_what_its_source_says(source):
    assert SOURCES[source] == produce(source)


def test_the_summary_is_what_the_committed_csvs_give(tmp_path):
    command = [sys.executable, ROOT / "plot_loss.py", "--output", tmp_path / "figure.png"]
    for config in ("baseline", "bf16_full", "bf16_full_sr"):
        for path in sorted(EVIDENCE.glob(f"{config}_seed*_loss.csv")):
            command += ["--run", f"{config}={path}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == (EVIDENCE / "summary.md").read_text()


def test_every_flag_of_train_py_is_in_the_readme():
    help_text = subprocess.run(
        [sys.executable, ROOT / "train.py", "--help"], check=True, capture_output=True, text=True
    ).stdout
    flags = set(re.findall(r"^  (--\w+)", help_text, re.M)) - {"--local_rank"}
    assert len(flags) > 20
    assert flags - set(re.findall(r"`(--\w+)`", README.read_text())) == set()


if __name__ == "__main__":
    write()
