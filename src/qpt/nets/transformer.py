"""A causal transformer over (return-to-go, cost-to-go, state, action) tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = 4  # a step is return-to-go, cost-to-go, state, action
STATE, ACTION = 2, 3  # places of the state and of the action token in a step


class Block(nn.Module):
    """Pre-norm attention and perceptron; the last block computes only the tokens that it is read at."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, kinds: tuple[int, ...] | None = None, mask: Tensor | None = None) -> Tensor:
        """x [B, L, D] -> [B, L, D], or only the tokens of the given kinds of each step: [B, K * len(kinds), D]."""
        h = self.norm1(x)
        if kinds is None:
            q, k, v = self._split(self.qkv(h)).unbind(2)
            return self._mix(x + self._attend(q, k, v, None))
        width = x.shape[-1]
        q = self._heads(F.linear(_pick(h, kinds), self.qkv.weight[:width], self.qkv.bias[:width]))
        k, v = self._split(F.linear(h, self.qkv.weight[width:], self.qkv.bias[width:])).unbind(2)
        return self._mix(_pick(x, kinds) + self._attend(q, k, v, mask))

    def _mix(self, x: Tensor) -> Tensor:
        """The perceptron's half of the block."""
        mixed: Tensor = x + self.mlp(self.norm2(x))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)  # [B, H, L, d]

    def _split(self, x: Tensor) -> Tensor:
        parts = x.shape[-1] // self.project.in_features
        return torch.unflatten(x, -1, (parts, self.heads, -1)).permute(0, 3, 2, 1, 4)  # [B, H, parts, L, d]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        rate = self.attention_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=mask is None)
        return self._merge(out)

    def _merge(self, out: Tensor) -> Tensor:
        """Bring the heads together: [B, H, L, d] -> [B, L, D]."""
        merged: Tensor = self.dropout(self.project(out.transpose(1, 2).flatten(2)))
        return merged

    # -- one step for many candidates that share their history ---------------------------------------------------------

    def prefix(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block on the shared history, and the keys and values that the candidates attend to."""
        q, k, v = self._split(self.qkv(self.norm1(x))).unbind(2)
        return self._mix(x + self._attend(q, k, v, None)), k, v

    def suffix(self, x: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, candidates: int) -> Tensor:
        """Tokens of the current step [B, m * J, D] attend to the shared keys [B, H, P, d] and causally to their own."""
        own = x.shape[1] // candidates
        q, k2, v2 = self._split(self.qkv(self.norm1(x))).unbind(2)  # [B, H, m * J, d]
        scale = q.shape[-1] ** -0.5
        shared = q @ k.transpose(-1, -2) * scale  # [B, H, m * J, P]
        shared = shared.masked_fill(~key_mask[:, None, None], float("-inf"))
        q, k2, v2 = (torch.unflatten(t, 2, (candidates, own)) for t in (q, k2, v2))
        later = torch.ones(own, own, dtype=torch.bool, device=x.device).triu(1)
        local = (q @ k2.transpose(-1, -2) * scale).masked_fill(later, float("-inf"))  # [B, H, m, J, J]
        weights = torch.cat([torch.unflatten(shared, 2, (candidates, own)), local], -1).softmax(-1)
        past = shared.shape[-1]
        out = (weights[..., :past].flatten(2, 3) @ v) + (weights[..., past:] @ v2).flatten(2, 3)
        return self._mix(x + self._merge(out))


def _pick(x: Tensor, kinds: tuple[int, ...]) -> Tensor:
    """The tokens of the given kinds of each step: [B, 4K, D] -> [B, K * len(kinds), D]."""
    steps = torch.unflatten(x, 1, (-1, TOKENS))
    return torch.cat([steps[:, :, kind : kind + 1] for kind in kinds], 2).flatten(1, 2)


class TrajectoryTransformer(nn.Module):
    """Hidden states of right-padded windows: the causal mask alone keeps the padding out of valid tokens."""

    mean: Tensor
    std: Tensor
    causal: Tensor

    def __init__(
        self,
        observation_mean: Tensor,
        observation_std: Tensor,
        action_dim: int,
        *,
        context: int,
        horizon: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        attention_dropout: float,
        return_scale: float,
        cost_scale: float,
        cost_offset: float,
    ) -> None:
        super().__init__()
        self.context, self.return_scale = context, return_scale
        self.cost_scale, self.cost_offset = cost_scale, cost_offset
        self.register_buffer("mean", observation_mean.clone())
        self.register_buffer("std", observation_std.clone())
        causal = torch.ones(context * TOKENS, context * TOKENS, dtype=torch.bool).tril()
        self.register_buffer("causal", causal, persistent=False)
        self.embed_return, self.embed_cost = nn.Linear(1, width), nn.Linear(1, width)
        self.embed_observation = nn.Linear(len(observation_mean), width)
        self.embed_action = nn.Linear(action_dim, width)
        self.embed_step = nn.Embedding(horizon + context, width)  # padded steps beyond the horizon need a row too
        self.norm_in, self.norm_out, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, attention_dropout) for _ in range(layers))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self,
        return_to_go: Tensor,  # [B, K]
        cost_to_go: Tensor,  # [B, K]
        observations: Tensor,  # [B, K, S]
        actions: Tensor,  # [B, K, A]
        steps: Tensor,  # [B, K]
        kinds: tuple[int, ...] = (STATE,),
    ) -> Tensor:
        """Hidden states at the tokens of the given kinds: [B, K, len(kinds), D]."""
        x = self._embed(return_to_go, cost_to_go, observations, actions, steps).flatten(1, 2)  # [B, 4K, D]
        x = self.dropout(self.norm_in(x))
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, kinds, self._visible(observations.shape[1], kinds))
        return torch.unflatten(self.norm_out(x), 1, (-1, len(kinds)))

    def _visible(self, context: int, kinds: tuple[int, ...]) -> Tensor:
        """Which of the 4K keys each read token may attend to: [K * len(kinds), 4K]."""
        rows = torch.unflatten(self.causal[: context * TOKENS, : context * TOKENS], 0, (context, TOKENS))
        return torch.cat([rows[:, kind : kind + 1] for kind in kinds], 1).flatten(0, 1)

    def _embed(
        self, return_to_go: Tensor, cost_to_go: Tensor, observations: Tensor, actions: Tensor, steps: Tensor
    ) -> Tensor:
        tokens = [
            self.embed_return(return_to_go[..., None] * self.return_scale),
            self.embed_cost(self.cost_offset - cost_to_go[..., None] * self.cost_scale),
            self.embed_observation((observations - self.mean) / self.std),
            self.embed_action(actions),
        ]
        embedded: Tensor = torch.stack(tokens, -2) + self.embed_step(steps)[..., None, :]  # [..., 4, D]
        return embedded

    def candidates(
        self,
        return_to_go: Tensor,  # [B, K] history, the current step last at position `last`
        cost_to_go: Tensor,  # [B, K]
        observations: Tensor,
        actions: Tensor,
        steps: Tensor,
        last: Tensor,  # [B] place of the current step
        return_candidates: Tensor,  # [B, m] return-to-go of the current step, one a candidate
        cost_candidates: Tensor,  # [B, m]
    ) -> Tensor:
        """Hidden state of the current step for m candidates: [B, m, D]. Their common history is computed once."""
        rows, m = torch.arange(last.shape[0], device=last.device), return_candidates.shape[1]
        current = self._embed(
            return_candidates,
            cost_candidates,
            observations[rows, last][:, None].expand(-1, m, -1),
            actions[rows, last][:, None].expand(-1, m, -1),
            steps[rows, last][:, None].expand(-1, m),
        )[:, :, :ACTION]  # the current action is not known yet: [B, m, 3, D]
        y = self.dropout(self.norm_in(current)).flatten(1, 2)
        past = self._embed(return_to_go, cost_to_go, observations, actions, steps).flatten(1, 2)
        x = self.dropout(self.norm_in(past))
        earlier = torch.arange(x.shape[1], device=x.device) < (last * TOKENS)[:, None]  # [B, 4K]
        for module in self.blocks:
            block = cast(Block, module)
            x, k, v = block.prefix(x)
            y = block.suffix(y, k, v, earlier, m)
        hidden: Tensor = self.norm_out(torch.unflatten(y, 1, (m, ACTION))[:, :, STATE])
        return hidden
