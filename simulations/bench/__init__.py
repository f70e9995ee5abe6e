"""When alignment beats plain averaging, when it does not, and what it costs: cells x methods x seeds.

make bench, make bench-full      (or: python -m simulations.bench --help)

cells.py      what is compared: regimes of federated training, methods, seeds
runs.py       one run: the apps' own server and clients in this process; client training is kept and not repeated
schedule.py   what there is to run, and where it is written down
anatomy.py    the models of first rounds taken apart: which groups, layers and anchors do it, distances, barriers
statistics.py paired differences and their intervals
report.py     `docs/benchmark.md` and the README's table out of `docs/benchmark.json`
dissected.py  its sections on first rounds taken apart
picking.py    runs of one cell or method, and their differences
engine.py     one run on Flower's engine, beside the same in this process
pictures.py   pictures out of the same file
"""
