"""Blocks: packed, sharded, ordered. In process, with the real `datasets` streams and real tokenizers."""

import bisect
import itertools
import json
from collections import Counter
from functools import partial

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import text_source
import train
from errors import UserError

SEQ_LENGTH = 16


def word_rows(count):
    """`count` rows of distinct three-digit-group "words", so that every token can be traced to its row."""
    return [f"{index} " for index in range(count)]


def tokenize(text):
    return [int(word) for word in text.split()]


def chunks_of(rows, num_shards=1):
    stream = datasets.Dataset.from_dict({"text": rows}).to_iterable_dataset(num_shards=num_shards)
    return stream.batch(text_source.CHUNK_ROWS)


def blocks_of(rows, rank=0, world_size=1, seed=0, epoch=0, seq_length=SEQ_LENGTH, num_shards=2):
    stream = chunks_of(rows, num_shards)
    return list(train.TextBlocks(stream, tokenize, seq_length, seed, rank, world_size).epoch(epoch))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_blocks_are_disjoint_and_cover_the_stream(world_size):
    rows = word_rows(1000)
    tokens = Counter()
    for rank in range(world_size):
        blocks = blocks_of(rows, rank, world_size)
        assert all(block.shape == (SEQ_LENGTH + 1,) for block in blocks)
        tokens.update(token for block in blocks for token in block.tolist())
    assert max(tokens.values()) == 1
    lost = len(rows) - len(tokens)
    assert lost < world_size * (SEQ_LENGTH + 1), "only each rank's last partial block may be lost"


def test_rows_stay_in_contiguous_chunks_and_every_target_is_the_next_token_of_the_text():
    tokens = [token for block in blocks_of(word_rows(1000), 1, 2, num_shards=1) for token in block.tolist()]
    breaks = [b for a, b in itertools.pairwise(tokens) if b != a + 1]
    assert breaks and all(b % text_source.CHUNK_ROWS == 0 for b in breaks), (
        "the text breaks where another chunk begins only"
    )


