"""Checkpoints that are complete or not there, and the command that makes one for another number of ranks.

    python checkpoint.py CHECKPOINT_DIR      # the newest checkpoint as a universal one: --resume on any number of ranks

A checkpoint is DeepSpeed's own, in a folder step_00000100 with a manifest that knows every file's size and SHA-256. It
is written under another name and renamed when it is whole. Its identity, the arguments and the config that made it, is
JSON and is compared before any of DeepSpeed's files, which are pickles, is opened.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.ds_to_universal import main as convert_to_universal

from errors import UserError
from ranks import say

FOLDER = re.compile(r"step_(\d{8})(_universal)?")
MANIFEST = "manifest.json"
# What a resumed run may be given otherwise: how long it runs, what it logs, where it writes.
FREE_ARGUMENTS = {
    "num_steps", "warmup_steps", "log_interval", "eval_interval", "loss_log_file", "memory_snapshot", "verbose",
    "local_rank", "checkpoint_dir", "checkpoint_interval", "keep_checkpoints", "checkpoint_strict", "resume", "on_nan",
    "max_skipped_steps", "deepspeed_config", "zero_stage", "learning_rate", "batch_size", "gradient_accumulation_steps",
}  # fmt: skip


def identity(arguments, config, world_size):
    """What has to be equal for one run to continue another, as a flat dict of JSON values.

    The config is the resolved one: what the command line set in it is compared there.
    """
    kept = {f"--{key}": value for key, value in arguments.items() if key not in FREE_ARGUMENTS}
    return json.loads(json.dumps(kept | dict(flatten(config)) | {"number of ranks": world_size}, default=str))


def flatten(value, path=""):
    for key, item in value.items():
        name = f"{path}.{key}" if path else key
        if isinstance(item, dict):
            yield from flatten(item, name)
        else:
            yield name, item


def differences(saved, wanted):
    """["name: saved value -> value now"] of two identities."""
    names = sorted(saved.keys() | wanted.keys())
    return [
        f"{name}: {saved.get(name, 'not set')} -> {wanted.get(name, 'not set')}"
        for name in names
        if saved.get(name) != wanted.get(name)
    ]


@dataclass
class Found:
    """One complete checkpoint on disk."""

    path: Path
    step: int
    is_universal: bool
    manifest: dict


class Checkpoints:
    """The checkpoints of one run under `folder`, of which the newest `keep` stay. Every method is collective.

    strict: a checkpoint that cannot be written ends the run; otherwise a loud line says so and training goes on.
    """

    def __init__(self, folder, keep, strict, identity):
        self.folder, self.keep, self.strict, self.identity = Path(folder), keep, strict, identity
        self.saved_step = None

    def find(self):
        """The newest checkpoint that is whole, None if there is none. Raises UserError where it is another run's."""
        for found in complete(self.folder):
            if damage := next(filter(None, gather(damaged(found, dist.get_rank(), dist.get_world_size()))), None):
                say(f"warning: checkpoint {found.path}: {damage}; looking for the one before", sys.stderr)
                continue
            return self.matching(found)
        return None

    def matching(self, found):
        different = differences(found.manifest["identity"], self.identity)
        other_ranks = [line for line in different if line.startswith("number of ranks")]
        if other_ranks:  # the micro batch changes with the number of ranks, where the global batch is to stay
            batch = ("number of ranks", "train_micro_batch", "train_batch", "gradient_accumulation")
            different = [line for line in different if not line.startswith(batch)]
        if different:
            raise UserError(f"--resume: {found.path} is of another run; {'; '.join(different)}")
        if not other_ranks:
            return found
        path = found.path.with_name(f"{found.path.name.removesuffix('_universal')}_universal")
        universal = [other for other in complete(self.folder) if other.path == path]
        if not universal:
            command = f"python checkpoint.py {self.folder}"
            raise UserError(f"--resume: {found.path} is for another {other_ranks[0]}; convert it first: {command}")
        return universal[0]

    def load(self, engine, found):
        """Restore the engine from `found`; returns every rank's own state at the save, by rank."""
        _, state = engine.load_checkpoint(str(self.folder), tag=found.path.name)
        if state is None:
            raise UserError(f"--resume: DeepSpeed cannot load {found.path}")
        # DeepSpeed 0.19.8 gives all sub-groups of a universal checkpoint one step tensor, and each would count in it.
        for values in engine.optimizer.optimizer.state.values():
            if torch.is_tensor(values.get("step")):
                values["step"] = values["step"].clone()
        self.saved_step = found.step
        return state["run_state"]

    def save(self, engine, step, own_state):
        """Write the state before `step`; True if it is complete. A failure leaves the earlier checkpoints untouched."""
        name = f"step_{step:08}"
        partial = self.folder / f"{name}.partial"
        client_state = {"step": step, "identity": self.identity, "run_state": gather(own_state)}
        client_state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}  # asked for by the converter
        with CarefulEngine(engine) as careful:
            careful.attempt(lambda: make_empty(partial) if dist.get_rank() == 0 else None)
            engine.save_checkpoint(str(self.folder), tag=partial.name, save_latest=False, client_state=client_state)
            files = careful.attempt(lambda: checksums(partial, dist.get_rank(), dist.get_world_size()))
            parts = gather(files or {})
            manifest = {"step": step, "identity": self.identity, "files": {k: v for p in parts for k, v in p.items()}}
            if not any(gather(careful.error)) and dist.get_rank() == 0:
                careful.attempt(lambda: publish(partial, self.folder / name, manifest))
            problem = next(filter(None, gather(careful.error)), None)
        if problem is None:
            self.saved_step = step
            if dist.get_rank() == 0:
                prune(self.folder, self.keep, step)
        else:
            say(f"WARNING: NO CHECKPOINT at step {step}: {problem}; the last good one stays", sys.stderr)
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
        return problem is None


