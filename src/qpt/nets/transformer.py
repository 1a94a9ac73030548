"""A causal transformer over (return-to-go, cost-to-go, state, action) tokens."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qpt.nets import entry, perceptron, residual
from qpt.nets.attention import ask, attend
from qpt.nets.pointwise import GELU, Dropout

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
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), GELU(), nn.Linear(4 * width, width), Dropout(dropout))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, normed: Tensor, following: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """Every token [B, L, D], given as it is and normed (by `norm1`); so is the result, by the norm that follows."""
        return self._rest(x, attend(normed, self.qkv, self.heads, self._rate()), following)

    def read(self, x: Tensor, normed: Tensor, kinds: tuple[int, ...], following: nn.LayerNorm) -> Tensor:
        """Only the tokens of the given kinds, normed by what follows: [B, L, D] -> [B, M, D]."""
        places = _pick(torch.arange(x.shape[1], device=x.device)[None, :, None], kinds)[0, :, 0]
        return self._read(_pick(x, kinds), _pick(normed, kinds), normed, places, following)

    def read_at(self, x: Tensor, normed: Tensor, places: Tensor, following: nn.LayerNorm) -> Tensor:
        """One token of every window, at places [B], normed by what follows: [B, L, D] -> [B, 1, D]."""
        there = places[:, None, None].expand(-1, 1, x.shape[-1])
        return self._read(x.gather(1, there), normed.gather(1, there), normed, places[:, None], following)

    def _read(self, chosen: Tensor, asking: Tensor, normed: Tensor, places: Tensor, following: nn.LayerNorm) -> Tensor:
        attended = ask(normed, asking, places, self.qkv, self.heads, self._rate())
        return self._rest(chosen, attended, following)[1]

    def _rate(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _rest(self, x: Tensor, attended: Tensor, following: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """All behind attention: its projection and the perceptron, each added to the stream; then the next norm."""
        if not perceptron.fits(x, self.mlp):
            x = x + self.dropout(self.project(attended))
            x = x + self.mlp(self.norm2(x))
            return x, following(x)
        if not torch.is_grad_enabled():
            return perceptron.rest(x, attended, self.project, self.norm2, self.mlp, following)
        rate, last = self.dropout.rate if self.training else 0.0, cast(nn.Linear, self.mlp[2])
        x, normed = residual.add(x, F.linear(attended, self.project.weight), self.project.bias, rate, self.norm2)
        return residual.add(x, perceptron.branch(normed, self.mlp), last.bias, rate, following)

    def _split(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each [B, H, L, d]."""
        return torch.unflatten(self.qkv(normed), -1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    # -- one step for many candidates that share their history ---------------------------------------------------------

    def prefix(self, x: Tensor, normed: Tensor, following: nn.LayerNorm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The block on the shared history, and the keys and values that the candidates attend to."""
        q, k, v = self._split(normed)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return *self._rest(x, attended.transpose(1, 2).flatten(2), following), k, v

    def suffix(
        self,
        x: Tensor,
        normed: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor,
        candidates: int,
        following: nn.LayerNorm,
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the current step [B, m * J, D] attend to the shared keys [B, H, P, d] and causally to their own."""
        own = x.shape[1] // candidates
        q, k2, v2 = self._split(normed)  # [B, H, m * J, d]
        scale = q.shape[-1] ** -0.5
        shared = q @ k.transpose(-1, -2) * scale  # [B, H, m * J, P]
        shared = shared.masked_fill(~key_mask[:, None, None], float("-inf"))
        q, k2, v2 = (torch.unflatten(t, 2, (candidates, own)) for t in (q, k2, v2))
        later = torch.ones(own, own, dtype=torch.bool, device=x.device).triu(1)
        local = (q @ k2.transpose(-1, -2) * scale).masked_fill(later, float("-inf"))  # [B, H, m, J, J]
        weights = torch.cat([torch.unflatten(shared, 2, (candidates, own)), local], -1).softmax(-1)
        past = shared.shape[-1]
        out = (weights[..., :past].flatten(2, 3) @ v) + (weights[..., past:] @ v2).flatten(2, 3)
        return self._rest(x, out.transpose(1, 2).flatten(2), following)


def _pick(x: Tensor, kinds: tuple[int, ...]) -> Tensor:
    """The tokens of the given kinds of each step: [B, L, D] -> [B, K * len(kinds), D]."""
    return torch.stack([x[:, kind::TOKENS] for kind in kinds], 2).flatten(1, 2)


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
        self.norm_in, self.norm_out, self.dropout = nn.LayerNorm(width), nn.LayerNorm(width), Dropout(dropout)
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
        inputs = (return_to_go, cost_to_go, observations, actions, steps)
        length = TOKENS * steps.shape[1] - (ACTION not in kinds)  # nothing looks back at a window's last action
        x, normed = self._begin(*self._embed(*inputs), length)
        *blocks, (final, norm_out) = self._chain()
        for block, following in blocks:
            x, normed = block(x, normed, following)
        if last is not None:
            return final.read_at(x, normed, last * TOKENS + STATE, norm_out)[:, None]
        return torch.unflatten(final.read(x, normed, kinds, norm_out), 1, (-1, len(kinds)))

    def _chain(self) -> list[tuple[Block, nn.LayerNorm]]:
        """Every block, and the norm behind it."""
        blocks = [cast(Block, block) for block in self.blocks]
        return list(zip(blocks, [*(block.norm1 for block in blocks[1:]), self.norm_out], strict=True))

    def _embed(
        self, return_to_go: Tensor, cost_to_go: Tensor, observations: Tensor, actions: Tensor, steps: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
        """What tokens are made of: return- and cost-to-go, embedded observations and actions, and the steps."""
        scalars = return_to_go * self.return_scale, self.cost_offset - cost_to_go * self.cost_scale
        seen, done = self.embed_observation((observations - self.mean) / self.std), self.embed_action(actions)
        return scalars, seen, done, steps

    def _begin(
        self, scalars: tuple[Tensor, Tensor], seen: Tensor, done: Tensor, steps: Tensor, length: int
    ) -> tuple[Tensor, Tensor]:
        """The first tokens of the windows [B, length, D], and the same normed for the first block."""
        norm = cast(Block, self.blocks[0]).norm1
        if entry.fits(seen, done):
            layers, rate = (self.embed_return, self.embed_cost), self.dropout.rate if self.training else 0.0
            return entry.enter(scalars, layers, seen, done, steps, self.embed_step, (self.norm_in, norm), length, rate)
        x = self._enter(scalars, seen, done, steps).flatten(1, 2)[:, :length].contiguous()
        return x, norm(x)

    def _enter(self, scalars: tuple[Tensor, Tensor], seen: Tensor, done: Tensor, steps: Tensor) -> Tensor:
        """The tokens of steps: [..., 4, D]."""
        kinds = [*map(_scaled, (self.embed_return, self.embed_cost), scalars), seen, done]
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
        current = self._embed(
            return_candidates,
            cost_candidates,
            observations[rows, last][:, None].expand(-1, m, -1),
            actions[rows, last][:, None].expand(-1, m, -1),
            steps[rows, last][:, None].expand(-1, m),
        )
        y = self._enter(*current)[:, :, :ACTION].flatten(1, 2)  # the current action is not known yet: [B, m * 3, D]
        own = cast(Block, self.blocks[0]).norm1(y)
        history = self._embed(return_to_go, cost_to_go, observations, actions, steps)
        x, normed = self._begin(*history, TOKENS * steps.shape[1])
        earlier = torch.arange(x.shape[1], device=x.device) < (last * TOKENS)[:, None]  # [B, 4K]
        for block, following in self._chain():
            x, normed, k, v = block.prefix(x, normed, following)
            y, own = block.suffix(y, own, k, v, earlier, m, following)
        return torch.unflatten(own, 1, (m, ACTION))[:, :, STATE]
