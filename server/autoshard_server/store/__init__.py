"""The service's database: tables, migrations, and a store for each table."""
