"""The host backend: what the translation rewrites, that it stays inside Megatron, and what each repair changes."""

import ast
import sys

import pytest
import torch

from megatron_dapo.parallel import cuda_stand_in, host_cuda, host_fixes
from megatron_dapo.parallel.host_cuda import translate

host_only = pytest.mark.skipif(torch.cuda.is_available(), reason="the host backend withdraws where CUDA is present")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.cuda.current_stream().wait_stream(s)", "_host_cuda.current_stream().wait_stream(s)"),
        ("torch.empty(3, device='cuda')", "torch.empty(3, device='cpu')"),
        ("torch.device('cuda', index)", "torch.device('cpu')"),
        ("torch.tensor(x, device=f'cuda:{i}')", "torch.tensor(x, device='cpu')"),
        ("x.cuda()", "x.to('cpu')"),
        ("x.cuda(non_blocking=True)", "x.to('cpu', non_blocking=True)"),
        ("x.cuda(torch.cuda.current_device())", "x.to('cpu')"),
        ("torch.zeros(3, pin_memory=True).pin_memory()", "torch.zeros(3, pin_memory=False)"),
        ("p.type() == 'torch.cuda.FloatTensor'", "p.type() == 'torch.FloatTensor'"),
        ("new_group(ranks, backend='nccl')", "new_group(ranks, backend='gloo')"),
        ("from torch.cuda import _lazy_call", "from megatron_dapo.parallel.cuda_stand_in import _lazy_call"),
        ("def f(device='cuda'): pass", "def f(device='cpu'):\n    pass"),
        ("assert torch.backends.cuda.matmul", "assert torch.backends.cuda.matmul"),
        ("name = 'cuda rng state'", "name = 'cuda rng state'"),
    ],
)
def test_translation(source, expected):
    assert ast.unparse(translate(source)) == expected


def test_line_numbers_stay():
    tree = translate("x = 1\n\ny = torch.cuda.Stream(\n  priority=1)\n")
    assert tree.body[1].lineno == 3


def test_the_stand_in_has_one_device_and_one_stream():
    assert cuda_stand_in.current_device() == torch.device("cpu")
    assert cuda_stand_in.current_stream() == cuda_stand_in.Stream()
    assert cuda_stand_in.is_available() == torch.cuda.is_available()  # what it does not define is torch's own
    state = cuda_stand_in.get_rng_state()
    torch.rand(3)
    cuda_stand_in.set_rng_state(state)
    assert torch.equal(cuda_stand_in.get_rng_state(), state)


@host_only
def test_torch_itself_is_untouched():
    from megatron.core import parallel_state

    assert parallel_state._host_cuda is cuda_stand_in
    assert not hasattr(torch.cuda, "_host_cuda") and torch.cuda.current_device is not cuda_stand_in.current_device


@host_only
def test_importing_megatron_first_is_refused(monkeypatch):
    """Half of Megatron translated and half not would fail much later, somewhere else."""
    others = [f for f in sys.meta_path if not isinstance(f, host_cuda._HostFinder)]
    monkeypatch.setattr(sys, "meta_path", others)
    monkeypatch.setitem(sys.modules, "megatron.core.imported_early", ast)
    with pytest.raises(RuntimeError, match="was imported before the host backend"):
        host_cuda.install()


def test_every_repair_names_module_reason_and_versions():
    for fix in host_fixes.FIXES:
        assert fix.module.startswith("megatron.core.") and len(fix.reason) > 20
        assert fix.fixed_in is None or host_fixes.Version(fix.fixed_in)


def test_packed_rope_equals_the_loop_it_replaces():
    """Positions restart with each sequence, and context parallelism sees its zigzag chunks."""
    positions = host_fixes._positions((0, 4, 12), 0, 1, False)
    assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
    assert host_fixes._positions((0, 4, 12), 0, 2, False).tolist() == [0, 3, 0, 1, 6, 7]
    assert host_fixes._positions((0, 4, 12), 1, 2, False).tolist() == [1, 2, 2, 3, 4, 5]
