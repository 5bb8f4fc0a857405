"""What the stages of a step made of the hardware: model FLOPs per second, by the architecture that was trained."""

from collections.abc import Mapping, Sequence

from megatron_dapo.config import Config
from megatron_dapo.data.types import Group
from megatron_dapo.metrics import Metrics, MlaDims, ModelDims, efficiency_metrics, peak_tflops
from megatron_dapo.metrics.efficiency import forward_flops
from megatron_dapo.models.architecture import Architecture


def model_dims(arch: Architecture, head: int | None = None) -> ModelDims:
    """The sizes that decide FLOPs; `head` is the output width (default: the vocabulary)."""
    mixture, latent = arch.mixture, arch.latent
    return ModelDims(
        layers=arch.layers,
        hidden=arch.hidden,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        ffn=arch.ffn,
        head=arch.vocab if head is None else head,
        experts=arch.experts,
        topk=mixture.topk if mixture else 0,
        expert_ffn=mixture.ffn if mixture else 0,
        shared_ffn=mixture.shared_ffn if mixture else 0,
        moe_layers=len(mixture.layers) if mixture else 0,
        mla=MlaDims(latent.q_rank or 0, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.v_dim)
        if latent
        else None,
    )


def linear_cost(arch: Architecture) -> float:
    """a / b of a sequence's cost a·L + b·L²: its matrices' FLOPs against its attention's, for `data.packing`."""
    one, two = (forward_flops(model_dims(arch), [length]) for length in (1, 2))
    half_pair = (two - 2 * one) / 2  # a·L + p·L·(L+1)/2, so b = p/2 and a = one - b
    return (one - half_pair) / half_pair


def stage_efficiency(
    arch: Architecture,
    config: Config,
    groups: Sequence[Group],
    seconds: Mapping[str, float],
    gpus: int,
    device: str | None,
) -> Metrics:
    """`perf/tflops/<stage>` (and `perf/mfu/<stage>` on a known GPU) of the stages that run the trained sequences.

    `device` is the name of the ranks' GPU: the driver may have none.
    """
    lengths = [len(g.prompt.token_ids) + len(one.response_ids) for g in groups for one in g.trajectories]
    policy, critic = model_dims(arch), model_dims(arch, head=1)
    peak = None if device is None else peak_tflops(device)
    stages = {
        "old_log_prob": (policy, False, 1),
        "ref": (policy, False, 1),
        "values": (critic, False, 1),
        "update_actor": (policy, True, config.actor.ppo_epochs),
        "update_critic": (critic, True, config.critic.ppo_epochs),
    }
    if config.algorithm.rollout_correction.bypass_mode:
        del stages["old_log_prob"]  # no forward pass is made
    metrics: Metrics = {}
    for stage, (dims, training, passes) in stages.items():
        if stage in seconds and lengths:
            metrics |= efficiency_metrics(
                stage, dims, lengths * passes, seconds[stage], gpus, training=training, peak_tflops=peak
            )
    return metrics
