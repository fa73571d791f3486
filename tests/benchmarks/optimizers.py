"""Stochastic rounding optimizers side by side: speed, state and what survives of small updates, as a Markdown table.

    pip install --no-deps torchao==0.18.0 heavyball==3.2.1
    python tests/benchmarks/optimizers.py

Under the deepspeed launcher, with PEER=torchao or PEER=heavyball in the environment, it is train.py with that optimizer
in place of StochasticAdamW: give it train.py's arguments and configs/bf16_full_sr.json.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from stochastic_adamw import StochasticAdamW

ELEMENTS, REPEATS, STEPS = 1 << 22, 7, 1000
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def torchao(params, seed=0, rank=0, **settings):
    from torchao.optim import _AdamW

    torch.manual_seed(1000 * seed + rank)  # its random numbers are PyTorch's own
    return _AdamW(params, bf16_stochastic_round=True, **settings)


def heavyball(params, seed=0, rank=0, **settings):
    import heavyball

    torch.manual_seed(1000 * seed + rank)
    return heavyball.AdamW(params, storage_dtype="bfloat16", **settings)


def fused(params, **settings):
    return torch.optim.AdamW(params, fused=True, **settings)


# name: (optimizer, dtype of the weights)
OPTIMIZERS = {
    "torch fused, fp32": (fused, torch.float32),
    "torch fused, bf16 to nearest": (fused, torch.bfloat16),
    "StochasticAdamW": (StochasticAdamW, torch.bfloat16),
    "torchao": (torchao, torch.bfloat16),
    "heavyball": (heavyball, torch.bfloat16),
}


def build(name, elements=ELEMENTS, **settings):
    make, dtype = OPTIMIZERS[name]
    weight = torch.nn.Parameter(torch.ones(elements, dtype=dtype, device=DEVICE))
    return make([weight], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **settings), weight


def one_step_s(optimizer, weight, gradient):
    """Seconds of one optimizer step. The gradient is given anew each time: heavyball takes it away."""
    weight.grad = gradient
    start = time.perf_counter()
    optimizer.step()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speeds(names):
    """{name: median nanoseconds an element}: one step of each in turn, after a first that compiles."""
    built, samples = {name: build(name) for name in names}, {name: [] for name in names}
    gradients = {dtype: torch.randn(ELEMENTS, device=DEVICE).to(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for repeat in range(1 + REPEATS):
        for name, (optimizer, weight) in built.items():
            seconds = one_step_s(optimizer, weight, gradients[weight.dtype])
            samples[name] += [seconds] if repeat else []
    return {name: 1e9 * statistics.median(times) / ELEMENTS for name, times in samples.items()}


def survivors(name):
    """(moved, decayed, state bytes a parameter, keys) of 4096 equal weights of 1.0, after 1000 steps of lr 1e-4.

    With a constant gradient Adam's every update is lr: in fp32 the weights end at 0.9. When the gradients then stop,
    exp_avg_sq falls to 0.999^1000 of itself. Returned are the mean movement and decay, as shares of those.
    """
    optimizer, weight = build(name, elements=4096)
    for _ in range(STEPS):
        one_step_s(optimizer, weight, torch.full_like(weight, 0.5))
    moved = (1 - weight.detach().double().mean().item()) / (STEPS * 1e-4)
    state = next(iter(optimizer.state.values()))
    tensors = {key: value for key, value in flat(state) if torch.is_tensor(value) and value.numel() == weight.numel()}
    square = next((tensor for key, tensor in tensors.items() if "exp_avg_sq" in key), None)
    size = sum(tensor.element_size() for tensor in tensors.values())
    decayed = None
    if square is not None:
        before = square.double().mean().item()
        for _ in range(STEPS):
            one_step_s(optimizer, weight, torch.zeros_like(weight))
        state = dict(flat(next(iter(optimizer.state.values()))))
        square = next(value for key, value in state.items() if "exp_avg_sq" in key)
        decayed = (before - square.double().mean().item()) / (before * (1 - 0.999**STEPS))
    return moved, decayed, size, sorted(tensors)


def flat(state, prefix=""):
    """(key, value) of a state whose values may be dictionaries again, as heavyball's are."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def available(name):
    try:
        build(name, elements=16)
    except ImportError:
        return False
    return True


def main():
    names = [name for name in OPTIMIZERS if available(name)]
    print(f"torch {torch.__version__} on {DEVICE}, {torch.get_num_threads()} threads, {ELEMENTS:,} elements\n")
    print("| Optimizer | ns an element | state bytes a parameter | updates kept | decay kept | state keys |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    speed = speeds(names)
    for name in names:
        moved, decayed, size, keys = survivors(name)
        decay = "n/a" if decayed is None else f"{decayed:.1%}"
        print(f"| {name} | {speed[name]:.2f} | {size} | {moved:.1%} | {decay} | {', '.join(keys)} |", flush=True)


def train_with(peer):
    import train

    train.StochasticAdamW = {"torchao": torchao, "heavyball": heavyball}[peer]
    train.main()


if __name__ == "__main__":
    train_with(os.environ["PEER"]) if "PEER" in os.environ else main()
