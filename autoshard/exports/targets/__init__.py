"""The frameworks for which plans are exported; each module registers one."""
