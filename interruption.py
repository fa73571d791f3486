"""Stopping together: signals, launchers and ranks that disappear, and one rank's failure that concerns them all.

Before each step the ranks agree, in one small reduction on the host, whether any of them was asked to stop, so that all
stop after the same step. A thread on every rank watches the launcher, the other ranks of its machine and a key in the
process group's store: a rank that waits in a collective for one that is gone is ended within seconds.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import psutil
import torch
from deepspeed import comm as dist

from errors import UserError

CARRY_ON, STOP, STOP_BY_CTRL_C, FAIL = range(4)  # by precedence: the ranks agree on the largest
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher passes one request on several times within a moment; a person's second comes later.
SECOND_SIGNAL_S = 1
WATCH_S = 1
LEAVE_S = 3  # how long a failed rank waits for the others to leave quietly before its own end is noticed
ORPHAN_S = 45  # how long an orderly stop may take once the launcher is gone


class Stopped(Exception):
    """Training ends early, on every rank after the same step.

    status: for the run record; code: exit code; save: whether the state is good enough for a checkpoint.
    """

    def __init__(self, status, code, save=True):
        super().__init__(status)
        self.status, self.code, self.save = status, code, save


class _Wake(Exception):
    """Ends a wait for data from within a signal handler."""


class Interruption:
    """This rank's part in stopping. As a context it ends the whole run, in one message, when its body fails."""

    def __init__(self):
        self.request, self.waiting, self.failure, self.log = CARRY_ON, False, None, None
        self.came, self.watcher, self.group = {}, None, None
        # Until the ranks have met there is nothing to save: the system's own way ends a wait for another rank at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def note(self, number):
        """Remember a request to stop; a second signal of its kind leaves at once. Called in the watcher's thread."""
        now = time.monotonic()
        if now - self.came.setdefault(number, now) > SECOND_SIGNAL_S:
            leave_at_once(128 + number)
        self.ask_to_stop(STOP_BY_CTRL_C if number == signal.SIGINT else STOP)

    def ask_to_stop(self, request=STOP):
        self.request = max(self.request, request)
        os.kill(os.getpid(), signal.SIGUSR2)  # the main thread may be waiting for data

    def wake(self, *_):
        """The signal handler: ends a wait for data, once the watcher has noted why."""
        if self.waiting and self.request != CARRY_ON:
            self.waiting = False
            raise _Wake

    def introduce(self):
        """Once the process group is there: make the ranks known to each other and start to watch. Collective."""
        self.group = torch.distributed.new_group(backend="gloo")
        peers = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(peers, (socket.gethostname(), os.getpid()), group=self.group)
        for number in (*SIGNALS, signal.SIGUSR2):
            signal.signal(number, self.wake)
        self.watcher = Watcher(self, peers)
        self.watcher.start()

    def fetch(self, batches, count):
        """The next `count` batches; None where a signal or a failure came first, which `agree` then tells to all."""
        try:
            self.waiting = True
            if self.request == CARRY_ON:
                return [next(batches) for _ in range(count)]
        except _Wake:
            pass
        except Exception as error:
            # A launcher ends the data worker before it tells its rank: allow the signal to arrive.
            with contextlib.suppress(_Wake):
                time.sleep(1)
            if self.request == CARRY_ON:
                self.failure = f"rank {dist.get_rank()} has no data: {last_line(error)}"
        finally:
            self.waiting = False
        return None

    def agree(self, step):
        """Raise Stopped on every rank if any rank was asked to stop or has failed before this step. Collective."""
        decision = torch.tensor([FAIL if self.failure else self.request])
        torch.distributed.all_reduce(decision, torch.distributed.ReduceOp.MAX, group=self.group)
        if decision == FAIL:
            failures = [None] * dist.get_world_size()
            torch.distributed.all_gather_object(failures, self.failure, group=self.group)
            raise Stopped(f"failed: {next(filter(None, failures))}", code=1)
        if decision != CARRY_ON:
            raise Stopped(f"interrupted at step {step}", code=130 if decision == STOP_BY_CTRL_C else 0)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _traceback):
        if error is None or isinstance(error, UserError | SystemExit):
            self.off()
            return False
        if "--verbose" in sys.argv:
            traceback.print_exception(error)
        self.fail(f"rank {os.environ.get('RANK', 0)}: {describe(error)}", is_lost_connection(error))

    def off(self):
        """From here on ranks may leave."""
        if self.watcher:
            self.watcher.off.set()

    def fail(self, reason, is_echo=False, message=None):
        """End the run: tell the other ranks `reason`, print one message, exit with code 1.

        is_echo: this rank only felt another one's failure; that one, or the watcher that sees it gone, speaks first.
        """
        if is_echo:
            time.sleep(4 * WATCH_S)
        self.off()
        if self.watcher:
            self.watcher.tell("failure", reason)
        print(message or f"train.py: error: {reason}", file=sys.stderr, flush=True)
        self.record(reason)
        time.sleep(LEAVE_S)
        leave_at_once(1)

    def record(self, reason):
        if self.log is not None:
            self.log.write_record(f"failed: {reason}")


