"""The process of a reference model, and its end with its owner."""

import subprocess
import sys
from multiprocessing import Pipe

import numpy as np
import pytest
from helpers import ROOT

from rl_core.references.scorer_process import receive_message, send_message

SLOW = """
import sys, time, torch
from rl_core.references import process_main

class SlowScorer:
    model = torch.nn.Linear(1, 1)

    def score_rows(self, rows, temperature):
        time.sleep(600)

process_main.load_requested_scorer = lambda **source: SlowScorer()
process_main.main(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_process_ends_during_a_pass_when_its_owner_ends():
    """Close the owner's end, as after SIGKILL: a restarted run needs the memory."""
    ours, theirs = Pipe()
    command = [sys.executable, "-c", SLOW, str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT) as child:
        theirs.close()
        send_message(ours, {}, np.zeros(0))
        receive_message(ours)
        send_message(ours, {"lengths": [2], "temperature": 1.0}, np.zeros(2, dtype=np.int64))
        ours.close()
        try:
            assert child.wait(120) == 0
        finally:
            child.kill()
