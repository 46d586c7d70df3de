"""`apply_liger_entropy(model, liger_kernels=True)` on a CUDA device: Liger's layers with this library's loss."""

import inspect
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1] / "huggingface"))
from comparison import batch
from families import tiny_model

from liger_entropy.huggingface import apply_liger_entropy, is_patched, remove_liger_entropy

monkey_patch = pytest.importorskip("liger_kernel.transformers.monkey_patch", exc_type=ImportError)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE, DTYPE = "cuda", torch.bfloat16
# family -> (Liger's MLP, the autograd node of its activation)
MLPS = {
    "llama": ("LigerSwiGLUMLP", "LigerSiLUMulFunctionBackward"),
    "qwen3": ("LigerSwiGLUMLP", "LigerSiLUMulFunctionBackward"),
    "gemma2": ("LigerGEGLUMLP", "LigerGELUMulFunctionBackward"),
}
# Both round to 16 bits, at other places: 0.9 to 1.05 in fp16 by Triton's interpreter.
FACTOR = 2.0
families = pytest.mark.parametrize("family", MLPS)


def built(family, dtype=None):
    """The same weights, representable in bf16, at every call; in bf16 unless told otherwise."""
    model = tiny_model(family, hidden_size=64, intermediate_size=128, head_dim=16)
    return model.to(DEVICE, DTYPE).to(dtype or DTYPE)


def inputs():
    return {name: tensor.to(DEVICE) for name, tensor in batch(shape=(4, 32)).items()}


def with_kernels(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply_liger_entropy(model, liger_kernels=True, token_statistics=True)
    refused = [str(w.message) for w in caught if "liger_kernels" in str(w.message)]
    assert not refused, f"nothing was applied: {refused}"
    return model


def nodes(loss):
    """The names of the autograd functions that the loss came through."""
    found, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in found}


def of_liger(loss):
    return {name for name in nodes(loss) if name.startswith("Liger")}


def step(model):
    """Outputs, and the gradient of every parameter in fp32."""
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs())
    outputs.loss.backward()
    return outputs, {name: p.grad.float() for name, p in model.named_parameters()}


def layers(model, ending):
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith(ending)}


def attributes(model):
    return {name: dict(module.__dict__) for name, module in model.named_modules()}


def modeling(model):
    return sys.modules[type(layers(model, "Attention").popitem()[1]).__module__]


@families
def test_layers_are_not_ligers(family):
    """Every norm, MLP and rotary embedding of the instance is Liger's: by its forward, and by the autograd graph."""
    model = with_kernels(built(family))
    mlp, activation = MLPS[family]
    for ending, expected in (("RMSNorm", "LigerRMSNorm"), ("MLP", mlp)):
        found = layers(model, ending)
        assert found
        for name, module in found.items():
            forward = getattr(module.__dict__.get("forward"), "__func__", None)
            assert forward is getattr(monkey_patch, expected).forward, f"{name}: {forward} is not {expected}.forward"
    for name, module in layers(model, "Attention").items():
        seen = inspect.unwrap(module.forward.__func__).__globals__["apply_rotary_pos_emb"]
        assert seen is monkey_patch.liger_rotary_pos_emb, f"{name} calls {seen.__module__}.{seen.__name__}"
    found = of_liger(model(**inputs()).loss)
    assert {"LigerRMSNormFunctionBackward", activation} <= found, found
    assert any("rope" in name.lower() for name in found), found


@families
def test_loss_is_ligers(family):
    """The operator of this library ran: neither Liger's loss nor logits."""
    torch_loss = F.cross_entropy
    model = with_kernels(built(family))
    outputs = model(**inputs())
    assert F.cross_entropy is torch_loss, "Liger's cross_entropy is in torch.nn.functional"
    assert "forward" not in model.__dict__, f"the model's forward is {model.__dict__['forward']}"
    assert outputs.logits is None and not model._liger_entropy.noted, model._liger_entropy.noted
    assert outputs.entropy_loss is not None
    found = nodes(outputs.loss)
    assert not [name for name in found if "CrossEntropy" in name or "NllLoss" in name], found


def error(got, exact):
    return (got.float() - exact.float()).norm().item()


