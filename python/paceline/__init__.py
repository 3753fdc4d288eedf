"""paceline: distributed training, measured and understood. The program is `paceline` or `python -m paceline`."""
