"""Plans before a run: a discrete-event simulation of trainers, rollout workers, weight updates and long tails."""
