"""The config of QPT: every open choice of the paper, and what goes beyond it, is a field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from qpt.algorithms.fields import check_fields
from qpt.data.sampling import Weighting
from qpt.errors import QptError

Reduction = Literal["min", "max", "mean"]


@dataclass(frozen=True)
class QPTConfig:
    """Every choice of QPT; docs/methods/qpt.md says which defaults were measured, and how."""

    # -- size of the run
    steps: int = 30_000
    """Gradient steps."""
    batch_size: int = 256
    """Windows a step."""

    # -- the transformer
    context: int = 10
    """Steps of history, K."""
    width: int = 128
    """Embedding size."""
    layers: int = 3
    """Blocks."""
    heads: int = 8
    """Attention heads."""
    dropout: float = 0.1
    """Dropout after embeddings and residual branches."""
    attention_dropout: float = 0.1
    """Dropout of attention weights."""
    return_scale: float | None = None
    """Factor of the return-to-go token; None: 10 / the largest return magnitude of the data."""
    cost_scale: float | None = None
    """Factor of the cost-to-go token; None: 10 / the largest episode cost of the data (1 if none had any)."""
    cost_offset: float = 0.0
    """The token is offset - scaled cost-to-go (CDT uses 50 with a scale of 1)."""
    head: Literal["tanh", "linear"] = "tanh"
    """Action head; "linear" is clamped to [-1, 1] when acting."""

    # -- data
    augmentation: bool = True
    """Relabel episodes with infeasible targets (switch 1 of the paper's ablation)."""
    augmentation_rule: Literal["paper", "osrl"] = "paper"
    """Algorithm 2 of the paper, or CDT's code."""
    augmentation_fraction: float = 0.2
    """Relabelled episodes, as a share of the logged ones (rule osrl: of those that its grid leaves)."""
    weighting: Weighting = "uniform"
    """How episodes are drawn; "low-cost" is CDT's and never sees those above the ceiling."""
    cost_ceiling: float = 70.0
    """Ceiling of low-cost weighting."""

    # -- critics
    critic_width: int = 256
    """Width of the critics' three hidden layers."""
    discount: float = 1.0
    """Discount of the reward critics (paper's predecessor: 0.99)."""
    cost_discount: float = 1.0
    """Discount of the cost critics; 1 with time critics makes Q^c comparable with the undiscounted cost-to-go."""
    n_step: int | None = None
    """Steps until a target bootstraps; None: to the end of the window, as in the paper."""
    bootstrap: Literal["policy", "expectile"] = "expectile"
    """Value at the end of the n steps: of the target policy's action (paper), or an expectile over logged actions."""
    reward_expectile: float = 0.9
    """Expectile of the reward value (bootstrap "expectile"): above 0.5 leans towards the best logged actions."""
    cost_expectile: float = 0.1
    """Expectile of the cost value: below 0.5 leans to the cheapest continuation, which has a meaning at every limit."""
    budget_critics: bool = True
    """Reward critics know the remaining budget, drawn at random in training, and value only continuations whose least
    cost (by the cost critics) fits it; needs bootstrap "expectile"."""
    budget_margin: float = 0.5
    """Cost by which a continuation may exceed the budget and still count as fitting, in training and in the test with
    budget critics: they are not exact. In units of the largest cost of a step where that is below 1."""
    unfit_penalty: float | None = None
    """With budget critics: an action whose least cost does not fit the budget is learned to be worth the state's value
    less this share of the mean return-to-go; None leaves such actions out, and what they are worth to chance."""
    time_critics: bool = True
    """Critics know the step, and the horizon's timeout ends the episode for them: values of the episode, not of an
    endless task. A log that was cut off before the horizon would have gone on."""
    cost_reduction: Reduction = "mean"
    """Over the twin cost critics, in targets and in the test (paper: min)."""
    reward_scale: float | None = None
    """Factor of rewards in the critics; None: 10 / the mean return-to-go of the data."""
    critic_cost_scale: float | None = None
    """Factor of costs in the critics; None: 10 / the mean cost-to-go of the data, or a dear step's cost of at most 1
    where that is more."""
    clamp_cost: bool = True
    """Keep bootstrapped costs at or above 0."""
    careful_costs: bool = False
    """Cost critics value what the target policy itself goes on to cost when it is told to spend no more, in place of
    the least cost among logged actions, which it may not be able to follow. Told so, it is also one of the candidates.
    A narrow `rtg_noise` goes well with it (measured in docs/qpt-choices.md). It needs bootstrap "expectile", and
    noise_mode "episode", for it is told so from its first step on."""
    careful_return: float = 0.9
    """The share of the return-to-go that it is then asked for; as much less where that is negative. 0.8 keeps lower
    limits (measured in docs/qpt-choices.md)."""

    # -- the objective
    train_with_reward_critic: bool = True
    """Use the reward term (switch 2 of the ablation)."""
    train_with_cost_critic: bool = True
    """Use the cost term (switch 3)."""
    eta_reward: float = 0.1
    """η1, weight of the reward term."""
    eta_cost: float = 0.1
    """η2, weight of the cost term."""
    cost_term: Literal["all", "excess"] = "excess"
    """Penalise the whole Q^c (paper), or only what exceeds the remaining budget (measured in docs/qpt-choices.md)."""
    normalizer: Literal["batch", "data"] = "data"
    """Scale of a term: the batch mean of |Q| on logged actions (paper), as the critics' step has just found it, or a
    constant of the data, which does not shrink as the policy gets safer (measured in docs/qpt-choices.md)."""
    normalizer_floor: float = 0.01
    """Smallest normaliser, for data in which costs are almost never seen."""

    # -- optimisation
    lr: float = 3e-4
    """Learning rate of the policy."""
    critic_lr: float = 3e-4
    """Learning rate of the critics."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of the policy."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's betas."""
    warmup: int = 500
    """Steps of linear warm-up of the policy's learning rate."""
    decay: float = 0.5
    """Share of the steps, at the end, over which all learning rates fall linearly to 0 (paper: none). A run that is
    resumed with more steps goes by the new number from there on."""
    clip: float = 0.25
    """Gradient-norm clip of the policy; 0: none."""
    critic_clip: float = 10.0
    """Gradient-norm clip of each kind of critic (paper: 0.25); 0: none."""
    ema: float = 0.995
    """ρ of the target policy: what it keeps at every step."""
    critic_ema: float = 0.99
    """ρ of the target critics (paper: that of the policy)."""

    # -- candidates and the test, at deployment
    history: int | None = None
    """Steps that a decision sees, the current one among them; None: as many as in training. With a past the policy goes
    on as whoever it has followed so far; 1 lets it change over to another logged behaviour."""
    limit_factor: float = 0.95
    """Share of the limit that decisions aim at (paper: 1): the realised cost lies on both sides of what is aimed at,
    and its mean shall not exceed the limit."""
    frugality: float | None = 0.01
    """Ask for no more cost than the logged episode with the target return had, and where half of the limit bought all
    but this share of the range of logged returns, for the cheapest such episode; but for no less than a quarter of the
    limit. None (paper): for the whole limit. The test goes by the limit in either case (docs/methods/qpt.md)."""
    inference_with_candidates: bool = True
    """Choose among candidates by the critics (switch 4 of the ablation)."""
    candidates: int = 50
    """Target pairs tried in one pass."""
    rtg_noise: float = 0.2
    """Spread of the candidates' return targets, relative to the target, or to a tenth of the range of logged returns
    where that is more (preset paper: 5 %; the paper names none). Wide enough that some ask for far less: when the
    policy's own action fails the test, they are the way out (measured in docs/comparison.md)."""
    ctg_noise: float = 0.1
    """Spread of the candidates' cost-to-go, relative to the limit (paper: 0; measured in docs/results.md)."""
    action_noise: float = 0.0
    """Spread of noise added to the candidates' actions."""
    noise_mode: Literal["episode", "step"] = "episode"
    """Noise drawn once an episode (paper), or anew on the last token of each step (one shared history, faster)."""
    cost_test: Literal["literal", "horizon", "none"] = "literal"
    """Feasible: Q^c <= cost-to-go (paper; with budget critics and their margin), <= the cost-to-go spent evenly and
    discounted (which needs a cost_discount below 1), or everything."""
    test_offset: float = 0.0
    """Added to Q^c in the test (see `qpt calibrate`)."""
    test_radius: float = 0.0
    """The worst counts, the largest Q^c and the least Q^r, of the action and its neighbours so far away in either
    direction of each dimension: an action between two that the data know can look cheaper or better than it is."""
    support: float = 0.0
    """Candidates count while they are at least so many times as likely, among logged actions, as an action drawn evenly
    from the whole range; if none is, all do. The policy averages over what was logged, and in between the critics only
    interpolate. Above 0, a classifier learns to tell logged actions from drawn ones, which gives that ratio."""
    fallback: Literal["least-cost", "ignore", "tradeoff"] = "least-cost"
    """When no candidate is feasible: the least Q^c, the largest Q^r, or the trade-off."""
    selection: Literal["constrained", "tradeoff", "shield"] = "shield"
    """Best feasible candidate (paper); argmax Q^r - λ Q^c; or the un-noised candidate unless it fails the test, then
    the feasible one whose action is nearest to its own (measured in docs/comparison.md)."""
    tradeoff: float = 1.0
    """λ of the trade-off, in reward per cost as the data scale them."""
    choice: Literal["argmax", "softmax"] = "argmax"
    """Take the best score, or draw by softmax over feasible ones (the fallback is never drawn)."""
    targets: Literal["data", "published"] = "data"
    """Return target for a limit: the best logged return within it, or that of the task's published pairs, interpolated
    (where a task has none, as with "data")."""
    target_factor: float = 1.0
    """What is asked for, as a multiple of the return target."""
    reward_reduction: Reduction = "min"
    """Over the twin reward critics, in targets and scores."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            eta_reward="at least 0",
            eta_cost="at least 0",
            unfit_penalty="at least 0",
            careful_return="above 0 and at most 1",
            decay="from 0 to 1",
            limit_factor="above 0 and at most 1",
            frugality="from 0 to 1",
            test_radius="at least 0",
            support="at least 0",
            tradeoff="at least 0",
        )
        if self.budget_critics and self.bootstrap != "expectile":
            raise QptError('budget critics need bootstrap "expectile"; add --no-budget-critics, or leave it so')
        if self.careful_costs and self.bootstrap != "expectile":
            raise QptError('careful costs need bootstrap "expectile"; add --no-careful-costs, or leave it so')
        if self.careful_costs and self.noise_mode != "episode":
            raise QptError('careful costs need noise_mode "episode": no shared history shows a policy that is careful')
        if self.unfit_penalty is not None and not self.budget_critics:
            raise QptError("an unfit penalty needs budget critics; leave it out, or add --budget-critics")
        trained = self.train_with_reward_critic or self.train_with_cost_critic or self.inference_with_candidates
        if trained and self.context < 2:  # only ends of episodes would have a target
            raise QptError("critics learn from the steps that follow in a window; give a context of at least 2")
        if self.history is not None and not 1 <= self.history <= self.context:
            raise QptError(f"history is from 1 to the context of {self.context} steps, not {self.history}")

    @classmethod
    def preset(cls, name: str) -> QPTConfig:
        """The default, "transformer" (no critics), or "paper": to the letter, with its table and CDT's open choices."""
        if name == "default":
            return cls()
        if name == "transformer":  # the plain conditional transformer with augmentation: switches 2 to 4 off
            return replace(
                cls(),
                train_with_reward_critic=False,
                train_with_cost_critic=False,
                limit_factor=1.0,
                frugality=None,
                inference_with_candidates=False,
            )
        if name == "paper":
            return replace(
                cls(),
                steps=100_000,
                batch_size=2048,
                return_scale=0.1,
                cost_scale=1.0,
                cost_offset=50.0,
                weighting="low-cost",
                discount=0.99,
                cost_discount=0.99,
                n_step=None,
                bootstrap="policy",
                budget_critics=False,
                time_critics=False,
                cost_reduction="min",
                reward_reduction="min",
                reward_scale=0.1,
                critic_cost_scale=1.0,
                critic_clip=0.25,
                critic_ema=0.995,
                clamp_cost=False,
                eta_reward=0.1,
                eta_cost=0.1,
                cost_term="all",
                normalizer="batch",
                lr=1e-4,
                critic_lr=1e-4,
                decay=0.0,
                limit_factor=1.0,
                frugality=None,
                inference_with_candidates=True,
                candidates=50,
                rtg_noise=0.05,
                ctg_noise=0.0,
                action_noise=0.0,
                noise_mode="episode",
                cost_test="literal",
                fallback="least-cost",
                selection="constrained",
                choice="argmax",
                targets="published",
            )
        raise QptError(f"QPT has no preset {name!r}; choose default, paper or transformer")
