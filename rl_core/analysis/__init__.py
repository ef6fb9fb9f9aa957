"""Trajectory analysis: comparison of models on the same episodes, with intervals, figures and a report."""

from rl_core.analysis.runner import AnalysisResult, analyze
from rl_core.analysis.trajectories import read_trajectories, write_trajectories

__all__ = ["AnalysisResult", "analyze", "read_trajectories", "write_trajectories"]
