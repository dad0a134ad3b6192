"""The picture of a plan as SVG."""
