"""Loading from the Hub, against a local server that speaks its routes: streamed, absent, and unreachable."""

import shutil
import socket
import threading
import time

import pytest
from conftest import ROOT, TINY, Running, environment, flags, free_port, launch
from hub_server import Hub, hanging_up

import text_source

CONFIGS = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")
WANTED, OTHER = CONFIGS[0], CONFIGS[2]
MOVED = {"gpt2": "openai-community/gpt2"}  # train.py's default is the old name, which the Hub still knows
SPLITS = ("test", "train", "validation")
# The same run as in test_golden.py, so that the local one is shared.
OPTIONS = {"use_real_data": True, "batch_size": 2, "learning_rate": 3e-3}
# Not finding the Hub may cost one connection attempt on top of any other error's start, and none of the libraries'
# retries, which take most of a minute.
EXTRA_S = 10


def dataset_card():
    """The metadata block of Salesforce/wikitext's own README.md, with one feature and three splits a config."""
    lines = ["---", "pretty_name: WikiText", "dataset_info:"]
    for config in CONFIGS:
        lines += [f"- config_name: {config}", "  features:", "  - name: text", "    dtype: string", "  splits:"]
        for split in SPLITS:
            lines += [f"  - name: {split}", "    num_bytes: 1000", "    num_examples: 100"]
    lines.append("configs:")
    for config in CONFIGS:
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in SPLITS:
            lines += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    return "\n".join([*lines, "---", "", "# Dataset Card", ""])


@pytest.fixture(scope="module")
def repos(wikitext_folder, tokenizer_folder, tmp_path_factory):
    """The two repositories that train.py's defaults name, laid out as on the Hub."""
    folder = tmp_path_factory.mktemp("hub") / "wikitext"
    shutil.copytree(wikitext_folder, folder)
    for config, source in {"wikitext-103-v1": WANTED, "wikitext-2-v1": OTHER}.items():
        shutil.copytree(folder / source, folder / config)
    for config in CONFIGS:
        shard = folder / config / "validation-00000-of-00001.parquet"
        shutil.copy(shard, shard.with_name("test-00000-of-00001.parquet"))
    (folder / "README.md").write_text(dataset_card())
    return {("datasets", "Salesforce/wikitext"): folder, ("models", "openai-community/gpt2"): tokenizer_folder}