def test_the_same_seed_gives_the_same_blocks_and_another_seed_or_epoch_another_order():
    first, again, other_seed, next_epoch = (
        torch.stack(blocks_of(word_rows(1000), seed=seed, epoch=epoch))
        for seed, epoch in ((5, 0), (5, 0), (6, 0), (5, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other_seed)
    assert not torch.equal(first, next_epoch)


def test_a_text_longer_than_the_shuffle_buffer_is_shuffled_within_it(monkeypatch):
    monkeypatch.setattr(train, "SHUFFLE_CHUNKS", 8)
    tokens = torch.cat(blocks_of(word_rows(3000), num_shards=1)).tolist()
    assert len(set(tokens)) == len(tokens) > 3000 - SEQ_LENGTH - 1
    chunks = [token // text_source.CHUNK_ROWS for token in tokens if token % text_source.CHUNK_ROWS == 0]
    assert chunks != sorted(chunks)
    assert all(chunk <= position + 8 for position, chunk in enumerate(chunks)), "a chunk cannot come before it is read"


def test_a_data_worker_gives_the_blocks_that_the_process_itself_would(wikitext_folder):
    blocks = train.TextBlocks(
        text_source.load_chunks(str(wikitext_folder))[0], lambda text: list(text.encode()), 64, 0, 0, 2
    )
    loader = torch.utils.data.DataLoader(blocks, batch_size=4, num_workers=1)
    inside, position = next(iter(loader))
    assert torch.equal(inside, torch.stack([block for block, _ in itertools.islice(blocks, 4)]))
    assert position.tolist() == [[0, 1], [0, 2], [0, 3], [0, 4]]


def test_when_the_stream_ends_it_starts_again_reshuffled():
    stream = chunks_of(word_rows(200))
    data = train.TextBlocks(stream, tokenize, SEQ_LENGTH, 0, 0, 1)
    per_epoch = 200 // (SEQ_LENGTH + 1)
    blocks = [block for block, _ in itertools.islice(data, 2 * per_epoch)]
    first, second = torch.stack(blocks[:per_epoch]), torch.stack(blocks[per_epoch:])
    assert not torch.equal(first, second)
    assert torch.equal(second, torch.stack(blocks_of(word_rows(200), epoch=1, num_shards=1)))


def test_a_share_shorter_than_one_block_is_the_users_error():
    stream = chunks_of(word_rows(10))
    with pytest.raises(UserError, match="too short"):
        next(iter(train.TextBlocks(stream, tokenize, SEQ_LENGTH, 0, 0, 1)))


def test_packing_real_text_adds_nothing_and_loses_nothing():
    rows = text_source.builtin_rows()[:500]
    encode, size = text_source.load_tokenizer("builtin", None)
    stream = chunks_of(rows)
    blocks = list(train.TextBlocks(stream, encode, 64, 3, 0, 1).epoch(0))
    chunks = [
        "".join(rows[start : start + text_source.CHUNK_ROWS]) for start in range(0, len(rows), text_source.CHUNK_ROWS)
    ]
    expected = Counter(token for chunk in chunks for token in encode(chunk))
    packed = Counter(token for block in blocks for token in block.tolist())
    assert max(packed) < size
    assert not packed - expected, "no token that the text does not have: no padding"
    assert (expected - packed).total() < 65


def test_random_block_i_depends_on_the_seed_and_on_i_alone():
    def global_batches(world_size, steps=3):
        micro_batch = 4 // world_size
        ranks = [iter(train.RandomBlocks(9, 100, 8, micro_batch, rank, world_size)) for rank in range(world_size)]
        return [[tuple(next(r)[0].tolist()) for r in ranks for _ in range(micro_batch)] for _ in range(steps)]

    assert global_batches(1) == global_batches(2) == global_batches(4)
    assert len({block for batch in global_batches(1) for block in batch}) == 12
    assert global_batches(1) != [[tuple(train.RandomBlocks(8, 100, 8, 1, 0, 1).block(i).tolist()) for i in range(4)]]


def test_builtin_tokenizer_is_the_same_every_time_it_is_trained():
    (first, size), (second, _) = text_source.load_tokenizer("builtin", 700), text_source.load_tokenizer("builtin", 700)
    sample = "".join(text_source.builtin_rows()[:50])
    assert size == 700
    assert first(sample) == second(sample)


def test_local_folder_in_the_hubs_layout_takes_the_wikitext_103_config(wikitext_folder, text):
    rows = [row["text"] for row in text_source.load_splits(str(wikitext_folder))["train"]]
    assert "".join(rows) == "".join(" " + sentence for sentence in text)
    assert [row["text"] for row in text_source.load_splits(f"{wikitext_folder}:wikitext-2-raw-v1")["train"]] == [
        "wrong config\n"
    ]


def test_local_folder_with_a_dataset_card_of_several_configs(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "from a\n"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "from b\n"}) + "\n")
    card = "configs:\n- config_name: first\n  data_files: a.jsonl\n- config_name: second\n  data_files: b.jsonl\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    assert [row["text"] for row in text_source.load_splits(f"{tmp_path}:second")["train"]] == ["from b\n"]
    with pytest.raises(UserError, match="several configs.*first, second"):
        text_source.load_splits(str(tmp_path))["train"]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl", "rows.txt"])
def test_local_files(tmp_path, name):
    rows = ["one\n", "\n", "two\n"]
    path = tmp_path / name
    if name.endswith("parquet"):
        datasets.Dataset.from_dict({"text": rows}).to_parquet(path)
    elif name.endswith("json"):
        path.write_text(json.dumps([{"text": row} for row in rows]))
    elif name.endswith("jsonl"):
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    else:
        path.write_text("".join(rows))
    assert [row["text"] for row in text_source.load_splits(str(path))["train"]] == rows


def test_files_and_columns_that_cannot_be_read_are_the_users_errors(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"content": "no text here"}\n')
    with pytest.raises(UserError, match="no column 'text', only content"):
        text_source.load_splits(str(tmp_path / "rows.jsonl"))["train"]
    (tmp_path / "rows.docx").write_text("x")
    with pytest.raises(UserError, match="must end in one of"):
        text_source.load_splits(str(tmp_path / "rows.docx"))["train"]
    (tmp_path / "broken.parquet").write_text("this is not parquet")
    with pytest.raises(UserError, match="broken.parquet cannot be loaded"):
        text_source.load_splits(str(tmp_path / "broken.parquet"))["train"]
    with pytest.raises(UserError, match="cannot be loaded"):
        text_source.load_tokenizer(str(tmp_path), None)


def test_local_tokenizer_folder(tokenizer_folder):
    encode, size = text_source.load_tokenizer(str(tokenizer_folder), None)
    assert size > 256
    assert max(encode("The parser returns a value.\n" * 200)) < size


def text_of(chunks):
    return "".join(text_source.join_rows(chunk) for chunk in chunks)


def test_a_validation_split_is_used_where_there_is_one(wikitext_folder):
    training, validation = text_source.load_chunks(str(wikitext_folder))
    assert text_of(validation) == "held out\n" * 400
    assert "held out" not in text_of(training)


def test_without_one_every_tenth_chunk_is_held_out():
    training, validation = text_source.load_chunks("builtin")
    kept, held_out = ([tuple(chunk["text"]) for chunk in chunks] for chunks in (training, validation))
    rows = text_source.builtin_rows()
    everything = [tuple(rows[i : i + text_source.CHUNK_ROWS]) for i in range(0, len(rows), text_source.CHUNK_ROWS)]
    assert held_out == everything[9::10]
    assert kept == [chunk for index, chunk in enumerate(everything) if index % 10 != 9]
    in_a_worker = torch.utils.data.DataLoader(training, batch_size=None, num_workers=1)
    assert [tuple(chunk["text"]) for chunk in in_a_worker] == kept


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 90), max_size=60), st.integers(2, 40))
def test_packing_keeps_every_token_once_and_in_order(lengths, block):
    tokens = iter(range(sum(lengths)))
    documents = [list(itertools.islice(tokens, length)) for length in lengths]
    packed = [block.tolist() for block in text_source.pack(documents, block)]
    assert all(len(one) == block for one in packed)
    whole = sum(lengths) // block * block
    assert list(itertools.chain(*packed)) == list(range(whole)), "only the tail may be lost"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), max_size=150), st.integers(1, 5), st.integers(1, 30), st.integers(0, 9))
