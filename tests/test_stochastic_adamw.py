"""StochasticAdamW against torch.optim.AdamW: in fp32 for what it should do on average, in bf16 for its state."""

import copy
import math

import pytest
import torch

import stochastic_adamw
from stochastic_adamw import StochasticAdamW, random_halves, stochastic_round

ALL_LOWER_HALVES = torch.arange(1 << 16, dtype=torch.int32)
DRAWS = 1 << 14  # elements that stand for one, so that their mean has 1 / 128 of one's standard deviation
Z = 6  # standard errors that a mean may be off: one test in 5e8 fails by chance, and the seeds are fixed


def ulp(values):
    """The distance between the bf16 neighbours of fp32 `values`."""
    bits = values.abs().view(torch.int32) & -0x10000
    return (bits + 0x10000).view(torch.float32).double() - bits.view(torch.float32).double()


def weights_of(value, count=DRAWS):
    return torch.nn.Parameter(torch.full((count,), value, dtype=torch.bfloat16))


def take_steps(optimizer, gradients):
    """One step per gradient, each spread over all elements. Returns the only parameter and its state."""
    (weight,) = optimizer.param_groups[0]["params"]
    for gradient in gradients:
        weight.grad = torch.as_tensor(gradient).to(weight.dtype).expand_as(weight).clone()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def fp32_reference(value, gradients, **options):
    """The same steps by torch.optim.AdamW on one fp32 element."""
    weight = torch.nn.Parameter(torch.tensor([value], dtype=torch.bfloat16).float())
    return take_steps(torch.optim.AdamW([weight], **options), [torch.tensor(g).bfloat16() for g in gradients])


def assert_mean(stored, expected, roundings):
    """The mean of `stored` (bf16) is `expected` within Z standard errors of a sum of `roundings` random roundings.

    A rounding moves a value by less than one ulp and has a variance of at most ulp^2 / 4.
    """
    largest_ulp = ulp(stored.float()).max().item()
    tolerance = Z * largest_ulp / 2 * math.sqrt(roundings / stored.numel())
    assert abs(stored.double().mean().item() - expected.item()) <= tolerance + abs(expected.item()) * 1e-6


# ------------------------------------------------------------------------------------------------ stochastic_round


@pytest.mark.parametrize("sign", (0, -(1 << 15)))
def test_rounding_is_unbiased_for_every_exponent(sign):
    """Of the 2^16 random numbers, as many round away from zero as the value has 2^-16ths of an ulp: no bias at all."""
    generator = torch.Generator().manual_seed(0)
    for exponent in range(255):  # 0: the subnormals
        lower, mantissa = (torch.randint(limit, (), generator=generator).item() for limit in (1 << 16, 127))
        upper = sign + (exponent << 7) + mantissa  # the bits of the bf16 neighbour towards zero
        value = torch.tensor((upper << 16) + lower, dtype=torch.int32).view(torch.float32)
        rounded = stochastic_round(value.expand(1 << 16), ALL_LOWER_HALVES).view(torch.int16)
        assert [(rounded == neighbour).sum() for neighbour in (upper, upper + 1)] == [(1 << 16) - lower, lower]


def test_every_bf16_number_stays_as_it_is():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for random16 in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        rounded = stochastic_round(every.float(), torch.full(every.shape, random16, dtype=torch.int32))
        numbers = ~every.isnan()
        assert torch.equal(rounded.view(torch.int16)[numbers], every.view(torch.int16)[numbers])  # -0.0 and inf too
        assert rounded[~numbers].isnan().all()


def test_no_nan_becomes_a_number_and_no_infinity_a_nan():
    """Among them the NaNs whose set bits are all lost in the cut, and the one that a carry would turn into -0."""
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -0x400000, -0x7FFFFF], dtype=torch.int32)
    infinities = torch.tensor([math.inf, -math.inf])
    for random16 in (0, 1, 0xFFFF):
        assert stochastic_round(nans.view(torch.float32), torch.full((6,), random16, dtype=torch.int32)).isnan().all()
        rounded = stochastic_round(infinities, torch.full((2,), random16, dtype=torch.int32))
        assert torch.equal(rounded.float(), infinities)


