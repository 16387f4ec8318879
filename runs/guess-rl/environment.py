class Environment:
    """Says whether the number is larger (>) or smaller (<) than a guess."""

    def reset(self, item, seed):
        self.number = int(item["answer"])

    def step(self, text):
        guess = text.removesuffix("?")
        if not guess.isdecimal():
            return "", {"correct": 0, "guesses": -2}, True
        if int(guess) == self.number:
            return "", {"correct": 1}, True
        return "<" if int(guess) > self.number else ">", {"guesses": -0.2}, False
