"""What the ranks of one run do together: start, act as one, and end."""

import logging
import os
import sys
import time

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils.logging import set_log_level_from_string

from errors import UserError
from interruption import leave_at_once


def start_process(args):
    """Join the process group, choose this rank's device, keep ranks x threads within the cores, quiet the libraries."""
    if "RANK" not in os.environ:
        raise UserError("no launcher started this process: run  deepspeed --num_gpus=N train.py ...")
    set_log_level_from_string("info" if args.verbose else "error")
    logging.getLogger("datasets").setLevel(logging.WARNING if args.verbose else logging.ERROR)
    if "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    local_rank = int(os.environ.get("LOCAL_RANK", args.local_rank))
    get_accelerator().set_device(local_rank)
    # On the CPU DeepSpeed would first compile an op for inference, most of a minute when it is new, and leave its 66 MB
    # a rank in /dev/shm for good. Training communicates through torch.distributed and never calls it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    return torch.device(get_accelerator().device_name(local_rank))


def together(action):
    """Run `action` on every rank. If it fails for the user's reason on one, every rank raises that rank's UserError."""
    result, message = None, None
    try:
        result = action()
    except UserError as error:
        message = str(error)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    if any(messages):
        raise UserError(next(filter(None, messages)))
    return result


def rank_zero_first(action):
    """`together`, with rank 0 ahead: what it cannot have no other rank asks for, what it downloads the others find."""
    is_first = dist.get_rank() == 0
    result = together(lambda: action() if is_first else None)
    return together(lambda: result if is_first else action())


def say(line, file=None):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, file=file, flush=True)


def leave(error):
    """End this rank for the user's mistake: rank 0 says it in one line, all ranks exit with code 2."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"train.py: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # a launcher that sees this rank gone first would kill rank 0 before it has spoken
    leave_at_once(2)
