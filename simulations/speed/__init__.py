"""Seconds and memory of rotfed, beside Flower's FedAvg and the paper's own procedure, in one run.

make speed      (or: python -m simulations.speed --help)

subjects.py   every call into rotfed that is measured
published.py  the procedure of arXiv 2502.00264, Algorithm 1, written plainly
shapes.py     the models: sizes, weights drawn at random, and weights that stand for local training
replies.py    clients' replies in files, and a grid that hands them to the server one by one
measure.py    seconds, stages, peak memory
sections.py   everything there is to measure, a piece a process
pairs.py      pieces: one model aligned to another; models of the apps' size
rounds.py     pieces: one round of a strategy
merging.py    pieces: two folders merged by the command line
run.py        pieces run one after another, and kept
asked.py      the figures that were asked for, each with its limit
report.py     the page out of the JSON
pictures.py   the pictures out of the JSON
"""
