"""Datasets from files of documents: Parquet, JSON lines or plain text, from the hub or local.

files     the user's files or a repository's: their splits and rows; fetches them ahead
building  tokenizes the files as a stream that can be killed and resumed"""
