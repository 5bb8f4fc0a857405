"""A plan, a search and a reshard plan as tables for the terminal."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron_dapo.planner.parameters import matrix_parameters, total_parameters
from megatron_dapo.planner.run import GIB, RunPlan

if TYPE_CHECKING:  # NumPy comes with these, and the plan of a run does without
    from megatron_dapo.planner.reshard import ReshardPlan
    from megatron_dapo.planner.search import Search


def text(*parts: Table | Text | Group, width: int = 120) -> str:
    """Rendered, without colours when the output is not a terminal."""
    console = Console(width=width, record=False, highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


def run_text(plan: RunPlan) -> str:
    """Memory, engines, time, traffic, verdict."""
    request = plan.request
    load = plan.load
    head = Text(
        f"{request.recipe}: {total_parameters(request.arch) / 1e9:.2f} B parameters "
        f"({matrix_parameters(request.arch) / 1e9:.2f} B active), {request.topology.world} x {request.device.name}, "
        f"{request.topology.describe()}\n"
        f"a step: {load.generated_prompts} prompts x {request.config.rollout.n} answered, {load.trained_sequences} "
        f"sequences of {load.sequence_tokens:.0f} tokens trained in {load.optimizer_steps} optimizer steps"
    )
    return text(head, _memory(plan), _engine(plan), _time(plan), _traffic(plan), _verdict(plan), _assumed(plan))


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"


def _memory(plan: RunPlan) -> Table:
    table = Table(title=f"GiB per rank, of {plan.request.device.memory_gib:g}", title_justify="left")
    columns = ("stage", "layers", "weights", "grads", "optim", "others", "activ.", "logits")
    for name in (*columns, *(f"in {phase}" for phase in plan.stages[0].phases)):
        table.add_column(name, justify="right")
    for stage in plan.stages:
        actor = stage.actor
        sizes = (
            actor.parameters,
            actor.gradients,
            actor.optimizer,
            stage.others.total,
            stage.activations,
            stage.logits,
        )
        peaks = [
            Text(_gib(stage.phases[phase]), style="red" if stage.phases[phase] > plan.request.device.memory else "")
            for phase in stage.phases
        ]
        table.add_row(str(stage.pp), str(stage.layers), *map(_gib, sizes), *peaks)
    return table


def _engine(plan: RunPlan) -> Text:
    engine, rollout = plan.engine, plan.request.config.rollout
    return Text(
        f"rollout rank (tensor {rollout.tensor_parallel_size}): weights {_gib(engine.weights)} GiB, keys and values "
        f"{_gib(max(0.0, engine.kv_room))} GiB = {engine.kv_tokens} tokens = {engine.longest_sequences} longest "
        f"sequences; {plan.time.concurrency:.0f} at once"
    )


def _time(plan: RunPlan) -> Group:
    time = plan.time
    table = Table(title="estimated seconds of a step", title_justify="left")
    for name in (*time.stages, "step"):
        table.add_column(name, justify="right")
    table.add_row(*(f"{seconds:.1f}" for seconds in time.stages.values()), f"{time.total:.1f}")
    caption = (
        f"{time.flops / 1e15:.0f} PFLOPs; update at {time.mfu_update:.0%} of peak; bubble {time.bubble:.0%} with "
        f"{time.micro_batches} micro-batches; communication {time.communication:.0%} of a forward pass; "
        f"{time.tokens_per_gpu_second:.0f} trained tokens per device and second"
    )
    return Group(table, Text(caption))


def _traffic(plan: RunPlan) -> Table:
    table = Table(title="MB sent per rank of the busiest stage", title_justify="left")
    for name in ("kind", "ranks", "links", "MB", "ms", "per"):
        table.add_column(name, justify="right")
    for name, link in vars(plan.time.traffic).items():
        if link.bytes and link.ranks > 1:
            per = {"data": "optimizer step", "push": "step"}.get(name, "micro-batch, one direction")
            where = "between nodes" if link.crosses_nodes else "inside the node"
            kind = name.replace("_", "-")
            table.add_row(kind, str(link.ranks), where, f"{link.bytes / 1e6:.1f}", f"{link.seconds * 1e3:.2f}", per)
    return table


def _verdict(plan: RunPlan) -> Text:
    if plan.fits:
        spare = plan.request.device.memory - plan.peak
        return Text(f"fits, with {_gib(spare)} GiB to spare", style="green")
    return Text("\n".join(f"does not work: {problem}" for problem in plan.problems), style="red")


def _assumed(plan: RunPlan) -> Text:
    values = ", ".join(f"{name}={value:g}" for name, value in asdict(plan.request.assume).items())
    return Text(f"assumed (assume.NAME=value changes one): {values}", style="dim")


def search_text(found: Search) -> str:
    """The best layouts and why; why the others are out."""
    table = Table(title=f"{found.fitting} of {found.considered} layouts fit", title_justify="left", show_lines=True)
    for name in ("", "layout", "s/step", "GiB", "bubble", "reasons"):
        table.add_column(name, overflow="fold")
    for rank, one in enumerate(found.best, 1):
        time = one.plan.time
        layout = f"{one.plan.request.topology.describe()}\n[dim]{' '.join(one.words)}[/dim]"
        why = "\n".join(one.reasons)
        table.add_row(str(rank), layout, f"{time.total:.1f}", _gib(one.plan.peak), f"{time.bubble:.0%}", why)
    lines = [f"out: {count} because {reason}" for reason, count in found.rejected.items()]
    if not found.best and found.nearest_miss:
        miss = found.nearest_miss
        lines.append(f"nearest miss: {miss.request.topology.describe()}: {miss.problems[0]}")
    lines.append("estimates: differences of a few per cent mean nothing; measure the first ones")
    return text(table, Text("\n".join(lines)), width=150)


def reshard_text(plan: ReshardPlan) -> str:
    """Bytes of a push beside the least possible and the naive amount."""
    stats = plan.stats
    source, destination, size = stats.largest_pair
    rows = {
        "moved": f"{stats.bytes_moved / 1e9:.2f} GB in {stats.transfers} boxes",
        "least possible": f"{stats.bytes_lower_bound / 1e9:.2f} GB (ratio {stats.ratio:.4f})",
        "whole tensors to every rank": f"{stats.naive_bytes / 1e9:.2f} GB",
        "received per rank": f"{stats.receive_max_bytes / 1e9:.3f} GB",
        "sent, busiest rank": f"{stats.send_max_bytes / 1e9:.3f} GB ({stats.send_max_over_mean:.3f} x mean)",
        "pairs": f"{stats.pairs}; largest: rank {source} to rollout rank {destination}, {size / 1e6:.1f} MB",
        "seconds": f"{stats.seconds(plan.bandwidth_gbs * 1e9):.2f} at {plan.bandwidth_gbs:g} GB/s per rank",
        "planned in": f"{plan.plan_seconds:.2f} s (and {plan.layout_seconds:.2f} s for the layouts)",
    }
    title = f"{plan.model}: {plan.topology.describe()} to {plan.engines} engines of {plan.rollout_tensor}"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    return text(table)
