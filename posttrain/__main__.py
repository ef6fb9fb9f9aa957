"""Entry point of `python -m posttrain`, the same as the console script."""

from posttrain.cli.entry import command

if __name__ == "__main__":
    command()
