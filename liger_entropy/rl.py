"""For policy gradients: log-probabilities of given tokens, entropy masks, and a controller of the entropy bonus.

The exact KL divergence to a reference is not here, because one distribution's statistics do not give it:
``KL(p || q) = sum_j p_j log p_j - sum_j p_j log q_j``, and the second sum needs the logits z of the policy and z' of
the reference of one chunk at the same time. It would take a second product per chunk, one more field
``sum_j e^(z_j - m) z'_j`` that merges like the entropy's, and the gradient ``p_j (log p_j - log q_j - KL)``. The usual
estimate from sampled tokens, ``e^r - r - 1`` with ``r = ref_logprob - logprob`` (Schulman's k3), needs no more than
the logprob of both models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .checks import product_dtype
from .planner import ComputeOptions
from .products import Products
from .token_statistics import linear_token_statistics


def selected_logprobs(
    input: Tensor,
    linear_weight: Tensor,
    token_ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor | None = 1.0,
    options: ComputeOptions | None = None,
) -> Tensor:
    """Log-probabilities of K given tokens at every position, for distillation and auditing.

    ``log p_j = z_j - lse`` with the z of :func:`liger_entropy.linear_token_statistics`: one pass of the operator for
    lse, and K dot products per position in fp32.

    Args:
        input: ``[..., D]``; linear_weight: ``[V, D]``, not sharded; linear_bias, softcap, logit_scale, temperature,
            options: as there.
        token_ids: ``[..., K]`` integers in [0, V), in any order, repeated or not, or ``ignore_index`` for none.

    Returns:
        ``[..., K]``, fp32 (fp64 for fp64 inputs), in nats, 0 where the id is ``ignore_index``; differentiable once in
        input, linear_weight and linear_bias.

    Raises:
        ValueError, TypeError: as :func:`liger_entropy.linear_token_statistics`; ValueError for an id outside [0, V).
    """
    ids, kept = _checked_ids(token_ids, input, linear_weight, ignore_index)
    any_kept = torch.where(kept.any(-1), 0, -100).view(input.shape[:-1])
    statistics = linear_token_statistics(
        input, linear_weight, any_kept, linear_bias=linear_bias, softcap=softcap, logit_scale=logit_scale,
        temperature=temperature, options=options, fields=("lse",),
    )  # fmt: skip
    x = input.reshape(-1, input.shape[-1])
    z = _SelectedLogits.apply(x, linear_weight, ids, product_dtype(input, linear_weight))
    z = _transformed(z if linear_bias is None else z + linear_bias.to(z.dtype)[ids], softcap, logit_scale, temperature)
    return torch.where(kept, z - statistics.lse.reshape(-1, 1), 0.0).view(token_ids.shape)


def _checked_ids(token_ids: Tensor, input: Tensor, weight: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """ids [T, K], 0 in place of ignored ones, and which are kept [T, K]."""
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise TypeError(f"token_ids: expected an integer tensor, got {token_ids.dtype}")
    if token_ids.shape[:-1] != input.shape[:-1] or token_ids.ndim == 0:
        raise ValueError(
            f"token_ids: expected shape {(*input.shape[:-1], 'K')} for an input of shape {tuple(input.shape)}, "
            f"got {tuple(token_ids.shape)}"
        )
    ids = token_ids.reshape(token_ids.shape[:-1].numel(), token_ids.shape[-1]).long()
    kept = ids != ignore_index
    bad = kept & ((ids < 0) | (ids >= weight.shape[0]))
    if bad.any():
        raise ValueError(
            f"token_ids: {int(ids[bad][0])} is neither in [0, {weight.shape[0]}) nor ignore_index={ignore_index}"
        )
    return torch.where(kept, ids, 0), kept


def _transformed(z: Tensor, softcap: float | None, logit_scale: float, temperature: float | Tensor | None) -> Tensor:
    """The order of the operator: scale, softcap, temperature. z [T, K]."""
    z = z * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    if isinstance(temperature, Tensor):
        return z / temperature.reshape(-1, 1).to(z)
    return z if temperature is None else z / temperature


class _SelectedLogits(torch.autograd.Function):
    """``out_tk = x_t . w_(ids_tk)``, one k at a time, so that nothing larger than x is made but dw.

    Plain indexing would make ``[T, K, D]`` forward and a ``[V, D]`` gradient for each k, summed in the weight's dtype.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, w, ids)
        ctx.dtype, ctx.accumulator = dtype, Products(dtype, x.device).accumulator
        rows = x.to(dtype).to(ctx.accumulator)  # [T, D]
        with torch.autocast(x.device.type, enabled=False):  # it would round vecdot's operands and result
            columns = [torch.linalg.vecdot(rows, w[k].to(dtype).to(ctx.accumulator)) for k in ids.unbind(1)]
        return torch.stack(columns, 1) if columns else rows.new_empty(len(x), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):  # [T, K]
        x, w, ids = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(x, dtype=ctx.accumulator)
            for g, k in zip(gradient.unbind(1), ids.unbind(1), strict=True):
                dx.addcmul_(g[:, None], w[k].to(ctx.dtype).to(ctx.accumulator))
            dx = dx.to(x.dtype)
        if ctx.needs_input_grad[1]:
            chosen, place = ids.unique(return_inverse=True)
            sums = torch.zeros(len(chosen), w.shape[1], dtype=ctx.accumulator, device=w.device)
            rows = x.to(ctx.dtype).to(ctx.accumulator)
            for g, k in zip(gradient.unbind(1), place.unbind(1), strict=True):
                sums.index_add_(0, k, g[:, None] * rows)
            dw = torch.zeros_like(w)
            dw[chosen] = sums.to(w.dtype)
        return dx, dw, None, None


