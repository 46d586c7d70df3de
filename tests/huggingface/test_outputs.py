"""What a patched model returns, and how the loss is reduced."""

import pytest
import torch
from comparison import RELATIVE, assert_close, assert_like_unpatched, assert_same_run, batch, entropy, evaluate, train
from families import tiny_model
from torch import nn
from torch.nn import functional as F

from liger_entropy import ComputeOptions
from liger_entropy.huggingface import apply_liger_entropy

INPUTS = batch()
IDS, LABELS = INPUTS["input_ids"], INPUTS["labels"]
KEPT = int((LABELS[:, 1:] != -100).sum())


@pytest.fixture
def plain():
    return tiny_model("llama")


@pytest.fixture
def model():
    return apply_liger_entropy(tiny_model("llama"), token_statistics=True)


@pytest.mark.parametrize("items", [2 * KEPT, 2.0 * KEPT, torch.tensor(2 * KEPT), torch.tensor(2.0 * KEPT)])
def test_num_items_in_batch_divides_the_sum(plain, model, items):
    """PAT-01, PAT-03: an int, a float, a 0-dim tensor."""
    expected, got = train(plain, INPUTS, num_items_in_batch=items), train(model, INPUTS, num_items_in_batch=items)
    assert_same_run(got, expected)
    whole = train(model, INPUTS)
    assert_close(got.loss * 2, whole.loss)
    assert_close(got.outputs.entropy_loss * 2, whole.outputs.entropy_loss)


def test_num_items_in_batch_of_one_element_gives_the_unpatched_shape(plain, model):
    items = torch.tensor([KEPT])
    expected, got = train(plain, INPUTS, num_items_in_batch=items), train(model, INPUTS, num_items_in_batch=items)
    assert_same_run(got, expected)
    assert got.outputs.entropy_loss.shape == ()


@pytest.mark.parametrize("positional", [False, True])
@pytest.mark.parametrize("options", [ComputeOptions(), ComputeOptions(skip_ignored=False)])
@pytest.mark.parametrize("items", [None, 0, 0.0, torch.tensor(0), torch.tensor([0.0]), 7, torch.tensor(7)])
def test_batch_without_a_label_has_no_loss(items, options, positional):
    """SHP-05, through the model's own division, also with fp16's loss scale."""

    class Positional(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_model("llama")
            self.lm_head = self.model.lm_head

        def forward(self, input_ids, labels, num_items_in_batch=None):
            outputs = self.model.model(input_ids)
            return self.model.loss_function(self.lm_head(outputs[0]), labels, 97, num_items_in_batch)

    target = {"entropy_coef": 0.5, "lse_square_scale": 0.1, "options": options}
    labels = torch.full_like(IDS, -100)
    if positional:
        model = apply_liger_entropy(Positional(), **target)
        loss = model(IDS, labels, items)
    else:
        model = apply_liger_entropy(tiny_model("llama"), **target).train()
        outputs = model(input_ids=IDS, labels=labels, num_items_in_batch=items)
        loss = outputs.loss
        assert outputs.entropy_loss == 0
    assert torch.equal(loss, torch.zeros_like(loss))
    (loss.sum() * 65536).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


class Unsynchronised(torch.utils._python_dispatch.TorchDispatchMode):
    """Refuses to copy the count to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.float64:
            raise AssertionError("the count was read")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fused", [True, False])
def test_count_stays_on_its_device(model, fused):
    """PAT-03: no .item() of the count; fp64 tells it from other scalars."""
    items = torch.tensor(float(KEPT), dtype=torch.float64)
    with Unsynchronised():
        outputs = model.train()(**INPUTS, num_items_in_batch=items, skip_logits=fused)
        with pytest.raises(AssertionError, match="was read"):
            items.item()
    assert_close(outputs.loss.detach().float(), model(**INPUTS).loss.detach())


@pytest.mark.parametrize("micro", [1, 2, 3])
def test_sums_have_no_hidden_division(model, micro):
    """PAT-31: a count of 1 gives the sum, and token statistics none at all, however the rows are split."""
    rows = {name: torch.cat([tensor, tensor.flip(0), tensor]) for name, tensor in INPUTS.items()}
    losses, entropies, logprobs = [], [], []
    for part in range(micro):
        outputs = model.train()(**{name: tensor[part::micro] for name, tensor in rows.items()}, num_items_in_batch=1)
        losses.append(outputs.loss)
        entropies.append(outputs.entropy_loss)
        logprobs.append(outputs.token_logprobs.sum())
    total = -sum(logprobs)
    logits = model.eval()(rows["input_ids"]).logits[:, :-1]
    kept = rows["labels"][:, 1:] != -100
    expected = F.cross_entropy(logits[kept].double(), rows["labels"][:, 1:][kept], reduction="sum").float()
    assert_close(sum(losses).detach(), expected.detach())
    assert_close(total.detach(), expected.detach())
    assert_close(sum(entropies).detach(), entropy(logits.detach())[kept].sum())


def test_micro_batches_add_up_to_the_batch(model):
    """PAT-01, DIST-17: rows with different numbers of kept tokens, summed over the global count."""
    whole = train(model, INPUTS)
    parts = [train(model, {k: v[i : i + 1] for k, v in INPUTS.items()}, num_items_in_batch=KEPT) for i in range(2)]
    assert_close(parts[0].loss + parts[1].loss, whole.loss)
    for name, gradient in whole.gradients.items():
        assert_close(parts[0].gradients[name] + parts[1].gradients[name], gradient, name, scale=0.1)


def test_loss_may_be_scaled_in_place(model, plain):
    """The Trainer multiplies the loss in place by the number of processes."""
    for m in (model, plain):
        loss = m.train()(**INPUTS).loss
        loss *= 2
        loss.backward()
    assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_training_gives_no_logits_and_eval_gives_them(plain, model):
    """PAT-04, PAT-05, PAT-06."""
    assert train(model, INPUTS).outputs.logits is None
    expected, got = evaluate(plain, INPUTS), evaluate(model, INPUTS)
    assert_close(got.loss, expected.loss)
    assert torch.equal(got.logits, expected.logits)
    assert evaluate(model, INPUTS, skip_logits=True).logits is None
    assert_close(evaluate(model, INPUTS, skip_logits=True).loss, expected.loss)


def test_skip_logits_false_gives_the_logits_and_the_same_gradients(plain, model):
    expected, got = train(plain, INPUTS), train(model, INPUTS, skip_logits=False)
    assert_same_run(got, expected)
    assert torch.equal(got.outputs.logits, expected.outputs.logits)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_no_labels_gives_logits(plain, model, mode):
    """PAT-25, PAT-30: distillation, the Trainer's own label smoothing."""
    getattr(plain, mode)(), getattr(model, mode)()
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(model(IDS, labels=None).logits, plain(IDS).logits)
    with pytest.raises(ValueError, match="skip_logits"):
        model(IDS, skip_logits=True)


@pytest.mark.parametrize("family", ["cohere", "granite", "gemma2"])
def test_scales_and_softcaps_reach_every_path(family):
    """PAT-13, PAT-14: the head's weight is large enough for a dropped scale to double the loss."""
    extra = {"cohere": dict(logit_scale=0.0625), "granite": dict(logits_scaling=8.0), "gemma2": {}}[family]
    model = tiny_model(family, **extra, **({"final_logit_softcapping": 0.05} if family == "gemma2" else {}))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    logits = model(IDS).logits
    assert_like_unpatched(model, INPUTS)
    assert torch.equal(model.train()(IDS).logits, logits)
    assert torch.equal(model(**INPUTS, skip_logits=False).logits, logits)


def test_shift_labels_in_shards_add_up(model):
    """PAT-08: the hidden states and their shifted labels cut in three; sums over the global count."""
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)
    whole = train(model, INPUTS)
    body = model.model(IDS)
    total = 0.0
    for start, stop in ((0, 5), (5, 10), (10, 16)):
        shard = type(body)(last_hidden_state=body.last_hidden_state[:, start:stop].detach())
        part = shifted[:, start:stop].contiguous()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model, "forward", lambda *args, shard=shard, **kwargs: shard)
            total += train(model, dict(input_ids=IDS, labels=part, shift_labels=part), num_items_in_batch=KEPT).loss
    assert_close(total, whole.loss)