def test_beyond_the_largest_bf16_the_upper_neighbour_is_infinity():
    largest = torch.tensor(torch.finfo(torch.float32).max).expand(2)
    rounded = stochastic_round(largest, torch.tensor([0, 0xFFFF], dtype=torch.int32))
    assert rounded.tolist() == [torch.finfo(torch.bfloat16).max, math.inf]


def test_rounding_leaves_its_arguments_alone():
    values, random16 = torch.tensor([1.003, -2.7]), torch.tensor([60000, 3], dtype=torch.int32)
    before = values.clone(), random16.clone()
    stochastic_round(values, random16)
    assert torch.equal(values, before[0]) and torch.equal(random16, before[1])


# -------------------------------------------------------------------------------------------------- random numbers


def key_of(place=0, step=1, start=0, **options):
    return StochasticAdamW([weights_of(0.0, 1)], **options)._key(place, step, start)


def test_random_halves_are_uniform():
    """Chi-squared of each number's upper and lower byte and of its lowest bit's run of neighbours."""
    count = 1 << 20
    for half in random_halves(count, key_of()):
        assert half.min() >= 0 and half.max() < 1 << 16
        for byte in (half >> 8, half & 255):
            expected = count / 256
            chi_squared = ((byte.bincount(minlength=256) - expected) ** 2 / expected).sum().item()
            assert abs(chi_squared - 255) < Z * math.sqrt(2 * 255)
        for bit in range(16):
            flips = ((half[1:] ^ half[:-1]) >> bit & 1).double().mean().item()
            assert abs(flips - 0.5) < Z * 0.5 / math.sqrt(count)


def test_other_seeds_ranks_tensors_and_steps_draw_other_numbers():
    """No two of the fields are correlated, at equal positions or shifted by one."""
    keys = [key_of(), key_of(seed=1), key_of(rank=1), key_of(place=1), key_of(step=2), key_of(start=1 << 16)]
    fields = torch.stack([half.double() for key in keys for half in random_halves(1 << 16, key)])
    count = fields.shape[1] - 1
    for shift in (0, 1):
        both = torch.corrcoef(torch.cat([fields[:, :count], fields[:, shift : shift + count]]))
        between = both[: len(fields), len(fields) :]
        if shift == 0:
            between = between - torch.eye(len(fields))
        assert between.abs().max().item() < Z / math.sqrt(count)


def test_numbers_do_not_depend_on_where_a_tensor_is_cut():
    whole = random_halves(1000, key_of())
    tail = random_halves(300, key_of(start=700))
    assert all(torch.equal(a[700:], b) for a, b in zip(whole, tail, strict=True))


def test_both_halves_of_a_key_count():
    assert not torch.equal(*(random_halves(99, torch.tensor([5, end], dtype=torch.int32))[0] for end in (6, 7)))


def test_keys_wrap_beyond_32_bit_positions():
    assert torch.equal(random_halves(5, key_of(start=1 << 32))[0], random_halves(5, key_of())[0])


# ------------------------------------------------------------------------------------------------------- the update


