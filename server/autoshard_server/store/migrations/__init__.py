"""Migrations of the service's database, run by `autoshard_server.store.database.migrate`."""
