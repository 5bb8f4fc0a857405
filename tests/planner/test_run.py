"""Plans of the recipes: they compose, fit or say why not, agree with the metrics' FLOPs, and are quick."""

import json
import resource
import subprocess
import sys
import time
from dataclasses import fields

import pytest

from megatron_dapo.cli.main import main
from megatron_dapo.config.compose import choices
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.planner.assumptions import Assumptions
from megatron_dapo.planner.devices import DEVICES
from megatron_dapo.planner.networks import NETWORKS, network
from megatron_dapo.planner.run import plan_run
from megatron_dapo.planner.timing import forward_flops
from megatron_dapo.planner.words import read_request

DEVICE = {"dapo_deepseek_v3": ["device=B200"]}  # an engine is on one node, and 8 x H100 cannot hold it
RECIPES = [name for name in choices("recipe") if name != "demo_sft"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_fits_its_devices(recipe: str):
    start = time.process_time()
    plan = plan_run(read_request([f"recipe={recipe}", *DEVICE.get(recipe, [])]))
    assert time.process_time() - start < 2
    assert plan.problems == ()
    assert plan.engine.longest_sequences >= 1 and 0 < plan.time.mfu_update < 0.6
    assert sum(stage.layers for stage in plan.stages) == plan.request.arch.layers


def test_the_supervised_demo_plans_with_its_model():
    assert plan_run(read_request(["recipe=demo_sft", "model=demo"])).fits


def test_an_engine_is_on_one_node():
    assert not plan_run(read_request(["recipe=dapo_deepseek_v3"])).fits  # H100
    plan = plan_run(read_request(["recipe=dapo_deepseek_v3", "device=B200", "rollout.tensor_parallel_size=32"]))
    assert [text for text in plan.problems if "tensor_parallel_size 32 does not divide the 8 devices of a node" in text]
    plan = plan_run(read_request(["recipe=dapo_deepseek_v3", "device=GB200"]))
    assert [text for text in plan.problems if "the 4 devices of a node" in text]  # of one operating system
    plan = plan_run(read_request(["recipe=dapo_qwen2_5_7b_8gpu", "rollout.engines=9"]))
    assert [text for text in plan.problems if text.startswith("rollout.engines 9")]


def test_what_does_not_fit_is_said_with_the_way_out():
    plan = plan_run(read_request(["recipe=dapo_qwen3_235b_a22b", "rollout.gpu_memory_utilization=0.7"]))
    assert not plan.fits and "rollout.tensor_parallel_size" in plan.problems[0]
    plan = plan_run(read_request(["recipe=dapo_qwen2_5_7b_8gpu", "device.memory_gib=40", "model.recompute=none"]))
    assert any("phase update" in text and "model.recompute=full" in text for text in plan.problems)
    plan = plan_run(
        read_request(["recipe=dapo_qwen2_5_7b_8gpu", "actor.offload.optimizer=false", "actor.offload.grad=false"])
    )
    assert any("phase rollout" in text for text in plan.problems)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=demo", "device=H1000"], "nearest is H100"),
        (["recipe=demo", "assume.keept=1"], "nearest is assume.kept"),
        (["recipe=demo", "assume.kept=much"], "must be a number"),
        (["recipe=demo", "device.colour=1"], "a device has"),
        (["recipe=demo", "gpus=none"], "whole number"),
        (["model=nothing"], "no bundled network"),
        (["model=qwen3-30b-a3b", "gpus=24", "parallel.tensor=8", "parallel.expert=3"], "illegal"),
        (["model=qwen2.5-7b", "rollout.tensor_parallel_size=3"], "rollout.tensor_parallel_size=3 does not divide"),
        (["oops"], "key=value"),
    ],
)
def test_mistakes(words: list[str], message: str):
    with pytest.raises(UserError, match=message):
        plan_run(read_request(words))


def dims(arch: Architecture):
    from megatron_dapo.metrics import MlaDims, ModelDims

    mixture, latent = arch.mixture, arch.latent
    return ModelDims(
        arch.layers, arch.hidden, arch.heads, arch.kv_heads, arch.head_dim, arch.ffn, arch.vocab,
        experts=arch.experts, topk=mixture.topk if mixture else 0, expert_ffn=mixture.ffn if mixture else 0,
        shared_ffn=mixture.shared_ffn if mixture else 0, moe_layers=len(mixture.layers) if mixture else 0,
        mla=MlaDims(latent.q_rank or 0, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.v_dim) if latent else None,
    )  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_flops_are_those_of_the_metrics(name: str):
    from megatron_dapo.metrics import efficiency

    arch = network(name)
    expected = efficiency.forward_flops(dims(arch), [1000, 1000])
    assert 2000 * forward_flops(arch, 1000) == pytest.approx(expected, rel=1e-12)


