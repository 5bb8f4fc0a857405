"""What a run looks like: the HTML report and the live view, both from the files in the run's directory."""

from megatron_dapo.report.page import write_report
from megatron_dapo.report.rollouts import show_rollouts
from megatron_dapo.report.run_files import read_run
from megatron_dapo.report.watch import watch

__all__ = ["read_run", "show_rollouts", "watch", "write_report"]
