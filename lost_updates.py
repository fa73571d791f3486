"""How many weight updates rounding throws away, watched on a sample while the training runs.

A stored weight moves only if its update reaches half a unit in its last place. In bf16 (8 significant bits) that is
2^-9 to 2^-8 of the weight, more than most of Adam's updates; in fp32 it is 2^-25 to 2^-24.
"""

import torch
from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

SAMPLE = 1_000_000  # elements a rank: indices and snapshot take some 8 MB


def adamw_update(weight, exp_avg, exp_avg_sq, step, lr, betas, eps, weight_decay):
    """What AdamW's step number `step` (from 1) subtracts from `weight`, in fp32, given the moments after it.

    Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2. Tensors of any one shape and floating dtype.
    """
    mean = exp_avg.float() / (1 - betas[0] ** step)
    root = (exp_avg_sq.float() / (1 - betas[1] ** step)).sqrt_()
    return lr * (mean / root.add_(eps) + weight_decay * weight.float())


def lost_fraction(before, after, update):
    """Of the weights whose fp32 `update` is not zero, the share that is stored `after` as `before` (scalar tensor)."""
    moved = update != 0
    return ((before == after) & moved).sum() / moved.sum()


class LostUpdates:
    """Measures `lost_fraction` on a fixed, seeded sample of the master weights that this rank owns.

    Call `before` and `after` around an optimizer step. Under ZeRO-3 through DeepSpeed's public accessors of local
    state; under ZeRO-1 and -2, which have none, through the fragment those read: nothing is gathered from other ranks.
    """

    def __init__(self, engine, seed):
        self.engine, self.stage, self.snapshot = engine, engine.zero_optimization_stage(), None
        owned = [(p, count) for p in engine.module.parameters() if (count := self.owned_elements(p))]
        share = min(1.0, SAMPLE / max(1, sum(count for _, count in owned)))
        draw = torch.Generator().manual_seed(seed)
        self.sample = []
        for parameter, count in owned:
            chosen = torch.randint(count, (round(count * share),), generator=draw) if share < 1 else torch.arange(count)
            self.sample.append((parameter, chosen.int()))

    def owned_elements(self, parameter):
        """How many elements of the parameter's master weight live on this rank, ZeRO-3's padding left out."""
        if self.stage < 3:
            return 0 if parameter._hp_mapping is None else parameter._hp_mapping.get_hp_fragment().numel()
        partition = parameter.ds_tensor.ds_numel
        rank = torch.distributed.get_rank(parameter.ds_process_group)
        return max(0, min(partition, parameter.ds_numel - rank * partition))

    def read(self, key=None):
        """The sampled elements of the master weights, or of the optimizer state `key`, as one flat tensor."""
        parts = []
        for parameter, index in self.sample:
            if self.stage < 3:
                values = parameter._hp_mapping.get_hp_fragment(key)
            elif key is None:
                values = safe_get_local_fp32_param(parameter)
            else:
                values = safe_get_local_optimizer_state(parameter, key)
            parts.append(values.flatten().index_select(0, index.to(values.device)))
        return torch.cat(parts) if parts else torch.empty(0)

    def before(self):
        self.snapshot = self.read()

    def after(self):
        """The fraction of this rank's sample that the step just taken lost; NaN where no step was applied."""
        if not self.engine.was_step_applied():
            return torch.tensor(torch.nan)
        group = self.engine.optimizer.param_groups[0]
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        step = self.engine.global_steps - self.engine.skipped_steps
        update = adamw_update(self.snapshot, self.read("exp_avg"), self.read("exp_avg_sq"), step, **settings)
        return lost_fraction(self.snapshot, self.read(), update)
