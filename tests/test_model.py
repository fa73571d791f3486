"""The decoder itself, in process: size, causality, initialisation, loss, and bf16 products on any CPU."""

import math

import pytest
import torch
import torch.nn.functional as F

import cpu_bf16
import train

TINY = {"num_layers": 2, "hidden_dim": 32, "num_heads": 4, "vocab_size": 100, "seq_length": 16}


def model(**changes):
    torch.manual_seed(0)
    return train.GPT(**TINY | changes)


def test_the_published_dimensions_have_6_86_billion_parameters():
    with torch.device("meta"):
        gpt = train.GPT(num_layers=32, hidden_dim=4096, num_heads=32, vocab_size=50257, seq_length=512)
    assert round(sum(p.numel() for p in gpt.parameters()) / 1e9, 2) == 6.86


def test_position_t_sees_no_later_token():
    gpt, tokens = model(), torch.arange(16)[None] % 100
    changed = tokens.clone()
    changed[0, 9] = 99
    before, after = gpt.logits(tokens), gpt.logits(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_target_of_position_t_is_token_t_plus_1():
    gpt, blocks = model(), torch.randint(100, (3, 17))
    log_probs = gpt.logits(blocks[:, :-1]).log_softmax(-1)
    by_hand = -sum(log_probs[b, t, blocks[b, t + 1]] for b in range(3) for t in range(16)) / (3 * 16)
    assert gpt(blocks).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_initial_weights():
    gpt = model(num_layers=8, hidden_dim=128)
    std = {name: p.std().item() for name, p in gpt.named_parameters()}
    assert std["blocks.3.qkv.weight"] == pytest.approx(0.02, rel=0.03)
    assert std["head.weight"] == pytest.approx(0.02, rel=0.05)
    assert std["tokens.weight"] == pytest.approx(0.02, rel=0.05)
    for residual in ("attention_out", "mlp_out"):
        assert std[f"blocks.5.{residual}.weight"] == pytest.approx(0.02 / math.sqrt(2 * 8), rel=0.03)
    assert all(p.eq(0).all() for name, p in gpt.named_parameters() if name.endswith("bias"))
    assert gpt.head.weight is not gpt.tokens.weight


@pytest.mark.parametrize(
    "tokens", [1, train.LOSS_CHUNK_TOKENS, train.LOSS_CHUNK_TOKENS + 1, 3 * train.LOSS_CHUNK_TOKENS]
)
def test_cross_entropy_and_its_gradient_are_pytorchs(tokens):
    torch.manual_seed(tokens)
    logits, targets = 3 * torch.randn(tokens, 50), torch.randint(50, (tokens,))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = train.CrossEntropy.apply(ours * 1, targets)  # * 1: a leaf is never overwritten in training either
    reference = F.cross_entropy(theirs, targets)
    (3 * loss).backward()
    (3 * reference).backward()
    torch.testing.assert_close(loss, reference)
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_cross_entropy_of_bf16_logits_is_computed_in_fp32():
    logits, targets = (4 * torch.randn(64, 300)).bfloat16(), torch.randint(300, (64,))
    loss = train.CrossEntropy.apply(logits.clone(), targets)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), targets).item(), rel=1e-6)


def test_without_gradients_the_logits_are_left_alone():
    logits = torch.randn(8, 5)
    kept = logits.clone()
    with torch.no_grad():
        train.CrossEntropy.apply(logits, torch.zeros(8, dtype=torch.long))
    assert torch.equal(logits, kept)


def assert_rounded_once(actual, exact):
    """`actual` (bf16) is the exact product but for fp32 additions and one rounding to bf16 (8 bits: half of 2^-8)."""
    assert actual.dtype is torch.bfloat16
    torch.testing.assert_close(actual.double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_bf16_linear_rounds_once_forward_and_backward(bias):
    torch.manual_seed(1)
    x, weight, grad = torch.randn(2, 5, 24).bfloat16(), torch.randn(7, 24).bfloat16(), torch.randn(2, 5, 7).bfloat16()
    inputs = [x, weight] + ([torch.randn(7).bfloat16()] if bias else [])
    ours = [t.clone().requires_grad_() for t in inputs]
    exact = [t.double().requires_grad_() for t in inputs]
    y, y_exact = cpu_bf16.linear(*ours), F.linear(*exact)
    y.backward(grad)
    y_exact.backward(grad.double())
    assert_rounded_once(y, y_exact)
    for mine, reference in zip(ours, exact, strict=True):
        assert_rounded_once(mine.grad, reference.grad)


def test_bf16_attention_is_causal_attention_rounded_once():
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 2, 4, 10, 8).bfloat16()
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert_rounded_once(cpu_bf16.causal_attention(q, k, v), exact)


def test_products_are_widened_for_bf16_only():
    x = torch.zeros(1)
    assert not cpu_bf16.needed_for(x)
    has_instructions = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert cpu_bf16.needed_for(x.bfloat16()) == (not has_instructions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cpu_bf16.needed_for(x) == (not has_instructions)
