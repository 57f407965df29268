"""Training in several processes, on what torch.distributed has; one process is the usual case.

processes.py   who this process is, which rows are its own, what all must agree on
parallel.py     the model behind DDP or FSDP2
cores.py       how many cores there are
launch.py      the processes of one machine, and the one line that says why they ended
"""
