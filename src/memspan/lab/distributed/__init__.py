"""Training in several processes, built on torch.distributed; one process is the usual case.

processes.py   who this process is, which rows are its own, what all must agree on
parallel.py    the model behind DDP or FSDP2
launch.py      the processes of one machine, and the one line that says why they ended
reports.py     without torch: whether this is one of several, how it reports a failure
"""
