"""What the report draws, as data: sections of charts, each naming its metrics. The page's script does the drawing."""

from dataclasses import dataclass, replace

from megatron_dapo.report.run_files import RunFiles, natural


@dataclass(frozen=True)
class Chart:
    """Lines over steps. `series` pairs a label with a metric; the first is the one drawn when runs are overlaid.

    `band` names the metrics of the lower and upper edge of a shaded range. `scale`: linear, log or percent.
    """

    title: str
    about: str
    series: tuple[tuple[str, str], ...]
    band: tuple[str, str] | None = None
    scale: str = "linear"
    kind: str = "lines"  # lines | stacked (parts of a whole)
    smooth: bool = True  # False for what has no noise


@dataclass(frozen=True)
class Section:
    key: str
    title: str
    charts: tuple[Chart, ...]


def spread(title: str, about: str, name: str, scale: str = "linear") -> Chart:
    """Mean with the range from smallest to largest shaded."""
    return Chart(title, about, (("mean", f"{name}/mean"),), (f"{name}/min", f"{name}/max"), scale)


LEARNING = (
    spread("Score", "Verifier reward after shaping; shaded from worst to best trajectory.", "critic/score"),
    Chart(
        "Training accuracy",
        "Right answers among the trained trajectories.",
        (("acc", "reward/acc/mean"),),
        None,
        "percent",
    ),
    Chart(
        "Signal of groups as generated",
        "Only mixed groups carry a gradient.",
        (
            ("mixed", "group/mixed_ratio"),
            ("all right", "group/all_correct_ratio"),
            ("all wrong", "group/all_wrong_ratio"),
        ),
        None,
        "percent",
    ),
    spread("Advantages", "Per response token.", "critic/advantages"),
    Chart(
        "Raw and shaped reward",
        "The gap is what the length penalty takes.",
        (("shaped", "reward/shaped/mean"), ("raw", "reward/raw/mean")),
    ),
    Chart("Critic: explained variance", "1 is a perfect critic.", (("explained", "critic/vf_explained_var"),)),
    Chart("Critic: value loss", "", (("loss", "critic/vf_loss"),)),
    Chart("Supervised loss", "Cross-entropy per token.", (("train", "sft/loss"), ("validation", "sft/val_loss"))),
)

POLICY = (
    Chart(
        "Entropy",
        "Per token. A fall to zero ends exploration; clip-higher is meant to prevent it.",
        (("entropy", "actor/entropy"),),
    ),
    Chart(
        "Policy movement (KL)",
        "Old minus new log-prob in the update, and KL to the reference where one is used.",
        (("ppo_kl", "actor/ppo_kl"), ("kl_loss", "actor/kl_loss"), ("reward KL", "actor/reward_kl_penalty")),
    ),
    Chart(
        "Clipped tokens",
        "Share of tokens whose ratio is clipped, and of those bound by the dual clip.",
        (("clipped", "actor/pg_clipfrac"), ("dual clip", "actor/pg_clipfrac_lower")),
        None,
        "percent",
    ),
    Chart(
        "Gradient norm",
        "Before clipping. Spikes foretell trouble.",
        (("actor", "actor/grad_norm"), ("critic", "critic/grad_norm")),
    ),
    Chart("Policy-gradient loss", "Its level says little; its jumps do.", (("loss", "actor/pg_loss"),)),
    Chart("Learning rate", "", (("actor", "actor/lr"), ("critic", "critic/lr"), ("sft", "sft/lr")), smooth=False),
    Chart(
        "Gradient: signal and noise",
        "Estimated from Σπ², without a second backward pass.",
        (
            ("signal", "variance_proxy/proxy1_signal_strength"),
            ("noise", "variance_proxy/proxy3_pure_noise"),
            ("power", "variance_proxy/proxy2_total_power"),
        ),
        None,
        "log",
    ),
)

