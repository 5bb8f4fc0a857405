"""What libraries say on every run because of how this project uses them, each with its reason. All else is shown."""

import logging
import warnings

KNOWN: tuple[tuple[type[Warning], str, str], ...] = (
    (
        FutureWarning,
        r"`torch\.distributed\.\w+` is (deprecated|a private function)",
        "Megatron calls torch's collectives by the names it was written for",
    ),
    (
        UserWarning,
        r"The \.grad attribute of a Tensor that is not a leaf",
        "Megatron's optimizer looks for gradients on the shards that it made of the parameters",
    ),
    (UserWarning, r"full scope is deprecated", "Megatron's own default of cuda_graph_scope, which nobody here sets"),
)


def hush() -> None:
    """Leaves out what KNOWN lists, in this process."""
    for category, message, _ in KNOWN:
        warnings.filterwarnings("ignore", message=message, category=category)
    # that it starts switched off, which is how it is started
    logging.getLogger("megatron.core.rerun_state_machine").addFilter(_not_the_greeting)


def _not_the_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("RerunStateMachine initialized in mode")
