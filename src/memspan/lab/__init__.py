"""The lab: everything that a person does with a model.

Texts become corpora (``data``); models are trained (``training``, ``distributed``) into runs
(``runs``), which are scored (``evaluation``), continued (``generation``) and measured
(``measurement``). Checkpoints come in (``converters``), and other libraries take part
(``integrations``). The command line (``cli``, ``commands``) offers the same.

The models need nothing of this. No module outside the lab imports it; :mod:`memspan` loads its verbs
on first use.
"""