def test_logits_to_keep_trims_before_the_head(plain, model):
    """PAT-09."""
    for keep in (1, torch.tensor([2, 5])):
        assert torch.equal(model(IDS, logits_to_keep=keep).logits, plain(IDS, logits_to_keep=keep).logits)
    shifted = F.pad(LABELS[:, 1:], (0, 1), value=-100)[:, -5:].contiguous()
    inputs = dict(input_ids=IDS, labels=LABELS, shift_labels=shifted, logits_to_keep=5)
    got = train(model, inputs)
    assert_same_run(got, train(plain, inputs))
    assert got.outputs.token_entropy.shape == shifted.shape
    for m in (plain, model):
        with pytest.raises(ValueError, match="batch_size"):
            m(IDS, labels=LABELS, logits_to_keep=5)


def test_tuples_have_the_loss_first(plain, model):
    """PAT-21."""
    expected = evaluate(plain, INPUTS, return_dict=False)
    got = evaluate(model, INPUTS, return_dict=False)
    assert len(got) == len(expected)
    assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    trained = train(model, INPUTS, return_dict=False).outputs
    assert_close(trained[0].detach(), train(plain, INPUTS, return_dict=False).loss)
    assert trained[1] is None


def test_fields_are_those_of_the_unpatched_model(plain, model):
    """PAT-24; Trainer.evaluate takes every further item for a prediction."""
    expected, got = evaluate(plain, INPUTS, use_cache=True), evaluate(model, INPUTS, use_cache=True)
    assert list(got.keys()) == list(expected.keys())
    assert type(got) is type(expected)


def test_token_statistics_speak_of_the_next_label(plain, model):
    outputs = train(model, INPUTS).outputs
    logits = plain(IDS).logits.detach()
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0]
    kept = LABELS[:, 1:] != -100
    assert_close(outputs.token_logprobs[:, :-1].detach(), torch.where(kept, logprobs, 0.0))
    assert_close(outputs.token_entropy[:, :-1].detach(), torch.where(kept, entropy(logits)[:, :-1], 0.0))
    assert not outputs.token_logprobs[:, -1].any()
    assert outputs.token_logprobs.dtype == outputs.token_entropy.dtype == torch.float32