@pytest.mark.parametrize("gradient_dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("value, gradient", ((0.02, 1e-3), (-1.3, 0.7), (0.0, -2.0), (0.0, 3e-8), (300.0, 1e-20)))
def test_one_step_is_fp32_adamw_on_average(value, gradient, gradient_dtype):
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    weight = weights_of(value)
    weight.grad_dtype = None  # torch then lets a bf16 tensor have an fp32 gradient
    weight.grad = torch.full(weight.shape, gradient, dtype=gradient_dtype)
    optimizer = StochasticAdamW([weight], **options)
    expected = torch.nn.Parameter(weight.detach()[:1].float())
    expected.grad = weight.grad[:1].float()
    reference = torch.optim.AdamW([expected], **options)
    optimizer.step()
    reference.step()
    assert_mean(weight.detach(), expected.detach(), roundings=1)
    assert len(weight.unique()) <= 2  # the moments' rounding does not enter it
    for key in ("exp_avg", "exp_avg_sq"):
        assert_mean(optimizer.state[weight][key], reference.state[expected][key], roundings=1)


def test_weight_decay_alone_shrinks_weights_and_to_nearest_does_not():
    options, gradients = {"lr": 1e-3, "weight_decay": 0.1}, [0.0] * 200
    weight, _ = take_steps(StochasticAdamW([weights_of(0.7)], **options), gradients)
    expected, _ = fp32_reference(0.7, gradients, **options)
    assert_mean(weight, expected, roundings=200)
    nearest, _ = take_steps(torch.optim.AdamW([weights_of(0.7, 8)], fused=True, **options), gradients)
    assert torch.equal(nearest, weights_of(0.7, 8)) and expected.item() < 0.99 * nearest[0].item()


def test_the_second_moment_decays_and_to_nearest_it_does_not():
    gradients = [1.0] + [0.0] * 300
    _, state = take_steps(StochasticAdamW([weights_of(0.1)]), gradients)
    _, expected = fp32_reference(0.1, gradients)
    assert_mean(state["exp_avg_sq"], expected["exp_avg_sq"], roundings=301)
    _, nearest = take_steps(torch.optim.AdamW([weights_of(0.1, 8)], fused=True), gradients)
    assert (nearest["exp_avg_sq"] > 1.3 * expected["exp_avg_sq"].item()).all()


def test_updates_below_half_an_ulp_add_up_and_to_nearest_they_do_not():
    """0.02 has an ulp of 1.2e-4; two hundred steps of 1e-6 should move it by 2e-4."""
    options, gradients = {"lr": 1e-6, "weight_decay": 0.0}, [1.0] * 200
    weight, _ = take_steps(StochasticAdamW([weights_of(0.02)], **options), gradients)
    expected, _ = fp32_reference(0.02, gradients, **options)
    assert_mean(weight, expected, roundings=200)
    assert weights_of(0.02, 1).item() - expected.item() > 1.9e-4
    nearest, _ = take_steps(torch.optim.AdamW([weights_of(0.02, 8)], fused=True, **options), gradients)
    assert torch.equal(nearest, weights_of(0.02, 8))


def test_nan_gradients_are_not_hidden():
    weight, state = take_steps(StochasticAdamW([weights_of(1.0, 100)]), [math.nan])
    assert weight.isnan().all() and state["exp_avg"].isnan().all() and state["exp_avg_sq"].isnan().all()


# --------------------------------------------------------------------------------------------- the optimizer's shape


def two_weights(numel=1001):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator).bfloat16()) for size in (numel, 3 * numel)]


def small_run(steps=4, numel=1001, optimizer=None, first=0, **options):
    """A few steps on two tensors. Returns the optimizer."""
    optimizer = optimizer or StochasticAdamW(two_weights(numel), lr=1e-2, **options)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1 + step)
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
        optimizer.step()
    return optimizer


def all_bits(optimizer):
    weights = optimizer.param_groups[0]["params"]
    tensors = [t for w in weights for t in (w.detach(), *(optimizer.state[w][k] for k in ("exp_avg", "exp_avg_sq")))]
    return torch.cat(tensors).view(torch.int16)


def test_a_run_is_reproducible_from_its_seed_and_rank():
    bits = all_bits(small_run(seed=3, rank=1))
    assert torch.equal(bits, all_bits(small_run(seed=3, rank=1)))
    assert not torch.equal(bits, all_bits(small_run(seed=4, rank=1)))
    assert not torch.equal(bits, all_bits(small_run(seed=3, rank=0)))


@pytest.mark.parametrize("chunk", (1, 7, 1000, 4096))
def test_chunks_change_nothing(monkeypatch, chunk):
    whole = all_bits(small_run(steps=2, numel=101))
    monkeypatch.setattr(stochastic_adamw, "CPU_CHUNK", chunk)
    assert torch.equal(whole, all_bits(small_run(steps=2, numel=101)))