def test_peaks_are_those_of_the_metrics():
    from megatron_dapo.metrics import peak_tflops

    for device in DEVICES.values():
        if device.name != "cpu":
            assert peak_tflops(device.name.removesuffix("-40GB")) == pytest.approx(device.tflops, rel=0.01)


def test_recomputation_costs_time_and_saves_memory():
    full, none = (
        plan_run(read_request(["recipe=dapo_qwen2_5_7b_8gpu", f"model.recompute={r}"])) for r in ("full", "none")
    )
    assert full.stages[0].activations < none.stages[0].activations / 3
    assert full.time.stages["update_actor"] == pytest.approx(4 / 3 * none.time.stages["update_actor"], rel=0.05)


def test_the_bubble_is_that_of_1f1b():
    plan = plan_run(read_request(["recipe=dapo_qwen2_5_32b"]))
    m = plan.time.micro_batches
    assert plan.time.bubble == pytest.approx(1 / (m + 1))


def test_critic_and_reference_cost_memory_and_time():
    words = [
        "recipe=dapo_qwen2_5_7b_8gpu",
        "algorithm.adv_estimator=gae",
        "actor.use_kl_loss=true",
        "rollout.gpu_memory_utilization=0.3",
    ]
    plan = plan_run(read_request(words))
    assert {"ref", "values", "update_critic"} <= set(plan.time.stages)
    assert plan.stages[0].others.total > plan.stages[0].actor.total
    away = plan_run(read_request([*words, *(f"critic.offload.{part}=true" for part in ("param", "grad", "optimizer"))]))
    before, after = plan.stages[0], away.stages[0]
    assert before.phases["update"] - after.phases["update"] == before.critic.total > 0
    assert after.phases["update_critic"] == before.phases["update_critic"]  # there it is on the device either way
    assert away.time.stages["offload"] > plan.time.stages["offload"]
    fewer = plan_run(read_request([*words, "critic.max_tokens_per_micro_batch=10240"])).stages[0]
    assert (
        fewer.phases["update_critic"] < before.phases["update_critic"]
        and fewer.phases["update"] == before.phases["update"]
    )


def test_a_push_is_part_of_the_plan(capsys):
    plan = plan_run(read_request(["recipe=dapo_qwen2_5_32b"]))
    assert plan.to_dict()["traffic"]["push"]["bytes"] == plan.time.traffic.push.bytes == plan.engine.weights
    assert plan.time.stages["update_weights"] == plan.time.traffic.push.seconds
    main(["plan", "recipe=dapo_qwen2_5_32b"])
    row = next(line for line in capsys.readouterr().out.splitlines() if "push" in line and "between nodes" in line)
    assert f"{plan.engine.weights / 1e6:.1f}" in row


def test_command(tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", "recipe=dapo_qwen3_30b_a3b", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "fits, with" in shown and "all-to-all" in shown and all(f.name in shown for f in fields(Assumptions))
    assert "plotly" in page.read_text()[:200000].lower()
    assert main(["plan", "recipe=dapo_qwen3_235b_a22b", "rollout.gpu_memory_utilization=0.7", "--json"]) == 1
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False and plan["time"]["stages"]["gen"] is None
    assert plan["model"]["parameters"] == 235_093_634_560


def test_planning_is_light():
    code = (
        "import sys; from megatron_dapo.planner.command import plan_command\n"
        "plan_command(['recipe=demo']); assert 'numpy' not in sys.modules\n"
        "plan_command(['reshard', 'model=demo', 'train.ep=2', 'train.world=2'])\n"
        "heavy = [m for m in ('torch', 'ray', 'vllm', 'transformers', 'megatron', 'plotly') if m in sys.modules]; print(heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr


def test_a_cold_plan_takes_less_than_two_seconds():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import sys; from megatron_dapo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run(
        [sys.executable, "-c", code, "plan", "recipe=dapo_deepseek_v3", "device=B200"], check=True, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2
