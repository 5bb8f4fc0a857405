"""Every metric name a run may write: unit, meaning and which way is good. `docs/metrics.md` is printed from this table.

    python -c "from megatron_dapo.metrics.names import document; print(document(), end='')" > docs/metrics.md

In a pattern `{a,b}` is one of the given words, `<i>` and `<n>` a number, any other `<word>` one part of a name between
slashes (`<source>` may itself contain slashes).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

STATS = "{mean,max,min}"


@dataclass(frozen=True)
class Name:
    """One row of the table. `good`: up, down, a value to be near, or "" where it depends."""

    pattern: str
    unit: str
    good: str
    meaning: str


@dataclass(frozen=True)
class Family:
    """Names that belong together, with the heading they have in the documentation."""

    title: str
    about: str
    names: tuple[Name, ...]


SCORES = Family(
    "Scores, rewards and advantages",
    "Of the trained batch. Scores and rewards count trajectories that have a response (non-aborted ones).",
    (
        Name(f"critic/score/{STATS}", "reward", "up", "Score of a trajectory: the verifier's reward after shaping."),
        Name(f"critic/rewards/{STATS}", "reward", "up", "Score minus the KL penalty, where KL is part of the reward."),
        Name(f"critic/advantages/{STATS}", "reward", "", "Advantages of response tokens."),
        Name(f"critic/returns/{STATS}", "reward", "", "Returns of response tokens."),
        Name(f"critic/values/{STATS}", "reward", "", "The critic's values of response tokens."),
        Name("critic/vf_explained_var", "ratio", "up", "1 - var(return - value) / var(return): 1 is a perfect critic."),
        Name(f"reward/raw/{STATS}", "reward", "up", "The verifier's reward before shaping."),
        Name(f"reward/shaped/{STATS}", "reward", "up", "The reward after shaping."),
        Name("reward/shaping/mean", "reward", "near 0", "What shaping (the overlong penalty) adds on average."),
        Name("reward/acc/mean", "ratio", "up", "Share of trajectories whose answer is right."),
        Name(
            "reward/failed_ratio", "ratio", "down", "Share of responses, of validation too, that could not be scored."
        ),
        Name("source/<source>/acc", "ratio", "up", "Accuracy on one data source."),
        Name("source/<source>/trajectories", "count", "", "Trajectories of one data source."),
        Name(
            "group/{all_correct,all_wrong}_ratio",
            "ratio",
            "down",
            "Share of groups without signal: too easy, too hard.",
        ),
        Name("group/mixed_ratio", "ratio", "up", "Share of groups that carry a gradient."),
        Name("group/acc_std", "ratio", "up", "Standard deviation of accuracy within a group, mean over groups."),
    ),
)

LENGTHS = Family(
    "Lengths",
    "In tokens. `clip_ratio` is the share that ended at the length limit.",
    (
        Name(f"response_length/{STATS}", "tokens", "", "Response length; a steady rise is usual, a jump is not."),
        Name("response_length/{p10,p50,p90,p99}", "tokens", "", "Quantiles of the response length, to about 5 %."),
        Name("response_length/clip_ratio", "ratio", "down", "Responses that ran into the length limit."),
        Name(f"response_length_non_aborted/{STATS}", "tokens", "", "Response length of trajectories with a response."),
        Name("response_length_non_aborted/clip_ratio", "ratio", "down", "The same share, aborted ones left out."),
        Name("response/aborted_ratio", "ratio", "near 0", "Trajectories without any response token."),
        Name(f"prompt_length/{STATS}", "tokens", "", "Prompt length."),
        Name("prompt_length/clip_ratio", "ratio", "near 0", "Prompts as long as the prompt limit (perhaps truncated)."),
        Name(f"num_turns/{STATS}", "count", "", "Turns of a trajectory, where a run allows several."),
        Name(f"tool_call_counts/{STATS}", "count", "", "Of those, turns that the environment answered."),
        Name("global_seqlen/{min,max,mean}", "tokens", "", "Tokens per data-parallel rank if split in arrival order."),
        Name("global_seqlen/minmax_diff", "tokens", "", "How uneven that split would be."),
        Name("global_seqlen/balanced_{min,max}", "tokens", "near mean", "Tokens per rank after balancing."),
    ),
)

POLICY = Family(
    "Policy and critic updates",
    "Means over tokens unless the loss says otherwise; losses add up over micro-batches and ranks.",
    (
        Name("actor/pg_loss", "loss", "", "Policy-gradient loss, without entropy and KL terms. Its level says little."),
        Name("actor/loss", "loss", "", "The whole actor loss, entropy and KL terms included."),
        Name("actor/pg_clipfrac", "ratio", "near 0", "Tokens whose ratio is clipped so that it changes the loss."),
        Name("actor/pg_clipfrac_lower", "ratio", "near 0", "Tokens with negative advantage bound by the dual clip."),
        Name("actor/ppo_kl", "nats", "near 0", "Mean of old minus new log-prob: how far the update moved the policy."),
        Name("actor/entropy", "nats", "", "Entropy per token before the update; collapse to 0 ends exploration."),
        Name("actor/entropy_loss", "nats", "", "Entropy per token inside the update."),
        Name("actor/kl_loss", "nats", "near 0", "KL to the reference policy, as a loss term."),
        Name("actor/kl_coef", "ratio", "", "Coefficient of that term."),
        Name("actor/reward_kl_penalty", "nats", "near 0", "KL to the reference policy, taken off the reward."),
        Name("actor/reward_kl_penalty_coeff", "ratio", "", "Coefficient of that penalty."),
        Name("{actor,critic,sft}/grad_norm", "norm", "", "Gradient norm before clipping; spikes foretell trouble."),
        Name("{actor,critic,sft}/lr", "1/step", "", "Learning rate."),
        Name("{actor,critic}/<loss>_aux", "loss", "", "Auxiliary losses of MoE routers."),
        Name("{actor,critic}/expert_bias/max_abs", "score", "", "Largest learned bias of an expert, sign left out."),
        Name("critic/vf_loss", "loss", "down", "Value loss."),
        Name("critic/vf_clipfrac", "ratio", "near 0", "Tokens whose value update is clipped."),
        Name("critic/vpred_mean", "reward", "", "Mean predicted value."),
        Name("sft/loss", "nats", "down", "Cross-entropy per token of supervised training."),
        Name("sft/val_loss", "nats", "down", "The same on held-out rows."),
        Name("sft/tokens", "tokens", "", "Tokens trained on in the step."),
        Name("variance_proxy/proxy1_signal_strength", "norm²", "up", "Squared gradient norm: the signal that is left."),
        Name("variance_proxy/proxy2_total_power", "norm²", "", "Signal and noise of the gradient per trajectory."),
        Name("variance_proxy/proxy3_pure_noise", "norm²", "down", "Estimated noise of the batch gradient."),
        Name("variance_proxy/expected_a_squared", "reward²", "", "Mean squared advantage of trajectories."),
        Name("variance_proxy/expected_w", "norm²", "", "Mean squared score norm of trajectories."),
    ),
)

OFF_POLICY = Family(
    "Off-policy: agreement, correction, staleness, filtering",
    "Train and rollout log-probs should agree to rounding when both hold the same weights.",
    (
        Name("training/rollout_probs_diff_{mean,max,std}", "probability", "near 0", "|p_train - p_rollout| per token."),
        Name("training/rollout_probs_diff_valid", "tokens", "", "Tokens compared."),
        Name("training/rollout_logprob_diff_{mean,max}", "nats", "near 0", "|log p_train - log p_rollout| per token."),
        Name("training/rollout_actor_probs_pearson_corr", "ratio", "near 1", "Correlation of both probabilities."),
        Name("rollout_corr/rollout_is_eff_sample_size", "ratio", "near 1", "Effective sample size / tokens."),
        Name(
            "rollout_corr/rollout_is_<statistic>", "ratio", "near 1", "Importance weights: mean, std, extremes, shares."
        ),
        Name("rollout_corr/rollout_rs_<statistic>", "ratio", "", "Rejection statistics; `masked_fraction`: near 0."),
        Name("rollout_corr/{training,rollout}_{ppl,log_ppl}", "perplexity", "", "Perplexity under either policy."),
        Name("rollout_corr/log_ppl_{diff,abs_diff,diff_max,diff_min}", "nats", "near 0", "Difference of both."),
        Name("rollout_corr/ppl_ratio", "ratio", "near 1", "Ratio of both perplexities."),
        Name("rollout_corr/{kl,k3_kl}", "nats", "near 0", "KL from rollout to training policy, direct and k3."),
        Name("rollout_corr/chi2_{token,seq}", "ratio", "near 0", "χ² divergence per token and per sequence."),
        Name(
            f"training/off_policy/trajectory_spans/{STATS}",
            "versions",
            "near 1",
            "Weight versions within a trajectory.",
        ),
        Name(f"training/off_policy/trajectory_staleness/{STATS}", "versions", "down", "Age of its newest token."),
        Name(f"training/off_policy/trajectory_staleness_worst/{STATS}", "versions", "down", "Age of its oldest token."),
        Name("training/off_policy/evicted_samples", "groups", "down", "Groups dropped as too old."),
        Name(
            f"training/off_policy/evicted_samples_staleness/{STATS}", "steps", "", "Their span: steps sent to dropped."
        ),
        Name("train/num_gen_batches", "count", "down", "Generation batches that the step needed."),
        Name("training/filter_groups/generated", "groups", "down", "Groups generated for the step."),
        Name("training/filter_groups/kept", "groups", "up", "Groups that passed the filter."),
        Name("training/filter_groups/dropped", "groups", "down", "Groups without signal (all values equal)."),
        Name("training/filter_groups/dropped_value/<value>", "groups", "", "Of those, by their common value."),
        Name("training/filter_groups/failed", "groups", "near 0", "Groups that could not be generated or scored."),
        Name("training/filter_groups/{discarded,carried}_surplus", "groups", "", "Groups more than the step needed."),
        Name("training/filter_groups/taken", "groups", "", "Groups trained on."),
        Name("training/filter_groups/taken_carried", "groups", "", "Of those, carried over from an earlier step."),
        Name("training/filter_groups/taken_age_max", "steps", "down", "Age of the oldest of those."),
    ),
)

SPEED = Family(
    "Time, throughput, memory",
    "Stages of a step: `step gen reward old_log_prob ref values adv update_critic update_actor update_weights testing "
    "save_checkpoint`. `step` covers the others.",
    (
        Name("timing_s/<stage>", "s", "down", "Wall-clock seconds of a stage in this step."),
        Name("timing_per_token_ms/<stage>", "ms/token", "down", "Generation per response token, others per token."),
        Name("perf/total_num_tokens", "tokens", "", "Prompt and response tokens trained on."),
        Name("perf/time_per_step", "s", "down", "Wall-clock seconds of the step."),
        Name("perf/throughput", "tokens/s/GPU", "up", "Tokens per second and device."),
        Name("perf/tflops/<stage>", "TFLOP/s/GPU", "up", "Model FLOPs per second and device, by true architecture."),
        Name("perf/mfu/<stage>", "ratio", "up", "Share of the device's bf16 peak; recomputation does not count."),
        Name("perf/max_memory_{allocated,reserved}_gb", "GiB", "", "Peak device memory of the fullest rank."),
        Name("perf/cpu_memory_used_gb", "GiB", "", "Peak resident memory of the largest rank, or of the driver."),
        Name("push/seconds", "s", "down", "Pushing the weights into the rollout engines."),
        Name("push/seconds_max", "s", "down", "The slowest push."),
        Name("push/bytes", "bytes", "down", "Bytes that the trainer's ranks sent."),
        Name("push/bytes_received", "bytes", "down", "Bytes that the engines' ranks took."),
        Name("push/gigabytes_per_s", "GB/s", "up", "Speed of the push."),
        Name(
            "push/ratio_to_bound", "ratio", "near 1", "Bytes taken over the fewest possible: those of the weights kept."
        ),
        Name("push/failed", "count", "near 0", "Pushes repeated: an engine died, or a slice failed its checksum."),
        Name("rollout/spec_accept_rate", "ratio", "up", "Speculative decoding: accepted / drafted tokens."),
        Name("rollout/spec_accept_length", "tokens", "up", "Speculative decoding: tokens per verification step."),
        Name("verifier/count/<event>", "count", "", "Events of the verifiers: scored, timeouts, retries, crashes."),
        Name(f"verifier/seconds/{STATS}", "s", "down", "Time of one job of the verifiers' worker processes."),
        Name("streaming/{queue_depth,in_flight}", "groups", "", "Groups waiting for training, being generated."),
        Name("streaming/{evicted,refilled,discarded}", "groups", "down", "Groups that left the queue or came again."),
        Name("streaming/failed_samples", "count", "near 0", "Samples of this run that an engine or a tool failed on."),
        Name("streaming/engine_restarts", "count", "near 0", "Engines of this run that died and were started again."),
        Name("streaming/idle_s/<role>", "s", "down", "Seconds a role (trainer, rollout) waited."),
    ),
)

BALANCE = "{max,avg}"
MOE = Family(
    "Mixture of experts",
    "`rollout/moe` counts what the rollout engine routed (response tokens), `training/moe` what the training router "
    "did. Load 1 is an expert's even share; `layer_<i>` numbers MoE layers; `max` and `avg` are over layers.",
    (
        Name("{rollout,training}/moe/max_vio/{max,avg,layer_<i>}", "load", "near 0", "Busiest expert's load minus 1."),
        Name("{rollout,training}/moe/min_vio/{max,avg,layer_<i>}", "load", "near 0", "Idlest expert's load minus 1."),
        Name("{rollout,training}/moe/avg_vio/{max,avg,layer_<i>}", "load", "near 0", "Mean |load - 1|."),
        Name("{rollout,training}/moe/cv/{max,avg,layer_<i>}", "ratio", "near 0", "Coefficient of variation of load."),
        Name(
            "{rollout,training}/moe/entropy/{max,avg,layer_<i>}", "ratio", "near 1", "Entropy of shares / log experts."
        ),
        Name("{rollout,training}/moe/dead_experts/{max,avg,layer_<i>}", "count", "near 0", "Experts without a token."),
        Name(f"{{rollout,training}}/moe/drift/{BALANCE}", "ratio", "", "Distance of loads from the last report, 0…1."),
        Name("{rollout,training}/moe/invalid_assignments", "count", "near 0", "Expert ids out of range (skipped)."),
        Name("{rollout,training}/moe/routed_experts_found", "0/1", "near 1", "Whether there was routing to count."),
        Name("{rollout,training}/moe/routed_expert_assignments", "count", "", "Token-expert assignments counted."),
        Name(
            "{rollout,training}/moe/{gpu,ep_rank,node}_load/max_over_mean",
            "ratio",
            "near 1",
            "Step-time cost of imbalance: slowest over mean, summed over layers.",
        ),
        Name("{rollout,training}/moe/{gpu,ep_rank,node}_load/worst_layer", "ratio", "near 1", "The same, worst layer."),
        Name("{rollout,training}/moe/gpu_load/slowest", "GPU number", "", "The GPU with the most work."),
        Name(
            "training/moe/routing_disagreement/{max,avg,layer_<i>}",
            "ratio",
            "near 0",
            "Expert choices that trainer and rollout do not share, for the same tokens.",
        ),
        Name(f"training/moe/rollout_distance/{BALANCE}", "ratio", "near 0", "Distance of both sources' loads, 0…1."),
    ),
)

VALIDATION = Family(
    "Validation",
    "Per data source and variable (`acc`, `reward`, …) with N samples per prompt, averaged over prompts. `val-core` "
    "holds the numbers to compare runs by, `val-aux` the rest.",
    (
        Name("val-{core,aux}/<source>/<variable>/mean@<n>", "value", "up", "Mean of N samples."),
        Name("val-{core,aux}/<source>/<variable>/std@<n>", "value", "", "Spread of N samples."),
        Name("val-{core,aux}/<source>/<variable>/best@<n>/{mean,std}", "value", "up", "Best of n samples (exact)."),
        Name("val-{core,aux}/<source>/<variable>/worst@<n>/{mean,std}", "value", "up", "Worst of n samples (exact)."),
        Name("val-{core,aux}/<source>/<variable>/maj@<n>/{mean,std}", "value", "up", "Majority answer of n samples."),
        Name("val-aux/<source>/unscored", "count", "near 0", "Samples whose verifier failed: in no other number here."),
        Name("val-aux/response_length/{mean,max,min,clip_ratio}", "tokens", "", "Lengths of validation responses."),
    ),
)

PROGRESS = Family(
    "Progress",
    "`step` is the key of every row; these are written beside it.",
    (
        Name("training/global_step", "steps", "", "The step, as in `step`."),
        Name("training/total_steps", "steps", "", "The step at which the run ends."),
        Name("training/epoch", "epochs", "", "Passes over the prompt file begun."),
    ),
)

FAMILIES = (SCORES, LENGTHS, POLICY, OFF_POLICY, SPEED, MOE, VALIDATION, PROGRESS)


def describe(name: str) -> Name | None:
    """The row that documents a metric, or None."""
    return next((row for expression, row in _compiled() if expression.fullmatch(name)), None)


def undocumented(names: Iterable[str]) -> list[str]:
    """Which of these names no row documents (the row key `step` aside)."""
    return sorted({name for name in names if name != "step" and describe(name) is None})


def document() -> str:
    """`docs/metrics.md`."""
    parts = [HEAD]
    for family in FAMILIES:
        parts += [f"\n## {family.title}\n\n{family.about}\n", "| name | unit | good | meaning |", "|---|---|---|---|"]
        for row in family.names:
            meaning = row.meaning.replace("|", chr(92) + "|")
            parts.append(f"| `{row.pattern}` | {row.unit} | {row.good} | {meaning} |")
    return "\n".join(parts) + "\n"


HEAD = """# Metrics

Every name that a run writes to `metrics.jsonl`, TensorBoard and the other trackers. This page is printed
from `megatron_dapo/metrics/names.py` (the command stands at its head) and a test holds both equal.

A metric carries its own reduction (sum, weighted mean, maximum, minimum, last, standard deviation, histogram), so
values over micro-batches, ranks and local updates are exact: a mean over tokens weighs tokens. What saw nothing is not
written at all, so there is no NaN that means "empty". Where verl has a name for something, it is the same here.

In a name `{a,b}` stands for one of the words, `<i>` and `<n>` for a number, `<word>` for one part of the name.
"good" is the direction of a healthy run; empty where it depends."""


@cache
def _compiled() -> list[tuple[re.Pattern[str], Name]]:
    return [(re.compile(_expression(row.pattern)), row) for family in FAMILIES for row in family.names]


def _expression(pattern: str) -> str:
    out = ""
    for token in re.findall(r"<\w+>|[{},]|[^<>{},]+", pattern):
        if token in ("<i>", "<n>"):
            out += r"\d+"
        elif token == "<source>":
            out += r".+"
        elif token.startswith("<"):
            out += r"[^/]+"
        else:
            out += {"{": "(?:", "}": ")", ",": "|"}.get(token, re.escape(token))
    return out
