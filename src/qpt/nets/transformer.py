"""A causal transformer over (return-to-go, cost-to-go, state, action) tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import entry
from qpt.nets.attention import query_attention, self_attention
from qpt.nets.norm import Norm
from qpt.nets.perceptron import mix
from qpt.nets.pointwise import GELU, Dropout

TOKENS = 4  # a step is return-to-go, cost-to-go, state, action
STATE, ACTION = 2, 3  # places of the state and of the action token in a step


class Block(nn.Module):
    """Pre-norm attention and perceptron; the last block computes only the tokens that it is read at."""

    def __init__(self, width: int, heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), GELU(), nn.Linear(4 * width, width), Dropout(dropout))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Every token: [B, L, D] -> [B, L, D]."""
        attended = self_attention(self.qkv(self.norm1(x)), self.heads, self._rate())
        return self._mix(x + self._project(attended))

    def read(self, x: Tensor, kinds: tuple[int, ...], places: Tensor) -> Tensor:
        """Only the tokens of the given kinds, at the given places [M] of the window: [B, L, D] -> [B, M, D]."""
        return self._read(x, _pick(x, kinds), places)

    def read_at(self, x: Tensor, places: Tensor) -> Tensor:
        """One token of every window, at places [B]: [B, L, D] -> [B, 1, D]."""
        return self._read(x, x.gather(1, places[:, None, None].expand(-1, 1, x.shape[-1])), places[:, None])

    def _read(self, x: Tensor, chosen: Tensor, places: Tensor) -> Tensor:
        width = x.shape[-1]
        q = F.linear(self.norm1(chosen), self.qkv.weight[:width], self.qkv.bias[:width])
        kv = F.linear(self.norm1(x), self.qkv.weight[width:], self.qkv.bias[width:])
        return self._mix(chosen + self._project(query_attention(q, kv, places, self.heads, self._rate())))

    def _rate(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _project(self, attended: Tensor) -> Tensor:
        projected: Tensor = self.dropout(self.project(attended))
        return projected

    def _mix(self, x: Tensor) -> Tensor:
        """The perceptron's half of the block."""
        return mix(x, self.norm2, self.mlp)

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [B, H, L, d]."""
        return torch.unflatten(self.qkv(self.norm1(x)), -1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    # -- one step for many candidates that share their history ---------------------------------------------------------

    def prefix(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block on the shared history, and the keys and values that the candidates attend to."""
        q, k, v = self._split(x)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self._mix(x + self._project(attended.transpose(1, 2).flatten(2))), k, v

    def suffix(self, x: Tensor, k: Tensor, v: Tensor, key_mask: Tensor, candidates: int) -> Tensor:
        """Tokens of the current step [B, m * J, D] attend to the shared keys [B, H, P, d] and causally to their own."""
        own = x.shape[1] // candidates
        q, k2, v2 = self._split(x)  # [B, H, m * J, d]
        scale = q.shape[-1] ** -0.5
        shared = q @ k.transpose(-1, -2) * scale  # [B, H, m * J, P]
        shared = shared.masked_fill(~key_mask[:, None, None], float("-inf"))
        q, k2, v2 = (torch.unflatten(t, 2, (candidates, own)) for t in (q, k2, v2))
        later = torch.ones(own, own, dtype=torch.bool, device=x.device).triu(1)
        local = (q @ k2.transpose(-1, -2) * scale).masked_fill(later, float("-inf"))  # [B, H, m, J, J]
        weights = torch.cat([torch.unflatten(shared, 2, (candidates, own)), local], -1).softmax(-1)
        past = shared.shape[-1]
        out = (weights[..., :past].flatten(2, 3) @ v) + (weights[..., past:] @ v2).flatten(2, 3)
        return self._mix(x + self._project(out.transpose(1, 2).flatten(2)))


def _pick(x: Tensor, kinds: tuple[int, ...]) -> Tensor:
    """The tokens of the given kinds of each step: [B, 4K, D] -> [B, K * len(kinds), D]."""
    steps = torch.unflatten(x, 1, (-1, TOKENS))
    return torch.cat([steps[:, :, kind : kind + 1] for kind in kinds], 2).flatten(1, 2)


def _scaled(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer of one input, as a product: no matrix unit, and no rounding to bf16 of what the targets say."""
    return x[..., None] * layer.weight[:, 0] + layer.bias


class TrajectoryTransformer(nn.Module):
    """Hidden states of right-padded windows: the causal mask alone keeps the padding out of valid tokens."""

    mean: Tensor
    std: Tensor

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
        self.embed_return, self.embed_cost = nn.Linear(1, width), nn.Linear(1, width)
        self.embed_observation = nn.Linear(len(observation_mean), width)
        self.embed_action = nn.Linear(action_dim, width)
        self.embed_step = nn.Embedding(horizon + context, width)  # padded steps beyond the horizon need a row too
        self.norm_in, self.norm_out, self.dropout = Norm(width), Norm(width), Dropout(dropout)
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
        last: Tensor | None = None,
    ) -> Tensor:
        """Hidden states at the tokens of the given kinds: [B, K, len(kinds), D].

        With `last` [B], only at the state token of that step of each window: [B, 1, 1, D].
        """
        x = self._enter(return_to_go, cost_to_go, observations, actions, steps).flatten(1, 2)  # [B, 4K, D]
        for block in self.blocks[:-1]:
            x = block(x)
        final = cast(Block, self.blocks[-1])
        if last is not None:
            return self.norm_out(final.read_at(x, last * TOKENS + STATE))[:, None]  # type: ignore[no-any-return]
        tokens = torch.arange(observations.shape[1] * TOKENS, device=x.device)
        x = final.read(x, kinds, _pick(tokens[None, :, None], kinds)[0, :, 0])
        return torch.unflatten(self.norm_out(x), 1, (-1, len(kinds)))

    def _enter(
        self, return_to_go: Tensor, cost_to_go: Tensor, observations: Tensor, actions: Tensor, steps: Tensor
    ) -> Tensor:
        """What the first block is given: [..., 4, D]."""
        scalars = return_to_go * self.return_scale, self.cost_offset - cost_to_go * self.cost_scale
        layers = self.embed_return, self.embed_cost
        seen, done = self.embed_observation((observations - self.mean) / self.std), self.embed_action(actions)
        if entry.fits(seen, done):
            tokens = entry.enter(scalars, layers, seen, done, steps, self.embed_step, self.norm_in)
        else:
            kinds = [*map(_scaled, layers, scalars), seen, done]
            tokens = self._narrow(self.norm_in(torch.stack(kinds, -2) + self.embed_step(steps)[..., None, :]))
        entered: Tensor = self.dropout(tokens)
        return entered

    @staticmethod
    def _narrow(x: Tensor) -> Tensor:
        """With autocast, what blocks add up is as narrow as what they add."""
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

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
        current = self._enter(
            return_candidates,
            cost_candidates,
            observations[rows, last][:, None].expand(-1, m, -1),
            actions[rows, last][:, None].expand(-1, m, -1),
            steps[rows, last][:, None].expand(-1, m),
        )[:, :, :ACTION]  # the current action is not known yet: [B, m, 3, D]
        y = current.flatten(1, 2)
        x = self._enter(return_to_go, cost_to_go, observations, actions, steps).flatten(1, 2)
        earlier = torch.arange(x.shape[1], device=x.device) < (last * TOKENS)[:, None]  # [B, 4K]
        for module in self.blocks:
            block = cast(Block, module)
            x, k, v = block.prefix(x)
            y = block.suffix(y, k, v, earlier, m)
        hidden: Tensor = self.norm_out(torch.unflatten(y, 1, (m, ACTION))[:, :, STATE])
        return hidden
