"""Train a GPT-style decoder under DeepSpeed and log what its numeric precision costs and saves.

    deepspeed --num_gpus=4 train.py --deepspeed_config configs/baseline.json --num_layers 32 --hidden_dim 4096 ...

The DeepSpeed JSON is the experiment: everything else stays the same between two runs that are compared. The file
reads in the order a run happens: arguments, model, data, engine, measurement, loop, main.
"""

import argparse
import contextlib
import itertools
import logging
import math
import os
import platform
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the data worker is a fork: its threads would not survive
if "--verbose" not in sys.argv:
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.disable(logging.WARNING)  # on the CPU, DeepSpeed warns from every process as it is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a stack of C++ for every connection to a rank that is gone

import deepspeed
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch.utils.checkpoint import checkpoint

import cpu_bf16
from checkpoint import Checkpoints, identity, random_states, set_random_states
from ds_config import STOCHASTIC_ROUND, read_config, resolve_config
from errors import UserError
from flops import model_flops_per_token, recomputed_flops_per_token
from interruption import Interruption, Stopped, leave_at_once, quiet_worker
from lost_updates import LostUpdates
from measured_memory import MemoryPlan, memory_snapshot, reset_peak_memory
from memory_model import LOSS_CHUNK_TOKENS, Model, Setup
from ranks import leave, rank_zero_first, say, start_process, together
from run_log import Clock, Progress, RowsFile, RunLog, as_json, print_summary
from stochastic_adamw import StochasticAdamW
from text_source import Persistent, go_offline_if_hub_is_unreachable, join_rows, load_chunks, load_tokenizer, pack
from validation import Validation

logging.disable(logging.NOTSET)

GPT2_VOCAB_SIZE = 50257
SHUFFLE_CHUNKS = 1024  # chunks held in the shuffle buffer


# ---------------------------------------------------------------------------------------------------- arguments


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (see --help)")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        # A default of None says nothing; the help text tells where the value comes from.
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def parse_args(argv=None):
    """The command line as a namespace. Raises UserError for values that cannot work together."""
    parser = Parser(description=__doc__.splitlines()[0], formatter_class=Help, allow_abbrev=False)
    add = parser.add_argument_group("experiment").add_argument
    add(
        "--deepspeed_config",
        required=True,
        metavar="JSON",
        help="DeepSpeed configuration, for example configs/baseline.json",
    )
    add("--zero_stage", type=int, choices=(1, 2, 3), help="ZeRO stage, in place of the JSON's")
    add("--learning_rate", type=float, help="learning rate, in place of the JSON's")
    add("--seed", type=int, default=42, help="seed of the weights and of the data order")

    add = parser.add_argument_group("model").add_argument
    add("--num_layers", type=positive, default=4, help="transformer blocks")
    add("--hidden_dim", type=positive, default=128, help="width of the residual stream")
    add("--num_heads", type=positive, default=4, help="attention heads; must divide hidden_dim")
    add(
        "--vocab_size",
        type=positive,
        help=f"rows of the embedding; the tokenizer's size, or {GPT2_VOCAB_SIZE}, unless given",
    )
    add("--seq_length", type=positive, default=512, help="tokens that the model sees at once")
    add(
        "--activation_checkpointing", action="store_true", help="recompute each block in backward instead of keeping it"
    )

    add = parser.add_argument_group("batch and steps").add_argument
    add("--batch_size", type=positive, help="micro batch per GPU; the JSON's, or 1, unless given")
    add("--gradient_accumulation_steps", type=positive, help="micro batches per step; the JSON's, or 1, unless given")
    add("--num_steps", type=positive, default=100, help="optimizer steps")
    add("--warmup_steps", type=int, default=10, help="first steps left out of the mean step time")

    add = parser.add_argument_group("data").add_argument
    add("--use_real_data", action="store_true", help="train on --dataset; without it, on random tokens")
    add(
        "--dataset",
        default="Salesforce/wikitext",
        metavar="NAME",
        help="Hub name (NAME:CONFIG for one of several), local folder or file, or 'builtin'",
    )
    add("--tokenizer", default="gpt2", metavar="NAME", help="Hub name, local folder, or 'builtin'")

    add("--eval_interval", type=int, default=0, help="steps between two validations; 0: once, at the end")
    add("--eval_batches", type=positive, default=32, help="micro batches of validation text per GPU, at most")

    add = parser.add_argument_group("checkpoints and faults").add_argument
    add("--checkpoint_dir", type=Path, metavar="DIR", help="where checkpoints are kept, one folder a run")
    add("--checkpoint_interval", type=int, default=0, help="steps between two checkpoints; 0: only when it ends")
    add("--keep_checkpoints", type=positive, default=2, help="how many of the newest stay")
    add("--checkpoint_strict", action="store_true", help="stop where a checkpoint cannot be written; else go on")
    add("--resume", action="store_true", help="continue from the newest whole checkpoint, if there is one")
    add("--on_nan", choices=("stop", "skip"), default="stop", help="where the gradients are not finite")
    add("--max_skipped_steps", type=positive, default=10, help="most steps in a row that --on_nan skip leaves out")

    add = parser.add_argument_group("logging").add_argument
    add(
        "--loss_log_file",
        metavar="CSV",
        help="where the rows go, the run record beside it; logs/CONFIG_loss.csv unless given",
    )
    add("--log_interval", type=positive, default=10, help="steps between two writes of rows and progress")
    add(
        "--memory_snapshot",
        type=Path,
        metavar="FILE",
        help="record one step's allocations, after the warm-up, for https://pytorch.org/memory_viz (CUDA only)",
    )
    add("--verbose", action="store_true", help="show the libraries' own messages")
    add("--local_rank", type=int, default=0, help="set by the launcher; chooses the device and nothing else")
    args = parser.parse_args(argv)
    check_args(args)
    args.loss_log_file = Path(args.loss_log_file or f"logs/{Path(args.deepspeed_config).stem}_loss.csv")
    if args.loss_log_file.suffix == ".json":
        raise UserError(f"--loss_log_file {args.loss_log_file}: the run record is written there; choose another ending")
    return args


