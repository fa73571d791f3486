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


ROWS = 256  # widened at once: what passes between two products stays in the cache


class _Linear(torch.autograd.Function):
    """F.linear in fp32 on bf16 tensors. It saves the bf16 tensors: under ZeRO-3 a widened copy of the weight would
    outlive the partitioning of the weight itself."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # (..., in), (out, in), (out,) or None -> (..., out)
        ctx.save_for_backward(x, weight)
        output = x.new_empty(*x.shape[:-1], len(weight))
        wide_weight, wide_bias = weight.float(), None if bias is None else bias.float()
        with torch.autocast("cpu", enabled=False):
            for y, rows in zip(_pieces(output), _pieces(x), strict=True):
                y.copy_(F.linear(rows.float(), wide_weight, wide_bias))
        return output

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wide_weight = weight.float()
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(wide_weight)
        grad_bias = wide_weight.new_zeros(len(weight)) if ctx.needs_input_grad[2] else None
        for to, rows, g in zip(_pieces(grad_x), _pieces(x), _pieces(grad.contiguous()), strict=True):
            g = g.float()
            to.copy_(g @ wide_weight)
            grad_weight.addmm_(g.t(), rows.float())
            if grad_bias is not None:
                grad_bias += g.sum(0)
        return grad_x, grad_weight.to(weight.dtype), None if grad_bias is None else grad_bias.to(weight.dtype)


def _pieces(tensor):
    """Views of (..., width) as up to ROWS rows each."""
    return tensor.flatten(0, -2).split(ROWS)


def linear(x, weight, bias=None):
    """F.linear(x, weight, bias) in bf16; x (..., in), weight (out, in), bias (out,) or None -> (..., out)."""
    return _Linear.apply(x.bfloat16().contiguous(), weight, bias)


def causal_attention(q, k, v):
    """Causal scaled dot-product attention of bf16 (batch, heads, seq, head_dim) tensors -> the same shape."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).bfloat16()
