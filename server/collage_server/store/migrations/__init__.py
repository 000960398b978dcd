"""Forward migrations, run by `collage_server.store.migrate`."""