LENGTHS = (
    Chart(
        "Response length",
        "Mean, in tokens; shaded from the shortest tenth to the longest.",
        (("mean", "response_length/mean"), ("longest 1 %", "response_length/p99")),
        ("response_length/p10", "response_length/p90"),
    ),
    Chart(
        "Hit the length limit",
        "Truncated answers teach little; a high share asks for more room or the overlong penalty.",
        (("clipped", "response_length/clip_ratio"), ("aborted", "response/aborted_ratio")),
        None,
        "percent",
    ),
    Chart("Prompt length", "Mean, in tokens.", (("mean", "prompt_length/mean"),)),
    Chart(
        "Tokens per rank",
        "After balancing, the lightest and heaviest data-parallel rank; before, the heaviest.",
        (
            ("heaviest", "global_seqlen/balanced_max"),
            ("lightest", "global_seqlen/balanced_min"),
            ("heaviest, unbalanced", "global_seqlen/max"),
        ),
    ),
    spread("Turns", "Of multi-turn trajectories.", "num_turns"),
)

AGREEMENT = (
    Chart(
        "Trainer and rollout log-probs",
        "|log p| difference on the sampled tokens, at the same weights. Rounding only, or something is wrong.",
        (("max", "training/rollout_logprob_diff_max"), ("mean", "training/rollout_logprob_diff_mean")),
        None,
        "log",
    ),
    Chart(
        "Trainer and rollout probabilities",
        "|p| difference on the sampled tokens.",
        (("max", "training/rollout_probs_diff_max"), ("mean", "training/rollout_probs_diff_mean")),
        None,
        "log",
    ),
    Chart(
        "Importance weights",
        "Mean and effective sample size; both near 1 when the policies agree.",
        (("mean", "rollout_corr/rollout_is_mean"), ("ESS", "rollout_corr/rollout_is_eff_sample_size")),
    ),
    Chart(
        "Rejected by rollout correction",
        "Tokens and sequences.",
        (
            ("tokens", "rollout_corr/rollout_rs_masked_fraction"),
            ("sequences", "rollout_corr/rollout_rs_seq_masked_fraction"),
        ),
        None,
        "percent",
    ),
    Chart("KL between rollout and trainer", "", (("k3", "rollout_corr/k3_kl"), ("kl", "rollout_corr/kl"))),
    Chart(
        "Staleness",
        "Versions between the weights that sampled and those that train.",
        (
            ("newest token", "training/off_policy/trajectory_staleness/mean"),
            ("oldest token", "training/off_policy/trajectory_staleness_worst/mean"),
            ("worst", "training/off_policy/trajectory_staleness_worst/max"),
        ),
    ),
)

SPEED = (
    Chart("Throughput", "Prompt and response tokens per second and device.", (("tokens/s", "perf/throughput"),)),
    Chart("Seconds per step", "", (("step", "perf/time_per_step"),)),
    Chart("Weight push", "Seconds to move the weights into the rollout engines.", (("push", "push/seconds"),)),
    Chart("Push against its bound", "1: no byte was received in vain.", (("ratio", "push/ratio_to_bound"),)),
    Chart(
        "Model FLOPs utilisation",
        "Share of the device's bf16 peak.",
        (("update", "perf/mfu/update_actor"), ("log-probs", "perf/mfu/old_log_prob")),
        None,
        "percent",
    ),
    Chart(
        "Peak memory (GiB)",
        "",
        (
            ("device, allocated", "perf/max_memory_allocated_gb"),
            ("device, reserved", "perf/max_memory_reserved_gb"),
            ("host, resident", "perf/cpu_memory_used_gb"),
        ),
    ),
    Chart(
        "Speculative decoding: accepted",
        "Accepted of drafted tokens.",
        (("rate", "rollout/spec_accept_rate"),),
        None,
        "percent",
    ),
)

MOE = (
    Chart(
        "Busiest expert",
        "Load above even (0 is even), worst layer and mean over layers.",
        (("worst layer", "rollout/moe/max_vio/max"), ("mean", "rollout/moe/max_vio/avg")),
    ),
    Chart(
        "Cost of imbalance",
        "Slowest over mean, summed over layers: the factor on the time of expert layers.",
        (
            ("GPU", "rollout/moe/gpu_load/max_over_mean"),
            ("EP rank", "rollout/moe/ep_rank_load/max_over_mean"),
            ("node", "rollout/moe/node_load/max_over_mean"),
        ),
    ),
    Chart(
        "Dead experts",
        "Without a token in a report.",
        (("worst layer", "rollout/moe/dead_experts/max"), ("mean", "rollout/moe/dead_experts/avg")),
    ),
    Chart(
        "Routing: trainer against rollout",
        "Expert choices not shared for the same tokens, and distance of loads.",
        (("choices", "training/moe/routing_disagreement/avg"), ("loads", "training/moe/rollout_distance/avg")),
        None,
        "percent",
    ),
    Chart(
        "Drift of loads",
        "Distance from the previous report.",
        (("mean", "rollout/moe/drift/avg"), ("worst", "rollout/moe/drift/max")),
    ),
)


