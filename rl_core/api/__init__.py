"""The Python API behind `import rl_core`: one entry point and one recipe for each algorithm."""
