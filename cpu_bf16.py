"""Bf16 matrix products on CPUs that have no bf16 instructions.

There PyTorch falls back to a scalar loop, about ten times slower than fp32. A bf16 matrix unit multiplies bf16
numbers, adds up in fp32 and rounds the sum to bf16 once; doing the same with an fp32 product of the widened inputs
gives that result (to the order of the additions) at fp32 speed. Parameters, activations and gradients stay bf16.
"""

import torch
import torch.nn.functional as F


def needed_for(tensor):
    """Whether products of `tensor` are bf16, by dtype or by autocast, on a CPU without bf16 instructions."""
    if tensor.device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    autocast_dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else tensor.dtype
    return autocast_dtype is torch.bfloat16


class _Linear(torch.autograd.Function):
    """F.linear in fp32 on bf16 tensors. It saves the bf16 tensors: under ZeRO-3 a widened copy of the weight would
    outlive the partitioning of the weight itself."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # (..., in), (out, in), (out,) or None -> (..., out)
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).bfloat16()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad, rows = grad.float().flatten(0, -2), x.float().flatten(0, -2)
        return (
            (grad @ weight.float()).bfloat16().view_as(x) if ctx.needs_input_grad[0] else None,
            (grad.t() @ rows).to(weight.dtype) if ctx.needs_input_grad[1] else None,
            grad.sum(0).to(weight.dtype) if ctx.needs_input_grad[2] else None,
        )


def linear(x, weight, bias=None):
    """F.linear(x, weight, bias) in bf16; x (..., in), weight (out, in), bias (out,) or None -> (..., out)."""
    return _Linear.apply(x.bfloat16(), weight, bias)


def causal_attention(q, k, v):
    """Causal scaled dot-product attention of bf16 (batch, heads, seq, head_dim) tensors -> the same shape."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).bfloat16()
