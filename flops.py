"""Floating-point operations of training a decoder, and how much of its device's peak a run reaches.

Two kinds are kept apart (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B): model FLOPs are those that the
mathematics of forward and backward needs, whatever the implementation does; recomputing activations is extra.
"""

# Dense bf16 TFLOP/s by a part of the name that CUDA reports, from NVIDIA's data sheets; the first match counts.
PEAK_TFLOPS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
}


def matmul_parameters(num_layers, hidden_dim, vocab_size):
    """Weights that a token is multiplied with: four matrices a block, 12 h^2 in all, and the head, not look-ups."""
    return num_layers * 12 * hidden_dim**2 + vocab_size * hidden_dim


def model_flops_per_token(num_layers, hidden_dim, vocab_size, seq_length):
    """6N + 12 L h s: forward takes 2 operations a weight and backward 4; attention's two products take 4 s h forward.

    As is the custom, every token is counted as attending to all seq_length tokens, although half of them are masked.
    """
    attention = 12 * num_layers * hidden_dim * seq_length
    return 6 * matmul_parameters(num_layers, hidden_dim, vocab_size) + attention


def recomputed_flops_per_token(num_layers, hidden_dim, seq_length):
    """What activation checkpointing adds: one more forward pass of every block, 24 L h^2 + 4 L h s."""
    return 24 * num_layers * hidden_dim**2 + 4 * num_layers * hidden_dim * seq_length


def peak_tflops(device):
    """The device's dense bf16 peak in TFLOP/s, None where it is not known."""
    return next((peak for name, peak in PEAK_TFLOPS.items() if name in device), None)


def speed(flops_per_token, tokens_per_step, step_time_s, world_size, device):
    """{"tflops_per_device", "peak_tflops", "mfu"}: model FLOPs a second and device; mfu is their share of the peak."""
    tflops = flops_per_token * tokens_per_step / step_time_s / world_size / 1e12
    peak = peak_tflops(device)
    return {"tflops_per_device": tflops, "peak_tflops": peak, "mfu": tflops / peak if peak else None}
