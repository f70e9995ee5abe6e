"""Federated LoRA on real tasks: what each way of aggregating adapters gives, over splits, ranks and seeds.

make lora      (or: python -m simulations.lora --help)

cells.py      what is compared: tasks, splits, ranks, methods, seeds
tasks.py      what a client trains: a model with an adapter, and everybody's examples
text.py       a sentence encoder that learns to sort news; its lower layers are computed once
language.py   a small Llama that learns to speak as single roles of plays
runs.py       one run: RotFedAvg and a ClientApp in this process
schedule.py   what there is to run, and where it is written down
page.py       `docs/lora-results.md` out of `docs/lora.json`
picture.py    `docs/lora.svg` out of the same file
"""
