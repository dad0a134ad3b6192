"""Explain plans to people: `explain` for tables, `picture` and `svg` for a drawing.

Pure: from a plan and its programs to values, and from those to SVG.
"""
