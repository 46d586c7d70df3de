"""The formulas, once, in plain torch. The eager backend and the merging of blocks and ranks use them as they stand;
the Triton kernels repeat :func:`transform_`, :func:`block_statistics` and :func:`block_gradient_` element for element.

With ``z = transform(x w^T + b)``, a row maximum ``m``, ``t_j = z_j - m``, ``d = sum_j e^(t_j)`` and
``log p_j = t_j - log d``, every statistic is written relative to ``m``, so that adding one number to all logits of a
row changes nothing but ``lse``:

    logprob = t_y - log d                  entropy = log d - sum_j e^(t_j) t_j / d
    lse     = m + log d                    smooth_logprob = 1/V sum_j c_j (t_j - log d)

Shapes: R rows, C columns of one block of the vocabulary, V the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Fields of a partial [FIELDS, R]: what one block of the vocabulary (a tile, a chunk, a rank's shard) knows of a row.
# All are kept in the accumulation dtype, so that one tensor travels between ranks; an index below 2^24 is exact in it.
ROW_MAX, NORMALIZER, SHIFTED_SUM, SMOOTH_SUM, SMOOTH_WEIGHT, TARGET_LOGIT, PREDICTION = range(7)
FIELDS = 7

# Rows of the coefficients [4, R] that the gradient needs, see row_coefficients.
PROBABILITY, LOG_PROBABILITY, TARGET, SMOOTH = range(4)

IGNORED = -1  # target of a row that takes no part
INVALID = -2  # target outside the vocabulary, met only when labels are not checked: the row is NaN


@dataclass(frozen=True)
class Transform:
    """Logits ``z`` from products ``a``: ``z = softcap(logit_scale (a + bias)) / temperature``.

    bias [C] | None; temperature is the float ``1 / inverse_temperature``, or a tensor [R, 1] beside it.
    """

    logit_scale: float = 1.0
    softcap: float = 0.0  # 0: none
    inverse_temperature: float = 1.0
    temperature: Tensor | None = None  # [R, 1]

    def rows(self, rows: slice) -> Transform:
        if self.temperature is None:
            return self
        temperature = self.temperature[rows]
        return Transform(self.logit_scale, self.softcap, self.inverse_temperature, temperature)


def put(values: Tensor, index: Tensor | None, tokens: int, fill: int = 0) -> Tensor:
    """Values of the rows [R, ...] back at their tokens [T, ...], `fill` at the tokens that were dropped."""
    if index is None:
        return values
    return values.new_full((tokens, *values.shape[1:]), fill).index_copy_(0, index, values)


def coded(target: Tensor, ignore_index: int, vocab_size: int) -> Tensor:
    """Labels with IGNORED and INVALID in place of every index that is no class. target [R]."""
    invalid = (target < 0) | (target >= vocab_size)
    return torch.where(target == ignore_index, IGNORED, torch.where(invalid, INVALID, target))


def transform_(z: Tensor, bias: Tensor | None, transform: Transform) -> Tensor:
    """Turn products into logits, in place. z [R, C], bias [C]."""
    if bias is not None:
        z.add_(bias)
    if transform.logit_scale != 1.0:
        z.mul_(transform.logit_scale)
    if transform.softcap:
        z.div_(transform.softcap).tanh_().mul_(transform.softcap)
    if transform.inverse_temperature != 1.0:
        z.mul_(transform.inverse_temperature)
    if transform.temperature is not None:
        z.div_(transform.temperature)
    return z


def softcap_derivative(z: Tensor, transform: Transform) -> Tensor:
    """``1 - tanh(u)^2`` recovered from logits ``z = softcap tanh(u) / temperature``. z [R, C]."""
    tanh = z * (1.0 / (transform.softcap * transform.inverse_temperature))
    if transform.temperature is not None:
        tanh.mul_(transform.temperature)
    return tanh.square_().neg_().add_(1.0)


def _finite_(t: Tensor) -> Tensor:
    """e^t is 0 below -1e4 in fp64 too, so a class of probability 0 gives 0 * -1e4 and not 0 * -inf. NaN stays NaN."""
    return t.clamp_(min=-1e4)


def block_statistics(
    z: Tensor,  # [R, C] logits, overwritten by z - row maximum
    target: Tensor,  # [R] index into the block; anything outside [0, C) has its target elsewhere
    class_weight: Tensor | None,  # [C]
    scratch: Tensor,  # [R, C]
    offset: int,  # index of the block's first class in the vocabulary
    out: Tensor,  # [FIELDS, R]
    wanted: tuple[bool, bool, bool],  # entropy, smooth_logprob, prediction
) -> None:
    entropy, smooth, prediction = wanted
    columns = z.shape[1]
    inside = (target >= 0) & (target < columns)
    at_target = z.gather(1, target.clamp(0, columns - 1)[:, None])[:, 0]
    out[TARGET_LOGIT] = torch.where(inside, at_target, 0.0)
    if prediction:
        row_max, index = z.max(dim=1)
        out[PREDICTION] = index + offset
    else:
        row_max = z.amax(dim=1)
    out[ROW_MAX] = row_max
    t = z.sub_(row_max.masked_fill(row_max == -math.inf, 0.0)[:, None])
    if smooth:
        out[SMOOTH_SUM], out[SMOOTH_WEIGHT] = _smooth_sum(t, class_weight)
    exponential = torch.exp(t, out=scratch)
    torch.sum(exponential, dim=1, out=out[NORMALIZER])
    if entropy:
        out[SHIFTED_SUM] = torch.linalg.vecdot(exponential, _finite_(t))


def _smooth_sum(t: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """``sum_j c_j t_j`` and ``sum_j c_j``. A class of weight 0 adds nothing, also when its logit is -inf."""
    if class_weight is None:
        return t.sum(dim=1), float(t.shape[1])
    return torch.where(class_weight == 0, 0.0, t).mv(class_weight), class_weight.sum()


def merge(partials: Tensor) -> Tensor:  # [N, FIELDS, R] -> [FIELDS, R]
    """The online rule: ``d = sum_i e^(m_i - m) d_i`` and ``s = sum_i e^(m_i - m) (s_i + (m_i - m) d_i)``."""
    block_max = partials[:, ROW_MAX]
    row_max, winner = block_max.max(dim=0)  # first of equals
    shift = torch.where(block_max == -math.inf, 0.0, block_max - row_max)
    scale = shift.exp()
    merged = torch.empty_like(partials[0])
    merged[ROW_MAX] = row_max
    merged[NORMALIZER] = (scale * partials[:, NORMALIZER]).sum(0)
    merged[SHIFTED_SUM] = (scale * (partials[:, SHIFTED_SUM] + shift * partials[:, NORMALIZER])).sum(0)
    merged[SMOOTH_SUM] = (partials[:, SMOOTH_SUM] + shift * partials[:, SMOOTH_WEIGHT]).sum(0)
    merged[SMOOTH_WEIGHT] = partials[:, SMOOTH_WEIGHT].sum(0)
    merged[TARGET_LOGIT] = partials[:, TARGET_LOGIT].sum(0)
    merged[PREDICTION] = partials[:, PREDICTION].gather(0, winner[None])[0]
    return merged


def finalize(state: Tensor, target: Tensor, vocab_size: int, wanted: tuple[bool, bool, bool]):
    """Statistics of each row from its merged partial. state [FIELDS, R], target [R] (IGNORED and INVALID included).

    Returns logprob, entropy, lse, smooth_logprob, prediction [R] each and residuals [4, R] for the gradient:
    row maximum, log d, s / d and sum(c) / V. A statistic that is not wanted is None, what only it needs is 0: the
    fields of the state behind it were never written.
    """
    log_norm = state[NORMALIZER].log()
    shifted_mean = state[SHIFTED_SUM] / state[NORMALIZER]
    mean_weight = state[SMOOTH_WEIGHT] / vocab_size
    logprob = (state[TARGET_LOGIT] - state[ROW_MAX]) - log_norm
    entropy = log_norm - shifted_mean if wanted[0] else None
    lse = state[ROW_MAX] + log_norm
    smooth = state[SMOOTH_SUM] / vocab_size - mean_weight * log_norm if wanted[1] else None
    kept, invalid = target != IGNORED, target == INVALID
    floats = [
        None if s is None else torch.where(kept, s.masked_fill(invalid, math.nan), 0.0)
        for s in (logprob, entropy, lse, smooth)
    ]
    prediction = torch.where(kept, state[PREDICTION].nan_to_num().long(), -1) if wanted[2] else None
    unused = torch.zeros_like(log_norm)
    optional = shifted_mean if wanted[0] else unused, mean_weight if wanted[1] else unused
    residuals = torch.stack([state[ROW_MAX], log_norm, *optional])
    return (*floats, prediction, residuals)


def row_coefficients(
    grad_logprob: Tensor | None,  # [R] each, None where no gradient arrives
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    grad_smooth: Tensor | None,
    target: Tensor,  # [R]
    residuals: Tensor,  # [4, R]
    vocab_size: int,
    transform: Transform,
) -> Tensor:  # [4, R]
    """What a row multiplies in ``dL/da_j = c'_j (p_j (P + L log p_j) + T [j = y] + S c_j)``, c' the softcap derivative:

    ``P = g_lse - g_logprob - g_smooth sum(c)/V - g_entropy H``, ``L = -g_entropy``, ``T = g_logprob``,
    ``S = g_smooth / V``, all times ``logit_scale / temperature``. A row whose four numbers are 0 has gradient 0,
    whatever its logits are.
    """
    _, log_norm, shifted_mean, mean_weight = residuals
    out = torch.zeros_like(residuals)
    if grad_lse is not None:
        out[PROBABILITY] += grad_lse
    if grad_logprob is not None:
        out[PROBABILITY] -= grad_logprob
        out[TARGET] = grad_logprob
    if grad_smooth is not None:
        out[PROBABILITY] -= torch.where(grad_smooth == 0, 0.0, grad_smooth * mean_weight)
        out[SMOOTH] = grad_smooth / vocab_size
    if grad_entropy is not None:
        entropy = log_norm - shifted_mean
        out[PROBABILITY] -= torch.where(grad_entropy == 0, 0.0, grad_entropy * entropy)
        out[LOG_PROBABILITY] = -grad_entropy
    out *= transform.logit_scale * transform.inverse_temperature
    if transform.temperature is not None:
        out /= transform.temperature[:, 0]
    out.masked_fill_(target == INVALID, math.nan)
    return out.masked_fill_(target == IGNORED, 0.0)


def block_gradient_(
    t: Tensor,  # [R, C] z - row maximum, overwritten by the gradient
    target: Tensor,  # [R] index into the block
    class_weight: Tensor | None,  # [C]
    log_norm: Tensor,  # [R]
    coefficients: Tensor,  # [4, R]
    scratch: Tensor,  # [R, C]
    with_entropy: bool,
    with_smooth: bool,
) -> Tensor:
    """``p_j (P + L log p_j) + T [j = y] + S c_j``; the softcap derivative is left to the caller."""
    columns = t.shape[1]
    p = torch.exp(t.sub_(log_norm[:, None]), out=scratch)
    if with_entropy:
        _finite_(t).mul_(coefficients[LOG_PROBABILITY][:, None]).add_(coefficients[PROBABILITY][:, None]).mul_(p)
    else:
        torch.mul(p, coefficients[PROBABILITY][:, None], out=t)
    if with_smooth:
        t.add_(coefficients[SMOOTH][:, None] * (1.0 if class_weight is None else class_weight))
    inside = (target >= 0) & (target < columns)
    at_target = torch.where(inside, coefficients[TARGET], 0.0)
    t.scatter_add_(1, target.clamp(0, columns - 1)[:, None], at_target[:, None])
    return t.masked_fill_((coefficients == 0).all(dim=0)[:, None], 0.0)