def check_args(args):
    if args.hidden_dim % args.num_heads:
        raise UserError(f"--hidden_dim {args.hidden_dim} is not divisible by --num_heads {args.num_heads}")
    if args.checkpoint_dir is None and (args.resume or args.checkpoint_interval or args.checkpoint_strict):
        raise UserError("--resume, --checkpoint_interval and --checkpoint_strict need a --checkpoint_dir")
    for name in ("warmup_steps", "eval_interval", "seed", "checkpoint_interval"):
        if getattr(args, name) < 0:
            raise UserError(f"--{name} must be 0 or more, not {getattr(args, name)}")
    if args.learning_rate is not None and not (math.isfinite(args.learning_rate) and args.learning_rate >= 0):
        raise UserError(f"--learning_rate must be a finite number >= 0, not {args.learning_rate}")


# -------------------------------------------------------------------------------------------------------- model


class Linear(nn.Linear):
    """nn.Linear with weights N(0, std) and zero bias.

    zero.Init partitions each module as its constructor returns; initialising later, from outside, would touch empty
    tensors. The draw is in fp32 whatever the parameter's dtype, so that every ZeRO stage starts from the same weights.
    """

    def __init__(self, in_features, out_features, bias=True, std=0.02):
        self.std = std
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(self.weight.float().normal_(std=self.std))
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, x):
        return cpu_bf16.linear(x, self.weight, self.bias) if cpu_bf16.needed_for(x) else super().forward(x)


class Embedding(nn.Embedding):
    """nn.Embedding with weights N(0, 0.02), drawn as Linear draws them."""

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(self.weight.float().normal_(std=0.02))