# In the order in which a step goes through them.
STAGES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "testing",
    "save_checkpoint",
)


def sections(runs: list[RunFiles]) -> list[Section]:
    """The sections with the charts for which some run has data; empty sections are left out."""
    present = sorted({name for run in runs for name in run.names}, key=natural)
    every = (
        Section("learning", "Learning", (*_validation(present), *LEARNING)),
        Section("policy", "Policy", POLICY),
        Section("lengths", "Lengths", LENGTHS),
        Section("filter", "Filter and data", _filter(present)),
        Section("agreement", "Agreement and staleness", AGREEMENT),
        Section("speed", "Speed", (*_stages(present), *SPEED)),
        Section("moe", "Experts", MOE),
    )
    return [section for section in (_with_data(section, set(present)) for section in every) if section.charts]


def _with_data(section: Section, present: set[str]) -> Section:
    charts = []
    for chart in section.charts:
        series = tuple(pair for pair in chart.series if pair[1] in present)
        band = chart.band if chart.band and present.issuperset(chart.band) else None
        if series:
            charts.append(replace(chart, series=series, band=band))
    return Section(section.key, section.title, tuple(charts))


def _validation(present: list[str]) -> list[Chart]:
    """One chart per validation source and core variable: mean, then best and majority of N."""
    sources: dict[str, list[tuple[str, str]]] = {}
    for name in present:
        if name.startswith("val-core/") and not name.endswith("/std"):
            stem, metric = name.removeprefix("val-core/").rsplit("/", 2 if name.endswith("/mean") else 1)[:2]
            sources.setdefault(stem, []).append((metric, name))
    charts = []
    for stem, series in sources.items():
        source, _, variable = stem.rpartition("/")
        ordered = tuple(sorted(series, key=lambda pair: not pair[0].startswith("mean")))
        scale = "percent" if variable == "acc" else "linear"
        charts.append(Chart(f"Validation: {source}", f"{variable} on held-out prompts.", ordered, None, scale))
    return charts


def _stages(present: list[str]) -> list[Chart]:
    names = [name.removeprefix("timing_s/") for name in present if name.startswith("timing_s/")]
    known = [name for name in STAGES if name in names]
    others = [name for name in names if name not in STAGES and name != "step"]
    series = tuple((name, f"timing_s/{name}") for name in known + others)
    return [Chart("Where a step's seconds go", "Stages of each step, stacked.", series, kind="stacked")]


def _filter(present: list[str]) -> tuple[Chart, ...]:
    root = "training/filter_groups"
    by_value = [name for name in present if name.startswith(f"{root}/dropped_value/")]
    dropped = [(f"dropped, all {name.rsplit('/', 1)[1]}", name) for name in by_value] or [
        ("dropped", f"{root}/dropped")
    ]
    parts = (("kept", f"{root}/kept"), *dropped, ("failed", f"{root}/failed"))
    return (
        Chart("Groups of a step", "Dropped groups carry no signal: all values equal.", parts, kind="stacked"),
        Chart(
            "Generation batches per step",
            "More than 1: dynamic sampling had to ask again.",
            (("batches", "train/num_gen_batches"),),
        ),
        Chart(
            "Surplus groups",
            "Passed the filter but were more than the step needed.",
            (("discarded", f"{root}/discarded_surplus"), ("carried over", f"{root}/carried_surplus")),
        ),
        Chart(
            "Verifier trouble",
            "Trajectories that could not be scored; events of the verifiers.",
            (
                ("failed", "reward/failed_ratio"),
                *((name.rsplit("/", 1)[1], name) for name in present if name.startswith("verifier/count/")),
            ),
        ),
    )
