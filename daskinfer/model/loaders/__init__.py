"""Formats in which a network is saved, one module each: read what a file tells, build the network.

They know nothing of recipes (`daskinfer.model`) and are told apart by `daskinfer.model.formats`.
"""
