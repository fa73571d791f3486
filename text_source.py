"""Where text and tokens come from (the Hub, a local folder or file, Python's own documentation), and packing them.

The Hugging Face libraries are imported where they are used: `go_offline_if_hub_is_unreachable` has to come first, and
a run on random tokens needs none of them.
"""

import http.client
import itertools
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import torch
from deepspeed import comm as dist

from errors import UserError

BUILTIN = "builtin"
BUILTIN_VOCAB_SIZE = 2048
WIKITEXT_CONFIG = "wikitext-103-raw-v1"
HUB_TIMEOUT_S = 5
CHUNK_ROWS = 32  # rows of text that stay together: about 2,000 tokens of Wikitext, several blocks
RETRY_WAITS_S = (1, 2, 4, 8, 16)  # between attempts to go on reading, once a source has failed
HOLD_OUT = 10  # one chunk in so many is held out for validation, where the source has no split for it


def builtin_rows():
    """The English of Python's language reference, line by line with line ends."""
    from pydoc_data.topics import topics

    return [line for name in sorted(topics) for line in topics[name].splitlines(keepends=True)]


def load_tokenizer(name, vocab_size):
    """(tokenize, size): a function from text to a list of token ids, all below `size`."""
    if name == BUILTIN:
        from tokenizers import ByteLevelBPETokenizer

        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(builtin_rows(), vocab_size=vocab_size or BUILTIN_VOCAB_SIZE, show_progress=False)
        return lambda text: tokenizer.encode(text).ids, tokenizer.get_vocab_size()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # the libraries raise a dozen kinds for "not there"
        raise UserError(unreachable("tokenizer", name, error)) from error
    # Chunks are longer than the model's context by design; packing cuts them.
    return lambda text: tokenizer(text, verbose=False)["input_ids"], len(tokenizer)


def load_chunks(name):
    """(training, validation): streams of contiguous chunks of rows, {"text": [CHUNK_ROWS strings]}.

    Where the source has no validation split, every tenth chunk of the training text is held out. Raises UserError.
    """
    splits = load_splits(name)
    chunks = splits["train"].batch(CHUNK_ROWS)
    if "validation" in splits:
        return chunks, splits["validation"].batch(CHUNK_ROWS)
    return (
        chunks.filter(lambda _, index: index % HOLD_OUT != HOLD_OUT - 1, with_indices=True),
        chunks.filter(lambda _, index: index % HOLD_OUT == HOLD_OUT - 1, with_indices=True),
    )


def load_splits(name):
    """Streaming datasets by split, "train" among them, each with a "text" column and no other.

    From the Hub, a local folder or file, or the built-in text. Raises UserError.
    """
    import datasets

    datasets.disable_progress_bars()
    # Of its own, silently: 20 attempts, 5 s apart, at every read. Persistent's speak.
    datasets.config.STREAMING_READ_MAX_RETRIES, datasets.config.STREAMING_READ_RETRY_INTERVAL = 1, 0
    if name == BUILTIN:
        return {"train": datasets.Dataset.from_dict({"text": builtin_rows()}).to_iterable_dataset()}
    try:
        splits = datasets.load_dataset(**dataset_location(name), streaming=True)
        # A row, not the card: the files may be out of reach where the card is not.
        columns = list(next(iter(splits["train"]))) if "train" in splits else []
    except UserError:
        raise
    except Exception as error:
        raise UserError(unreachable("dataset", name, error)) from error
    if "train" not in splits:
        raise UserError(f"dataset {name} has no split 'train', only {', '.join(splits)}")
    if "text" not in columns:
        raise UserError(f"dataset {name} has no column 'text', only {', '.join(columns)}")
    return {split: rows.select_columns(["text"]) for split, rows in splits.items()}