class Block(nn.Module):
    """Pre-LayerNorm transformer block: causal self-attention, then a 4x GELU MLP, each added to its input."""

    def __init__(self, hidden_dim, num_heads, num_layers):
        super().__init__()
        # GPT-2 (Radford et al. 2019, section 2.3): 2 x num_layers residual additions keep unit variance this way.
        residual_std = 0.02 / math.sqrt(2 * num_layers)
        self.num_heads = num_heads
        self.ln_1 = nn.LayerNorm(hidden_dim)
        self.qkv = Linear(hidden_dim, 3 * hidden_dim)
        self.attention_out = Linear(hidden_dim, hidden_dim, std=residual_std)
        self.ln_2 = nn.LayerNorm(hidden_dim)
        self.mlp_in = Linear(hidden_dim, 4 * hidden_dim)
        self.mlp_out = Linear(4 * hidden_dim, hidden_dim, std=residual_std)

    def forward(self, x):  # (batch, seq, hidden) -> the same
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.num_heads, -1))  # (batch, seq, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, seq, head_dim)
        if cpu_bf16.needed_for(q):
            attention = cpu_bf16.causal_attention(q, k, v)
        else:
            attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.ln_2(x)), approximate="tanh"))


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (tokens, vocab) against targets (tokens,), computed in fp32.

    Logits and their gradient are a decoder's largest activation. This one walks over LOSS_CHUNK_TOKENS tokens at a
    time and writes each chunk's gradient over its logits: no fp32 copy of them and no separate gradient ever exists;
    the idea is Liger Kernel's (Hsu et al. 2024, arXiv 2410.10989, section 3.2). The head needs its output no more.
    """

    @staticmethod
    def forward(ctx, logits, targets):
        loss = torch.zeros((), dtype=torch.float32, device=logits.device)
        chunks = logits.detach().split(LOSS_CHUNK_TOKENS), targets.split(LOSS_CHUNK_TOKENS)
        for chunk, target in zip(*chunks, strict=True):
            log_probs, target = chunk.float().log_softmax(-1), target[:, None]
            loss -= log_probs.gather(1, target).sum()
            if ctx.needs_input_grad[0]:
                gradient = log_probs.exp_()
                gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
                chunk.copy_(gradient.div_(len(targets)))
        ctx.save_for_backward(logits.detach())
        return loss / len(targets)

    @staticmethod
    def backward(ctx, grad_loss):
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(grad_loss.to(gradient.dtype)), None


class GPT(nn.Module):
    """GPT-2-style decoder with learned positions and an output head not tied to the embedding.

    `forward` takes blocks of token ids (batch, seq_length + 1) and returns the scalar mean next-token loss: position
    t sees tokens <= t and its target is token t + 1.
    """

    def __init__(self, num_layers, hidden_dim, num_heads, vocab_size, seq_length, activation_checkpointing=False):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.tokens = Embedding(vocab_size, hidden_dim)
        self.positions = Embedding(seq_length, hidden_dim)
        self.blocks = nn.ModuleList(Block(hidden_dim, num_heads, num_layers) for _ in range(num_layers))
        self.ln_final = nn.LayerNorm(hidden_dim)
        self.head = Linear(hidden_dim, vocab_size, bias=False)

    def forward(self, blocks):
        return CrossEntropy.apply(self.logits(blocks[:, :-1]).flatten(0, 1), blocks[:, 1:].flatten())

    def logits(self, inputs):  # (batch, seq) -> (batch, seq, vocab)
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.activation_checkpointing else block(x)
        return self.head(self.ln_final(x))


def build_model(args, config, device):
    """The model in the config's dtype on `device`; under ZeRO-3 each rank keeps its partition only."""
    dtype = model_dtype(config)
    if config["zero_optimization"]["stage"] == 3:
        placement = deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype)
    else:
        placement = torch.device(device)
    default_dtype = torch.get_default_dtype()
    torch.manual_seed(args.seed)
    try:
        torch.set_default_dtype(dtype)
        with placement:
            return GPT(
                args.num_layers,
                args.hidden_dim,
                args.num_heads,
                args.vocab_size,
                args.seq_length,
                args.activation_checkpointing,
            )
    finally:
        torch.set_default_dtype(default_dtype)


