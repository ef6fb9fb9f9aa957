"""The Python API behind `import rl_core`: an entry point and a recipe for each algorithm."""
