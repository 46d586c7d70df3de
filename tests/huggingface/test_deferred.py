"""Deferred logits in the hands of model code: every recorded operation, and every way out to the true logits."""

import copy
import warnings

import numpy as np
import pytest
import torch
from comparison import assert_close, entropy
from torch import nn
from torch.nn import functional as F

from liger_entropy.huggingface import apply_liger_entropy

VOCABULARY = 13


class Model(nn.Module):
    """Two sequences of five hidden states; ``loss`` is what the test does with the logits."""

    def __init__(self, loss, bias):
        super().__init__()
        self.body, self.lm_head, self.loss = nn.Linear(8, 8), nn.Linear(8, VOCABULARY, bias=bias), loss
        self.scale = nn.Parameter(torch.tensor(1.7))

    def forward(self, hidden, labels=None):
        return {"loss": self.loss(self.lm_head(self.body(hidden)), labels, self)}


def run(loss, bias=True, dtype=torch.float32, **options):
    """(unpatched, patched) losses and gradients, and the reasons the patched one was not fused."""
    torch.manual_seed(0)
    plain = Model(loss, bias).to(dtype)
    model = apply_liger_entropy(copy.deepcopy(plain), **options)
    hidden = 3 * torch.randn(2, 5, 8, dtype=dtype)
    labels = torch.tensor([[1, 4, -100, 0, 3], [-100, 2, 2, 5, 1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [m(hidden, labels=labels) for m in (plain, model)]
    for result in results:
        result["loss"].backward()
    return plain, model, results


def check(loss, fused, bias=True):
    plain, model, (expected, got) = run(loss, bias)
    assert_close(got["loss"].detach(), expected["loss"].detach(), "loss")
    for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert_close(b.grad, a.grad, name, scale=0.1)
    assert bool(model._liger_entropy.noted) != fused, model._liger_entropy.noted
    return got


def ce(z, y, **options):
    return F.cross_entropy(z.reshape(-1, z.shape[-1]), y.reshape(-1), **options)


RECORDED = {
    "nothing": lambda z, y, m: ce(z, y),
    "module": lambda z, y, m: nn.CrossEntropyLoss()(z.view(-1, VOCABULARY), y.view(-1)),
    "keywords": lambda z, y, m: F.cross_entropy(input=z.view(-1, VOCABULARY), target=y.view(-1)),
    "sum": lambda z, y, m: ce(z, y, reduction="sum") / 7,
    "none": lambda z, y, m: ce(z, y, reduction="none").sum() / 7,
    "legacy reduction": lambda z, y, m: ce(z, y, size_average=False),
    "class weight": lambda z, y, m: ce(z, y, weight=torch.arange(1.0, VOCABULARY + 1)),
    "smoothing": lambda z, y, m: ce(z, y, label_smoothing=0.2),
    "ignore_index": lambda z, y, m: ce(z, y.clamp(min=0), ignore_index=0),
    "multiply": lambda z, y, m: ce(z * 0.3, y),
    "multiply from the left": lambda z, y, m: ce(0.3 * z, y),
    "divide": lambda z, y, m: ce(z / 3, y),
    "torch.mul and div": lambda z, y, m: ce(torch.div(torch.mul(z, 2), 3), y),
    "softcap": lambda z, y, m: ce(torch.tanh(z / 2) * 2, y),
    "softcap, scaled": lambda z, y, m: ce((z * 0.4).tanh() * 5 / 2, y),
    "scaled softcap of a scale": lambda z, y, m: ce(torch.tanh(z * 2 / 3.0) * 3.0, y),
    "casts": lambda z, y, m: ce(z.float().to(torch.float64).double().to(z.device).type_as(m.lm_head.weight), y),
    "contiguous": lambda z, y, m: ce(z.contiguous().clone(), y),
    "shift": lambda z, y, m: ce(z[..., :-1, :], y[..., 1:]),
    "shift without ellipsis": lambda z, y, m: ce(z[:, :-1].contiguous(), y[:, 1:]),
    "columns": lambda z, y, m: ce(z[..., :9], y),
    "columns twice": lambda z, y, m: ce(z[:, :, :11][..., :9] * 2, y),
    "mask": lambda z, y, m: F.cross_entropy(z[y != -100], y[y != -100]),
    "index tensor": lambda z, y, m: F.cross_entropy(z[:, torch.tensor([0, 3])].flatten(0, 1), y[:, [0, 3]].flatten()),
    "row": lambda z, y, m: F.cross_entropy(z[1], y[1]),
    "one vector": lambda z, y, m: F.cross_entropy(z[1, 2], y[1, 2]),
    "classes second": lambda z, y, m: F.cross_entropy(z.transpose(1, 2), y),
    "permute": lambda z, y, m: F.cross_entropy(z.permute(0, 2, 1), y),
    "unsqueeze": lambda z, y, m: ce(z.unsqueeze(1).squeeze(1)[None], y),
    "inferred columns": lambda z, y, m: F.cross_entropy(z.view(10, -1), y.view(-1)),
    "sizes as a tuple": lambda z, y, m: F.cross_entropy(z.reshape((-1, z.size(-1))), y.view(-1)),
}  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", RECORDED)
def test_recorded_operation_is_fused(name, bias):
    check(RECORDED[name], fused=True, bias=bias)


def test_learned_scale_gets_its_gradient():
    """Without a bias the scale moves to the hidden states."""
    check(lambda z, y, m: ce(z * m.scale, y), fused=True, bias=False)
    check(lambda z, y, m: ce(z / m.scale, y), fused=True, bias=False)


def edited(edit, after=lambda z: z):
    def loss(z, y, m):
        other = after(z)
        edit(z)
        return ce(other, y)

    return loss


TRUE_LOGITS = {
    "learned scale with a bias": lambda z, y, m: ce(z * m.scale, y),
    "negative scale": lambda z, y, m: ce(z * -1.5, y),
    "zero scale": lambda z, y, m: ce(z * 0.0, y),
    "floor division": lambda z, y, m: ce(torch.div(z, 0.5, rounding_mode="floor") * m.scale, y),
    "scale per token": lambda z, y, m: ce(z * torch.arange(1.0, 6.0)[:, None], y),
    "reciprocal": lambda z, y, m: ce(1.0 / (z + 9.0), y),
    "two softcaps": lambda z, y, m: ce(z.tanh().tanh(), y),
    "offset": lambda z, y, m: ce(z + torch.arange(VOCABULARY), y),
    "power": lambda z, y, m: ce(z**2, y),
    "temperature by hand": lambda z, y, m: ce(z - z.max(-1, keepdim=True).values, y),
    "masked classes": lambda z, y, m: ce(z.masked_fill(torch.arange(VOCABULARY) > 8, -1e4), y),
    "concatenation": lambda z, y, m: ce(torch.cat([z, z.new_zeros(2, 5, 1)], -1), y),
    "every second class": lambda z, y, m: ce(z[..., ::2], y.clamp(max=6)),
    "classes by index": lambda z, y, m: ce(z[..., torch.arange(9)], y),
    "rows mixed into classes": lambda z, y, m: F.cross_entropy(z.view(-1, 5 * VOCABULARY), torch.tensor([1, 2])),
    "classes first": lambda z, y, m: F.cross_entropy(z.permute(2, 0, 1).flatten(1).t(), y.view(-1)),
    "in place": lambda z, y, m: ce(z.mul_(2), y),
    "in-place operator": edited(lambda z: z.__itruediv__(2.0)),
    "assignment": edited(lambda z: z.__setitem__((..., 0), -3.0)),
    "edit seen through an earlier view": edited(lambda z: z.mul_(0.5), after=lambda z: z[..., :9]),
    "edit not seen by an earlier copy": edited(lambda z: z.mul_(0.5), after=lambda z: z * 2),
    "edit of a view": edited(lambda z: z[:, 1:].zero_()),
    "out": lambda z, y, m: ce(torch.add(z, 1.0), y) + ce(z, y),
    "own loss": lambda z, y, m: -z.log_softmax(-1).flatten(0, 1)[range(10), y.clamp(min=0).flatten()].mean(),
    "soft labels": lambda z, y, m: F.cross_entropy(z.flatten(0, 1), torch.full((10, VOCABULARY), 1 / VOCABULARY)),
    "detached": lambda z, y, m: ce(z.detach() * m.scale, y),
    "iteration": lambda z, y, m: sum(ce(row, labels) for row, labels in zip(z, y, strict=True)),
    "argmax": lambda z, y, m: ce(z, y) + 0 * z.argmax(-1).sum(),
    "comparison": lambda z, y, m: ce(z, y) * (z > 0).float().mean(),
    "numpy": lambda z, y, m: ce(z, y) * float(np.asarray(z.detach()).mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", TRUE_LOGITS)
def test_other_operation_gets_the_true_logits(name):
    check(TRUE_LOGITS[name], fused=False)


def test_entropy_is_that_of_the_changed_logits():
    """Whether fused or not, H speaks of what cross_entropy was given."""
    for change in (lambda z: torch.tanh(z / 2) * 2, lambda z: z**2):
        plain, _, (_, got) = run(lambda z, y, m, change=change: ce(change(z), y))
        torch.manual_seed(0)
        Model(ce, True)
        z = change(plain.lm_head(plain.body(3 * torch.randn(2, 5, 8))))
        kept = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]).bool()
        assert_close(got["entropy_loss"].detach(), entropy(z)[kept].mean().detach(), scale=0.1)


def test_coefficients_on_a_loss_that_cannot_carry_them_are_refused():
    for name in ("own loss", "soft labels"):
        with pytest.raises((RuntimeError, ValueError), match="entropy_coef"):
            run(TRUE_LOGITS[name], entropy_coef=0.1)


def test_shape_errors_are_the_unpatched_ones():
    """Fewer labels than rows, a view that does not fit."""
    for loss in (lambda z, y, m: F.cross_entropy(z[0], y.view(-1)), lambda z, y, m: z.view(3, VOCABULARY).sum()):
        plain = Model(loss, True)
        model = apply_liger_entropy(copy.deepcopy(plain))
        errors = []
        for m in (plain, model):
            with pytest.raises((ValueError, RuntimeError)) as caught, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                m(torch.randn(2, 5, 8), labels=torch.zeros(2, 5, dtype=torch.long))
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]


def test_questions_about_shape_compute_nothing():
    seen = []

    def loss(z, y, m):
        seen.append(
            (z.shape, z.size(), z.size(-1), z.dim(), z.ndim, z.numel(), len(z), z.dtype, z.device.type, repr(z))
        )
        return ce(z, y)

    check(loss, fused=True)
    assert seen[0][:9] == seen[1][:9]
    assert "DeferredLogits(shape=(2, 5, 13)" in seen[1][9]


def test_warning_comes_once_and_names_the_operation():
    torch.manual_seed(0)
    model = apply_liger_entropy(Model(TRUE_LOGITS["power"], True))
    arguments = dict(hidden=torch.randn(2, 5, 8), labels=torch.ones(2, 5, dtype=torch.long))
    with pytest.warns(UserWarning, match="not fused.*__pow__"):
        model(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**arguments)


def test_autocast_of_the_head_holds_for_the_loss():
    """The model leaves autocast before its loss; both sides multiply in bf16."""

    class Casting(Model):
        def forward(self, hidden, labels=None):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.lm_head(self.body(hidden))
            assert logits.dtype == torch.bfloat16
            return {"loss": ce(logits.float(), labels)}

    torch.manual_seed(0)
    plain = Casting(None, True)
    model = apply_liger_entropy(copy.deepcopy(plain))
    hidden, labels = torch.randn(2, 5, 8), torch.ones(2, 5, dtype=torch.long)
    assert (model(hidden, labels=labels)["loss"] - plain(hidden, labels=labels)["loss"]).abs() < 2e-2
    assert not model._liger_entropy.noted


class Changing(Model):
    """``change(hidden)`` comes between the head and the loss."""

    def forward(self, hidden, labels=None):
        hidden = self.body(hidden)
        logits = self.lm_head(hidden)
        return {"loss": self.loss(logits, labels, hidden)}


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y, h: (h.add_(1), ce(z, y))[1],
        lambda z, y, h: (h.add_(1), F.cross_entropy(z.transpose(1, 2), y))[1],
        lambda z, y, h: (z := z.transpose(1, 2), h[:, 0].zero_(), F.cross_entropy(z, y))[2],
        lambda z, y, h: (h.add_(1), z.logsumexp(-1).sum())[1],
    ],
)
def test_hidden_states_changed_in_place_are_refused(loss):
    model = apply_liger_entropy(Changing(loss, True))
    arguments = dict(hidden=torch.randn(2, 5, 8), labels=torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(RuntimeError, match=r"hidden states \(2, .*changed in place.*deferred"):
        model(**arguments)
    model(**arguments, skip_logits=False)
    with torch.inference_mode():  # whose tensors count no changes
        model.eval()(**arguments)


def test_hidden_states_may_change_in_place_after_their_use():
    """After the loss, or after an operation that copied the rows it took."""
    chosen = torch.tensor([0, 3])

    def loss(z, y, h):
        rows = z[:, chosen].flatten(0, 1)
        h.add_(1)
        value = F.cross_entropy(rows, y[:, chosen].flatten())
        h.add_(1)
        return value

    torch.manual_seed(0)
    plain = Changing(loss, True)
    model = apply_liger_entropy(copy.deepcopy(plain))
    arguments = dict(hidden=torch.randn(2, 5, 8), labels=torch.ones(2, 5, dtype=torch.long))
    assert_close(model(**arguments)["loss"], plain(**arguments)["loss"])
    assert not model._liger_entropy.noted


def test_byte_labels_are_kept_where_ignore_index_would_wrap_onto_them():
    """-100 is 156 in uint8."""

    class Bytes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = nn.Linear(8, 200)

        def forward(self, hidden, labels=None):
            return {"loss": F.cross_entropy(self.lm_head(hidden), labels, reduction="none").sum()}

    model = apply_liger_entropy(Bytes())
    hidden, labels = torch.randn(3, 8), torch.tensor([156, 3, 4])
    expected, got = (model(hidden, labels=y)["entropy_loss"] for y in (labels, labels.to(torch.uint8)))
    assert_close(got, expected)


def test_error_in_the_forward_leaves_the_model_usable():
    def fail(z, y, m):
        raise KeyError("in the model's own code")

    model = apply_liger_entropy(Model(fail, True))
    with pytest.raises(KeyError, match="own code"):
        model(torch.randn(2, 5, 8), labels=torch.ones(2, 5, dtype=torch.long))
    assert isinstance(model.lm_head(torch.randn(3, 8)), torch.Tensor)
