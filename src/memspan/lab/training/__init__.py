"""Training a run: ``start`` begins or resumes it, ``trainer`` is the loop, and each part has a module.

start.py        train() and resume(): options, corpus and folder are checked before the first update
trainer.py      the loop, and its checkpoints
state.py        everything that the next step depends on, to and from a checkpoint
updates.py      one update: gradients accumulated, clipped, and applied or skipped
optimisers.py   the optimisers, which parameters decay, and the learning rate of every update
validation.py   score, sample and statistics
metrics.py      records while training, where they go, and how they are drawn
changes.py      what may differ on resuming
summary.py      what is printed before and at the end
estimate.py     what a run would take, and the refusal of what does not fit
terminal.py     progress, signals, output that cannot fail
"""
