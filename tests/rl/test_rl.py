"""Log-probabilities of given tokens, entropy masks, and the entropy controller."""

import math
from fractions import Fraction

import oracle
import pytest
import torch
from measure import memory

from liger_entropy import ComputeOptions, linear_token_statistics
from liger_entropy.rl import EntropyController, high_entropy_mask, selected_logprobs


def problem(dtype=torch.float32, T=12, D=17, V=1037, K=5):
    x = torch.randn(T, D).to(dtype).requires_grad_()
    w = (torch.randn(V, D) / 2).to(dtype).requires_grad_()
    ids = torch.randint(0, V, (T, K))
    ids[3] = ids[3, 0]  # one token repeated
    ids[:, 1] = 7  # and one at every position
    return x, w, ids


def exact(x, w, ids, bias=None, **transform):
    z = oracle.logits_of(x.double(), w.double(), linear_bias=bias, **transform)
    kept = ids != -100
    return torch.where(kept, z.log_softmax(-1).gather(1, torch.where(kept, ids, 0)), 0.0)


TRANSFORMS = [{}, dict(logit_scale=0.5, softcap=2.0, temperature=0.7), dict(temperature=torch.linspace(0.5, 2.0, 12))]


@pytest.mark.parametrize("transform", TRANSFORMS, ids=["none", "all", "per token"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_selected_logprobs_and_gradients(dtype, transform):
    x, w, ids = problem(dtype)
    bias = torch.randn(len(w), dtype=torch.float64, requires_grad=True)
    ids[5] = -100
    ids[6, 2:] = -100
    got = selected_logprobs(x, w, ids, linear_bias=bias, **transform)
    want = exact(x, w, ids, bias, **transform)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = dict(rtol=1e-10, atol=1e-10) if dtype == torch.float64 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.double(), want, **tolerance)
    upstream = torch.randn(want.shape, dtype=torch.float64)
    ours = torch.autograd.grad((got.double() * upstream).sum(), (x, w, bias))
    theirs = torch.autograd.grad((want * upstream).sum(), (x, w, bias))
    loose = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else dict(rtol=1e-4, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **(tolerance if dtype == torch.float64 else loose))


def test_autocast_rounds_the_operands_and_nothing_else():
    x, w, ids = problem()
    rounded = [t.detach().bfloat16().double().requires_grad_() for t in (x, w)]
    want = exact(*rounded, ids)
    upstream = torch.randn(want.shape)
    with torch.autocast("cpu", torch.bfloat16):
        got = selected_logprobs(x, w, ids)
        ours = torch.autograd.grad((got * upstream).sum(), (x, w))
    theirs = torch.autograd.grad((want * upstream).sum(), rounded)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_the_label_itself_gives_its_logprob_and_all_tokens_sum_to_one():
    x, w, ids = problem()
    y = ids[:, 0]
    logprob = linear_token_statistics(x, w, y).logprob
    torch.testing.assert_close(selected_logprobs(x, w, y[:, None])[:, 0], logprob, rtol=1e-6, atol=1e-6)
    every = torch.arange(len(w)).expand(len(x), -1)
    torch.testing.assert_close(selected_logprobs(x, w, every).exp().sum(-1), torch.ones(len(x)), rtol=1e-5, atol=1e-5)


def test_batched_ids_keep_their_shape():
    x, w, ids = problem()
    flat = selected_logprobs(x, w, ids)
    batched = selected_logprobs(x.view(3, 4, -1), w, ids.view(3, 4, -1))
    torch.testing.assert_close(batched, flat.view(3, 4, -1), rtol=0, atol=0)
    assert selected_logprobs(x, w, ids[:, :0]).shape == (12, 0)


def test_distillation_from_top_tokens_has_the_gradient_of_the_full_one_on_them():
    """A teacher's top-k cross-entropy, the usual use."""
    x, w, _ = problem()
    teacher = torch.randn(12, len(w)).softmax(-1)
    probability, ids = teacher.topk(8, dim=-1)
    loss = -(probability * selected_logprobs(x, w, ids)).sum()
    plain = -(probability * exact(x, w, ids)).sum()
    for a, b in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(plain, (x, w)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_no_logits_and_no_gathered_weights_are_made():
    x, w, ids = problem(T=256, D=128, V=4096, K=64)
    options = ComputeOptions(chunk_bytes=4096)
    used = memory(lambda: selected_logprobs(x, w, ids, options=options).sum().backward())
    weight, chunk = 4096 * 128 * 4, 256 * 1024 * 4
    assert used.largest <= weight, "larger than the weight's gradient and than a chunk"
    assert used.peak <= 4 * weight + 4 * chunk, f"{used}: one gradient of the weight's size for each id?"


def test_a_second_derivative_is_refused():
    x, w, ids = problem()
    (dx,) = torch.autograd.grad(selected_logprobs(x, w, ids).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dx.sum(), x)


def test_ids_are_checked_before_any_work():
    x, w, ids = problem()
    with pytest.raises(ValueError, match="token_ids: 1037"):
        selected_logprobs(x, w, torch.full_like(ids, 1037))
    with pytest.raises(ValueError, match=r"token_ids: -1 "):
        selected_logprobs(x, w, torch.full_like(ids, -1))
    with pytest.raises(ValueError, match=r"token_ids.*shape"):
        selected_logprobs(x, w, ids[:5])
    with pytest.raises(TypeError, match="token_ids"):
        selected_logprobs(x, w, ids.float())


def test_mask_takes_the_most_uncertain_fraction_of_the_counted_tokens():
    entropy = torch.tensor([[0.1, 5.0, 0.3, 9.0], [0.2, 0.4, 0.5, 0.6]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    got = high_entropy_mask(entropy, mask, 0.3)  # ceil(0.3 * 7) = 3 tokens; the 9.0 does not count
    assert got.dtype == torch.bool
    assert entropy[got].tolist() == pytest.approx([5.0, 0.5, 0.6])
    assert high_entropy_mask(entropy, mask, 1.0).equal(mask.bool())
    assert high_entropy_mask(entropy, mask, 1e-6).sum() == 1


@pytest.mark.parametrize("fraction", ["0.3", "0.1", "0.05", "0.7", "0.999", "0.0001", "1.0"])
def test_mask_counts_in_decimals(fraction):
    for n in (*range(1, 200), 1000, 10000):
        taken = high_entropy_mask(torch.arange(float(n)), torch.ones(n), float(fraction)).sum()
        assert taken == math.ceil(Fraction(fraction) * n), n


def test_mask_counts_more_tokens_than_fp32_can():
    n = 2**24 + 3  # rounds to 2**24 + 4
    assert high_entropy_mask(torch.zeros(n), torch.ones(n, dtype=torch.bool), 1.0).all()


def test_mask_takes_nan_last():
    entropy = torch.tensor([1.0, math.nan, 3.0, 2.0])
    assert high_entropy_mask(entropy, torch.ones(4), 0.5).tolist() == [False, False, True, True]
    assert high_entropy_mask(entropy, torch.ones(4), 1.0).all()


def test_mask_of_nothing_is_empty():
    entropy = torch.tensor([1.0, 2.0])
    assert not high_entropy_mask(entropy, torch.zeros(2), 0.5).any()
    assert high_entropy_mask(entropy[:0], torch.zeros(0), 0.5).shape == (0,)


def test_mask_is_detached_and_checks_its_arguments():
    entropy = torch.rand(4, requires_grad=True)
    assert not high_entropy_mask(entropy, torch.ones(4)).requires_grad
    with pytest.raises(ValueError, match="fraction"):
        high_entropy_mask(entropy, torch.ones(4), 0.0)
    with pytest.raises(ValueError, match="mask"):
        high_entropy_mask(entropy, torch.ones(3))


def test_training_on_the_masked_tokens_leaves_the_others_without_gradient():
    x, w, ids = problem()
    s = linear_token_statistics(x, w, ids[:, 0])
    mask = high_entropy_mask(s.entropy, torch.ones(12), 0.25)
    (dx,) = torch.autograd.grad(-(s.logprob * mask).sum(), x)
    assert mask.sum() == 3 and (dx[~mask] == 0).all() and (dx[mask] != 0).any(-1).all()


def test_controller_moves_against_the_error_by_the_stated_rule():
    controller = EntropyController(target=1.0, coef=0.02, rate=0.5)
    assert controller.update(0.4) == pytest.approx(0.02 * math.exp(0.5 * 0.6))
    assert controller.update(torch.tensor(2.0)) == pytest.approx(0.02 * math.exp(0.5 * 0.6 - 0.5))


def test_controller_stays_in_its_bounds_and_leaves_them_at_once():
    controller = EntropyController(target=1.0, coef=0.5, rate=1.0, max_coef=1.0, min_coef=0.1)
    for _ in range(100):
        controller.update(0.0)
    assert controller.coef == 1.0
    assert controller.update(2.0) == pytest.approx(math.exp(-1.0))
    assert controller.update(1e9) == 0.1
    assert controller.update(-1e9) == 1.0


def test_controller_holds_a_policy_that_would_collapse():
    """One softmax whose reward prefers its first class: without a bonus the entropy goes to 0."""

    def final_entropy(controller):
        z, reward = torch.zeros(8, requires_grad=True), torch.eye(8)[0]
        coef = 0.0 if controller is None else controller.coef
        for _ in range(600):
            log_p = z.log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum()
            (gradient,) = torch.autograd.grad((log_p.exp() * reward).sum() + coef * entropy, z)
            z = (z + gradient).detach().requires_grad_()
            coef = 0.0 if controller is None else controller.update(entropy)
        return entropy.item()

    assert final_entropy(None) < 0.1
    assert final_entropy(EntropyController(target=1.2)) == pytest.approx(1.2, abs=0.1)


def test_controller_state_round_trip_and_bad_numbers():
    controller = EntropyController(target=1.0)
    controller.update(0.0)
    other = EntropyController(target=1.0)
    other.load_state_dict(controller.state_dict())
    assert other == controller
    for bad in (dict(target=0.0), dict(target=math.nan), dict(target=1.0, rate=-1.0), dict(target=1.0, coef=2.0)):
        with pytest.raises(ValueError):
            EntropyController(**bad)
    with pytest.raises(ValueError, match="entropy"):
        controller.update(math.nan)


@pytest.mark.parametrize("bad", [math.nan, 5.0, 0.0, "many", None])
def test_controller_keeps_its_coefficient_when_a_bad_state_is_refused(bad):
    controller = EntropyController(target=1.0, coef=0.02)
    with pytest.raises((ValueError, TypeError)):
        controller.load_state_dict({"coef": bad})
    assert controller.coef == 0.02
