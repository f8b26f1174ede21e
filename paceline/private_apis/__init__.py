"""Names of other libraries that have no public way, a module for each library.

Only these modules use such names, and say the version that they were tried with. `tests/unit/private_apis` fails when
one of the names changes: then this is the place to look.
"""
