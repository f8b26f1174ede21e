"""Every training backend, a file each; `engine_registry` says which module a name is in."""