def test_one_tensor_at_a_time_is_the_same_run():
    """ZeRO-3 swaps its sub-groups into the param group and calls step() for each."""
    together = small_run(steps=1)
    weights = two_weights()
    apart = StochasticAdamW(weights, lr=1e-2)
    for weight, twin in zip(weights, together.param_groups[0]["params"], strict=True):
        weight.grad = twin.grad
        apart.param_groups[0]["params"] = [weight]
        apart.step()
    apart.param_groups[0]["params"] = weights
    assert torch.equal(all_bits(apart), all_bits(together))


def test_state_is_that_of_fused_adamw():
    ours, theirs = weights_of(1.0, 33), weights_of(1.0, 33)
    _, state = take_steps(StochasticAdamW([ours]), [1.0])
    _, reference = take_steps(torch.optim.AdamW([theirs], fused=True), [1.0])
    layout = {key: (value.dtype, value.shape, value.nbytes) for key, value in reference.items()}
    assert {key: (value.dtype, value.shape, value.nbytes) for key, value in state.items()} == layout


def test_state_dict_round_trip_continues_bit_for_bit(tmp_path):
    straight = all_bits(small_run(steps=6, seed=5))
    half = small_run(steps=3, seed=5)
    torch.save(half.state_dict(), tmp_path / "state.pt")
    weights = [torch.nn.Parameter(w.detach().clone()) for w in half.param_groups[0]["params"]]
    resumed = StochasticAdamW(weights, seed=5)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(straight, all_bits(small_run(steps=3, optimizer=resumed, first=3)))


def test_a_deep_copy_continues_bit_for_bit():
    optimizer = small_run(steps=3, seed=5)
    twin = copy.deepcopy(optimizer)
    assert torch.equal(*(all_bits(small_run(steps=2, optimizer=each, first=3)) for each in (optimizer, twin)))


def test_tensors_may_share_a_step_tensor():
    """As they do on a ZeRO-3 rank after it has loaded a universal checkpoint."""
    optimizer = small_run(steps=1)
    first, second = optimizer.param_groups[0]["params"]
    optimizer.state[first]["step"] = optimizer.state[second]["step"]
    small_run(steps=2, optimizer=optimizer)
    assert [float(optimizer.state[weight]["step"]) for weight in (first, second)] == [3, 3]


def test_empty_tensors_and_those_without_gradient():
    empty, idle, used = weights_of(1.0, 0), weights_of(1.0, 5), weights_of(1.0, 1)
    empty.grad, used.grad = torch.zeros_like(empty), torch.ones_like(used)
    optimizer = StochasticAdamW([empty, idle, used], lr=0.1)
    optimizer.step()
    assert idle not in optimizer.state and torch.equal(idle, weights_of(1.0, 5))
    assert optimizer.state[empty]["exp_avg"].shape == (0,) and used.item() < 0.95


def test_param_groups_have_their_own_options():
    still, moving = weights_of(1.0, 100), weights_of(1.0, 100)
    still.grad, moving.grad = torch.ones_like(still), torch.ones_like(moving)
    StochasticAdamW([{"params": [still], "lr": 0.0}, {"params": [moving]}], lr=0.1).step()
    assert (still == 1).all() and (moving < 0.95).all()


def test_step_returns_the_loss_of_a_closure():
    weight = weights_of(1.0, 3)
    optimizer = StochasticAdamW([weight])

    def closure():
        loss = weight.float().square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3 and weight.grad is not None


def test_only_contiguous_bf16_parameters_are_taken():
    with pytest.raises(ValueError, match="torch.float32"):
        StochasticAdamW([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="contiguous"):
        StochasticAdamW([torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16).t())])
    optimizer = StochasticAdamW([weights_of(1.0, 3)])
    swapped_in = torch.zeros(3, requires_grad=True)
    swapped_in.grad = torch.ones(3)
    optimizer.param_groups[0]["params"] = [swapped_in]
    with pytest.raises(ValueError, match="torch.float32"):
        optimizer.step()
