"""What a verifier worker imports must stay small: it is started anew whenever one is killed."""

import subprocess
import sys


def test_importing_the_verifiers_does_not_import_torch():
    code = (
        "import sys, megatron_dapo.rewards, megatron_dapo.rewards.worker\n"
        "heavy = {'torch', 'transformers', 'sympy', 'pydantic', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert megatron_dapo.rewards.compute_score('math_dapo', 'Answer: 5', '5')['acc']\n"
        "from megatron_dapo.rewards import RewardManager\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error():
    import megatron_dapo.rewards

    assert not hasattr(megatron_dapo.rewards, "nonesuch")
