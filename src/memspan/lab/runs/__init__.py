"""A run: its options, its folder, and the files in it, one module each.

| file in the folder                                   | module                                        |
| ---------------------------------------------------- | --------------------------------------------- |
| the folder itself, ``.lock``                         | ``folder``: found by its path or name, locked |
| ``config.toml``                                      | ``options``                                   |
| ``history.jsonl``                                    | ``history``: options changed on resuming      |
| ``tokenizer.json``                                   | ``memspan.lab.data.tokenizers``               |
| ``model.safetensors``                                | ``checkpoint_files``; ``run``: loaded         |
| ``metrics.jsonl``, ``loss.png``                      | ``memspan.lab.training.metrics``              |
| ``checkpoints/``                                     | ``checkpoints``: saved, found, dropped        |
| ``…/step-N/{state.json,*.safetensors}``              | ``checkpoint_files``                          |
| ``…/step-N/shards/``                                 | ``shards``: tensors of several processes      |

``texts``: a text in the tokens of a run.

``docs/reliability.md`` describes the files for users. Old folders must always load.
"""
