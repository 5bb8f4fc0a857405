"""How far apart trainer and rollout engine are: perplexities, KL and chi-square of one policy under the other."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from megatron_dapo.algorithms.correction.thresholds import LOG_BOUND
from megatron_dapo.algorithms.masked import row_means
from megatron_dapo.algorithms.measured import Measured


def off_policy_metrics(
    old_logprob: Float[Tensor, "b t"], rollout_logprob: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> dict[str, Measured]:
    """Means over the rows that have valid tokens, unless named otherwise; both log-probs are 0 in padding.

    - training_ppl, rollout_ppl: exp(-mean_t log π) per row; *_log_ppl: without the exponential
    - kl: mean over tokens of log π_rollout - log π_old, KL(rollout ‖ old); k3_kl: its k3 estimate r - 1 - log r
    - log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min: of mean_t (log π_rollout - log π_old) per row;
      ppl_ratio: of its exponential
    - chi2_token: mean of r² over tokens, minus 1; chi2_seq: mean of the squared product of r over the sequence, minus 1
    """
    rows = mask.any(-1)
    trainer, engine = row_means(old_logprob, mask), row_means(rollout_logprob, mask)
    difference = engine - trainer
    log_r = old_logprob - rollout_logprob
    held = log_r.clamp(-LOG_BOUND, LOG_BOUND)
    sequence = log_r.sum(-1).clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "training_ppl": Measured("mean", torch.exp(-trainer), rows),
        "training_log_ppl": Measured("mean", -trainer, rows),
        "rollout_ppl": Measured("mean", torch.exp(-engine), rows),
        "rollout_log_ppl": Measured("mean", -engine, rows),
        "kl": Measured("mean", -log_r, mask),
        "k3_kl": Measured("mean", held.exp() - held - 1, mask),
        "log_ppl_diff": Measured("mean", difference, rows),
        "log_ppl_abs_diff": Measured("mean", difference.abs(), rows),
        "log_ppl_diff_max": Measured("max", difference, rows),
        "log_ppl_diff_min": Measured("min", difference, rows),
        "ppl_ratio": Measured("mean", difference.exp(), rows),
        "chi2_token": Measured("mean", (2 * held).exp() - 1, mask),
        "chi2_seq": Measured("mean", (2 * sequence).exp() - 1, rows),
    }
