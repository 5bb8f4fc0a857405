"""Run the unmodified Megatron-core package on a host without CUDA.

Megatron writes `torch.cuda.…`, `device="cuda"`, `.cuda()` and even `"torch.cuda.FloatTensor"` literally, in about a
hundred files. `install()` registers an import hook that translates these spellings in the syntax tree of a Megatron
module while it is imported. torch itself is not touched, so vLLM or transformers in the same process see no
difference, and nothing on disk changes. With CUDA present the hook withdraws at the first Megatron import.

Bugs that only show on such a host are repaired in `host_fixes.py`, each with its reason and versions.
"""

import ast
import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGES = ("megatron", "mbridge")
STAND_IN = "megatron_dapo.parallel.cuda_stand_in"
_NAME = "_host_cuda"  # how a translated module calls the stand-in
_CACHE_TAG = f".host{zlib.crc32(Path(__file__).read_bytes()):08x}"


class _Translate(ast.NodeTransformer):
    """CUDA's spellings to the host's. Line numbers stay, so tracebacks and breakpoints do too."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(_NAME, node.ctx), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":  # always the device when it stands alone
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant("torch." + node.value.removeprefix("torch.cuda.")), node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":  # f"cuda:{index}"
            return ast.copy_location(ast.Constant("cpu"), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else None
            if function.attr == "pin_memory" and not node.args and not node.keywords:
                return self.visit(function.value)  # pinned memory needs a CUDA driver
            if function.attr == "cuda" and owner != "torch":
                node.args = [ast.copy_location(ast.Constant("cpu"), node)]
                function.attr = "to"
            if function.attr == "device" and owner == "torch" and _is_cuda(node.args[:1]):
                node.args = node.args[:1]  # torch.device("cuda", index)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Constant):
            if node.arg == "pin_memory" and node.value.value is True:
                node.value = ast.copy_location(ast.Constant(False), node.value)
            if node.arg == "backend" and node.value.value == "nccl":
                node.value = ast.copy_location(ast.Constant("gloo"), node.value)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        if node.module == "torch.cuda":
            node.module = STAND_IN
        return node


def _is_cuda(nodes: Sequence[ast.expr]) -> bool:
    return any(isinstance(n, ast.Constant) and n.value == "cuda" for n in nodes)


def translate(source: str | bytes) -> ast.Module:
    """The module's syntax tree with CUDA's spellings replaced by the host's."""
    return ast.fix_missing_locations(_Translate().visit(ast.parse(source)))


class _HostLoader(SourceFileLoader):
    """Loads a module translated; its byte code is cached beside the ordinary one under a name of its own."""

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> CodeType:  # type: ignore[override]
        return compile(translate(data), path, "exec", dont_inherit=True, optimize=_optimization)

    def get_data(self, path: str) -> bytes:
        return super().get_data(_cache_name(path))

    def set_data(self, path: str, data: Any, **options: Any) -> None:
        super().set_data(_cache_name(path), data, **options)

    def exec_module(self, module: ModuleType) -> None:
        from megatron_dapo.parallel import cuda_stand_in, host_fixes

        module.__dict__[_NAME] = cuda_stand_in
        super().exec_module(module)
        host_fixes.apply(module)


def _cache_name(path: str) -> str:
    return path.removesuffix(".pyc") + _CACHE_TAG + ".pyc" if path.endswith(".pyc") else path


class _HostFinder(MetaPathFinder):
    """Hands Megatron's modules to the loader above; decides about CUDA only when the first of them is asked for."""

    def __init__(self) -> None:
        self._active = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in PACKAGES:
            return None
        if not self._active and not self._activate():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _HostLoader(spec.loader.name, spec.loader.path)
        return spec

    def _activate(self) -> bool:
        import torch

        if torch.cuda.is_available():
            sys.meta_path.remove(self)
            return False
        for package in ("transformer_engine", "apex"):
            # Installed but without libcuda, Transformer Engine raises RuntimeError, which Megatron's
            # `except ImportError` lets through; None in sys.modules makes it an ImportError.
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]
        # Their absence is this module's premise; a dozen warnings about it would bury the real ones.
        warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex).*not installed", append=False)
        self._active = True
        return True


def install() -> None:
    """Register the import hook, once. Does nothing to a process with CUDA, and nothing until Megatron is imported.

    Raises RuntimeError where Megatron-core was imported before on a host without CUDA: it would be half translated.
    """
    if any(isinstance(finder, _HostFinder) for finder in sys.meta_path):
        return
    early = [name for name in sys.modules if name.startswith("megatron.core")]
    if early:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                f"{early[0]} was imported before the host backend on a machine without CUDA; import megatron_dapo first"
            )
        return
    sys.meta_path.insert(0, _HostFinder())
