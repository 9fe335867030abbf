"""A finished or running training run as one self-contained HTML file: curves, settings and a trajectory browser."""
