"""The same loss written in plain torch on full logits, and computed by the library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from liger_entropy import ComputeOptions, apply_liger_entropy, linear_cross_entropy

from .data import VOCABULARY
from .training import Objective


def mean_entropy(logits: Tensor, weight: Tensor) -> Tensor:  # [B, S, V], [B, S] -> []
    logp = logits.float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (weight * entropy).sum() / weight.sum()


def plain(entropy_coef: float = 0.0) -> Callable[[PreTrainedModel], Objective]:
    """The model's own loss; the entropy from its logits."""

    def objective_of(model: PreTrainedModel) -> Objective:
        def objective(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            outputs = model(input_ids=ids, labels=labels)
            entropy = mean_entropy(outputs.logits[:, :-1], (labels[:, 1:] != -100).float())
            return outputs.loss - entropy_coef * entropy, entropy

        return objective

    return objective_of


def exact_head(model: PreTrainedModel) -> Objective:
    """The model's own loss with its head computed in fp32: what bf16 training would be without rounded logits."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: F.linear(hidden.float(), head.weight.float())
    return plain()(model)


def patched(
    entropy_coef: float = 0.0,
    options: ComputeOptions | None = None,
    compiler: str | None = None,
    fullgraph: bool = False,
) -> Callable[[PreTrainedModel], Objective]:
    """The model after :func:`apply_liger_entropy`, as it is or compiled by that backend of torch.compile."""

    def objective_of(model: PreTrainedModel) -> Objective:
        apply_liger_entropy(model, entropy_coef=entropy_coef, options=options)
        run = model
        if compiler:
            torch.compiler.reset()  # Dynamo counts recompilations over all models of a process
            run = torch.compile(model, backend=compiler, fullgraph=fullgraph)

        def objective(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            outputs = run(input_ids=ids, labels=labels)
            assert outputs.logits is None, "the patched model built its logits"
            return outputs.loss, outputs.entropy_loss

        return objective

    return objective_of


@dataclass(frozen=True)
class EveryOption:
    """A loss with label smoothing, z-loss, class weights, token weights and an entropy term at once."""

    label_smoothing: float = 0.1
    z_loss: float = 1e-3
    entropy_coef: float = 0.05
    temperature: float = 1.3

    def class_weight(self, device: torch.device) -> Tensor:  # [V], from 0.5 to 1.5
        return torch.linspace(0.5, 1.5, VOCABULARY, device=device)

    def token_weight(self, target: Tensor) -> Tensor:  # [B, S]; every seventh class has weight 0, the others 0.5 to 2
        return torch.where(target % 7 == 0, 0.0, 0.5 + (target % 4) / 2)

    def plain(self, model: PreTrainedModel) -> Objective:
        def objective(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(input_ids=ids).logits[:, :-1].float() / self.temperature  # [B, S, V]
            target = labels[:, 1:]
            kept = target != -100
            class_weight = self.class_weight(ids.device)
            weight = self.token_weight(target) * kept
            ce = F.cross_entropy(
                logits.transpose(1, 2), target, class_weight, reduction="none", label_smoothing=self.label_smoothing
            )
            ce = (weight * ce).sum() / (weight * class_weight[target.clamp(min=0)]).sum()
            z_loss = (weight * logits.logsumexp(-1).square()).sum() / weight.sum()
            entropy = mean_entropy(logits, weight)
            return ce + self.z_loss * z_loss - self.entropy_coef * entropy, entropy

        return objective

    def fused(self, options: ComputeOptions | None = None) -> Callable[[PreTrainedModel], Objective]:
        def objective_of(model: PreTrainedModel) -> Objective:
            def objective(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
                hidden = model.base_model(input_ids=ids).last_hidden_state[:, :-1]  # [B, S, D]
                target = labels[:, 1:]
                output = linear_cross_entropy(
                    hidden, model.get_output_embeddings().weight, target, weight=self.class_weight(ids.device),
                    token_weight=self.token_weight(target), label_smoothing=self.label_smoothing,
                    lse_square_scale=self.z_loss, entropy_coef=self.entropy_coef, temperature=self.temperature,
                    softcap=getattr(model.config, "final_logit_softcapping", None),
                    logit_scale=1.0 / getattr(model.config, "logits_scaling", 1.0),
                    return_entropy_loss=True, options=options,
                )  # fmt: skip
                return output.loss, output.entropy_loss

            return objective

        return objective_of
