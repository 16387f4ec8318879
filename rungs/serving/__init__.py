"""Serving models over HTTP in the format of OpenAI's API, and a page to try them.

slots       texts that are generated together, each in a row of one compiled program
engine      the thread that lets texts join and leave the slots of their model
protocol    what clients may ask for, and the form of answers
structured  answers of a JSON schema
served      a model that clients may ask; `--follow`, which loads each new checkpoint
answering   the answer to one request, from the engine's tokens to text and JSON
app         the routes, with limits and keys; the process that listens; `chat.html` is the page at /
"""
