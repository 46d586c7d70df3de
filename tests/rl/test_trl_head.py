"""The fused head for TRL on tiny models: the model's own logits, whatever it does to them."""

import copy
import math
import warnings

import oracle
import pytest
import tiny
import torch
import trl.trainer.utils as trl_utils
from measure import memory

from liger_entropy.huggingface import apply_liger_entropy, remove_liger_entropy
from liger_entropy.integrations.trl import add_fused_lm_head, apply_to_trl, remove_from_trl

ALL = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def batch(vocab, B=3, S=9):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, vocab, (B, S), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100
    return ids, mask, labels


def expected(model, ids, mask, labels, temperature):
    """Every field of TRL's output from the logits that the model itself returns, in fp64."""
    z = model(input_ids=ids, attention_mask=mask).logits[:, :-1].double() / temperature
    y = labels[:, 1:]
    kept = y != -100
    s = oracle.statistics(z.reshape(-1, z.shape[-1]), y)
    log_p = z.log_softmax(-1)
    zero = lambda values: torch.where(kept, values, 0.0)  # noqa: E731
    return dict(
        log_probs=s["logprob"], entropy=s["entropy"], is_top1=(s["prediction"] == y) & kept, label_mask=kept,
        mean_logits=zero(z.mean(-1)).detach(), log_sum_sq_probs=zero((2 * log_p).logsumexp(-1)).detach(),
    )  # fmt: skip


