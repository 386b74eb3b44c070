"""A tier of KV on drives for serving engines: adapters of `nearflash.storage.blocks`, each loaded by its engine."""
