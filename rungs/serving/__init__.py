"""Serving models over HTTP in the format of OpenAI's API, and a page to try them.

- slots: texts that are generated together, each in a row of one compiled program
- engine: the thread that lets requests join and leave the slots
- protocol: what clients may ask for, and the form of answers
- answer_text: the text of tokens as they arrive, up to a stop string
- app: the routes, with limits, keys and metrics
- server: the process that listens, from start to the last answer
"""