@families
def test_bf16_is_further_from_fp32_than_without_kernels(family):
    """Token log-probabilities and gradients, by groups of parameters; the loss as the mean of the former."""
    labels = inputs()["labels"][:, 1:]
    exact, exact_gradients = step(built(family, torch.float32))
    plain, plain_gradients = step(built(family))
    ours, our_gradients = step(with_kernels(built(family)))

    def logprobs(logits):
        return -F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels, reduction="none")

    truth = logprobs(exact.logits)
    bound, got = error(logprobs(plain.logits), truth), error(ours.token_logprobs[:, :-1], truth)
    print(f"{family}: log-probabilities {got:.3g}, without kernels {bound:.3g}")
    assert got <= FACTOR * bound, f"log-probabilities: {got:.3g} from fp32, without kernels {bound:.3g}"
    mean = bound / (labels != -100).sum().item() ** 0.5  # what one token's error comes to
    assert abs(ours.loss.item() - exact.loss.item()) <= FACTOR * mean, (ours.loss.item(), exact.loss.item(), mean)
    for group in ("norm", "attn", "mlp", "embed_tokens", "lm_head" if family != "gemma2" else "embed"):
        names = [name for name in exact_gradients if group in name]
        truth, plainly, kernels = (
            torch.cat([gradients[name].flatten() for name in names])
            for gradients in (exact_gradients, plain_gradients, our_gradients)
        )
        bound, got = error(plainly, truth), error(kernels, truth)
        print(f"{family}: gradients of {group} {got:.3g}, without kernels {bound:.3g}, themselves {truth.norm():.3g}")
        assert got <= FACTOR * bound, f"gradients of {group}: {got:.3g} from fp32, without kernels {bound:.3g}"


@families
def test_other_models_are_reached(family):
    """Models of the family made before and after the patch, and one on the CPU, compute as they did."""
    earlier = built(family)
    expected, gradients = step(earlier)
    names = dict(vars(modeling(earlier)))
    layer_norm = torch.nn.LayerNorm
    patched = with_kernels(built(family))
    patched(**inputs()).loss.backward()
    changed = [name for name, value in vars(modeling(earlier)).items() if names.get(name) is not value]
    assert not changed, f"{modeling(earlier).__name__} has other {changed}"
    assert torch.nn.LayerNorm is layer_norm, torch.nn.LayerNorm
    for other in (earlier, built(family)):
        assert not is_patched(other)
        assert not of_liger(other(**inputs()).loss), of_liger(other(**inputs()).loss)
        got, again = step(other)
        assert torch.equal(got.loss, expected.loss), (got.loss.item(), expected.loss.item())
        assert all(torch.allclose(again[name], gradients[name], rtol=1e-2, atol=1e-4) for name in again)
    assert tiny_model(family)(**batch()).loss.isfinite()


@families
def test_removal_leaves_something_behind(family):
    """Every attribute of every module, and the class, as before; the loss to the bit."""
    model = built(family)
    expected = model(**inputs()).loss.detach()
    before, cls = attributes(model), type(model)
    remove_liger_entropy(with_kernels(model))
    assert type(model) is cls
    for name, old in before.items():
        new = dict(model.get_submodule(name).__dict__)
        left = {key for key in new.keys() | old.keys() if new.get(key) is not old.get(key)}
        assert not left, f"{name or 'the model'}: {left}"
    outputs = model(**inputs())
    assert torch.equal(outputs.loss, expected) and not of_liger(outputs.loss), of_liger(outputs.loss)


@families
def test_later_call_without_kernels_keeps_them(family):
    """Twice is once with the later options, in both directions."""
    model = with_kernels(with_kernels(built(family)))
    with_layers = of_liger(model(**inputs()).loss)
    assert with_layers
    assert not of_liger(apply_liger_entropy(model)(**inputs()).loss)
    assert of_liger(with_kernels(model)(**inputs()).loss) == with_layers


def test_generation_breaks():
    """Prompt and single tokens with a cache go through the kernels without a graph."""
    model = with_kernels(built("llama")).eval()
    tokens = model.generate(inputs()["input_ids"][:, :8], max_new_tokens=4, do_sample=False)
    assert tokens.shape == (4, 12)


def test_accumulated_training_diverges():
    """Ten steps of two micro-batches; without kernels, bf16 ends 7e-4 from fp32."""
    losses = {}
    for name, model in (("plain", built("llama")), ("kernels", with_kernels(built("llama")))):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[name] = []
        for _ in range(10):
            for _ in range(2):
                loss = model(**inputs()).loss
                (loss / 2).backward()
            losses[name].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses["plain"][-1] < 0.95 * losses["plain"][0]
    assert losses["kernels"] == pytest.approx(losses["plain"], rel=5e-3), losses