def dataset_location(name):
    """Arguments for datasets.load_dataset: NAME or NAME:CONFIG on the Hub, or a local folder or file."""
    import datasets

    path, _, config = (name, "", "") if Path(name).exists() else name.partition(":")
    if Path(path).is_file():
        kinds = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".txt": "text"}
        if Path(path).suffix not in kinds:
            raise UserError(f"dataset {path}: the name must end in one of {', '.join(kinds)}")
        kind = kinds[Path(path).suffix]
        # The rows are joined as they stand, so lines have to keep their ends.
        return {"path": kind, "data_files": path} | ({"keep_linebreaks": True} if kind == "text" else {})
    folder = Path(path, config or WIKITEXT_CONFIG)
    if folder.is_dir():  # the Hub's own layout, one folder a config: read it directly, with or without a dataset card
        return {"path": str(folder)}
    if not config:
        names = datasets.get_dataset_config_names(path)
        config = WIKITEXT_CONFIG if WIKITEXT_CONFIG in names else names[0]
        if len(names) > 1 and config != WIKITEXT_CONFIG:
            raise UserError(f"dataset {path} has several configs: choose one as {path}:NAME from {', '.join(names)}")
    return {"path": path, "name": config}


def unreachable(what, name, error):
    """One line for a dataset or tokenizer that could not be loaded."""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if os.environ.get("HF_HUB_OFFLINE") == "1" and not Path(name).exists():
        reason = f"the Hub cannot be reached and there is no local copy ({type(error).__name__})"
    return f"{what} {name} cannot be loaded: {reason[:200]}. No network? Give a local folder, or '{BUILTIN}'"


def go_offline_if_hub_is_unreachable(names):
    """Let one rank try the Hub once, where a name needs it; if it does not answer, no library of any rank will ask.

    Must come before the Hugging Face libraries are imported: they read HF_HUB_OFFLINE then, and offline they look
    into their cache and fail at once instead of retrying for most of a minute on every rank.
    """
    if all(name == BUILTIN or Path(name).exists() for name in names) or "HF_HUB_OFFLINE" in os.environ:
        return

    answer = [False]
    if dist.get_rank() == 0:
        # A socket's timeout counts per address and per read, and a name look-up has none: bound the whole.
        answers = []
        probe = threading.Thread(target=lambda: answers.append(hub_answers()), daemon=True)
        probe.start()
        probe.join(HUB_TIMEOUT_S)
        answer = [any(answers)]
    dist.broadcast_object_list(answer, src=0)
    if not answer[0]:
        os.environ["HF_HUB_OFFLINE"] = "1"


def hub_answers():
    """Whether HF_ENDPOINT speaks HTTP and is not out of order: the libraries would retry a 5xx, on every rank."""
    try:
        urllib.request.urlopen(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code < 500
    except urllib.error.URLError as error:  # the libraries bring certificates of their own: let them judge
        return isinstance(error.reason, ssl.SSLCertVerificationError)
    except (OSError, ValueError, http.client.HTTPException):
        return False
    return True


class Persistent:
    """An iterable over a stream that fails at times: it is opened anew, after growing waits, and read on from there.

    The stream has to give the same items every time. Raises UserError once every wait in RETRY_WAITS_S was in vain.
    """

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        done, waits = 0, iter(RETRY_WAITS_S)
        while True:
            try:
                for item in itertools.islice(self.stream, done, None):
                    yield item
                    done, waits = done + 1, iter(RETRY_WAITS_S)
                return
            except Exception as error:  # the libraries raise a dozen kinds for a server that does not answer
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
                if (wait := next(waits, None)) is None:
                    raise UserError(f"the dataset cannot be read any more: {reason}") from error
                print(f"the dataset cannot be read: {reason}; again in {wait} s", file=sys.stderr, flush=True)
                time.sleep(wait)


def join_rows(chunk):
    return "".join(row or "" for row in chunk["text"])


def pack(token_lists, length):
    """The tokens end to end, as int64 tensors (length,); the last partial one is dropped."""
    tokens = []
    for more in token_lists:
        tokens += more
        while len(tokens) >= length:
            yield torch.tensor(tokens[:length])
            del tokens[:length]