def model_dtype(config):
    """The dtype of the parameters that DeepSpeed computes with."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled"):
            return dtype
    return torch.float32


# --------------------------------------------------------------------------------------------------------- data


class RandomBlocks(torch.utils.data.IterableDataset):
    """Endless blocks of uniformly random tokens, this rank's share.

    Block i depends on the seed and on i alone, and every step takes the next global batch of them, so that runs of
    equal global batch see the same data on any number of ranks. Yields (block, position after it), as TextBlocks does;
    the position is (0, this rank's blocks so far).
    """

    def __init__(self, seed, vocab_size, seq_length, micro_batch, rank, world_size, start=(0, 0)):
        self.seed, self.vocab_size, self.seq_length = seed, vocab_size, seq_length
        self.micro_batch, self.rank, self.world_size, self.start = micro_batch, rank, world_size, start

    def block(self, index):
        return torch.from_numpy(
            np.random.default_rng([self.seed, index]).integers(self.vocab_size, size=self.seq_length + 1)
        )

    def __iter__(self):
        for count in itertools.count(self.start[1]):
            micro_step, index = divmod(count, self.micro_batch)
            first = (micro_step * self.world_size + self.rank) * self.micro_batch
            yield self.block(first + index), torch.tensor([0, count + 1])


class TextBlocks(torch.utils.data.IterableDataset):
    """Endless blocks of seq_length + 1 real tokens, this rank's share of a streamed text.

    Contiguous chunks of rows are shuffled (the order depends on the seed and the epoch only), dealt to the ranks in
    turn, tokenized by the rank they belong to, and packed end to end: no padding, no token twice, and at the end of
    an epoch only the last partial block is lost. Yields (block, position after it); the position, int64 (2,), is the
    epoch and the number of its blocks so far, and `start` continues there, by reading the epoch again up to it.
    Raises UserError when this rank's share is shorter than one block.
    """

    def __init__(self, chunks, tokenize, seq_length, seed, rank, world_size, start=(0, 0)):
        self.chunks, self.tokenize, self.seq_length = chunks, tokenize, seq_length
        self.seed, self.rank, self.world_size, self.start = seed, rank, world_size, start

    def __iter__(self):
        first_epoch, skip = self.start
        for epoch in itertools.count(first_epoch):
            done = 0
            for done, block in enumerate(self.epoch(epoch), start=1):
                if done > skip:
                    yield block, torch.tensor([epoch, done])
            if not done:
                raise UserError(
                    f"the dataset is too short: rank {self.rank} of {self.world_size} cannot fill one block of "
                    f"--seq_length {self.seq_length} + 1 tokens; use a shorter one, fewer ranks or more text"
                )
            skip = 0

    def epoch(self, epoch):
        """One pass over this rank's share, as int64 tensors of seq_length + 1 tokens."""
        mine = itertools.islice(self.shuffled(epoch), self.rank, None, self.world_size)
        yield from pack((self.tokenize(join_rows(chunk)) for chunk in mine), self.seq_length + 1)

    def shuffled(self, epoch):
        """The epoch's chunks by way of a shuffle buffer, in the same order on every rank.

        datasets 5.2 has one too, but its order differs between a data worker and the main process, it cannot be
        resumed, and over several files it sleeps for 5 s as it ends.
        """
        draw, buffer = random.Random(f"{self.seed} {epoch}"), []
        for chunk in self.chunks:
            if len(buffer) < SHUFFLE_CHUNKS:
                buffer.append(chunk)
            else:
                index = draw.randrange(SHUFFLE_CHUNKS)
                buffer[index], chunk = chunk, buffer[index]
                yield chunk
        draw.shuffle(buffer)
        yield from buffer


def load_text(args, micro_batch):
    """(chunks, tokenize, validation): the training text and a Validation, which is None where the validation text is
    shorter than a block. Fills in args.vocab_size. Raises UserError.
    """
    go_offline_if_hub_is_unreachable([args.dataset, args.tokenizer])
    tokenize, size = rank_zero_first(lambda: load_tokenizer(args.tokenizer, args.vocab_size))
    if args.vocab_size is not None and args.vocab_size < size:
        raise UserError(f"--vocab_size {args.vocab_size} is smaller than the tokenizer's {size}")
    args.vocab_size = args.vocab_size or size
    chunks, held_out = rank_zero_first(lambda: load_chunks(args.dataset))
    validation = together(lambda: Validation(held_out, tokenize, args.seq_length, micro_batch, args.eval_batches))
    return Persistent(chunks), tokenize, validation if len(validation.blocks) else None


def build_batches(args, micro_batch, text, stop, start=(0, 0)):
    """This rank's endless iterator over (blocks, positions): int64 (micro_batch, seq_length + 1) and (micro_batch, 2).

    text: (chunks, tokenize), None for random tokens. start: the position to continue from. Raises UserError.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if text is None:
        blocks = RandomBlocks(args.seed, args.vocab_size, args.seq_length, micro_batch, rank, world_size, start)
    else:
        blocks = TextBlocks(*text, args.seq_length, args.seed, rank, world_size, start)
    batches = iter(torch.utils.data.DataLoader(
        blocks,
        batch_size=micro_batch,
        num_workers=1,
        prefetch_factor=4,
        pin_memory=get_accelerator().device_name() != "cpu",
        worker_init_fn=quiet_worker,
    ))  # fmt: skip
    first = together(lambda: first_batch(batches, stop))
    return itertools.chain(first, batches)


def first_batch(batches, stop):
    """[the first batch], empty where a signal came first. Without data from the start, it is the user's mistake."""
    first, failure, stop.failure = stop.fetch(batches, 1), stop.failure, None
    if failure:
        raise UserError(failure)
    return first or []


# ------------------------------------------------------------------------------------------------------- engine


def build_engine(model, config, seed):
    """The DeepSpeed engine, which from here on owns the model, its optimizer and the precision of every state."""
    params = dict(config["optimizer"]["params"])
    stochastic_round, optimizer = params.pop(STOCHASTIC_ROUND, False), None
    if stochastic_round:  # not DeepSpeed's: it gets a client optimizer in place of its "optimizer" section
        settings = {key: value for key, value in params.items() if key not in ("torch_adam", "fused")}
        optimizer = partial(StochasticAdamW, seed=seed, rank=dist.get_rank(), **settings)
        config = {key: value for key, value in config.items() if key != "optimizer"}
        config["zero_allow_untested_optimizer"] = True
    else:
        config = config | {"optimizer": config["optimizer"] | {"params": params}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config
    )
    return engine


# -------------------------------------------------------------------------------------------------- measurement


def memory_plan(args, config, micro_batch):
    """What this run is predicted to need on each rank."""
    model = Model(args.num_layers, args.hidden_dim, args.num_heads, args.vocab_size, args.seq_length)
    sizes = dist.get_world_size(), micro_batch, args.activation_checkpointing, LOSS_CHUNK_TOKENS
    return MemoryPlan(Setup(model, config, *sizes))


def describe_run(args, config, engine, memory):
    """The run record as far as it is known before the first step."""
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    shape = args.num_layers, args.hidden_dim
    recomputed = recomputed_flops_per_token(*shape, args.seq_length)
    return {
        "status": "running",
        "config_name": Path(args.deepspeed_config).stem,
        "arguments": as_json(vars(args)),
        "deepspeed_config": config,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "deepspeed", "transformers", "datasets")},
        "device": f"cpu ({platform.machine()})" if on_cpu else torch.cuda.get_device_name(),
        "memory_kind": "resident memory" if on_cpu else "allocator",
        "world_size": dist.get_world_size(),
        "zero_stage": engine.zero_optimization_stage(),
        "parameter_count": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "tokens_per_step": engine.train_batch_size() * args.seq_length,
        "model_flops_per_token": model_flops_per_token(*shape, args.vocab_size, args.seq_length),
        "recomputed_flops_per_token": recomputed if args.activation_checkpointing else 0,
        "memory": memory.describe(),
        "validation": None,
    }


