"""A real SLURM of two nodes on this machine: munged, slurmctld and two slurmd of its own, in one directory, torn down."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
START_SECONDS = 60.0
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmctldPort={ports[0]}
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000
JobRequeue=1
ReturnToService=2
KillWait=30
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> list[str]:
    """Why there can be no cluster here; empty: there can."""
    found = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    reasons = (
        [f"{', '.join(found)} not installed: apt-get install slurmctld slurmd slurm-client munge"] if found else []
    )
    return reasons + ([] if os.geteuid() == 0 else ["slurmd needs root"])


@dataclass(frozen=True)
class Cluster:
    """Runs SLURM's commands against this cluster."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        base = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        return base | {"SLURM_CONF": str(self.directory / "slurm.conf"), "PATH": PATH}

    def run(self, *command: str, **variables: str) -> str:
        """Standard output of a command; an error carries its own words."""
        done = subprocess.run(command, env=self.environment | variables, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields that `scontrol show job` has."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, seconds: float) -> dict[str, str]:
        """Until the job is over for good."""
        deadline = time.monotonic() + seconds
        while (job := self.job(number))["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            assert time.monotonic() < deadline, (
                f"job {number} is {job['JobState']} ({job.get('Reason')}) after {seconds} s"
            )
            time.sleep(0.5)
        return job

    def logs(self) -> str:
        """The daemons' last words."""
        return "\n".join(
            f"--- {file.name}\n{file.read_text()[-2000:]}" for file in sorted(self.directory.glob("*.log"))
        )


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster whose two nodes are idle. Its daemons end with the block, whatever happens in it."""
    os.chmod(directory, 0o755)
    (directory / "state").mkdir()
    (directory / "munge.key").write_bytes(os.urandom(128))
    (directory / "munge.key").chmod(0o600)
    words = {"host": socket.gethostname().split(".")[0], "user": "root", "directory": directory, "ports": free_ports(3)}
    (directory / "slurm.conf").write_text(CONFIG.format(**words))
    (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
    made, daemons = Cluster(directory), []
    munge = [f"--{name}-file={directory}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *munge],
        ["slurmctld", "-D", "-c", "-i"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    try:
        for number, command in enumerate(commands):
            with open(directory / f"{command[0]}-{number}.out.log", "w") as output:
                daemon = subprocess.Popen(
                    command, env=made.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            daemons.append(daemon)
            time.sleep(1)
        _wait_until_idle(made, daemons)
        yield made
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _wait_until_idle(made: Cluster, daemons: list[subprocess.Popen]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        dead = [daemon.args for daemon in daemons if daemon.poll() is not None]
        assert not dead, f"{dead} ended:\n{made.logs()}"
        asked = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"], env=made.environment, capture_output=True, text=True
        )
        if asked.stdout.split() == ["idle", "idle"]:
            return
        assert time.monotonic() < deadline, f"no two idle nodes: {asked.stdout}{asked.stderr}\n{made.logs()}"
        time.sleep(0.5)