def hub_environment(url, folder):
    """An empty cache, and nothing of the caller's own Hub settings; download counts would go to another host."""
    env = {key: value for key, value in environment().items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    return env | {"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"}


def run_against(url, folder, **options):
    """A run of train.py that knows the Hub under `url` only; returns it and the seconds it took."""
    env = hub_environment(url, folder)
    csv = folder / "loss.csv"
    command = [ROOT / "train.py", "--deepspeed_config", ROOT / "configs/bf16_full.json", "--loss_log_file", csv]
    start = time.monotonic()
    run = launch(*command, *flags({**TINY, "num_steps": 8, **OPTIONS, **options}), env=env)
    run.csv = csv
    return run, time.monotonic() - start


@pytest.fixture(scope="module")
def streamed(repos, tmp_path_factory):
    """(run, requests, HF_HOME) of a run with the default --dataset and --tokenizer."""
    folder = tmp_path_factory.mktemp("streamed")
    with Hub(repos, MOVED) as hub:
        run, _ = run_against(hub.url, folder)
    return run, hub.requests, folder / "home"


def test_default_names_train_from_the_hub_as_a_local_copy_does(streamed, train, wikitext_folder, tokenizer_folder):
    run, *_ = streamed
    assert run.code == 0, run.stdout + run.stderr
    assert run.stderr == ""
    local = train("bf16_full", dataset=wikitext_folder, tokenizer=tokenizer_folder, **OPTIONS)
    assert run.record["data_fingerprint"] == local.record["data_fingerprint"]
    assert run.losses == local.losses
    assert run.losses[-1] < run.losses[0] - 0.5


def test_only_two_splits_of_one_config_are_read_and_only_in_ranges(streamed, repos):
    _, requests, home = streamed
    shards = [request for request in requests if request.method == "GET" and ".parquet" in request.path]
    assert all(f"/{WANTED}/" in request.path and "/test-" not in request.path for request in shards), shards
    assert all(request.status == 206 for request in shards), "a shard was downloaded whole"
    assert len({request.path.split("?")[0] for request in shards}) == 3, "two of training, one of validation"
    assert not list(home.rglob("*.arrow")), "a dataset was prepared on disk"
    assert not list(home.rglob("*.parquet")), "a shard was downloaded"


@pytest.mark.slow
def test_a_hub_that_fails_in_mid_run_is_asked_again_and_then_the_run_saves_and_ends(repos, tmp_path):
    """The text is read anew in every epoch, here every 70 steps or so; the libraries' own retries come on top."""
    env = hub_environment("", tmp_path)
    options = {"batch_size": 2, "use_real_data": True, "num_steps": 100_000, "checkpoint_dir": tmp_path / "kept"}
    with Hub(repos, MOVED) as hub:
        env["HF_ENDPOINT"] = hub.url
        with Running(tmp_path / "run", "bf16_full", env=env, **options) as running:
            running.wait_for_rows(5)
            hub.is_in_trouble = True
            run = running.end(timeout=500)
        hub.is_in_trouble = False
        steps = len(run.rows)
        assert run.code == 1
        assert "has no data: the dataset cannot be read any more" in run.record["status"]
        for wait in (1, 2, 4, 8, 16):
            assert f"again in {wait} s" in run.stdout
        assert "Traceback" not in run.stdout
        options |= {"num_steps": steps + 3, "resume": True}
        with Running(tmp_path / "run", "bf16_full", env=env, **options) as running:
            run = running.end()
    assert run.code == 0, run.stdout
    assert f"at step {steps}" in run.stdout and len(run.rows) == steps + 3


def complaint(run):
    """The one line that a user's error ends in."""
    assert run.code == 2, run.stdout + run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith("train.py: error: ") and "'builtin'" in line
    assert "Traceback" not in run.stdout
    return line


@pytest.fixture(scope="module")
def missing(repos, tmp_path_factory):
    """(run, seconds, requests) of a run whose Hub answers at once and has the tokenizer but not the dataset."""
    with Hub({key: folder for key, folder in repos.items() if key[0] == "models"}, MOVED) as hub:
        run, seconds = run_against(hub.url, tmp_path_factory.mktemp("missing"))
    return run, seconds, hub.requests


@pytest.mark.slow
def test_a_dataset_that_the_hub_does_not_have(missing):
    run, _, requests = missing
    line = complaint(run)
    assert "dataset Salesforce/wikitext" in line and "doesn't exist on the Hub" in line
    assert not run.csv.exists() and not run.csv.with_suffix(".json").exists()
    asked = [request for request in requests if "wikitext" in request.path]
    assert len(asked) == len(set(asked)), "asked twice: by both ranks, or by a retry"


def check_unreachable(url, folder, missing):
    (folder / "loss.csv").write_text("step,loss\n0,1.0\n")
    run, seconds = run_against(url, folder)
    line = complaint(run)
    assert "tokenizer gpt2" in line and "the Hub cannot be reached" in line
    assert run.csv.read_text() == "step,loss\n0,1.0\n" and not run.csv.with_suffix(".json").exists()
    _, usual_seconds, _ = missing
    assert seconds < usual_seconds + EXTRA_S


@pytest.mark.slow
def test_a_hub_that_hangs_up_is_asked_once_by_one_rank(missing, tmp_path):
    with hanging_up() as (url, connections):
        check_unreachable(url, tmp_path, missing)
    assert len(connections) == 1


@pytest.mark.slow
def test_a_hub_that_nothing_listens_for(missing, tmp_path):
    check_unreachable(f"http://127.0.0.1:{free_port()}", tmp_path, missing)


def one_answer(answer):
    """A URL whose server answers one connection with these bytes and closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.sendall(answer)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    "answer, usable",
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", True),  # a mirror may want a token for its root
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", False),
        (b"SSH-2.0-OpenSSH_9.6\r\n", False),
        (b"", False),
    ],
)
def test_what_counts_as_a_hub_that_answers(answer, usable, monkeypatch):
    monkeypatch.setattr(text_source, "HUB_TIMEOUT_S", 0.5)
    monkeypatch.setenv("HF_ENDPOINT", one_answer(answer))
    assert text_source.hub_answers() is usable


@pytest.mark.parametrize("url", ["huggingface.co", "http://127.0.0.1:port", "http://my hub/"])
def test_an_endpoint_that_is_no_url_is_no_hub(url, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", url)
    assert text_source.hub_answers() is False
