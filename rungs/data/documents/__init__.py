"""Datasets from files of documents: Parquet, JSON lines or plain text, from the hub or local.

sources   the files of a repository on the hub, or the user's own
files     which of them are for which split; fetch them ahead of the reader
reading   the rows of a file
building  tokenize the files as a stream; killed and started again, it goes on
"""
