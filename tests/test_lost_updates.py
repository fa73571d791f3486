"""The trap, by hand: which updates a stored weight survives, and the share that was lost."""

import pytest
import torch

from lost_updates import adamw_update, lost_fraction

SETTINGS = {"betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}


def step_once(weight, gradient, lr, dtype):
    """One PyTorch AdamW step of a stored weight under a constant gradient; returns (before, after, fp32 update)."""
    parameter = torch.full((4,), weight, dtype=dtype).requires_grad_()
    before = parameter.detach().clone()
    parameter.grad = torch.full_like(parameter, gradient)
    optimizer = torch.optim.AdamW([parameter], lr, fused=True, **SETTINGS)
    optimizer.step()
    state = optimizer.state[parameter]
    update = adamw_update(before, state["exp_avg"], state["exp_avg_sq"], 1, lr, **SETTINGS)
    return before, parameter.detach(), update


@pytest.mark.parametrize("lr, lost", [(2**-9 * 0.9, 1.0), (2**-9 * 1.1, 0.0), (2**-8, 0.0)])
def test_below_one_the_bf16_neighbour_of_1_is_2_to_the_minus_8_away(lr, lost):
    """A constant gradient makes Adam's first update the learning rate itself: m / (1 - b1) over sqrt(v / (1 - b2))
    is 1. Half a unit in the last place below 1.0 is 2^-9."""
    before, after, update = step_once(1.0, 0.5, lr, torch.bfloat16)
    assert update.tolist() == pytest.approx([lr] * 4, rel=2**-7)  # the stored moments have 8 bits
    assert lost_fraction(before, after, update) == lost


def test_in_fp32_the_same_update_is_kept():
    before, after, update = step_once(1.0, 0.5, 2**-9 * 0.9, torch.float32)
    assert (before - after).tolist() == pytest.approx(update.tolist(), rel=1e-3)
    assert lost_fraction(before, after, update) == 0


def test_weights_that_were_not_to_move_do_not_count():
    before = torch.tensor([1.0, 1.0, 2.0, 3.0])
    after = torch.tensor([1.0, 1.0, 2.0, 3.5])
    update = torch.tensor([0.0, 1e-9, 1e-9, -0.5])
    assert lost_fraction(before, after, update) == pytest.approx(2 / 3)


def test_nothing_to_move_is_no_fraction():
    assert lost_fraction(torch.ones(3), torch.ones(3), torch.zeros(3)).isnan()


def test_the_update_is_adamws():
    torch.manual_seed(0)
    parameter = torch.randn(50).requires_grad_()
    optimizer = torch.optim.AdamW([parameter], 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(1, 4):
        before = parameter.detach().clone()
        parameter.grad = torch.randn(50)
        optimizer.step()
        state = optimizer.state[parameter]
        update = adamw_update(before, state["exp_avg"], state["exp_avg_sq"], step, 1e-2, (0.8, 0.95), 1e-6, 0.1)
        torch.testing.assert_close(before - update, parameter.detach())
