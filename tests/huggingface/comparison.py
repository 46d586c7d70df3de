"""What a patched model must give, taken from the same instance before the patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_entropy.huggingface import apply_liger_entropy

# Both sides compute in fp32 with different orders of summation; measured over all families the largest difference is
# 3e-6 of the largest entry of a gradient.
RELATIVE = 1e-5


@dataclass
class Run:
    loss: Tensor
    outputs: Any
    gradients: dict[str, Tensor]


def batch(vocabulary: int = 97, shape: tuple[int, int] = (2, 16)) -> dict[str, Tensor]:
    """Token ids, and labels that ignore a different prefix in each row. Ids below 4 are left to special tokens."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, vocabulary, shape, generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[1, :7] = -100
    return {"input_ids": ids, "labels": labels}


def train(model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Run:
    model.zero_grad(set_to_none=True)
    model.train()
    torch.manual_seed(2)  # routers and layer drops draw numbers
    outputs = model(**inputs, **kwargs)
    loss = outputs[0] if isinstance(outputs, tuple) else outputs.loss
    loss.backward()
    return Run(loss.detach(), outputs, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@torch.no_grad()
def evaluate(model: nn.Module, inputs: dict[str, Any], **kwargs: Any) -> Any:
    model.eval()
    torch.manual_seed(2)
    return model(**inputs, **kwargs)


def assert_close(got: Tensor, expected: Tensor, name: str = "", scale: float | None = None) -> None:
    """Equal up to RELATIVE of the largest expected entry (or of ``scale``)."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    largest = expected.abs().max().item() if expected.numel() else 0.0
    error = (got - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= RELATIVE * max(largest, scale or 0.0, 1e-30), (
        f"{name}: differs by {error:.3g}, largest {largest:.3g}"
    )


def assert_same_run(got: Run, expected: Run) -> None:
    """Loss, and the gradient of every parameter: the same ones have one, and each is close."""
    assert_close(got.loss, expected.loss, "loss")
    assert got.gradients.keys() == expected.gradients.keys(), got.gradients.keys() ^ expected.gradients.keys()
    largest = max(g.abs().max().item() for g in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        # A gradient that is zero in exact arithmetic is rounding noise on both sides: 1e-3 of the largest one.
        assert_close(got.gradients[name], gradient, name, scale=1e-1 * largest)


def entropy(logits: Tensor) -> Tensor:
    logprobs = logits.double().log_softmax(-1)
    return -(logprobs.exp() * logprobs).nan_to_num().sum(-1).float()


def assert_like_unpatched(model: nn.Module, inputs: dict[str, Any], with_entropy: bool = True) -> nn.Module:
    """Compare the model before and after the patch in everything that both have; the patched model comes back."""
    plain = {k: v for k, v in inputs.items() if k != "labels"}
    expected = train(model, inputs)
    logits, evaluated = evaluate(model, plain).logits, evaluate(model, inputs)
    apply_liger_entropy(model, token_statistics=True)
    got = train(model, inputs)
    assert_same_run(got, expected)
    if with_entropy:
        assert_entropy(got, expected, inputs)
    assert torch.equal(evaluate(model, plain).logits, logits), "logits without labels"
    again = evaluate(model, inputs)
    assert_close(again.loss, evaluated.loss, "loss in eval")
    assert torch.equal(again.logits, evaluated.logits), "logits in eval"
    return model


def assert_entropy(got: Run, expected: Run, inputs: dict[str, Any]) -> None:
    """Each token's entropy is that of the unpatched logits at its position, and entropy_loss is their mean."""
    tokens = got.outputs.token_entropy
    assert tokens.shape == inputs["labels"].shape == got.outputs.token_logprobs.shape
    kept = tokens.detach() != 0
    assert 1 <= kept.sum() <= (inputs["labels"] != -100).sum()
    # Image tokens come before the text and have no labels.
    truth = entropy(expected.outputs.logits.detach())[:, -tokens.shape[1] :]
    # H is a difference of terms of order 1, whose rounding stays when H itself is near 0: hence an error of 1e-6.
    assert_close(tokens.detach()[kept], truth[kept], "token_entropy", scale=0.1)
    assert_close(got.outputs.entropy_loss.detach(), truth[kept].mean(), "entropy_loss", scale=0.1)
