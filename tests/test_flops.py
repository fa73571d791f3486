"""FLOPs against PyTorch's own counter, against published figures, and in a run's record."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flops
import train

SHAPE = {"num_layers": 3, "hidden_dim": 48, "vocab_size": 160, "seq_length": 32}


def counted(activation_checkpointing):
    """FLOPs a token of one forward and backward pass, as PyTorch's dispatcher sees them."""
    model = train.GPT(num_heads=4, activation_checkpointing=activation_checkpointing, **SHAPE)
    blocks = torch.randint(SHAPE["vocab_size"], (2, SHAPE["seq_length"] + 1))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(blocks).backward()
    return counter.get_total_flops() / (2 * SHAPE["seq_length"])


def test_model_flops_are_those_that_pytorch_counts():
    assert flops.model_flops_per_token(**SHAPE) == counted(activation_checkpointing=False)


def test_recomputed_flops_are_those_that_pytorch_counts_on_top():
    shape = {key: value for key, value in SHAPE.items() if key != "vocab_size"}
    extra = counted(activation_checkpointing=True) - counted(activation_checkpointing=False)
    # PyTorch's checkpoint stops as soon as it has what backward needs: each block's last product is not repeated.
    last = 2 * 4 * SHAPE["hidden_dim"] ** 2 * SHAPE["num_layers"]
    assert flops.recomputed_flops_per_token(**shape) - last == extra


def test_gpt_3_s_published_training_flops():
    """Brown et al. 2020 (arXiv 2005.14165), table D.1: 300 B tokens, 3.14e23 FLOPs, attention left out."""
    weights = flops.matmul_parameters(num_layers=96, hidden_dim=12288, vocab_size=50257)
    assert 6 * weights * 300e9 == pytest.approx(3.14e23, rel=0.01)


@pytest.mark.parametrize(
    "device, peak",
    [("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA A100-SXM4-80GB", 312), ("cpu (x86_64)", None)],
)
def test_peaks_are_found_by_the_name_that_cuda_reports(device, peak):
    assert flops.peak_tflops(device) == peak


def test_speed_is_of_one_device():
    speed = flops.speed(2e9, tokens_per_step=4000, step_time_s=0.5, world_size=4, device="NVIDIA A100-SXM4-80GB")
    assert speed["tflops_per_device"] == pytest.approx(2e9 * 4000 / 0.5 / 4 / 1e12)
    assert speed["mfu"] == pytest.approx(speed["tflops_per_device"] / 312)
    assert flops.speed(2e9, 4000, 0.5, 4, "cpu (x86_64)")["mfu"] is None
