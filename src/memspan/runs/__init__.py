"""A run: its options, its folder, and the files in it, one module each.

| file in the folder                                   | module                                        |
| ---------------------------------------------------- | --------------------------------------------- |
| the folder itself, ``.lock``                         | ``run_lock``: one trainer at a time           |
| ``config.toml``                                      | ``options``; ``config_files``: as TOML, flags |
| ``history.jsonl``                                    | ``history``: options changed on resuming      |
| ``tokenizer.json``                                   | ``memspan.data.tokenizers``                   |
| ``model.safetensors``                                | ``weights``; ``run``: loading a trained model |
| ``metrics.jsonl``, ``loss.png``                      | ``memspan.training.metrics``                  |
| ``checkpoints/``, ``checkpoints/latest``             | ``checkpoints``: saved, found, dropped        |
| ``…/step-N/state.json``                              | ``state_file``                                |
| ``…/step-N/{model,training}.safetensors``            | ``tensor_files``: written by one process      |
| ``…/step-N/shards/``                                 | ``shards``: written by several, and           |
|                                                      | ``shared_saves``: while training goes on      |

``binding`` has the checksums that bind weights and checkpoints to a run's ``config.toml`` and
``tokenizer.json``; ``shipped`` names the runs that come with memspan; ``reading`` is about using a
trained model, not about a file.
``docs/run-folder.md`` describes the files for users. Old folders must load for good, so formats do not
change.
"""
