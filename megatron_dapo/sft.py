"""The program of one rank of supervised training: `torchrun … -m megatron_dapo.sft key=value …`."""

import sys
from pathlib import Path

from megatron_dapo.config import Config, load_config
from megatron_dapo.parallel import host_cuda
from megatron_dapo.runtime.failure import StopRequest, ignore_stop_signals, run_rank
from megatron_dapo.runtime.group import serve


def sft(config: Config) -> None:
    """Brings this rank up and drives or serves until the model is trained and exported to `<run>/hf`."""
    host_cuda.install()  # before anything imports megatron.core
    from megatron_dapo.metrics import Trackers
    from megatron_dapo.trainers import bringup
    from megatron_dapo.trainers.sft import SftRun, fit_sft, read_rows
    from megatron_dapo.trainers.stages import Ranks
    from megatron_dapo.trainers.worker import SupervisedWorker

    topology = bringup.topology_of(config)
    arch = bringup.checked_architecture(config, topology.world)
    driver = bringup.rank() == 0
    rows = read_rows(config)
    stop = StopRequest()
    stop.install() if driver else ignore_stop_signals()
    control = bringup.join_world(config, topology)
    worker = SupervisedWorker(config, arch, topology, rows.total_steps)
    if not driver and control is not None:
        serve(worker, control)
        return
    directory = Path(config.trainer.default_local_dir)
    config.save(directory)
    ranks = Ranks(bringup.worker_group(worker, control), bringup.dispatcher(config, arch, topology))
    trackers = Trackers(list(config.trainer.logger), directory, config.model_dump(mode="json"))
    fit_sft(SftRun(config, ranks, rows, trackers, directory / "hf", stop))
    ranks.group.close()
    trackers.close()


def main() -> None:
    """The rank's entry point; every way out sets the exit code."""
    run_rank(lambda: sft(load_config(sys.argv[1:], command="sft")))


if __name__ == "__main__":
    main()
