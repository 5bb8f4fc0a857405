"""Known messages are left out and nothing else is."""

import logging
import warnings

from megatron_dapo.parallel.noise import KNOWN, hush


def test_only_what_is_known_is_left_out():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        hush()
        warnings.warn("`torch.distributed.all_gather_into_tensor` is deprecated. Please use x.", FutureWarning, 1)
        warnings.warn("`torch.distributed._all_gather_base` is a private function and will be", FutureWarning, 1)
        warnings.warn("The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.", UserWarning, 1)
        warnings.warn("full scope is deprecated. Use empty cuda_graph_scope", UserWarning, 1)
        assert not shown
        warnings.warn("`torch.load` is deprecated", FutureWarning, 1)
        warnings.warn("full scope is deprecated", FutureWarning, 1)
        assert len(shown) == 2
    assert all(why for _, _, why in KNOWN)


def test_megatron_may_say_anything_but_its_greeting(caplog):
    hush()
    log = logging.getLogger("megatron.core.rerun_state_machine")
    log.warning("RerunStateMachine initialized in mode %s", "RerunMode.DISABLED")
    log.warning("Unexpected result at rank 3")
    assert caplog.messages == ["Unexpected result at rank 3"]
