"""train.py as it is, with one fault on one rank. Run under the launcher; FAULT is KIND:RANK:STEP.

KIND: "raise" in the step, "sleep" for ever in it, "no-data" (its data worker fails from there on, and again at every
attempt) or "slow-data" (its data worker stalls there).
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import text_source
import train

KIND, RANK, STEP = os.environ["FAULT"].split(":")


def faulty_step(train_step):
    def step(engine, batches, log):
        if log.next_step == int(STEP):
            if KIND == "raise":
                raise ArithmeticError("the numbers do not add up")
            time.sleep(1000)
        return train_step(engine, batches, log)

    return step


def faulty_block(block):
    def failing(self, index):
        if index // (self.micro_batch * self.world_size) >= int(STEP):
            if KIND == "slow-data":
                time.sleep(1000)
            raise ConnectionError("the cable is cut")
        return block(self, index)

    return failing


if __name__ == "__main__":
    text_source.RETRY_WAITS_S = (0.1, 0.2)
    if os.environ["RANK"] == RANK:
        if KIND in ("raise", "sleep"):
            train.train_step = faulty_step(train.train_step)
        else:
            train.RandomBlocks.block = faulty_block(train.RandomBlocks.block)
    try:
        train.main()
    except train.UserError as error:
        train.leave(error)
