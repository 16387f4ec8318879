"""Datasets from files of documents: Parquet, JSON lines or plain text, from the hub or local.

building         tokenize the files as a stream; killed and started again, go on
files            which files of a repository, and their splits
fetching         get files a few ahead of the one that is read
reading          the rows of a file
progress         how far an unfinished dataset is
hub_documents    what to build from a repository on the hub
local_documents  what to build from the user's own files
"""