def high_entropy_mask(entropy: Tensor, mask: Tensor, fraction: float = 0.2) -> Tensor:
    """True at the ``fraction`` of the masked tokens whose entropy is largest, to train on the uncertain ones alone.

    As in "Beyond the 80/20 rule" (Wang et al. 2025), which takes the policy gradient of the top 20 %.

    Args:
        entropy: any shape, NaN counts as the lowest; mask: the same shape, True (or non-zero) at the tokens that count.
        fraction: in (0, 1]; ``ceil(fraction * number of masked tokens)`` are taken, and more only where entropies tie.
            The fraction is the decimal number it was written as: 0.3 of 100 tokens are 30.

    Returns:
        A bool tensor of that shape, not differentiable; all False where no token counts.
    """
    if entropy.shape != mask.shape:
        raise ValueError(f"mask: expected the shape of entropy, {tuple(entropy.shape)}, got {tuple(mask.shape)}")
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction: expected a number in (0, 1], got {fraction}")
    mask = mask.bool()
    masked = entropy.detach().masked_fill(~mask | entropy.isnan(), -math.inf)
    # The last factor exceeds the roundings of the fraction and of both products, 2^-53 each: a product that is
    # whole in decimals does not end above it.
    count = torch.ceil(mask.sum().double() * fraction * (1 - 2**-51)).long()
    if entropy.numel() == 0:
        return mask
    threshold = masked.flatten().sort(descending=True).values.take((count - 1).clamp(min=0))
    return (masked >= threshold) & mask


@dataclass
class EntropyController:
    """Adapts the coefficient of an entropy bonus so that the policy's entropy stays near a target.

    ``log coef += rate * (target - entropy)`` after every step: the dual step of soft actor-critic with an entropy
    constraint (Haarnoja et al. 2018, "Soft actor-critic algorithms and applications", eq. 18).

    Args:
        target: entropy in nats, the mean over the tokens that carry loss.
        coef: the first coefficient.
        rate: change of log coef per nat of error.
        min_coef, max_coef: bounds, both > 0; they also keep a long one-sided error from winding the coefficient up.

    Raises:
        ValueError: numbers out of range, or an entropy that is not finite.
    """

    target: float
    coef: float = 0.01
    rate: float = 0.1
    min_coef: float = 1e-5
    max_coef: float = 1.0

    def __post_init__(self) -> None:
        for name in ("target", "rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a finite number > 0, got {value}")
        if not 0 < self.min_coef <= self.coef <= self.max_coef < math.inf:
            raise ValueError(
                f"coef: expected 0 < min_coef <= coef <= max_coef, got {self.min_coef}, {self.coef}, {self.max_coef}"
            )

    def update(self, entropy: float | Tensor) -> float:
        """The coefficient for the next step, given this step's mean entropy, over all ranks where there are several."""
        entropy = float(entropy.detach() if isinstance(entropy, Tensor) else entropy)
        if not math.isfinite(entropy):
            raise ValueError(f"entropy: expected a finite number, got {entropy}")
        # The exponent is bounded as the coefficient is, so that no entropy overflows it.
        exponent = min(self.rate * (self.target - entropy), math.log(self.max_coef / self.coef))
        self.coef = max(self.min_coef, min(self.max_coef, self.coef * math.exp(exponent)))
        return self.coef

    def state_dict(self) -> dict[str, float]:
        """What changes: the coefficient."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises ValueError, and keeps the coefficient, where that of the state is out of bounds."""
        self.coef = replace(self, coef=float(state["coef"])).coef