# --------------------------------------------------------------------------------------------------------- loop


@dataclass
class Run:
    """What one run is made of, once it is ready to train. position: this rank's place in the data, after first_step."""

    engine: deepspeed.DeepSpeedEngine
    batches: Iterator
    position: tuple
    validation: Validation | None
    log: RunLog
    memory: MemoryPlan
    checkpoints: Checkpoints | None

    def own_state(self):
        """What only this rank knows of its state, for a checkpoint."""
        return {"position": tuple(self.position), "rng": random_states(), "log": self.log.state()}

    def save(self, step):
        """A checkpoint of the state before `step`, its CSV rows written; True unless it failed."""
        if self.checkpoints is None or self.checkpoints.saved_step == step:
            return True
        self.log.flush()
        return self.checkpoints.save(self.engine, step, self.own_state())


def train(args, run, stop):
    """Run the optimizer steps that are left, with a validation every args.eval_interval and after the last one.

    Raises Stopped where a rank was asked to stop, has no more data, or sees gradients that are not finite.
    """
    engine, log = run.engine, run.log
    progress = Progress(args.num_steps, log.next_step)
    lost_updates = LostUpdates(engine, args.seed)
    snapshot_step = min(args.warmup_steps, args.num_steps - 1) if args.memory_snapshot else None
    reset_peak_memory()
    for step in range(log.next_step, args.num_steps):
        batches = stop.fetch(run.batches, engine.gradient_accumulation_steps())
        stop.agree(step)
        last = step + 1 == args.num_steps
        flushes = last or (step + 1) % args.log_interval == 0
        if flushes:
            lost_updates.before()
        row = {"step": step, "learning_rate": engine.get_lr()[0], "clock": Clock()}
        with memory_snapshot(args.memory_snapshot) if step == snapshot_step else contextlib.nullcontext():
            row["loss"] = train_step(engine, batches, log)
        row["clock"].stop()
        run.position = batches[-1][1][-1].tolist()
        if step == log.first_step:
            log.record["memory"] = run.memory.measure(engine)
        row["grad_norm"] = engine.get_global_grad_norm()
        if flushes:
            row["lost_update_fraction"] = lost_updates.after()
        if run.validation and (last or (args.eval_interval and (step + 1) % args.eval_interval == 0)):
            log.record["validation"] = run.validation.evaluate(engine)
            row["validation_loss"] = log.record["validation"]["loss"]
        log.add(row)
        progress.advance(log.flush() if flushes else None)
        check_finite(args, engine, row, log)
        if args.checkpoint_interval and (step + 1) % args.checkpoint_interval == 0:
            if not run.save(step + 1) and args.checkpoint_strict:
                raise Stopped(f"failed: no checkpoint could be written at step {step + 1}", code=1, save=False)
    progress.close()


