"""Convert other programs' checkpoints into runs: ``memspan convert``.

Wherever a file is missing, damaged or of another model, :class:`~memspan.errors.MemspanError` says so.

kinds.py            the kinds, by name and by the files that identify them
convert.py          what a kind's ``read`` returns, as a run
transfo_xl.py       folders of transformers               authors.py      of the authors' PyTorch code
labml.py            runs of labml_nn
transformer_xl.py   options and names that Transformer-XL checkpoints share
vocabulary.py       their vocabularies                    tensors.py      tensors in others' files
names.py            a peer's tensors in terms of ours     torch_files.py  what torch.save wrote, as data
options.py          a peer's options, checked             pickles.py      pickles, as data
"""
