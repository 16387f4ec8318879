"""Datasets from files of documents: Parquet, JSON lines or plain text, from the hub or local.

files     the user's own files or a repository's, their splits and rows; fetch them ahead
building  tokenize the files as a stream; killed and started again, it goes on"""
