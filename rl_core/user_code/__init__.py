"""Code that a user names in settings or passes to the API: loading, checks of signatures and results, digests.

A name is an import path, 'package.module:name', or a file relative to the current folder, 'path/to/file.py:name'.
"""
