"""AdamW for bf16 weights and bf16 moments that rounds stochastically, so that small updates survive on average.

A bf16 number has 8 significant bits. Rounded to nearest, any change below half a unit in the last place is lost: under
a small learning rate weights stand still, and exp_avg_sq, which should shrink by 0.1 % a step, cannot shrink at all.
Rounded up with a probability equal to the distance from the neighbour below, what is stored is right on average, at
the same bytes (Zamirai et al. 2020, arXiv 2010.06192; Ozkara et al. 2025, arXiv 2502.20566).
"""

import functools
import hashlib
import math
import struct

import torch

CPU_CHUNK = 1 << 18  # elements: about 10 MB of fp32 temporaries; fewer cost calls, more cost cache misses
ACCELERATOR_CHUNK = 1 << 26  # elements: the compiled update has no temporaries; this bounds them should it not compile
STRIDE = -0x61C88647  # the odd integer nearest to 2^32 / golden ratio, as int32: sets consecutive elements far apart


def stochastic_round(values, random16):
    """`values` (fp32) rounded to one of the two bf16 neighbours, so that the mean over `random16` is the value itself.

    random16: int32, same shape, uniform in [0, 2^16). bf16 is the upper half of fp32: a random number added to the
    lower half carries into the upper one as often as it should, for either sign and for subnormals too. Numbers that
    bf16 can hold, infinities and NaNs stay; beyond the largest finite bf16 the upper neighbour is infinity.
    """
    bits = values.view(torch.int32) + random16
    rounded = bits.bitwise_and_(-0x10000).view(torch.float32)
    # A carry can turn a NaN into a number, a cut can turn it into infinity. The bound is NaN for NaN, else infinity;
    # a comparison and torch.where would take four times as long on the CPU.
    return rounded.clamp_(max=values.clamp(min=math.inf)).to(torch.bfloat16)


def random_halves(count, key):
    """Three int32 tensors (count,), uniform in [0, 2^16), which depend on position and `key` (int32, (2,)) alone.

    A hash of a counter instead of a generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no
    state to save, the same numbers however a tensor is cut, and it fuses into the compiled update. The mixing is
    lowbias32's (Wellons, hash-prospector); Knuth's multiplier makes the second and third number of the first.
    Of a product mod 2^32 only the upper bits are random, hence the halves. Shifts of int32 copy the sign: masked away.
    """
    x = torch.arange(count, dtype=torch.int32, device=key.device).mul_(STRIDE).add_(key[0])
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).add_(key[1])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(-0x7B935975)
    first = (x >> 16).bitwise_and_(0xFFFF)
    second = (x.mul_(1664525) >> 16).bitwise_and_(0xFFFF)
    third = (x.mul_(1664525) >> 16).bitwise_and_(0xFFFF)
    return first, second, third


def _update(weight, grad, exp_avg, exp_avg_sq, key, scalars, beta1, beta2):
    """One step for flat tensors, in place and in fp32. What changes from step to step is a tensor: no recompiling."""
    for_weight, for_exp_avg, for_exp_avg_sq = random_halves(weight.numel(), key)
    decay, step_size, eps = scalars.unbind()
    grad = grad.float()
    mean = exp_avg.float().lerp_(grad, 1 - beta1)
    exp_avg.copy_(stochastic_round(mean, for_exp_avg))
    square = exp_avg_sq.float().mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    exp_avg_sq.copy_(stochastic_round(square, for_exp_avg_sq))
    # The weight moves by the moments in fp32, before rounding, so that one rounding does not enter another.
    change = mean.div_(square.sqrt_().add_(eps)).mul_(step_size)
    weight.copy_(stochastic_round(weight.float().mul_(decay).sub_(change), for_weight))


@functools.cache
def _compiled_update():
    return torch.compile(_update, dynamic=True)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) that stores bf16 weights and moments, rounded stochastically.

    Every step is computed in fp32; gradients may be bf16 or fp32. The state has the keys, dtypes and bytes of
    torch.optim.AdamW(fused=True), so that DeepSpeed partitions, shows and saves it alike. DeepSpeed takes it as
    `initialize(optimizer=lambda params: StochasticAdamW(params, ...))` with "zero_allow_untested_optimizer": true.

    The random numbers follow from `seed`, `rank`, the tensor's place, the step and the element's index: a resumed run
    with the same seed and rank continues bit for bit. Under ZeRO each rank owns other weights and passes its own rank;
    under plain data parallelism all ranks must pass the same one, or the replicas drift apart.

    Raises ValueError for a parameter that is not contiguous bf16.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, *, seed=0, rank=0):
        # Not in the param groups: from there a universal checkpoint hands rank 0's values to every rank.
        self.seed, self.rank, self._places = seed, rank, {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        for group in self.param_groups:
            for weight in group["params"]:
                _check(weight)

    def __getstate__(self):  # for copies and pickles; torch's own keeps the defaults, the state and the groups only
        return super().__getstate__() | {"seed": self.seed, "rank": self.rank, "_places": self._places}

    @torch.no_grad()
    def step(self, closure=None):
        """Update each parameter that has a gradient. Returns the loss of `closure`, where there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                # ZeRO-3 shows one sub-group a call, always in the same order: the place is the order of appearance.
                place = self._places.setdefault(weight, len(self._places))
                if weight.grad is not None:
                    self._step_one(weight, place, group)
        return loss

    def _step_one(self, weight, place, group):
        _check(weight)  # again: DeepSpeed swaps in flat partitions of its own
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)  # stays on the host, where it is read
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        # Not "+=": after a universal checkpoint the sub-groups of a ZeRO-3 rank share one step tensor.
        state["step"] = state["step"] + 1
        step = int(state["step"])
        scalars = _scalars(step, group).to(weight.device, non_blocking=True)
        tensors = [t.reshape(-1) for t in (weight.detach(), weight.grad, state["exp_avg"], state["exp_avg_sq"])]
        update, chunk = (_update, CPU_CHUNK) if weight.device.type == "cpu" else (_compiled_update(), ACCELERATOR_CHUNK)
        for start in range(0, weight.numel(), chunk):
            pieces = (tensor[start : start + chunk] for tensor in tensors)
            key = self._key(place, step, start).to(weight.device, non_blocking=True)
            update(*pieces, key, scalars, *group["betas"])

    def _key(self, place, step, start):
        """The key (int32, (2,)) that gives elements from `start` on the numbers they have in the whole tensor."""
        text = f"{self.seed} {self.rank} {place} {step}".encode()
        first, second = struct.unpack("<2I", hashlib.blake2b(text, digest_size=8).digest())
        return torch.tensor([(first + start * STRIDE) % 2**32, second]).to(torch.int32)  # wraps, as the hash does


def _scalars(step, group):
    """Weight decay's factor, step size and eps as one fp32 tensor.

    torch's update, lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps), with its corrections in the last two.
    """
    beta1, beta2 = group["betas"]
    correction = math.sqrt(1 - beta2**step)
    step_size = group["lr"] * correction / (1 - beta1**step)
    return torch.tensor([1 - group["lr"] * group["weight_decay"], step_size, group["eps"] * correction])


def _check(weight):
    if weight.dtype != torch.bfloat16:
        raise ValueError(f"StochasticAdamW rounds to bfloat16: it cannot update a parameter of dtype {weight.dtype}")
    if not weight.is_contiguous():
        raise ValueError(f"StochasticAdamW needs contiguous parameters, not one of strides {weight.stride()}")
