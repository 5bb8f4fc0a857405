"""How a run goes and what it leaves behind: the section `trainer`."""

from typing import Literal

from megatron_dapo.config.base import Count, Every, Int, NonNegativeInt, Section

Tracker = Literal["console", "jsonl", "tensorboard", "wandb", "mlflow", "trackio", "swanlab", "clearml"]


class TrainerConfig(Section):
    """Length, validation, checkpoints, logging, recovery."""

    project_name: str = "megatron_dapo"
    """Project under which trackers file the run."""
    experiment_name: str = "default"
    """Name of the run."""
    default_local_dir: str = "runs/default"
    """The run directory: metrics, checkpoints, samples, the resolved configuration."""
    runtime: Literal["torchrun", "ray"] = "torchrun"
    """How the ranks exist: started by torchrun or `megatron-dapo train`, or as Ray actors that a driver starts, in the
    cluster at RAY_ADDRESS or in a Ray of the run's own."""
    mode: Literal["sync", "colocate_async", "separate_async"] = "sync"
    """The loop: generate then train; in-flight generation on shared devices; or on its own devices."""
    total_epochs: Count = 1
    """Passes over the training prompts, unless `total_training_steps` ends the run earlier."""
    total_training_steps: Count | None = None
    """Training steps; null: `total_epochs` decides."""
    save_freq: Every = -1
    """Steps between checkpoints; -1: none, but a run that is asked to stop saves its last step."""
    test_freq: Every = -1
    """Steps between validations; -1: none."""
    val_before_train: bool = True
    """Validate before the first step (where there are val_files)."""
    critic_warmup: NonNegativeInt = 0
    """The step, counted from 1, from which on the actor is updated too: at 2 the first step is the critic's alone; 0
    and 1 leave none to it."""
    logger: tuple[Tracker, ...] = ("console", "jsonl", "tensorboard")
    """Trackers; jsonl is always written."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    """Continue from the run directory's latest checkpoint, never, or from `resume_from_path`."""
    resume_from_path: str | None = None
    """Checkpoint directory for `resume_mode=path`."""
    max_ckpt_to_keep: Count | None = None
    """Oldest checkpoints beyond so many are deleted; null: keep all."""
    async_save: bool = False
    """Write checkpoints beside the training."""
    seed: Int = 1
    """Seed of sampling, initialisation and dropout."""
    export_hf: bool = False
    """At the end, write the policy to `<run>/hf` in Hugging Face format and compare its logits with Megatron's."""
    log_samples_every: Every = 10
    """Steps between printed sample generations; -1: none."""
    log_expert_load_every: Every = 10
    """Steps between reports of a mixture's expert load (`moe.jsonl`, `megatron-dapo moe`); -1: not counted at all."""
    rollout_data_dir: str | None = None
    """Where every step's generations are dumped, for `megatron-dapo rollouts`; null: not."""
    rollout_data_format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of that dump."""
    balance_batch: bool = True
    """Spread sequences over data-parallel ranks by their cost."""
    full_determinism: bool = False
    """Deterministic kernels only, slower; one that has no such form raises. On a host a run repeats without it."""
    max_restarts: NonNegativeInt = 0
    """How often a run that failed is started again, from its last checkpoint (else anew)."""
    parameter_sync_step: Count = 1
    """Asynchronous modes: local updates between two weight pushes."""
    max_off_policy_threshold: Count = 8
    """Asynchronous modes: most steps that a group may span, from the one it was sent in to the one it is trained in."""
    max_off_policy_strategy: Literal["drop", "wait"] = "drop"
    """Asynchronous modes: evict and replace what is older, or hold a step back until nothing will become so."""
    num_warmup_batches: NonNegativeInt = 1
    """Asynchronous modes: batches sent ahead of the step that trains them."""
    replay_sampler: str = "oldest_first"
    """Asynchronous modes: which finished groups a step takes; oldest_first, newest_first, `package.module:function`."""
    queue_storage_units: Count = 1
    """Asynchronous modes: processes among which TransferQueue spreads its rows."""
