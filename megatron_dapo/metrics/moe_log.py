"""Expert counts on disk (`moe.jsonl`), and the what-if answers that are computed from them (`moe_what_if.json`)."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from megatron_dapo.errors import UserError
from megatron_dapo.metrics.jsonl import JsonlWriter, read_jsonl
from megatron_dapo.metrics.moe import MoELoadAccumulator
from megatron_dapo.metrics.placement import (
    Placement,
    gpu_load,
    greedy_placement,
    load_by,
    megatron_placement,
    overhead,
)

MOE_FILE = "moe.jsonl"
WHAT_IF_FILE = "moe_what_if.json"
LEVELS, SHADES = (0.25, 0.75, 1.25, 2.0, 4.0), "·░▒▓█▲"
KEY = ("< 0.25", "< 0.75", "even", "< 2", "< 4", "more")


class MoELog:
    """Writes one object per report: step, source, counts, and the load of each GPU where the placement is known."""

    def __init__(self, run_dir: Path | str) -> None:
        self._writer = JsonlWriter(Path(run_dir) / MOE_FILE)

    def write(
        self, step: int, source: str, accumulator: MoELoadAccumulator, placement: Placement | None = None
    ) -> None:
        """`source` is "rollout" or "training". Call it before `add_to_metrics`, which resets the accumulator."""
        counts = accumulator.counts.numpy()
        row: dict[str, Any] = {"step": step, "source": source, "counts": counts.tolist()}
        if placement is not None and counts.any():
            row["gpus_per_node"] = placement.gpus_per_node
            row["gpu_load"] = gpu_load(counts, placement).sum(0).round(1).tolist()
        self._writer.write(row)

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class WhatIf:
    """One placement's answer: predicted step-time cost (max/mean, 1 = even) by GPU and node, and each GPU's load."""

    name: str
    gpus: int
    gpus_per_node: int
    slots_per_gpu: int
    overhead: float
    node_overhead: float
    gpu_load: list[float]


def what_if(
    counts: Int[np.ndarray, "layers experts"],
    gpus: int,
    gpus_per_node: int = 8,
    *,
    fit_on: Int[np.ndarray, "layers experts"] | None = None,
    extra_slots: tuple[int, ...] = (1, 2),
) -> list[WhatIf]:
    """Step-time cost of `counts` under Megatron's contiguous blocks, greedy packing, and greedy with hot-expert copies.

    The fitted placements are chosen on `fit_on` (an earlier report) and judged on `counts`, so that the prediction is
    not about the past; None fits and judges on the same counts, which flatters them.
    """
    layers, experts = counts.shape
    fitted = counts if fit_on is None else fit_on
    spread = next(e for e in range(min(gpus, experts), 0, -1) if experts % e == 0 and gpus % e == 0)
    contiguous = megatron_placement(layers, experts, world=gpus, expert=spread, gpus_per_node=gpus_per_node)
    answers = [_judge("contiguous", counts, contiguous)]
    if experts >= gpus:
        answers.append(_judge("greedy", counts, greedy_placement(fitted, gpus, gpus_per_node)))
    for extra in extra_slots:
        placement = greedy_placement(fitted, gpus, gpus_per_node, extra)
        answers.append(_judge(f"greedy + {extra} copies per GPU", counts, placement))
    return answers


def moe_report(
    run_dir: Path | str,
    *,
    source: str | None = None,
    step: int | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
) -> str:
    """A text report of a run's expert load and of other placements; also writes `moe_what_if.json` for the HTML report.

    `source` and `step` choose the report (default: the newest, rollout first). `gpus` and `gpus_per_node` are the
    machine to imagine (default: the run's own where it was recorded, else 16 nodes × 8 GPUs).
    """
    run_dir = Path(run_dir)
    rows = _reports(run_dir, source)
    chosen = [row for row in rows if step is None or row["step"] == step]
    if not chosen:
        raise UserError(f"no expert load of step {step} in {run_dir / MOE_FILE}; steps: {[r['step'] for r in rows]}")
    row = chosen[-1]
    earlier = [r for r in rows if r["step"] < row["step"]]
    per_node = gpus_per_node or row.get("gpus_per_node", 8)
    world = gpus or len(row.get("gpu_load", ())) or 128
    counts = np.asarray(row["counts"])
    fit_on = np.asarray(earlier[-1]["counts"]) if earlier else None
    answers = what_if(counts, world, per_node, fit_on=fit_on)
    head = {"step": row["step"], "source": row["source"], "fitted_on_step": earlier[-1]["step"] if earlier else None}
    variants = [vars(answer) for answer in answers]
    (run_dir / WHAT_IF_FILE).write_text(json.dumps(head | {"variants": variants}))
    return _text(head, counts, answers)


def _reports(run_dir: Path, source: str | None) -> list[dict[str, Any]]:
    path = run_dir / MOE_FILE
    if not path.exists():
        raise UserError(f"{path} does not exist: the run recorded no expert load (a dense model, or recording off)")
    rows = [row for row in read_jsonl(path) if np.asarray(row["counts"]).any()]
    present = sorted({row["source"] for row in rows})
    wanted = source or ("rollout" if "rollout" in present else present[0] if present else "rollout")
    found = [row for row in rows if row["source"] == wanted]
    if not found:
        raise UserError(f"{path} has no expert load of source {wanted!r}; it has {present}")
    return found


def _judge(name: str, counts: Int[np.ndarray, "layers experts"], placement: Placement) -> WhatIf:
    load = gpu_load(counts, placement)
    node_holds = load_by(placement.holds, placement.node) > 0
    return WhatIf(
        name=name,
        gpus=placement.gpus,
        gpus_per_node=placement.gpus_per_node,
        slots_per_gpu=placement.slots.shape[2],
        overhead=overhead(load, placement.holds),
        node_overhead=overhead(load_by(load, placement.node), node_holds),
        gpu_load=load.sum(0).round(1).tolist(),
    )


def _text(head: dict[str, Any], counts: Int[np.ndarray, "layers experts"], answers: list[WhatIf]) -> str:
    layers, experts = counts.shape
    load = counts / np.maximum(counts.sum(-1, keepdims=True), 1) * experts
    worst = np.argsort(-load.max(-1))[:5]
    basis = "itself" if head["fitted_on_step"] is None else f"step {head['fitted_on_step']}"
    lines = [
        f"expert load of step {head['step']} ({head['source']}): {counts.sum():,} assignments, "
        f"{layers} layers × {experts} experts",
        f"  busiest expert, mean over layers: {load.max(-1).mean():.2f} × even;"
        f" experts without a token: {(counts == 0).sum()} of {counts.size}",
        "  least even layers: " + ", ".join(f"{i} (expert {load[i].argmax()}: {load[i].max():.2f} ×)" for i in worst),
        "",
        "layer by expert, as multiples of even: "
        + "  ".join(f"{shade} {text}" for shade, text in zip(SHADES, KEY, strict=True)),
        *(f"  {i:>3} {_shaded(layer)}" for i, layer in enumerate(load)),
        "",
        f"placements on {answers[0].gpus} GPUs, {answers[0].gpus_per_node} per node, fitted on {basis}",
        f"  {'placement':<26}{'slots/GPU':>10}{'max/mean GPU':>14}{'max/mean node':>15}",
    ]
    lines += [f"  {a.name:<26}{a.slots_per_gpu:>10}{a.overhead:>14.3f}{a.node_overhead:>15.3f}" for a in answers]
    return "\n".join([*lines, "", *_node_map(answers[0])])


def _shaded(load: Float[np.ndarray, " experts"]) -> str:
    return "".join(SHADES[int(i)] for i in np.searchsorted(LEVELS, load, side="right"))


def _node_map(answer: WhatIf) -> list[str]:
    """Each GPU's load in multiples of even, a line per node."""
    even = sum(answer.gpu_load) / len(answer.gpu_load)
    lines = [f"node by GPU under {answer.name}, all layers together, as multiples of even"]
    for node, first in enumerate(range(0, answer.gpus, answer.gpus_per_node)):
        row = answer.gpu_load[first : first + answer.gpus_per_node]
        lines.append(f"  {node:>3} " + " ".join(f"{load / even:5.2f}" for load in row))
    return lines
