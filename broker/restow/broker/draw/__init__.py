"""Plans for people: what moves and how, in words and in pictures.

Pure: from a plan and its programs to values, and from those to SVG.
"""