class Watcher(threading.Thread):
    """Looks once a second whether the launcher and the ranks are all there. Speaks through psutil and a TCPStore.

    peers: (host name, process id) by rank.
    """

    def __init__(self, interruption, peers):
        super().__init__(daemon=True)
        # Python runs a handler once the main thread is back from C, which a collective may never be: the number of
        # every signal comes through this pipe, too, and at once.
        self.signals, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.interruption, self.rank, self.off = interruption, dist.get_rank(), threading.Event()
        host = peers[self.rank][0]
        self.peers = {rank: psutil.Process(pid) for rank, (name, pid) in enumerate(peers) if name == host}
        self.launchers = launchers()
        # A connection of its own to the store that the process group met in: one thread's wait would block another's.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = torch.distributed.TCPStore(*address, is_master=False, timeout=timedelta(seconds=10))
        self.attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store survives a restart

    def run(self):
        orphan_since, has_asked = None, False
        while not self.off.is_set():
            for number in self.arrived(WATCH_S):
                self.interruption.note(number)
            if reason := self.reason():
                self.interruption.record(reason)
                leave_at_once(1)
            if orphan_since is None and not all(map(is_alive, self.launchers)):
                orphan_since = time.monotonic()
                self.interruption.ask_to_stop()
            if orphan_since is not None and time.monotonic() - orphan_since > ORPHAN_S:
                leave_at_once(1)
            # A rank that waits for data takes part in no reduction: it hears of a request from here.
            if self.interruption.request == CARRY_ON and self.told("request"):
                self.interruption.ask_to_stop()
            elif self.interruption.request != CARRY_ON and not has_asked:
                has_asked = True
                self.tell("request", "stop")

    def arrived(self, seconds):
        """The numbers of the signals to stop that come within so many seconds; returns as soon as there are some."""
        ready, _, _ = select.select([self.signals], [], [], seconds)
        return [number for number in os.read(self.signals, 64) if number in SIGNALS] if ready else []

    def reason(self):
        """Why the run cannot go on: what another rank told, or which one is gone; None if all is well."""
        told = self.told("failure")
        if told is not None:
            return told
        gone = [rank for rank, process in self.peers.items() if not is_alive(process)]
        # It may have told and then left, or the run may be over: look again.
        if not gone or self.off.wait(WATCH_S):
            return None
        if (told := self.told("failure")) is not None:
            return told
        reason = f"rank {gone[0]} is gone: it was killed, or it crashed without a word"
        if self.rank == min(rank for rank, process in self.peers.items() if is_alive(process)):
            print(f"train.py: error: {reason}", file=sys.stderr, flush=True)
            self.tell("failure", reason)
        return reason

    def told(self, what):
        """The "failure" or "request" that a rank has told, None if there is none."""
        key = f"{what} {self.attempt}"
        try:
            return self.store.get(key).decode() if self.store.check([key]) else None
        except (RuntimeError, OSError):  # where rank 0 lives, its store dies with it
            gone = what == "failure" and 0 not in self.peers
            return "rank 0 is gone, and with it the store that the ranks meet in" if gone else None

    def tell(self, what, words):
        with contextlib.suppress(RuntimeError, OSError):
            self.store.set(f"{what} {self.attempt}", words)


def launchers():
    """The processes that started this one: its parent, and above it those of the same launcher."""
    parents = psutil.Process().parents()
    return parents[:1] + [parent for parent in parents[1:] if is_launcher(parent)]


def is_launcher(process):
    with contextlib.suppress(psutil.Error):
        return any(Path(part).name.split(".")[0] in ("deepspeed", "torchrun") for part in process.cmdline()[:3])
    return False


def is_alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def quiet_worker(_index):
    """For a DataLoader's worker: a signal to the whole group is its rank's to answer, which ends by `leave_at_once`."""
    signal.set_wakeup_fd(-1)
    for number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def leave_at_once(code):
    """End this process and its data worker without waiting for anything."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def is_lost_connection(error):
    """Whether a collective failed because another rank is gone (gloo's and NCCL's words for it)."""
    words = ("connection closed", "connection reset", "broken pipe", "gloo", "nccl", "timed out", "socket")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def last_line(error):
    """An error in one line; of a data worker's, which carries a traceback, the line that counts."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return (lines[-1] if "Traceback" in str(error) else lines[0]).split("UserError: ")[-1][:300] or type(error).__name__


def describe(error):
    """An error in one line, with its kind and the place where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in place)
    return f"{type(error).__name__}: {last_line(error)}{where}"
