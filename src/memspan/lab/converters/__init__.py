"""Convert other programs' checkpoints into runs: ``memspan convert``.

Wherever a file is missing, damaged or of another model, :class:`~memspan.errors.MemspanError` says so.

kinds.py            the kinds, by name and by the files that identify them
convert.py          what a kind's ``read`` returns, as a run
transfo_xl.py       folders of transformers               authors.py      of the authors' PyTorch code
exported.py         folders that memspan itself exported to transformers
vocabulary.py       vocabularies of the first two         options.py      a peer's options, checked
names.py            a peer's tensors in terms of ours     tensors.py      tensors in others' files
torch_files.py      pickles, and what torch saved
"""
