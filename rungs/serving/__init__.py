"""Serving models over HTTP in the format of OpenAI's API, and a page to try them.

slots        texts that are generated together, each in a row of one compiled program
engine       the thread that lets texts join and leave the slots of their model
protocol     what clients may ask for, and the form of answers
served       a model that clients may ask: its weights, tokenizer and chat template
following    loads each new checkpoint of the runs that are served
answer_text  the text of tokens as they arrive, up to a stop string
answering    the answer to one request, from the engine's tokens to JSON
app          the routes, with limits, keys and metrics; `chat.html` is the page at /
server       the process that listens, from start to the last answer
"""
