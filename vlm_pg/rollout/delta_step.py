"""The gated delta rule for one token, with the state replaced in place and read as seldom as possible.

The rule (https://arxiv.org/abs/2412.06464), with state S [dk, dv], normed key k and query q [dk], value v [dv],
0 < decay <= 1, 0 < beta < 1:

    S' = decay S + k delta^T        delta = beta (v - decay S^T k)        out = S'^T q

Of what a decode step reads only the weights are larger than the states, so what counts is how often these pass through
memory. Since S'^T q = decay S^T q + (q . k) delta, one matrix product reads S for key and query together.
"""

from __future__ import annotations

import torch

# transformers' and FLA's.
NORM_EPSILON = 1e-6


def gated_delta_step_(
    state: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """One token of transformers' ``torch_recurrent_gated_delta_rule``, with its norms; n rows, Hv value heads.

    Args:
        state: fp32 [n, Hv, dk, dv], contiguous; replaced in place.
        query, key: [n, Hv, dk], any floating dtype.
        value: [n, Hv, dv].
        log_decay, beta: [n, Hv].

    Returns:
        fp32 [n, Hv, dv].
    """
    query, key = (_normed(x.float()) for x in (query, key))
    query = query / query.shape[-1] ** 0.5
    decay, beta = log_decay.float().exp()[..., None], beta.float()[..., None]
    # The state is read once here, and read and written once by each of the two operators below.
    with torch.autocast(state.device.type, enabled=False):
        reads = torch.matmul(torch.stack([key, query], dim=-2), state) * decay[..., None]
    delta = (value.float() - reads[..., 0, :]) * beta
    state.mul_(decay[..., None])
    state.addcmul_(key[..., None], delta[..., None, :])
    return reads[..., 1, :] + (query * key).sum(-1, keepdim=True) * delta


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)