def test_sharding_deals_every_token_to_one_rank(lengths, world_size, seq_length, seed):
    words = iter(range(sum(lengths)))
    rows = ["".join(f"{word} " for word in itertools.islice(words, length)) for length in lengths]
    chunks = [{"text": rows[i : i + text_source.CHUNK_ROWS]} for i in range(0, len(rows), text_source.CHUNK_ROWS)]
    ranks = [train.TextBlocks(chunks, tokenize, seq_length, seed, rank, world_size) for rank in range(world_size)]
    tokens = [torch.cat(blocks).tolist() if (blocks := list(rank.epoch(0))) else [] for rank in ranks]
    seen = Counter(itertools.chain(*tokens))
    assert not seen or max(seen.values()) == 1
    assert sum(lengths) - len(seen) <= world_size * seq_length, "a rank loses less than a block"
    for mine in tokens:  # within a chunk, the text's own order
        starts = list(itertools.accumulate(map(len, (" ".join(chunk["text"]).split() for chunk in chunks)), initial=0))
        chunk_of = [bisect.bisect_right(starts, token) for token in mine]
        pairs = zip(itertools.pairwise(mine), itertools.pairwise(chunk_of), strict=True)
        assert all(following == token + 1 for (token, following), (chunk, other) in pairs if chunk == other)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 3), st.integers(0, 60))
def test_a_stream_continues_from_any_position_across_epochs(world_size, consumed):
    make = partial(train.TextBlocks, chunks_of(word_rows(500)), tokenize, SEQ_LENGTH, 3, world_size - 1, world_size)
    whole = list(itertools.islice(make(), consumed + 25))
    position = tuple(whole[consumed - 1][1].tolist()) if consumed else (0, 0)
    rest = list(itertools.islice(make(start=position), 25))
    assert position[0] > 0 or consumed < 30, "the later ones begin in another epoch"
    for (block, after), (expected, expected_after) in zip(rest, whole[consumed:], strict=True):
        assert torch.equal(block, expected) and torch.equal(after, expected_after)


def test_random_blocks_continue_from_any_position():
    make = partial(train.RandomBlocks, 5, 100, 8, 3, 1, 2)
    whole = [block for block, _ in itertools.islice(make(), 12)]
    _, position = list(itertools.islice(make(), 6))[-1]
    rest = [block for block, _ in itertools.islice(make(start=tuple(position.tolist())), 6)]
    assert torch.equal(torch.stack(rest), torch.stack(whole[6:]))


class FailsAt:
    """The numbers 0 to 9; the first reading fails before 3, the second before 7, and every one before `always`."""

    def __init__(self, always=None):
        self.always, self.failures = always, [3, 7]

    def __iter__(self):
        for number in range(10):
            if number == self.always or (self.failures and number == self.failures[0]):
                self.failures = self.failures[1:]
                raise ConnectionError(f"no answer before {number}\nand more")
            yield number


def test_a_stream_that_fails_is_read_on_from_where_it_failed(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(text_source.time, "sleep", waits.append)
    assert list(text_source.Persistent(FailsAt())) == list(range(10))
    assert waits == [1, 1], "what works again starts again with the shortest wait"
    assert capsys.readouterr().err.splitlines() == [
        f"the dataset cannot be read: no answer before {number}; again in 1 s" for number in (3, 7)
    ]


def test_waits_grow_and_end_in_the_users_error(monkeypatch, capsys):
    waits, given_out = [], []
    monkeypatch.setattr(text_source.time, "sleep", waits.append)
    with pytest.raises(UserError, match="cannot be read any more: no answer before 5"):
        given_out.extend(text_source.Persistent(FailsAt(always=5)))
    assert waits[-5:] == [1, 2, 4, 8, 16]
    assert len(capsys.readouterr().err.splitlines()) == len(waits)
