"""The service's database: its tables and migrations, and a store for each kind of rows."""
