"""Seconds of one weight update to one worker on Ray, verification included: python -m asynchrony.transfer [SHAPE]."""

import json
import statistics
import sys
import time

import torch

from asynchrony.one_run import count_busy_cores
from asynchrony.slow_tools import SharedRay, make_ray_settings, make_trainer

if __name__ == "__main__":
    shape = sys.argv[1] if len(sys.argv) > 1 else "27M"
    others = count_busy_cores()
    torch.set_num_threads(1)
    trainer, close = make_trainer(make_ray_settings(1), shape=shape)
    team, sampling, wall, trainer_seconds = trainer.worker_group, trainer.settings.sampling, [], []
    for _ in range(8):
        with torch.no_grad():
            for parameter in trainer.policy.parameters():
                parameter.add_(1e-6)
        began, spent = time.perf_counter(), time.process_time()
        team.send_weights(sampling)
        wall.append(time.perf_counter() - began)
        trainer_seconds.append(time.process_time() - spent)
    results = {
        "shape": shape,
        "bytes": team.sent_bytes,
        "seconds": wall,
        "median_s": statistics.median(wall[1:]),
    }
    print(
        json.dumps(
            {
                **results,
                "trainer_processor_s": statistics.median(trainer_seconds[1:]),
                "others": others,
            }
        )
    )
    close()
    SharedRay.shared.close()
