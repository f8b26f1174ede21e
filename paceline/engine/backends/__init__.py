"""Every training backend, a file each; `engine_interface` says which module a name is in."""