@pytest.mark.parametrize("family", list(tiny.CONFIGS))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_every_field_is_that_of_the_models_own_logits(family, temperature):
    """Also Granite's scale, and the softcaps of Gemma 2 and RecurrentGemma, whose config names it differently."""
    model = tiny.model(family)
    ids, mask, labels = batch(model.config.vocab_size)
    want = expected(model, ids, mask, labels, temperature)
    add_fused_lm_head(model, temperature, outputs=ALL)
    got = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    for name, value in want.items():
        ours = getattr(got, name)
        if value.is_floating_point():
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), value, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(ours, value), name
    loss = -want["log_probs"].sum() / want["label_mask"].sum()
    if got.aux_loss is not None:
        loss = loss + 0.1 * got.aux_loss
    torch.testing.assert_close(got.loss.double(), loss.double(), rtol=1e-5, atol=1e-5)
    assert (got.aux_loss is not None) == (family == "mixtral")


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2", "mixtral"])
def test_all_fields_agree_with_trls_own_head(family):
    results = []
    for add in (trl_utils.add_fused_lm_head, add_fused_lm_head):
        model = tiny.model(family)
        add(model, 0.7, outputs=ALL)
        ids, mask, labels = batch(model.config.vocab_size)
        results.append(model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True))
    theirs, ours = results
    assert type(ours) is type(theirs)
    for name in (*ALL, "loss", "aux_loss", "label_mask"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
def test_entropy_and_log_prob_gradients_reach_every_parameter(family):
    gradients = []
    for fused in (True, False):
        model = tiny.model(family)
        ids, mask, labels = batch(model.config.vocab_size)
        if fused:
            add_fused_lm_head(model, 0.6, outputs=("log_probs", "entropy"))
            out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            log_probs, entropy = out.log_probs, out.entropy
        else:
            want = expected(model, ids, mask, labels, 0.6)
            log_probs, entropy = want["log_probs"], want["entropy"]
        weights = torch.linspace(-1, 2, log_probs.numel()).view(log_probs.shape)
        ((weights * log_probs).sum() + (weights.flip(0) * entropy).sum()).backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_fields_that_were_not_asked_for_are_none():
    model = tiny.model()
    add_fused_lm_head(model)
    ids, mask, labels = batch(model.config.vocab_size)
    out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert out.log_probs is not None
    assert all(getattr(out, name) is None for name in ALL[1:])


def test_shift_labels_are_scored_where_they_stand():
    model = tiny.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask, labels = batch(model.config.vocab_size)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    a = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    b = model(input_ids=ids, attention_mask=mask, shift_labels=shifted, fused_lm_head=True)
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(getattr(b, name)[:, :-1], getattr(a, name))
        assert (getattr(b, name)[:, -1] == 0).all()


def test_labels_of_bytes_are_all_kept():
    """-100 modulo 256 is a token."""
    model = tiny.model()
    add_fused_lm_head(model, outputs=("log_probs", "is_top1"))
    ids = torch.full((1, 6), 156)
    wide, narrow = (model(input_ids=ids, labels=y, fused_lm_head=True) for y in (ids, ids.to(torch.uint8)))
    assert narrow.label_mask.all()
    for name in ("loss", "log_probs", "is_top1"):
        assert torch.equal(getattr(narrow, name), getattr(wide, name)), name


def test_num_items_in_batch_divides_the_loss():
    model = tiny.model()
    add_fused_lm_head(model)
    ids, mask, labels = batch(model.config.vocab_size)
    for items in (7, 7.0, torch.tensor(7)):
        out = model(input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=items, fused_lm_head=True)
        torch.testing.assert_close(out.loss, -out.log_probs.sum() / 7)


def test_a_batch_without_labels_to_score_gives_a_connected_zero():
    model = tiny.model()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    ids, mask, labels = batch(model.config.vocab_size)
    out = model(input_ids=ids, attention_mask=mask, labels=torch.full_like(labels, -100), fused_lm_head=True)
    (out.loss + out.entropy.sum()).backward()
    assert out.loss == 0
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    assert model.lm_head.weight.grad is not None


def test_without_the_flag_the_forward_is_the_models_own():
    plain, patched = tiny.model(), tiny.model()
    add_fused_lm_head(patched)
    ids, mask, labels = batch(plain.config.vocab_size)
    a = plain(input_ids=ids, attention_mask=mask, labels=labels)
    b = patched(input_ids=ids, attention_mask=mask, labels=labels)
    assert torch.equal(a.logits, b.logits) and torch.equal(a.loss, b.loss)
    with torch.no_grad():
        torch.testing.assert_close(*(m.generate(ids, attention_mask=mask, max_new_tokens=4) for m in (plain, patched)))


def test_fp32_head_multiplies_in_fp32_outside_autocast():
    """As TRL prepares it for cast_lm_head_to_fp32: an fp32 head with a forward of its own on a bf16 body."""
    model = tiny.model().to(torch.bfloat16)
    model.lm_head.float()
    model.lm_head.forward = lambda h: torch.nn.functional.linear(h.float(), model.lm_head.weight)
    ids, mask, labels = batch(model.config.vocab_size)
    want = expected(model, ids, mask, labels, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_fused_lm_head(model, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
        got = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    torch.testing.assert_close(got.log_probs.double(), want["log_probs"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.entropy.double(), want["entropy"], rtol=1e-5, atol=1e-5)
    hidden = []
    model.model.register_forward_hook(lambda module, args, output: hidden.append(output.last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16):
        under = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    z = hidden[0][:, :-1].reshape(-1, 32).double() @ model.lm_head.weight.double().t()
    exact = oracle.statistics(z, labels[:, 1:])
    torch.testing.assert_close(under.log_probs.double(), exact["logprob"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(under.entropy.double(), exact["entropy"], rtol=1e-5, atol=1e-5)
    assert model(input_ids=ids, attention_mask=mask).logits.dtype == torch.float32


def test_no_logits_are_held():
    """TRL's tile of 32,768 columns is the whole logits at this vocabulary; a chunk here is 1,024."""
    used = {}
    for name, add in (("trl", trl_utils.add_fused_lm_head), ("ours", add_fused_lm_head)):
        model = tiny.model(vocab_size=16000, hidden_size=8, head_dim=4, scale=1.0)
        add(model, outputs=("log_probs", "entropy"))
        ids, mask, _ = batch(300, B=8, S=17)

        def step(model=model, ids=ids, mask=mask):
            out = model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
            (out.loss - 0.1 * out.entropy.mean()).backward()

        used[name] = memory(step)
    logits = 8 * 16 * 16000 * 4
    assert used["trl"].largest >= logits, "the measure no longer sees TRL's tile"
    assert used["ours"].largest <= logits / 12
    assert used["ours"].peak <= used["trl"].peak / 8, f"{used}"


def test_a_head_that_cannot_be_deferred_is_right_and_says_so_once():
    model = tiny.model()
    ids, mask, labels = batch(model.config.vocab_size)
    model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    want = expected(model, ids, mask, labels, 0.6)
    add_fused_lm_head(model, 0.6, outputs=ALL)
    with pytest.warns(UserWarning, match="forward hook") as caught:
        for _ in range(2):
            got = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    assert len([w for w in caught if "liger_entropy" in str(w.message)]) == 1
    for name in ALL[:4]:
        torch.testing.assert_close(getattr(got, name).double(), want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_computes_with_its_own_weights(times):
    model = tiny.model()
    ids, mask, labels = batch(model.config.vocab_size)
    for _ in range(times):
        add_fused_lm_head(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    given = dict(input_ids=ids, attention_mask=mask, labels=labels)
    out = twin(**given, fused_lm_head=True)
    uniform = torch.full_like(out.log_probs, -math.log(model.config.vocab_size))
    torch.testing.assert_close(out.log_probs, torch.where(out.label_mask, uniform, 0.0))
    assert (twin(**given).logits == 0).all() and not (model(**given).logits == 0).all()
    out.loss.backward()
    assert twin.lm_head.weight.grad.any()
    assert all(p.grad is None for p in model.parameters())


def test_the_head_outlives_remove_liger_entropy():
    model = apply_liger_entropy(tiny.model())
    ids, mask, labels = batch(model.config.vocab_size)
    given = dict(input_ids=ids, attention_mask=mask, labels=labels)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    before = model(**given, fused_lm_head=True)
    remove_liger_entropy(model)
    after, plain = model(**given, fused_lm_head=True), model(**given)
    assert torch.equal(after.log_probs, before.log_probs) and torch.equal(after.entropy, before.entropy)
    own = tiny.model()(**given)
    assert torch.equal(plain.logits, own.logits) and torch.equal(plain.loss, own.loss)


def test_arguments_are_checked_by_name():
    model = tiny.model()
    with pytest.raises(ValueError, match=r"outputs.*logits"):
        add_fused_lm_head(model, outputs=("logits",))
    with pytest.raises(ValueError, match="temperature"):
        add_fused_lm_head(model, temperature=0.0)
    add_fused_lm_head(model)
    with pytest.raises(ValueError, match="labels"):
        model(input_ids=torch.ones(1, 2, dtype=torch.long), fused_lm_head=True)


def test_a_loss_option_that_trl_would_pass_by_is_refused():
    model = apply_liger_entropy(tiny.model(), entropy_coef=0.1)
    with pytest.raises(ValueError, match=r"GRPOConfig\.entropy_coef"):
        add_fused_lm_head(model)


def test_a_trl_without_the_function_or_with_other_arguments_is_refused(monkeypatch):
    monkeypatch.setattr(trl_utils, "add_fused_lm_head", lambda model, temperature: None)
    with pytest.raises(RuntimeError, match="temperature"):
        apply_to_trl()
    monkeypatch.delattr(trl_utils, "add_fused_lm_head")
    with pytest.raises(RuntimeError, match=r"1\.16"):
        apply_to_trl()


def test_apply_reaches_every_trainer_and_remove_restores_it():
    import trl.trainer.grpo_trainer as grpo
    import trl.trainer.sft_trainer as sft

    own = trl_utils.add_fused_lm_head
    apply_to_trl()
    apply_to_trl()
    try:
        import trl.trainer.dpo_trainer as dpo

        for module in (trl_utils, grpo, sft, dpo):
            assert module.add_fused_lm_head.func is add_fused_lm_head
    finally:
        remove_from_trl()
    assert all(module.add_fused_lm_head is own for module in (trl_utils, grpo, sft, dpo))
