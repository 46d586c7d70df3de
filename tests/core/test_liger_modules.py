"""The modules and functionals in the place of Liger's: same calls, same meaning of every output, torch's numbers."""

import inspect

import oracle
import pytest
import torch
import torch.nn.functional as F
from problems import labels

import liger_entropy

liger = pytest.importorskip("liger_kernel.transformers")
functional = pytest.importorskip("liger_kernel.transformers.functional")

NAMES = ["LigerFusedLinearCrossEntropyLoss", "LigerCrossEntropyLoss"]
FUNCTIONALS = ["liger_fused_linear_cross_entropy", "liger_cross_entropy"]
CONSTRUCTIONS = [
    {},
    dict(reduction="sum", label_smoothing=0.1, ignore_index=3),
    dict(reduction="none", lse_square_scale=1e-2, return_z_loss=True),
    dict(softcap=3.0, return_token_accuracy=True, return_predicted_tokens=True, return_z_loss=True),
    dict(lse_square_scale=1e-2, return_z_loss=True, return_token_accuracy=True, reduction="sum"),
]


def assert_near(ours, exact, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(ours.double(), exact.double(), rtol=rtol, atol=atol)


@pytest.fixture
def data():
    x, w, b = torch.randn(9, 6), torch.randn(40, 6), torch.randn(40)
    t = labels((9,), 40)
    t[0] = (x @ w.T + b)[0].argmax()
    return x, w, b, t


def parameters(function):
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", NAMES + FUNCTIONALS)
def test_arguments_differ_from_those_of_liger(name):
    """Liger's, in its order and with its defaults, come first; ours follow."""
    theirs = parameters(getattr(functional if name in FUNCTIONALS else liger, name))
    assert parameters(getattr(liger_entropy, name))[: len(theirs)] == theirs


@pytest.mark.parametrize("name", NAMES)
def test_forward_arguments_differ_from_those_of_liger(name):
    theirs = parameters(getattr(liger, name).forward)
    assert parameters(getattr(liger_entropy, name).forward)[: len(theirs)] == theirs


@pytest.mark.parametrize("name", NAMES)
def test_module_is_no_liger_module(name):
    module = getattr(liger_entropy, name)()
    assert isinstance(module, getattr(liger, name)) and not list(module.parameters()) and not module.state_dict()
    assert set(vars(getattr(liger, name)())) <= set(vars(module))


@pytest.mark.parametrize("arguments", CONSTRUCTIONS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_output_means_something_else_than_in_liger(name, arguments, data):
    """The loss with the z-loss in it, the z-loss alone, the share of right predictions, and the predictions."""
    x, w, b, t = data
    module = getattr(liger_entropy, name)(**arguments)
    z = (x @ w.T + b).double()
    ours = module(w, x, t, b) if "Fused" in name else module(x @ w.T + b, t)
    if (cap := arguments.get("softcap")) is not None:
        z = cap * torch.tanh(z / cap)
    names = ("reduction", "label_smoothing", "ignore_index", "lse_square_scale")
    exact = oracle.loss_terms(z, t, **{n: v for n, v in arguments.items() if n in names})
    asked = {n.removeprefix("return_") for n in arguments if n.startswith("return_")}
    if not asked:
        assert isinstance(ours, torch.Tensor)
        return assert_near(ours, exact["loss"])
    assert isinstance(ours, functional.CrossEntropyOutput)
    for field in ("loss", "z_loss", "token_accuracy", "predicted_tokens", "entropy_loss"):
        if field in asked | {"loss"}:
            assert_near(getattr(ours, field), exact[field])
        else:
            assert getattr(ours, field) is None, field
    return None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_token_scaling_differs_from_liger(reduction, data):
    """use_token_scaling: each token's loss times its detached probability; the mean divides by the number of tokens."""
    x, w, b, t = data
    x.requires_grad_()
    module = liger_entropy.LigerFusedLinearCrossEntropyLoss(reduction=reduction, use_token_scaling=True)
    nll = F.cross_entropy(x @ w.T + b, t, reduction="none")
    scaled = nll * (-nll.detach()).exp()
    exact = dict(none=scaled, sum=scaled.sum(), mean=scaled.sum() / (t != -100).sum())[reduction]
    ours = module(w, x, t, b)
    assert_near(ours, exact)
    assert_near(*(torch.autograd.grad(v.sum(), x)[0] for v in (ours, exact)))


def test_class_weights_stay_behind_or_are_ignored(data):
    x, w, b, t = data
    weight = torch.rand(40)
    exact = F.cross_entropy(x @ w.T + b, t, weight=weight)
    assert_near(liger_entropy.LigerFusedLinearCrossEntropyLoss(weight)(w, x, t, b), exact)
    assert_near(liger_entropy.LigerCrossEntropyLoss(weight)(x @ w.T + b, t), exact)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk_mem_const", [1, 2, 7])
def test_liger_tuning_arguments_change_the_result(chunk_mem_const, accum_dtype, data):
    """accum_dtype and chunk_mem_const are accepted; accumulation is fp32 whatever they say."""
    x, w, b, t = data
    ours = liger_entropy.liger_fused_linear_cross_entropy(
        x, w, t, b, None, -100, 0.0, 0.1, "mean", None, False, accum_dtype, False, False, False, chunk_mem_const
    )
    assert_near(ours, F.cross_entropy(x @ w.T + b, t, label_smoothing=0.1))


@pytest.mark.parametrize(
    "name, error, value",
    [("accum_dtype", TypeError, "fp32"), ("accum_dtype", TypeError, torch.int32), ("chunk_mem_const", ValueError, 0),
     ("chunk_mem_const", ValueError, 1.5), ("use_token_scaling", TypeError, 1)],
)  # fmt: skip
def test_bad_liger_argument_is_accepted(name, error, value, data):
    x, w, _, t = data
    with pytest.raises(error, match=f"^{name}"):
        liger_entropy.liger_fused_linear_cross_entropy(x, w, t, **{name: value})


def test_deprecated_reductions_are_ignored(data):
    x, w, b, t = data
    z = x @ w.T + b
    with pytest.warns(UserWarning):
        assert_near(liger_entropy.liger_cross_entropy(z, t, size_average=False), F.cross_entropy(z, t, reduction="sum"))


def test_entropy_arguments_of_the_module_do_nothing(data):
    x, w, b, t = data
    module = liger_entropy.LigerFusedLinearCrossEntropyLoss(
        return_entropy_loss=True, entropy_coef=0.3, temperature=0.7, logit_scale=0.5
    )
    out = module(w, x, t, b, token_weight=torch.linspace(0.1, 1, 9))
    z = (x @ w.T + b).double() * 0.5 / 0.7
    exact = oracle.loss_terms(z, t, token_weight=torch.linspace(0.1, 1, 9), entropy_coef=0.3)
    assert type(out) is liger_entropy.CrossEntropyOutput
    assert_near(out.loss, exact["loss"])
    assert_near(out.entropy_loss, exact["entropy_loss"])
