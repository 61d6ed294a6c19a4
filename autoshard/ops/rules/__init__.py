"""The language of sharding rules: index spaces, strategies, collectives inside operators."""
