"""Parts of learning.py.

jobs               what is trained: algorithms, variants, staleness, group sizes, curricula
training           one run: the SFT model, rollouts, preference pairs, success of the result
gradient_variance  variance of the policy gradient by credit assignment
report             tables and curves
"""