class CarefulEngine:
    """Within it, DeepSpeed's writes on this rank fail by setting `error`: its collectives stay in step with the rest.

    A rank that raised in the middle of save_checkpoint would leave the others waiting in its next barrier.
    """

    def __init__(self, engine):
        self.writer, self.error = engine.checkpoint_engine, None

    def __enter__(self):
        for name in ("save", "makedirs"):
            setattr(self.writer, name, self.guarded(getattr(self.writer, name)))
        return self

    def __exit__(self, *_):
        del self.writer.save, self.writer.makedirs  # the class's own come back

    def guarded(self, method):
        return lambda *positional, **named: self.attempt(lambda: method(*positional, **named))

    def attempt(self, action):
        if self.error is None:
            try:
                return action()
            except OSError as error:
                self.error = error.strerror or str(error)
            except RuntimeError as error:  # torch's zip writer, which does not tell the system's reason
                self.error = f"a file was cut short, as on a full disk ({str(error).splitlines()[0][:200]})"
        return None


def random_states():
    """The state of every random generator of this process: Python's, NumPy's, PyTorch's and the device's."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), get_accelerator().get_rng_state()


def set_random_states(states):
    python, numpy, cpu, device = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    get_accelerator().set_rng_state(device)


def gather(value):
    """Every rank's value, by rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def make_empty(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def files_of(folder):
    """The files under `folder`, but the manifest, by their names relative to it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path for path in paths}


def checksums(folder, rank=0, world_size=1):
    """{name: [bytes, SHA-256]} of this rank's share of the files, each flushed to the disk."""
    found = {}
    for name, path in list(files_of(folder).items())[rank::world_size]:
        with path.open("rb") as file:
            found[name] = [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
            os.fsync(file.fileno())
    return found


def publish(partial, final, manifest):
    """Write the manifest, make the checkpoint appear under its name, and name it in `latest` for DeepSpeed's tools."""
    write_whole(partial / MANIFEST, json.dumps(manifest, indent=1))
    discard(final)
    partial.rename(final)
    if not final.name.endswith("_universal"):
        write_whole(final.with_name("latest"), final.name)


def write_whole(path, text):
    """Write a file that no reader ever sees in part."""
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def complete(folder):
    """The checkpoints in `folder` that have a manifest, as Found, the newest first; links are not followed."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = FOLDER.fullmatch(path.name)
        if not match or path.is_symlink() or not (path / MANIFEST).is_file():
            continue
        try:
            manifest = json.loads((path / MANIFEST).read_text())
            sound = manifest["step"] == int(match[1]) and isinstance(manifest["identity"], dict)
            sound = sound and all(len(entry) == 2 for entry in manifest["files"].values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError):
            sound = False
        if sound:
            found.append(Found(path, int(match[1]), bool(match[2]), manifest))
        else:
            found.append(Found(path, int(match[1]), bool(match[2]), {"files": {MANIFEST: [0, ""]}}))
    return sorted(found, key=lambda one: (one.step, not one.is_universal), reverse=True)


def damaged(found, rank=0, world_size=1):
    """What is wrong with the files of a checkpoint, in words; None if all are as they were written."""
    listed, there = found.manifest["files"], files_of(found.path)
    if MANIFEST in listed:
        return f"{MANIFEST} is damaged"
    if missing := sorted(listed.keys() - there.keys()):
        return f"{missing[0]} is missing"
    if extra := sorted(there.keys() - listed.keys()):
        return f"{extra[0]} does not belong to it"
    for name in sorted(listed)[rank::world_size]:
        size, digest = listed[name]
        if there[name].stat().st_size != size:
            return f"{name} has {there[name].stat().st_size} bytes in place of {size}"
        with there[name].open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                return f"{name} is damaged"
    return None


def prune(folder, keep, step):
    """Remove all but the newest `keep` steps up to `step`, the one just saved, and what earlier runs left half written.

    Later ones are damaged, or of a run that was begun anew: left there, they would count as newer than what is saved.
    """
    steps = sorted({found.step for found in complete(folder) if found.step <= step}, reverse=True)
    for found in complete(folder):
        if found.step not in steps[:keep]:
            discard(found.path)
    for path in folder.glob("step_*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def discard(path):
    """Remove a checkpoint: first its name, at once, and then its files, which takes a while."""
    if path.is_dir():
        shutil.rmtree(path.rename(path.with_name(f"{path.name}.old.partial")), ignore_errors=True)


def to_universal(folder):
    """Convert the newest whole checkpoint in `folder` to DeepSpeed's universal format; returns its path."""
    found = next((one for one in complete(folder) if not one.is_universal and damaged(one) is None), None)
    if found is None:
        raise UserError(f"no complete checkpoint in {folder}")
    final = found.path.with_name(f"{found.path.name}_universal")
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    convert_to_universal(argparse.Namespace(
        input_folder=str(found.path), output_folder=str(partial), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=False,
    ))  # fmt: skip
    publish(partial, final, found.manifest | {"files": checksums(partial)})
    return final


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint_dir", type=Path, help="the --checkpoint_dir of the run")
    try:
        print(f"{to_universal(parser.parse_args().checkpoint_dir)} continues on any number of ranks with --resume")
    except UserError as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