def train_step(engine, batches, log):
    """One optimizer step over its micro batches; returns their mean loss on this rank (scalar, on the device)."""
    loss = torch.zeros((), device=engine.device)
    for blocks, _ in batches:
        log.see(blocks)
        micro_loss = engine(blocks.to(engine.device, non_blocking=True))
        engine.backward(micro_loss)
        engine.step()
        loss += micro_loss.detach() / engine.gradient_accumulation_steps()
    return loss


def check_finite(args, engine, row, log):
    """Raise Stopped if the step's gradients were not finite and args.on_nan allows no more of them.

    DeepSpeed has looked already, over all ranks, and skipped the update; where it does not look, the norm shows it.
    """
    skipped, norm = not engine.was_step_applied(), row["grad_norm"]
    is_on_device = torch.is_tensor(norm) and norm.device.type != "cpu"  # reading it would stall the device
    log.count_skipped(skipped)
    if not skipped and (is_on_device or math.isfinite(norm)):
        return
    if args.on_nan == "skip" and skipped and log.skipped_in_a_row <= args.max_skipped_steps:
        say(f"step {row['step']}: gradients not finite, update skipped ({log.skipped_in_a_row} in a row)")
        return
    log.flush()
    reason = f"loss {row['loss']:.4g} or its gradients not finite at step {row['step']}"
    raise Stopped(f"failed: {reason}, learning rate {row['learning_rate']:.3g}", code=1, save=False)


# --------------------------------------------------------------------------------------------------------- main


def check_with_deepspeed(config):
    """DeepSpeed's own reading of the config; what it refuses becomes one line."""
    try:
        return deepspeed.DeepSpeedConfig(config)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError("DeepSpeed refuses the config: " + " ".join(str(error).split())[:300]) from error


