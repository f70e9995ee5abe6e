"""One model out of several parties' own: how good is it, by method, and what does it cost?

python -m simulations.merging [--seeds 0,1,2] [--only vision,skewed,language]

parties.py    data, models, and how parties train theirs, kept in a folder for the next run
methods.py    how several models become one
vision.py     two, four and eight parties whose data are alike
skewed.py     four parties that know different classes; and what federating from the best of them gives
language.py   the loss between two causal language models, in nats
page.py       `docs/merging-results.md` out of `docs/merging.json`
"""
