"""Run under the launcher: train a little, evaluate, and evaluate again block by block; prints one JSON line."""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train

MODEL = [
    "--num_layers",
    "1",
    "--hidden_dim",
    "32",
    "--seq_length",
    "32",
    "--vocab_size",
    "300",
    "--learning_rate",
    "1e-2",
]
MICRO_BATCH = 3


def main():
    args = train.parse_args([*sys.argv[1:], *MODEL])
    config, _ = train.resolve_config(train.read_config(args.deepspeed_config), MICRO_BATCH, 1, args.learning_rate, 3)
    device = train.start_process(args)
    engine = train.build_engine(train.build_model(args, config, device), config, args.seed)
    # Repeated tokens and random ones, so that the blocks' losses differ; 20 blocks: one more than three full rounds.
    texts = [{"text": ["a" * 33]}] * 11 + [{"text": [bytes(torch.randperm(33).add(60).tolist()).decode()]}] * 9
    validation = train.Validation(texts, lambda text: list(text.encode()), args.seq_length, MICRO_BATCH, 100)
    blocks = validation.blocks.to(device)
    for _ in range(10):
        loss = engine(blocks[:3])
        engine.backward(loss)
        engine.step()
    result, again = validation.evaluate(engine), validation.evaluate(engine)
    engine.eval()
    with torch.no_grad():
        singly = [engine(block[None]).item() for block in blocks]
    if train.dist.get_rank() == 0:
        report = {"blocks": len(blocks), "block_losses": singly, "again": again["loss"]}
        print(json.dumps(report | result | {"bytes_per_token": validation.bytes_per_token}), flush=True)
    train.dist.destroy_process_group()


if __name__ == "__main__":
    main()
