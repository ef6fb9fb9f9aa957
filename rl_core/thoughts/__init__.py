"""Training of thoughts before answers: episodes, gain, baseline, trainer, controls, verdict."""
