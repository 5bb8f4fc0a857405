"""The TransformerConfig follows checkpoint, layout and machine; what would contradict them is refused by name."""

import pytest
import torch

from megatron_dapo.config.model import ModelConfig, MoEConfig, ParallelConfig
from megatron_dapo.config.training import OptimConfig
from megatron_dapo.engine.optimizer import build_optimizer, ddp_config
from megatron_dapo.errors import UserError
from megatron_dapo.models.architecture import Architecture
from megatron_dapo.models.megatron_config import transformer_config
from megatron_dapo.parallel.capabilities import capabilities
from tests.models.hf_models import CONFIGS


def config(name="qwen3_moe", parallel=None, **model):
    arch = Architecture.from_hf(CONFIGS[name].to_dict())
    return transformer_config(arch, ModelConfig(**({"dtype": "float32"} | model)), parallel or ParallelConfig())


def test_what_the_known_silent_errors_demand():
    c = config(parallel=ParallelConfig(pipeline=2, virtual_pipeline=2))
    assert c.overlap_p2p_comm and not c.batch_p2p_comm
    assert c.moe_token_dispatcher_type == "alltoall" and c.variable_seq_lengths
    assert c.calculate_per_token_loss is False
    assert c.deallocate_pipeline_outputs == capabilities().cuda
    assert not config(parallel=ParallelConfig(pipeline=2)).overlap_p2p_comm
    assert config("llama").moe_token_dispatcher_type == "alltoall"


def test_router_losses_are_off_unless_asked_for():
    c = config()
    assert (c.moe_router_load_balancing_type, c.moe_aux_loss_coeff, c.moe_z_loss_coeff) == ("none", 0.0, None)
    c = config(moe=MoEConfig(load_balancing="aux_loss", aux_loss_coeff=0.1, z_loss_coeff=0.01))
    assert (c.moe_router_load_balancing_type, c.moe_aux_loss_coeff, c.moe_z_loss_coeff) == ("aux_loss", 0.1, 0.01)


def test_routing_of_the_families():
    deep = config("deepseek_v3")
    assert deep.moe_layer_freq == [0, 1, 1, 1] and deep.moe_router_score_function == "sigmoid"
    assert (deep.moe_router_num_groups, deep.moe_router_group_topk) == (4, 2)
    assert config("qwen3_moe_sparse").moe_router_pre_softmax and not config("qwen3_moe").moe_router_pre_softmax


def test_dtype_recompute_and_replay():
    c = config(dtype="bfloat16", recompute="full", router_replay="R2")
    assert c.params_dtype == torch.bfloat16 and c.bf16 and c.recompute_num_layers == 1 and c.moe_enable_routing_replay
    assert config(recompute="selective", recompute_modules=("moe",)).recompute_modules == ["moe"]


def test_uneven_stages_become_an_explicit_layout():
    c = config(parallel=ParallelConfig(pipeline=2, first_stage_layers=1))
    layout = c.pipeline_model_parallel_layout.layout
    assert [[kind.name for kind in chunk] for stage in layout for chunk in stage] == [
        ["embedding", "decoder"],
        ["decoder", "decoder", "decoder", "loss"],
    ]


def test_pass_through():
    assert config(megatron={"attention_dropout": 0.1}).attention_dropout == 0.1
    with pytest.raises(UserError, match=r"model\.megatron\.atention_dropout.*nearest is attention_dropout"):
        config(megatron={"atention_dropout": 0.1})
    with pytest.raises(UserError, match=r"model\.megatron\.hidden_size=64.*config\.json"):
        config(megatron={"hidden_size": 64})


def test_pass_through_to_gradients_and_optimizer():
    assert ddp_config({"overlap_grad_reduce": True}).overlap_grad_reduce
    assert not ddp_config({"check_for_nan_in_grad": False}).check_for_nan_in_grad and ddp_config({}).grad_reduce_in_fp32
    with pytest.raises(UserError, match=r"model\.megatron_ddp\.overlap_grads.*nearest is overlap_grad_reduce"):
        ddp_config({"overlap_grads": True})
    with pytest.raises(UserError, match="overlap_param_gather=True: decided by the engine"):
        ddp_config({"overlap_param_gather": True})
    with pytest.raises(UserError, match=r"model\.megatron_optimizer\.clip_grad=2\.0: decided by the role's `optim`"):
        build_optimizer([], OptimConfig(), torch.float32, {"clip_grad": 2.0})


def test_experts_with_tensor_parallelism_need_sequence_parallelism():
    with pytest.raises(UserError, match="sequence_parallel=false"):
        config(parallel=ParallelConfig(tensor=2, sequence_parallel=False))
    assert not config("llama", parallel=ParallelConfig(tensor=2, sequence_parallel=False)).sequence_parallel


def test_illegal_layout():
    with pytest.raises(UserError, match="8 experts are not divisible by expert 3"):
        config(parallel=ParallelConfig(expert=3))
