"""A plan or a search as one self-contained HTML page."""

from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_dapo.planner.run import GIB, RunPlan
from megatron_dapo.planner.search import Search


def write_run(plan: RunPlan, path: Path) -> Path:
    """Memory of every stage by part and by phase against the device, and the step's seconds."""
    titles = ("GiB in the update, by stage", "peak GiB by phase and stage", "seconds of a step")
    figure = make_subplots(rows=1, cols=3, subplot_titles=titles)
    names = [f"stage {stage.pp}" for stage in plan.stages]
    parts = {
        "parameters": [stage.actor.parameters for stage in plan.stages],
        "gradients": [stage.actor.gradients for stage in plan.stages],
        "optimizer": [stage.actor.optimizer for stage in plan.stages],
        "other roles": [stage.others.total for stage in plan.stages],
        "activations": [stage.activations for stage in plan.stages],
        "logits": [stage.logits for stage in plan.stages],
    }
    for name, sizes in parts.items():
        figure.add_bar(x=names, y=[size / GIB for size in sizes], name=name, row=1, col=1)
    for phase in plan.stages[0].phases:
        peaks = [stage.phases[phase] / GIB for stage in plan.stages]
        figure.add_scatter(x=names, y=peaks, name=f"peak {phase}", mode="lines+markers", row=1, col=2)
    for column in (1, 2):
        figure.add_hline(y=plan.request.device.memory_gib, line_dash="dot", row=1, col=column)
    stages = plan.time.stages
    figure.add_bar(x=list(stages), y=list(stages.values()), showlegend=False, row=1, col=3)
    verdict = "fits" if plan.fits else "; ".join(plan.problems)
    title = f"{plan.request.recipe} on {plan.request.topology.world} x {plan.request.device.name}: {verdict}"
    figure.update_layout(barmode="stack", title=title, template="plotly_white")
    return _write(figure, path)


def write_search(found: Search, path: Path) -> Path:
    """Every shown candidate's step, stacked by stage."""
    names = [f"{rank}. {one.plan.request.topology.describe()}" for rank, one in enumerate(found.best, 1)]
    figure = go.Figure()
    for stage in dict.fromkeys(name for one in found.best for name in one.plan.time.stages):
        seconds = [one.plan.time.stages.get(stage, 0.0) for one in found.best]
        figure.add_bar(y=names, x=seconds, name=stage, orientation="h")
    title = f"estimated seconds of a step; {found.fitting} of {found.considered} layouts fit"
    figure.update_layout(barmode="stack", title=title, template="plotly_white", yaxis={"autorange": "reversed"})
    return _write(figure, path)


def _write(figure: go.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)
    return path