def prepare_output(args):
    """Create the folders and see that every file can be written, without touching what is there; returns the CSV's
    RowsFile, which no other run can have at the same time, on rank 0.
    """
    if args.memory_snapshot and get_accelerator().device_name() != "cuda":
        raise UserError("--memory_snapshot records the CUDA allocator, and this run is on the CPU")
    if dist.get_rank() != 0:
        return None
    path = args.loss_log_file
    try:
        for folder in (args.memory_snapshot and args.memory_snapshot.parent, args.checkpoint_dir):
            if folder:
                folder.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        if path.with_suffix(".json").exists():
            path.with_suffix(".json").open("a").close()
        return RowsFile(path)
    except OSError as error:
        raise UserError(f"cannot write --loss_log_file {path}: {error.strerror}") from error


def prepare(args, config, device, stop, rows):
    """Everything up to the first step of a new or resumed run, as a Run."""
    micro_batch = together(lambda: check_with_deepspeed(config)).train_micro_batch_size_per_gpu
    text, validation = None, None
    if args.use_real_data:
        *text, validation = load_text(args, micro_batch)
    args.vocab_size = args.vocab_size or GPT2_VOCAB_SIZE
    checkpoints, found = None, None
    if args.checkpoint_dir:
        mine = identity(as_json(vars(args)), config, dist.get_world_size())
        checkpoints = Checkpoints(args.checkpoint_dir, args.keep_checkpoints, args.checkpoint_strict, mine)
        found = checkpoints.find() if args.resume else None
    memory = memory_plan(args, config, micro_batch)
    if warning := memory.warning():
        say(warning)
    with memory.explain_out_of_memory(stop):
        if found and found.is_universal:
            config = config | {"checkpoint": config.get("checkpoint", {}) | {"load_universal": True}}
        engine = build_engine(build_model(args, config, device), config, args.seed)
        states = checkpoints.load(engine, found) if found else None
    position = place_in_data(states) if found else (0, 0)
    batches = build_batches(args, micro_batch, text, stop, position)
    if found:  # last: building a model and a data loader draws random numbers
        set_random_states(state_of_this_rank(states)["rng"])
    log = RunLog(
        args.loss_log_file, rows, describe_run(args, config, engine, memory), device,
        found.step if found else 0, state_of_this_rank(states)["log"] if found else None,
    )  # fmt: skip
    if args.resume:
        say(f"resumed from {found.path}, at step {found.step}" if found else "no checkpoint yet: a fresh start")
    return Run(engine, batches, position, validation, log, memory, checkpoints)


def state_of_this_rank(states):
    return states[dist.get_rank() % len(states)]


def place_in_data(states):
    """This rank's position in the data, given every rank's own state at the save.

    On another number of ranks, every rank goes on where the ranks were on average: the same blocks for random tokens,
    about as many of each epoch for a text, whose chunks are dealt anew.
    """
    if len(states) == dist.get_world_size():
        return states[dist.get_rank()]["position"]
    epochs, blocks = zip(*(state["position"] for state in states), strict=True)
    return min(epochs), sum(blocks) // dist.get_world_size()


def finish_early(run, stopped):
    """Leave a record, and a checkpoint where the state is good, of a run that stops before its last step."""
    run.log.flush()
    if stopped.save and not run.save(run.log.next_step):
        stopped.code = stopped.code or 1
    run.log.finish(stopped.status)
    say(f"train.py: {stopped.status}", sys.stderr)
    return stopped.code


def main():
    args = parse_args()
    config, notes = resolve_config(
        read_config(args.deepspeed_config), args.batch_size, args.gradient_accumulation_steps,
        args.learning_rate, args.zero_stage,
    )  # fmt: skip
    with Interruption() as stop:
        device = start_process(args)
        stop.introduce()
        for note in notes:
            say(note)
        rows, code = together(lambda: prepare_output(args)), 0
        try:
            run = prepare(args, config, device, stop, rows)
        except UserError:
            if rows is not None:
                rows.withdraw()
            raise
        stop.log = run.log
        try:
            with run.memory.explain_out_of_memory(stop):
                train(args, run, stop)
            run.save(args.num_steps)
            run.log.finish("completed")
        except Stopped as stopped:
            code = finish_early(run, stopped)
    if dist.get_rank() == 0 and not code and run.log.record["status"] == "completed":
        print_summary(run.log.record, args.loss_log_file)
    dist.destroy_process_group()
    leave_at_once(code)  # an orderly exit would wait for a data worker that ignores signals


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        leave(error)
