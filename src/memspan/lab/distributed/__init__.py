"""Training in several processes, built on torch.distributed; one process is the usual case.

processes.py   this process's rank and rows, and collective operations
parallel.py    the model behind DDP or FSDP2
launch.py      starts the processes of one machine, and reports in one line why they ended
reports.py     without torch: detects launched processes, and reports a failure once for all
"""
