"""Who is updated and how: the sections `actor`, `critic`, `ref` and `sft`, and their optimizer."""

from typing import Annotated, Literal

from pydantic import Field

from megatron_dapo.config.base import Count, Float, Int, NonNegative, NonNegativeInt, Positive, Section, Strings

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
LossMode = Literal[
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "geo_mean",
    "dro",
    "cispo",
    "reinforce",
]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW through Megatron's distributed optimizer; warm-up and decay count trainer steps, each at one rate."""

    lr: Positive = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Trainer steps of linear warm-up from 0."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    lr_decay_steps: Count | None = None
    """Trainer steps until `min_lr`; null: the run's length."""
    min_lr: NonNegative = 0.0
    """Where the decay ends."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay (not on norms and biases)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Adam's moment decays."""
    eps: Positive = 1e-8
    """Adam's denominator term."""
    clip_grad: NonNegative = 1.0
    """Global gradient norm limit; 0: none."""


class PolicyLossConfig(Section):
    """Which surrogate is optimized, and the parameters that only some of them read."""

    loss_mode: LossMode = "vanilla"
    """`vanilla` is the decoupled, dual-clip loss of DAPO."""
    clip_cov_ratio: Positive = 2e-4
    """clip_cov: share of tokens whose gradient is removed."""
    clip_cov_lb: Float = 1.0
    """clip_cov: lower end of the covariance band."""
    clip_cov_ub: Float = 5.0
    """clip_cov: upper end of the covariance band."""
    clip_cov_seed: Int = 0
    """clip_cov: seed of the choice among candidates, the same on every rank."""
    kl_cov_ratio: Positive = 2e-4
    """kl_cov: share of tokens that get the KL penalty."""
    ppo_kl_coef: NonNegative = 0.1
    """kl_cov: weight of that penalty."""
    dro_beta: Positive | None = None
    """dro: weight of the quadratic term; required by `loss_mode=dro` only."""
    tau_pos: Positive = 1.0
    """sapo: temperature of the gate where the advantage is positive."""
    tau_neg: Positive = 1.05
    """sapo: temperature of the gate elsewhere."""


class OffloadConfig(Section):
    """What leaves the device while another role uses it."""

    param: bool = False
    """Parameters."""
    grad: bool = False
    """Gradient buffers."""
    optimizer: bool = False
    """Optimizer state and main weights."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: Count = 256
    """Prompts per optimizer step (global; times rollout.n responses)."""
    ppo_epochs: Count = 1
    """Passes over a training batch."""
    shuffle: bool = False
    """Shuffle a training batch before it is cut into mini-batches."""
    data_loader_seed: NonNegativeInt = 42
    """Seed of that shuffle."""
    max_tokens_per_micro_batch: Count = 16384
    """Packed tokens (prompt + response) in one micro-batch of one data-parallel rank, a hard bound; counted before a
    cut over `parallel.context`."""
    clip_ratio: NonNegative = 0.2
    """Clip range on both sides of 1."""
    clip_ratio_low: NonNegative | None = None
    """Clip range below 1; null: `clip_ratio`."""
    clip_ratio_high: NonNegative | None = None
    """Clip range above 1 (DAPO's clip-higher: 0.28); null: `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1)] = 3.0
    """Dual clip: bound on the ratio where the advantage is negative (DAPO: 10)."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; `token-mean` is DAPO's token-level loss."""
    loss_scale_factor: Positive | None = None
    """`seq-mean-token-sum-norm`: the constant horizon divided by; null: data.max_response_length."""
    entropy_coeff: Float = 0.0
    """Weight of the entropy bonus."""
    calculate_entropy: bool = True
    """Compute and report the policy's entropy."""
    calculate_sum_pi_squared: bool = False
    """Compute the sum of squared probabilities (variance proxy, optimal token baseline)."""
    use_kl_loss: bool = False
    """Add a KL term to the loss; needs the reference model."""
    kl_loss_coef: NonNegative = 0.001
    """Its weight."""
    kl_loss_type: KLKind = "low_var_kl"
    """Its estimator."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    offload: OffloadConfig = OffloadConfig()


class CriticConfig(Section):
    """The value model: same body as the policy with a scalar head, its own optimizer."""

    enable: bool | None = None
    """null: exactly when algorithm.adv_estimator is `gae`."""
    path: str | None = None
    """Hugging Face directory of its initial body; null: model.path."""
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step; null: the actor's."""
    ppo_epochs: Count = 1
    """Passes over a training batch."""
    max_tokens_per_micro_batch: Count | None = None
    """Packed tokens in one micro-batch; null: the actor's."""
    cliprange_value: Positive = 0.5
    """Clip range of the value around its old prediction."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    offload: OffloadConfig = OffloadConfig()


class RefConfig(Section):
    """The frozen reference policy; used only when a KL term is on."""

    path: str | None = None
    """Hugging Face directory; null: model.path."""
    offload_param: bool = False
    """Keep its parameters on the host between uses."""


class SFTConfig(Section):
    """Supervised training on prompt/response rows (`megatron-dapo sft` only)."""

    train_files: Strings = ()
    """Parquet or JSONL files."""
    val_files: Strings = ()
    """Held-out rows; empty: no evaluation."""
    batch_size: Count = 64
    """Rows per optimizer step (global)."""
    max_length: Count = 2048
    """Longest prompt + response, in tokens."""
    epochs: Count = 1
    """Passes over the rows, unless `max_steps` ends the run earlier."""
    max_steps: Count | None = None
    """Optimizer steps; null: `epochs` decides."""
    eval_every: Count | None = None
    """Optimizer steps between evaluations; null: only at the end."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
