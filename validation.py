"""Validation loss: the same text every time, for every config, exact over the ranks."""

import itertools
import math

import torch
from deepspeed import comm as dist

from text_source import join_rows, pack


class Validation:
    """Mean loss on the first blocks of the validation text: the same ones for every config and every evaluation.

    At most `most_batches` micro batches a rank are used. Every rank holds all the blocks, (blocks, seq_length + 1), and
    computes its share of each global batch.
    """

    def __init__(self, chunks, tokenize, seq_length, micro_batch, most_batches):
        self.micro_batch, texts, lists = micro_batch, [], []

        def tokenized():
            for chunk in chunks:
                texts.append(join_rows(chunk))
                lists.append(tokenize(texts[-1]))
                yield lists[-1]

        most_blocks = most_batches * micro_batch * dist.get_world_size()
        blocks = list(itertools.islice(pack(tokenized(), seq_length + 1), most_blocks))
        self.blocks = torch.stack(blocks) if blocks else torch.empty(0, seq_length + 1, dtype=torch.long)
        self.bytes_per_token = sum(len(text.encode()) for text in texts) / max(1, sum(map(len, lists)))

    def evaluate(self, engine):
        """{"loss": nats a token, "perplexity", "bits_per_byte", "tokens"}: exact over the ranks, a collective call."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        total = torch.zeros(2, dtype=torch.double, device=engine.device)  # summed losses, and blocks
        engine.eval()
        with torch.no_grad():
            for batch in self.blocks.split(world_size * self.micro_batch):
                mine = batch[rank * self.micro_batch : (rank + 1) * self.micro_batch]
                # A rank left without blocks still takes part: under ZeRO-3 a forward pass gathers from all ranks.
                loss = engine((mine if len(mine) else batch[:1]).to(engine.device))
                total += torch.stack([loss.double() * len(mine), torch.full_like(loss.double(), len(mine))])
        engine.train()
        dist.all_reduce(total)
        loss, tokens = (total[0] / total[1]).item(), len(self.blocks) * (self.blocks.shape[1] - 1)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss / math.log(2) / self.bytes_per_token,
            "tokens": tokens,
        }
