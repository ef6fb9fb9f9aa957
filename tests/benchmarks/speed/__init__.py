"""Parts of compare_speed.py and scaling.py.

inputs      models, tokenizer and rows that both sides read           (both Pythons)
protocol    requests for steps to a worker, and its answers          (both Pythons)
worker      entry of every worker process                             (both Pythons)
trl_side    the peer's trainers, held between two steps               (the peer's Python)
ours        our trainers and engine
generating  transformers' `generate`, alone and in a loop over turns
episodes    prompts, rewards and episodes of our side
floor       what any implementation has to do, and how fast this machine does it
checks      that the same comes out
table       medians, ratios, markdown, picture
"""