@pytest.mark.parametrize("name", ["entropy_loss", "token_entropy", "token_logprobs"])
def test_statistics_are_differentiable(plain, model, name):
    train(model, INPUTS)
    model.zero_grad()
    getattr(model(**INPUTS), name).sum().backward()
    logits = plain(IDS).logits[:, :-1]
    kept = LABELS[:, 1:] != -100
    logprobs = logits.log_softmax(-1)
    h = -(logprobs.exp() * logprobs).sum(-1)[kept]
    value = {"entropy_loss": h.mean, "token_entropy": h.sum}.get(name)
    picked = logprobs.gather(-1, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0][kept].sum
    plain.zero_grad()
    (value or picked)().backward()
    assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)
    assert_close(model.model.embed_tokens.weight.grad, plain.model.embed_tokens.weight.grad)


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_options_change_the_loss(plain, items, mode):
    """loss = CE(label smoothing) + scale lse^2 - coef H, every part under the model's own reduction."""
    options = dict(entropy_coef=0.3, label_smoothing=0.1, lse_square_scale=0.01)
    model = apply_liger_entropy(tiny_model("llama"), **options)
    getattr(plain, mode)(), getattr(model, mode)()
    logits = plain(IDS).logits[:, :-1][LABELS[:, 1:] != -100]
    target = LABELS[:, 1:][LABELS[:, 1:] != -100]
    logprobs = logits.log_softmax(-1)
    h = -(logprobs.exp() * logprobs).sum(-1)
    tokens = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1) + 0.01 * logits.logsumexp(-1) ** 2
    expected = (tokens - 0.3 * h).sum() / (items or KEPT)
    got = model(**INPUTS, **({} if items is None else {"num_items_in_batch": items}))
    assert_close(got.loss.detach(), expected.detach())
    assert_close(got.entropy_loss.detach(), h.detach().sum() / (items or KEPT))
    expected.backward()
    got.loss.backward()
    assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad)


def test_token_accuracy_counts_the_right_tokens(plain, model):
    """PAT-26, PAT-06: after the shift, ties to the first class, a tensor."""
    guess = plain(IDS).logits.argmax(-1)[:, :-1]
    labels = LABELS.clone()
    labels[0, 5:8] = guess[0, 4:7]
    kept = labels[:, 1:] != -100
    expected = ((guess == labels[:, 1:]) & kept).sum() / kept.sum()
    for mode in ("train", "eval"):
        got = getattr(model, mode)()(IDS, labels=labels, return_token_accuracy=True).token_accuracy
        assert_close(got, expected)
    assert not hasattr(model(IDS, labels=labels), "token_accuracy")


def test_token_scaling_weighs_by_the_probability(model):
    outputs = model(**INPUTS, use_token_scaling=True)
    logprobs = outputs.token_logprobs[outputs.token_logprobs != 0]
    assert_close(outputs.loss.detach(), -(logprobs.exp() * logprobs).mean().detach())


def test_batch_without_a_kept_token_trains(model):
    """The contract's 0 with zero gradients, where the unpatched model gives NaN."""
    got = train(model, {"input_ids": IDS, "labels": torch.full_like(IDS, -100)})
    assert got.loss == 0 and got.outputs.entropy_loss == 0
    assert all(not gradient.any() for gradient in got.gradients.values())


def test_options_reach_the_operator(model):
    """Chunks of one block of columns give the same; a label out of range is named."""
    chunked = apply_liger_entropy(tiny_model("llama", vocab_size=3000), options=ComputeOptions(chunk_bytes=1))
    whole = apply_liger_entropy(tiny_model("llama", vocab_size=3000))
    assert_same_run(train(chunked, INPUTS), train(whole, INPUTS))
    labels = LABELS.clone()
    labels[0, 9] = 97
    with pytest.raises(ValueError, match="97"):
        model.train()(IDS, labels=labels)


def test_autocast_gives_the_unpatched_loss_up_to_bf16(plain, model):
    """The products run in bf16 on both sides; plain torch also rounds its logits, so it bounds the difference."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = train(plain, INPUTS), train(model, INPUTS)
    truth = train(tiny_model("llama"), INPUTS)
    error = (expected.loss - truth.loss).abs()
    assert (got.loss - truth.loss).abs() <= 2 * error + RELATIVE
    assert got.loss.dtype == torch.float32
    for name, gradient in expected.gradients.items():
        assert got.gradients[name].dtype == gradient.dtype


def test_meta_device(model):
    ids = IDS.to("meta")
    model.to("meta").train()
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    assert outputs.loss.shape == outputs.entropy_loss.shape == () and outputs.loss.device.type == "meta"
    assert model.lm_head.weight.grad.shape == model.lm_head.weight.shape
    assert model.eval()(input_ids=ids, labels=ids).logits.shape == (*ids.shape, 97)
